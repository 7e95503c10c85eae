"""Host-side code that all kernels share: Triton if it is installed, launch settings, tile sizes.

CPU builds of torch come without Triton. The kernel files can be imported then, and `available` returns False.
"""

from __future__ import annotations

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
except ImportError:  # no kernels; `jit` returns the functions unchanged

    class _Missing:
        constexpr = staticmethod(lambda value: value)

    triton, tl, TensorDescriptor = None, _Missing(), None

# Entries of a thin factor that one program holds in registers.
THIN_ENTRIES = 2048
# Every function that `jit` has compiled, including those that only other kernels call.
KERNELS: list[Any] = []


@dataclass(frozen=True)
class Target:
    """What the kernels are compiled for. The default is a GPU; wrappers read `TARGET` at each launch.

    float32_dots: cast the operands of every `tl.dot` to float32 (Triton's interpreter multiplies bfloat16 wrongly).
    max_tile: upper bound of the rows and columns of a tile.
    max_block: upper bound of the entries of a one-dimensional block.
    """

    float32_dots: bool = False
    max_tile: int | None = None
    max_block: int | None = None

    def tile(self, side: int) -> int:
        """Return the side of a tile, bounded by `max_tile`."""
        return side if self.max_tile is None else min(side, self.max_tile)

    def block(self, entries: int) -> int:
        """Return the length of a one-dimensional block, bounded by `max_block`."""
        return entries if self.max_block is None else min(entries, self.max_block)


TARGET = Target()


def jit(fn: Any = None, *, unaligned: Sequence[str] = (), unspecialized: Sequence[str] = ()) -> Any:
    """Compile with `triton.jit`, or return the function unchanged if Triton is missing (it is then never called).

    Args:
        unaligned: pointer arguments with an alignment that must not select another kernel. Gradient addresses change
            when a step is recorded as a CUDA graph, and nothing should be compiled during the recording.
        unspecialized: integer arguments for which the values 1 and 16 k must not select another kernel.
    """
    if fn is None:
        return partial(jit, unaligned=unaligned, unspecialized=unspecialized)
    if triton is None:
        return fn
    kernel = triton.jit(fn, do_not_specialize_on_alignment=list(unaligned), do_not_specialize=list(unspecialized))
    KERNELS.append(kernel)
    return kernel


def available(device: torch.device) -> bool:
    """Return whether the kernels run on this device: CUDA of compute capability 8.0 or newer, with Triton."""
    return triton is not None and torch.version.hip is None and capability(device) >= (8, 0)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, (0, 0) for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make this CUDA device current: Triton launches on the current device, not on that of the operands."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def false_flag(device: torch.device) -> Tensor:
    """Return a device flag that is False, so that steps without a `skip` flag can use the same kernels."""
    return torch.zeros((), dtype=torch.bool, device=device)


def power_of_two(x: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least x and at least `least`."""
    return max(least, 1 << (x - 1).bit_length())


def padded_row(length: int, element_size: int) -> int:
    """Return the elements of a row in memory so that each row begins at a multiple of 16 bytes if the first does."""
    return -(-length * element_size // 16) * 16 // element_size


def thin_rows(R: int) -> int:
    """Return the rows of a thin factor of R columns that one program of four warps takes."""
    return max(1, THIN_ENTRIES // R)


@dataclass(frozen=True)
class Launch:
    """The tile size (rows x cols) of a kernel, and Triton's launch options."""

    rows: int
    cols: int
    warps: int = 8
    stages: int = 3

    def fit(self, R: int) -> Launch:
        """Shrink the tile so that it fits in registers and shared memory with thin factors of R columns."""
        rows, cols = self.rows, self.cols
        if R > 64:
            rows, cols = max(64, rows * 128 // max(R, 128)), max(16, cols * 64 // R)
        return replace(self, rows=TARGET.tile(rows), cols=TARGET.tile(cols))

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}
