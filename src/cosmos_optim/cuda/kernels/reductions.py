"""Sums by parts: one kernel writes a partial sum for each block, (batch, parts), and the next kernel adds them.

This saves a launch per sum. Parts are float64, or float32 for numbers of moderate size; their total is float64, added
in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, tl

# Entries that one program reads at a time, and how many times it does.
BLOCK, BLOCKS_PER_PROGRAM = 2048, 4


@jit
def sum_parts(parts, batch, count, COUNT: tl.constexpr):
    """Return the sum of the parts of matrix `batch` in float64."""
    at = tl.arange(0, COUNT)
    return tl.sum(tl.load(parts + batch * count + at, mask=at < count, other=0.0).to(tl.float64))


@jit
def max_parts(parts, batch, count, COUNT: tl.constexpr):
    """Return the largest of the parts of matrix `batch`."""
    at = tl.arange(0, COUNT)
    return tl.max(tl.load(parts + batch * count + at, mask=at < count, other=0.0))


@jit
def norm_sq(x):
    """Return the sum of squares of a block in float64: the squares of 1e-30 and 1e20 do not fit in float32."""
    wide = x.to(tl.float64)
    return tl.sum(wide * wide)


@jit
def _norm_sq_and_max(x, norm_sq_parts, max_abs_parts, size, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    start = x + batch.to(tl.int64) * size
    total, x_max = tl.zeros((BLOCK,), dtype=tl.float64), tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, SPAN, BLOCK):
        at = part * SPAN + first + tl.arange(0, BLOCK)
        value = tl.load(start + at, mask=at < size, other=0.0)
        wide = value.to(tl.float64)
        total += wide * wide
        x_max = tl.maximum(x_max, tl.abs(value))
    tl.store(norm_sq_parts + batch * parts + part, tl.sum(total))
    tl.store(max_abs_parts + batch * parts + part, tl.max(x_max))


def norm_sq_and_max(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return |X|^2 (float64) and the largest |entry| of each matrix of a float32 stack, by parts (batch, parts)."""
    X = X.contiguous()
    batch, size = X.shape[0], X[0].numel()
    block = launch.TARGET.block(BLOCK)
    span = BLOCKS_PER_PROGRAM * block
    parts = -(-size // span)
    norm_sq_parts = torch.empty(batch, parts, dtype=torch.float64, device=X.device)
    max_abs_parts = torch.empty(batch, parts, dtype=torch.float32, device=X.device)
    _norm_sq_and_max[(parts, batch)](X, norm_sq_parts, max_abs_parts, size, SPAN=span, BLOCK=block, num_warps=4)
    return norm_sq_parts, max_abs_parts
