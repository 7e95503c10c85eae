"""Kernels on a CPU: launch settings for Triton's interpreter, and the interpreter without the work that it repeats."""

import importlib.util
import os
from typing import Any

import torch


def interpreted() -> bool:
    """Return whether this process runs kernels in Triton's interpreter (`TRITON_INTERPRET=1`) instead of compiling."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def run_kernels_on_cpu() -> None:
    """Let the wrappers launch their kernels on CPU tensors, with tiles so small that small matrices have several."""
    from cosmos_optim.cuda.kernels import launch

    speed_up_interpreter()
    launch.TARGET = launch.Target(float32_dots=True, max_tile=16, max_block=32)
    launch.capability = hopper  # what `available` and `syrk.supports` ask for


def hopper(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU that runs every kernel."""
    return 9, 0


def speed_up_interpreter() -> None:
    """Do three things once instead of with every operation: 132 s of CPU for the kernel tests instead of 217.

    1. The first call of a device function makes its module's language interpretable. Nothing reverts that, except at
       the end of a launch, and the next launch does it again. An operation that was left out raises.
    2. The table of numpy's types is made once for each of Triton's types.
    3. The name of a tuple's type, which every shape has, is made when it is asked for.
    """
    from triton.language.core import tuple_type
    from triton.runtime import interpreter

    first_call, called = interpreter.InterpretedFunction.__call__, set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in called:
            return self.rewrite()(*args, **kwargs)
        called.add(self)
        return first_call(self, *args, **kwargs)

    get_numpy_dtype, known = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:  # by name: a pointer's type has no hash
            known[scalar.name] = get_numpy_dtype(scalar)
        return known[scalar.name]

    def init_without_name(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = numpy_dtype
    tuple_type.__init__ = init_without_name
    tuple_type.name = property(lambda self: f"[{','.join(f'{k}:{v}' for k, v in zip(self.fields, self.types))}]")
