"""Read a parameter in float32, and write the result back: rounded to nearest, stochastically, or with a correction.

Stochastic rounding of x to bfloat16 adds a uniform integer from [0, 2^16) to the bits of the float32 and clears the low
16 bits. The expectation is x, so updates far below one unit in the last place are not lost. The integers are a hash of
(element index, step count) instead of random numbers, so replicas of a parameter use the same ones without
communication. A process numbers the elements that it stores, so shards are not rounded as the whole parameter would
be. The mean stays right.

Shapes: everything is elementwise; a seed is a 0-dim tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.linalg.weight24 import join_weight, split_weight

LOW16 = 0xFFFF
# Odd multipliers of the hash: of the index, and of the murmur3 finalizer, as signed 32-bit integers.
INDEX_MIX = 0x9E3779B  # the first 28 bits of the golden ratio's inverse; a resumed run needs the same multiplier
MIX1 = 0x85EBCA6B - (1 << 32)
MIX2 = 0xC2B2AE35 - (1 << 32)


def noise16(count: int, seed: Tensor) -> Tensor:
    """Return `count` int32 in [0, 2^16), a hash of (index, seed), on the device of the 0-dim tensor `seed`."""
    x = torch.arange(count, dtype=torch.int32, device=seed.device)
    x = x * INDEX_MIX + seed.to(torch.int32) * MIX1
    for mix in (MIX1, MIX2):
        x = x ^ ((x >> 15) & 0x1FFFF)
        x = x * mix
    x = x ^ ((x >> 16) & LOW16)
    return x & LOW16


def stochastic_bfloat16(x: Tensor, seed: Tensor) -> Tensor:
    """Round x (float32) up or down to bfloat16, with the probabilities that keep its mean.

    >>> x = torch.full((10000,), 1.0 + 2.0**-10)          # an eighth of the way from 1 to the next bfloat16
    >>> y = stochastic_bfloat16(x, torch.tensor(3)).float()
    >>> sorted(y.unique().tolist()), round(float(((y - 1) / 2**-7).mean()), 1)
    ([1.0, 1.0078125], 0.1)
    """
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + noise16(x.numel(), seed).view(x.shape)) & ~LOW16
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).to(torch.bfloat16)


def read_weight(p: Tensor, dtype: torch.dtype, correction: Tensor | None = None) -> Tensor:
    """Return p in `dtype`, with its correction if it has one."""
    return p.to(dtype) if correction is None else join_weight(p, correction)


def write_(p: Tensor, value: Tensor, seed: Tensor | None = None, correction: Tensor | None = None) -> None:
    """Write p <- value, rounded to nearest, or stochastically if a seed is given and p is bfloat16.

    If a correction is given, p and the correction become the 24 bits of the value.
    """
    if correction is not None:
        value, rest = split_weight(value)
        correction.copy_(rest)
    elif seed is not None and p.dtype is torch.bfloat16:
        value = stochastic_bfloat16(value.float(), seed)
    p.copy_(value)
