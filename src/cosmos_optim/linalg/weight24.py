"""Store a float32 weight in 24 bits: the bfloat16 that the model reads, and a correction of 8 bits.

A float32 has 32 bits. Its upper 24, rounded, are a number with 16 significant bits. The bfloat16 nearest to it has the
upper 16 of these, and the correction is the difference, in units of a 256th of the bfloat16's last place:

    bits24 = (bits + 128) >> 8,  bits16 = (bits24 + 128) >> 8,  correction = bits24 - (bits16 << 8) in -128..127
    bits = ((bits16 << 8) + correction) << 8

The bits of floats of one sign are in the order of their magnitudes, so these sums round magnitudes to nearest and carry
into the exponent. Splitting moves a number by at most 2^-16 of it, and splitting a joined number gives the same bits.
A number that rounds to inf in bfloat16 is inf, and NaN stays NaN; their correction is 0.

`cuda.kernels.weight24_tiles` does the same on a GPU. Shapes: everything is elementwise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_weight(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 and the int8 correction of x (float32).

    >>> p, correction = split_weight(torch.tensor([1.0, 1.0 + 2.0**-10, 1.0 - 2.0**-10]))
    >>> p.tolist(), correction.tolist()
    ([1.0, 1.0, 1.0], [0, 32, -64])
    """
    bits24 = (torch.where(x.isnan(), torch.nan, x).view(torch.int32) + 128) >> 8  # a NaN with bits that do not overflow
    bits16 = (bits24 + 128) >> 8
    p = bits16.to(torch.int16).view(torch.bfloat16)
    return p, torch.where(p.isfinite(), bits24 - (bits16 << 8), 0).to(torch.int8)


def join_weight(p: Tensor, correction: Tensor) -> Tensor:
    """Return the float32 of a bfloat16 and its correction.

    If other code has written p since, the correction still moves it by at most half a unit in its last place. It is
    ignored if it has no meaning: if p is not finite, and if it would move a zero across zero.

    >>> join_weight(torch.tensor([1.0, 0.0]).bfloat16(), torch.tensor([32, -64], dtype=torch.int8)).tolist()
    [1.0009765625, 0.0]
    """
    bits24 = (p.view(torch.int16).int() << 8) + correction
    joined = (bits24 << 8).view(torch.float32)
    return torch.where(p.isfinite() & ((p != 0) | (correction >= 0)), joined, p.float())
