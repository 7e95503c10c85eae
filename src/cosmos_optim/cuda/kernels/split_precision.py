"""U = U1 + U2 in half precision, the form in which thin factors enter the other kernels (see `tiles`).

(B, k, r) float32 -> (2, B, k, R), R the next power of two, zeros beyond r. float16 parts are those of c U, with a power
of two c that keeps them normal numbers: 2^8 for a basis, whose entries are at most 1; from the largest entry otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import bring, exponent, halves, thin_rows

# c for the factors whose entries are at most 1.
BASIS_SCALE = 256.0


@jit
def _split(x, y, peak, total, k, r, step, scale, BLOCK: tl.constexpr, R: tl.constexpr, PEAK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, R)
    inside = row[:, None] < total
    at = row[:, None].to(tl.int64) * R + col[None, :]
    held = inside & (col[None, :] < r)
    value = tl.load(x + row[:, None].to(tl.int64) * r + col[None, :], mask=held, other=0.0) * scale
    if PEAK:
        value = value * bring(exponent(tl.load(peak + row // k, mask=row < total, other=1.0)))[:, None]
    lead = value.to(y.dtype.element_ty)
    tl.store(y + at, lead, mask=inside)
    tl.store(y + step + at, (value - lead.to(tl.float32)).to(y.dtype.element_ty), mask=inside)


def split(U: Tensor, dtype: torch.dtype, *, scale: float = 1.0, peak: Tensor | None = None) -> Tensor:
    """The two parts of c U, (2, B, k, R), with c = scale, or c = scale 2^(9 - exponent of peak) by matrix."""
    batch, k, r = U.shape
    R = power_of_two(r)
    U = U.contiguous()
    Y = torch.empty(2, batch, k, R, dtype=dtype, device=U.device)
    block = max(1, 2048 // R)
    _split[(-(-batch * k // block),)](
        U, Y, U if peak is None else peak, batch * k, k, r, Y.stride(0), scale, BLOCK=block, R=R,
        PEAK=peak is not None, num_warps=4,
    )  # fmt: skip
    return Y


@jit
def _split_both(x, half, wide, total, r, step, scale, BLOCK: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    row, col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    value = thin_rows(x, row.to(tl.int64), col, total, r)
    at, inside = row[:, None].to(tl.int64) * R + col[None, :], row[:, None] < total
    lead, rest = halves(value * scale)
    tl.store(half + at, lead, mask=inside)
    tl.store(half + step + at, rest, mask=inside)
    wider = value.to(tl.bfloat16)
    tl.store(wide + at, wider, mask=inside)
    tl.store(wide + step + at, (value - wider.to(tl.float32)).to(tl.bfloat16), mask=inside)


def split_both(U: Tensor) -> tuple[Tensor, Tensor]:
    """A basis in float16 parts times BASIS_SCALE, and in bfloat16 parts."""
    batch, k, r = U.shape
    U, R = U.contiguous(), power_of_two(r)
    half, wide = (torch.empty(2, batch, k, R, dtype=d, device=U.device) for d in (torch.float16, torch.bfloat16))
    block = max(1, 2048 // R)
    _split_both[(-(-batch * k // block),)](
        U, half, wide, batch * k, r, half.stride(0), BASIS_SCALE, BLOCK=block, R=R, num_warps=4
    )
    return half, wide


def split_torch(U: Tensor, dtype: torch.dtype, *, scale: float = 1.0, peak: Tensor | None = None) -> Tensor:
    """The same in plain torch."""
    value = torch.nn.functional.pad(U.float() * scale, (0, power_of_two(U.shape[-1]) - U.shape[-1]))
    if peak is not None:
        value = torch.ldexp(value, 10 - torch.frexp(peak.view(-1, 1, 1)).exponent)
    lead = value.to(dtype)
    return torch.stack([lead, (value - lead.float()).to(dtype)])
