"""Split thin factors into two half-precision parts, U = U1 + U2, as the other kernels expect them (see `tiles`).

(batch, k, r) float32 -> (2, batch, k, R), with R the next power of two and zeros in the columns beyond r. float16 parts
are those of c U, with a power of two c that avoids subnormal numbers: 2^8 for a basis, with entries of at most 1;
computed from the largest entry for any other factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, thin_rows, tl
from cosmos_optim.cuda.kernels.tiles import exponent, load_thin, scale_up, split_float16, store_bfloat16_parts

# c for factors with entries of at most 1.
BASIS_SCALE = 256.0


@jit
def _split(
    x, y, x_max, rows, k, r, part_stride, scale, BLOCK: tl.constexpr, R: tl.constexpr, MAX_GIVEN: tl.constexpr
):  # fmt: skip
    row, col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    value = load_thin(x, row.to(tl.int64), col, rows, r) * scale
    if MAX_GIVEN:
        value = value * scale_up(exponent(tl.load(x_max + row // k, mask=row < rows, other=1.0)))[:, None]
    at, inside = row[:, None].to(tl.int64) * R + col[None, :], row[:, None] < rows
    y1, y2 = split_float16(value)
    tl.store(y + at, y1, mask=inside)
    tl.store(y + part_stride + at, y2, mask=inside)


def split(U: Tensor, x_max: Tensor | None = None) -> Tensor:
    """Return the float16 parts of c U, (2, batch, k, R).

    c is BASIS_SCALE; or, with the largest |entry| of each matrix x_max (batch,), 2^(9 - exponent of x_max).
    """
    batch, k, r = U.shape
    U, R = U.contiguous(), power_of_two(r)
    Y = torch.empty(2, batch, k, R, dtype=torch.float16, device=U.device)
    block = thin_rows(R)
    _split[(-(-batch * k // block),)](
        U, Y, U if x_max is None else x_max, batch * k, k, r, Y.stride(0), BASIS_SCALE if x_max is None else 1.0,
        BLOCK=block, R=R, MAX_GIVEN=x_max is not None, num_warps=4,
    )  # fmt: skip
    return Y


@jit
def _split_both(x, half, wide, rows, r, part_stride, scale, BLOCK: tl.constexpr, R: tl.constexpr):
    row, col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    value = load_thin(x, row.to(tl.int64), col, rows, r)
    at, inside = row[:, None].to(tl.int64) * R + col[None, :], row[:, None] < rows
    half1, half2 = split_float16(value * scale)
    tl.store(half + at, half1, mask=inside)
    tl.store(half + part_stride + at, half2, mask=inside)
    store_bfloat16_parts(wide + at, part_stride, value, inside)


def split_both(U: Tensor) -> tuple[Tensor, Tensor]:
    """Return a basis in float16 parts, times BASIS_SCALE, and in bfloat16 parts; one launch for both."""
    batch, k, r = U.shape
    U, R = U.contiguous(), power_of_two(r)
    half, wide = (torch.empty(2, batch, k, R, dtype=d, device=U.device) for d in (torch.float16, torch.bfloat16))
    block = thin_rows(R)
    _split_both[(-(-batch * k // block),)](
        U, half, wide, batch * k, r, half.stride(0), BASIS_SCALE, BLOCK=block, R=R, num_warps=4
    )
    return half, wide
