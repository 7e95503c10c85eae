"""Triton where it is installed, and what the kernels may rely on.

CPU builds of torch come without Triton; the kernel files still import then, and `available` says no.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no kernels; `jit` leaves the functions as plain names

    class _Missing:
        constexpr = object

    triton, tl, TensorDescriptor = None, _Missing(), None

# All functions that `jit` has made, those that only other kernels call among them.
KERNELS: list[Any] = []
# Under the interpreter the same kernels run on CPU tensors, for tests.
INTERPRET = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def jit(fn: Any = None, *, anywhere: Sequence[str] = (), whatever: Sequence[str] = ()) -> Any:
    """`triton.jit`, or the function itself where there is no Triton (it is then never called).

    `anywhere`: pointers whose alignment makes no other kernel. What a recorded step reads lies elsewhere than what the
    steps before it read, and nothing should be compiled while it is recorded. `whatever`: numbers that make no other
    kernel, multiples of 16 or not.
    """
    if fn is None:
        return partial(jit, anywhere=anywhere, whatever=whatever)
    if triton is None:
        return fn
    KERNELS.append(triton.jit(fn, do_not_specialize_on_alignment=list(anywhere), do_not_specialize=list(whatever)))
    return KERNELS[-1]


def available(device: torch.device) -> bool:
    """Whether kernels run on this device: Ampere or newer, or the interpreter."""
    if triton is None:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and capability(device) >= (8, 0)
    return INTERPRET and device.type == "cpu"


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Around launches: kernels go to the current device, whatever their operands are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors, or a small number under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def never(device: torch.device) -> Tensor:
    """A flag that does not hold, for kernels that read one: no second kernel for steps that are not to be skipped."""
    return torch.zeros((), dtype=torch.bool, device=device)


def power_of_two(x: int, least: int = 16) -> int:
    """The smallest power of two that is at least x and `least`."""
    return max(least, 1 << (x - 1).bit_length())


@dataclass(frozen=True)
class Launch:
    """How a thin kernel covers a matrix: blocks of rows x cols, and what Triton is told."""

    rows: int
    cols: int
    warps: int = 8
    stages: int = 3

    def fit(self, R: int) -> Launch:
        """The same within registers and shared memory for thin factors of R columns; tiny under the interpreter."""
        if INTERPRET:
            return replace(self, rows=16, cols=16)
        if R <= 64:
            return self
        return replace(self, rows=max(64, self.rows * 128 // max(R, 128)), cols=max(16, self.cols * 64 // R))

    @property
    def options(self) -> dict[str, int]:
        """Triton's own launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}
