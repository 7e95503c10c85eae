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
    check_strides_in_bytes()
    make_masks_boolean()
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


def check_strides_in_bytes() -> None:
    """Let Triton 3.5 accept the strides that it accepts on a GPU, and that later versions accept here too.

    A tensor descriptor needs strides of a multiple of 16 bytes. The interpreter of 3.5 asks for 16 elements.
    """
    from triton.runtime import interpreter

    handle, check = interpreter.TensorDescHandle, interpreter.TensorDescHandle.validate

    def validate(self: Any) -> None:
        size = self.base.dtype.element_ty.primitive_bitwidth // 8
        *outer, last = self.strides
        in_bytes = [interpreter.TensorHandle(stride.data * size, stride.dtype) for stride in outer]
        check(handle(self.base, self.shape, [*in_bytes, last], self.block_shape, self.padding))

    if triton_version() < (3, 6):
        handle.validate = validate


def make_masks_boolean() -> None:
    """Let Triton 3.9 accept a mask that contains a comparison of scalars.

    The interpreter gives the result of a comparison the type of its operands, so a scalar one that is spread over a
    tile becomes integers 0 and 1. Versions up to 3.6 take these as a mask, 3.9 refuses them.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        return interpreter.TensorHandle(np.asarray(mask.data, dtype=bool), tl.int1)

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return masked_load(self, ptrs, boolean(mask), *rest, **named)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return masked_store(self, ptrs, value, boolean(mask), *rest)

    if triton_version() > (3, 6):
        builder.create_masked_load, builder.create_masked_store = load, store


def triton_version() -> tuple[int, int]:
    """Return major and minor of the installed Triton."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)
