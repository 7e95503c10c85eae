"""Sums that one kernel leaves by blocks and the next one adds: (B, parts), one launch less for each.

They are float64, or float32 where the numbers are known to be of moderate size; the total is float64, in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, tl

# Entries that one program reads at a time, and how often.
BLOCK, BLOCKS_PER_PROGRAM = 2048, 4


@jit
def total(parts, batch, count, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the parts of matrix `batch`."""
    at = tl.arange(0, COUNT)
    return tl.sum(tl.load(parts + batch * count + at, mask=at < count, other=0.0).to(tl.float64))


@jit
def largest(parts, batch, count, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of the parts of matrix `batch`."""
    at = tl.arange(0, COUNT)
    return tl.max(tl.load(parts + batch * count + at, mask=at < count, other=0.0))


@jit
def square_sum(x):  # type: ignore[no-untyped-def]
    """The sum of squares of a block in float64: the square of 1e-30 or of 1e20 is no float32 number."""
    wide = x.to(tl.float64)
    return tl.sum(wide * wide)


@jit
def _measure(x, squares, peaks, size, SPAN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    start = x + batch.to(tl.int64) * size
    sums, top = tl.zeros((BLOCK,), dtype=tl.float64), tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, SPAN, BLOCK):
        at = part * SPAN + first + tl.arange(0, BLOCK)
        value = tl.load(start + at, mask=at < size, other=0.0)
        wide = value.to(tl.float64)
        sums += wide * wide
        top = tl.maximum(top, tl.abs(value))
    tl.store(squares + batch * parts + part, tl.sum(sums))
    tl.store(peaks + batch * parts + part, tl.max(top))


def measure(X: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares (float64) and the largest |entry| of each matrix of a float32 stack by blocks, (B, parts)."""
    X = X.contiguous()
    batch, size = X.shape[0], X[0].numel()
    block = launch.TARGET.block(BLOCK)
    span = BLOCKS_PER_PROGRAM * block
    parts = -(-size // span)
    squares = torch.empty(batch, parts, dtype=torch.float64, device=X.device)
    peaks = torch.empty(batch, parts, dtype=torch.float32, device=X.device)
    _measure[(parts, batch)](X, squares, peaks, size, SPAN=span, BLOCK=block, num_warps=4)
    return squares, peaks


def added(parts: Tensor) -> Tensor:
    """Sums by parts, added: (B, 1, 1) in float64."""
    return parts.flatten(1).sum(1, dtype=torch.float64).view(-1, 1, 1)


def measure_torch(X: Tensor) -> tuple[Tensor, Tensor]:
    """The same in one part, in plain torch."""
    return X.double().square().sum((1, 2))[:, None], X.abs().amax((1, 2))[:, None]
