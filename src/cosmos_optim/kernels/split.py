"""U = U1 + U2 (+ U3) in bfloat16, the form in which thin factors enter the other kernels (see `tiles`).

(B, k, r) float32 -> (parts, B, k, R), R the next power of two, zeros beyond r. With one part: U rounded to `dtype`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import available, jit, power_of_two, tl


@jit
def _split(x, y, total, r, step, sign, BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, R)
    inside = row[:, None] < total
    at = row[:, None].to(tl.int64) * R + col[None, :]
    rest = tl.load(x + row[:, None].to(tl.int64) * r + col[None, :], mask=inside & (col[None, :] < r), other=0.0) * sign
    for k in tl.static_range(PARTS):
        lead = rest.to(y.dtype.element_ty)
        tl.store(y + k * step + at, lead, mask=inside)
        rest = rest - lead.to(tl.float32)


def split(U: Tensor, parts: int, dtype: torch.dtype = torch.bfloat16, sign: float = 1.0) -> Tensor:
    """The parts of sign U, (parts, B, k, R)."""
    batch, k, r = U.shape
    R = power_of_two(r)
    if not available(U.device):
        return split_torch(sign * U, parts, dtype)
    U = U.contiguous()
    Y = torch.empty(parts, batch, k, R, dtype=dtype, device=U.device)
    block = max(1, 4096 // R)
    grid = (-(-batch * k // block),)
    _split[grid](U, Y, batch * k, r, Y.stride(0), sign, BLOCK=block, R=R, PARTS=parts, num_warps=4)
    return Y


def split_torch(U: Tensor, parts: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same in plain torch."""
    rest = torch.nn.functional.pad(U.float(), (0, power_of_two(U.shape[-1]) - U.shape[-1]))
    out = []
    for _ in range(parts):
        out.append(rest.to(dtype))
        rest = rest - out[-1].float()
    return torch.stack(out)
