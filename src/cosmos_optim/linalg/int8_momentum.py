"""Store the momentum, a matrix, as integers of 8 bits, with one float32 scale for each block of a row.

A block of `BLOCK` neighbouring elements of a row (the last block of a row may be shorter) has the scale absmax / 127,
and each element is the nearest multiple of it: x = code * scale, with code in -127..127. An outlier costs only
the precision of its block.

A scale has 17 significant bits and a code 7, so their product is exact in float32. Because of this, quantizing a
dequantized matrix gives the same codes and scales. `cuda.kernels.momentum_int8` does the same on a GPU.

Shapes: X (..., m, n), codes (..., m, n) int8, scales (..., m, ceil(n / BLOCK)) float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
LARGEST_CODE = 127
# Bounds of a scale: its inverse and 127 times the scale must be finite and normal. A block of zeros has the least.
LEAST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**121
# The low bits of a float32 that a scale leaves zero.
CLEARED_BITS = 7


def scale_columns(n: int) -> int:
    """Return the number of scales of a row of n elements."""
    return -(-n // BLOCK)


def quantize(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of X, rounded to nearest.

    >>> codes, scales = quantize(torch.tensor([[127.0, -63.6, 0.4]]))
    >>> codes.tolist(), scales.tolist()
    ([[127, -64, 0]], [[1.0]])
    """
    blocks = blocks_of(X)
    scales = rounded_scales(blocks.abs().amax(-1) / LARGEST_CODE, LARGEST_SCALE, CLEARED_BITS)
    codes = (blocks * (1 / scales.to(X.dtype)).unsqueeze(-1)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.to(torch.int8).flatten(-2)[..., : X.shape[-1]].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix of these codes and scales."""
    blocks = blocks_of(codes).to(dtype) * scales.to(dtype).unsqueeze(-1)
    return blocks.flatten(-2)[..., : codes.shape[-1]]


def blocks_of(X: Tensor) -> Tensor:
    """Return (..., m, blocks, BLOCK): the blocks of each row, the last one filled up with zeros."""
    n = X.shape[-1]
    return pad(X, (0, scale_columns(n) * BLOCK - n)).unflatten(-1, (scale_columns(n), BLOCK))


def rounded_scales(scales: Tensor, largest: float, cleared_bits: int) -> Tensor:
    """Return scales from LEAST_SCALE to `largest`, in float32, rounded to numbers with zeros in the low bits."""
    half, kept = 1 << (cleared_bits - 1), -1 << cleared_bits
    bits = scales.clamp(LEAST_SCALE, largest).float().view(torch.int32)
    return ((bits + half) & kept).view(torch.float32)
