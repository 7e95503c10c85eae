"""Store Adam's moments as 8-bit codes, spaced like squares, with one float32 scale for each block of a row.

A block is `BLOCK` neighbouring elements of a row (the last block of a row may be shorter):

    m = code |code| scale        code in -127..127 (int8),  scale = largest |m| / 127^2
    sqrt(v) = code^2 scale       code in 0..255 (uint8),    scale = largest sqrt(v) / 255^2

Squares are dense near 0, so an element with 1 % of its block's largest still has a code of 12 (m) or 25 (v).

**Rounding.** A code is rounded up or down with the probabilities that keep the mean of m or sqrt(v). Rounding to
nearest would never move a moment by less than half a code: at beta2 = 0.98 and codes linear in sqrt(v), v could not
decay below 4 % of its block's largest, and an m that does not decay is a drift. The noise is a lattice over (element,
step) instead of random numbers: the same on every device and for every number of processes, and it visits [0, 1) evenly
in time.

**Zero.** A v above 0 has a code of at least 2: sqrt(v) = 2^2/255^2 of the largest, the size of m's smallest code above
0. So rounding never leaves an m without a v: a tiny element gets a smaller update instead of a wild one.

Scales have 20 significant bits, so storing a stored moment again changes no bit of it, for any noise.
`cuda.kernels.adam_update` does the same on a GPU.

Shapes: X, v (..., n), codes (..., n), scales (..., ceil(n / BLOCK)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.linalg.int8_momentum import blocks_of, rounded_scales

LARGEST_CODE, LARGEST_ROOT_CODE = 127, 255
# The least code of a v above 0.
LEAST_ROOT_CODE = 2
# The largest scale: 255^2 times it must be finite.
LARGEST_SCALE = 2.0**111
# The low bits of a float32 that a scale leaves zero.
CLEARED_BITS = 4
# Noise has 13 bits: a stored number is read with an error below 2^-15 of a step between codes, so no noise moves it.
NOISE_BITS = 13
# Odd 32-bit multipliers, as signed integers: 2^32 times 1/g, 1/g^2 (g^3 = g + 1) and the golden ratio's inverse.
ELEMENT_MIX = 0xC13FA9A9 - (1 << 32)
STEP_MIX = 0x91E10DA5 - (1 << 32)
ROOT_STEP_MIX = 0x9E3779B1 - (1 << 32)


def quantize_signed(X: Tensor, index: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (int8) and scales of a first moment.

    Args:
        X: the moment, in float32 or float64.
        index: the number of each element, as `element_index` gives it.
        step: a 0-dim tensor, the step count.

    >>> X = torch.tensor([[16129.0, -4.0, 0.0]])
    >>> codes, scales = quantize_signed(X, element_index(X), torch.tensor(1.0))
    >>> codes.tolist(), scales.tolist()
    ([[127, -2, 0]], [[1.0]])
    """
    magnitudes, scales = _codes(X.abs(), LARGEST_CODE, _noise(index, step, STEP_MIX))
    return (magnitudes * X.sign()).to(torch.int8), scales


def quantize_root(v: Tensor, index: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8) and scales of a second moment; arguments as for `quantize_signed`."""
    codes, scales = _codes(v.sqrt(), LARGEST_ROOT_CODE, _noise(index, step, ROOT_STEP_MIX))
    return torch.where(v > 0, codes.clamp(min=LEAST_ROOT_CODE), 0).to(torch.uint8), scales


def dequantize_signed(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the first moment of these codes and scales."""
    wide = codes.to(dtype)
    return _times(wide * wide.abs(), scales)


def dequantize_root(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the second moment of these codes and scales: the square of code^2 scale."""
    return _times(codes.to(dtype).square(), scales).square()


def element_index(X: Tensor, first: tuple[int, int] = (0, 0), width: int | None = None) -> Tensor:
    """Return the number of each element of X, int32, with overflow: row * width + column.

    Args:
        X: a tensor, or the part of a larger one.
        first: the row and column of its first element in the larger one. All dimensions but the last count rows.
        width: the columns of the larger one.
    """
    n = X.shape[-1] if X.dim() else 1
    row = torch.arange(X.numel() // max(n, 1), dtype=torch.int32, device=X.device) + first[0]
    column = torch.arange(n, dtype=torch.int32, device=X.device) + first[1]
    return (row[:, None] * (n if width is None else width) + column).view(X.shape)


def _noise(index: Tensor, step: Tensor, mix: int) -> Tensor:
    """Return a number in (0, 1) for each element, a multiple of 2^-13 plus half of that."""
    bits = index * ELEMENT_MIX + step.to(torch.int32) * mix
    return (((bits >> (32 - NOISE_BITS)) & ((1 << NOISE_BITS) - 1)).float() + 0.5) / (1 << NOISE_BITS)


def _codes(X: Tensor, largest: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of X >= 0, rounded by the noise, and the scales of its blocks."""
    blocks = blocks_of(X)
    scales = rounded_scales(blocks.amax(-1) / largest**2, LARGEST_SCALE, CLEARED_BITS)
    squares = _times(X, 1 / scales.to(X.dtype))
    low = squares.sqrt().floor()  # a root may be rounded up to the next integer
    low = low - (low * low > squares).to(X.dtype)
    up = noise * (2 * low + 1) < squares - low * low
    return (low + up).clamp_(max=largest), scales


def _times(X: Tensor, scales: Tensor) -> Tensor:
    """Return each element of X times the number of its block."""
    return (blocks_of(X) * scales.to(X.dtype).unsqueeze(-1)).flatten(-2)[..., : X.shape[-1]]
