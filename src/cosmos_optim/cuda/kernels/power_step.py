"""Between the large products of a power step: Y / c in parts, and beta U S / c^2 + (1 - beta) (H U / c + eps U).

c^2 = |Y|^2 + trace S keeps everything in the number range, whatever the size of the gradient (`linalg.subspace`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.reductions import largest, measure, total
from cosmos_optim.cuda.kernels.thin_qr import plan, warps
from cosmos_optim.cuda.kernels.tiles import bring, exponent, halves, mac_tile, thin_rows, undo


@jit
def _scaled(  # type: ignore[no-untyped-def]
    x, s, squares, peaks, y, scale, peak, k, r, parts, step, BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    row, col = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    diagonal = tl.load(s + batch * r * r + col * (r + 1), mask=col < r, other=0.0)
    c = tl.sqrt(total(squares, batch, parts, PARTS) + tl.sum(diagonal.to(tl.float64))).to(tl.float32)
    c = tl.where(c > 0, c, 1.0)
    top = largest(peaks, batch, parts, PARTS) / c
    value = thin_rows(x + batch.to(tl.int64) * k * r, row, col, k, r) / c
    lead, rest = halves(value * bring(exponent(top)))
    at, inside = y + (batch.to(tl.int64) * k + row[:, None]) * R + col[None, :], row[:, None] < k
    tl.store(at, lead, mask=inside)
    tl.store(at + step, rest, mask=inside)
    if block == 0:
        tl.store(scale + batch, c)
        tl.store(peak + batch, top)


def scaled(Y: Tensor, S: Tensor, squares: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Y / c in float16 parts (2, B, k, R), its largest |entry| (B,), and c (B, 1, 1), 1 for a zero matrix."""
    batch, k, r = Y.shape
    Y, S, R = Y.contiguous(), S.contiguous(), power_of_two(r)
    parts = torch.empty(2, batch, k, R, dtype=torch.float16, device=Y.device)
    c, peak = (torch.empty(batch, dtype=torch.float32, device=Y.device) for _ in range(2))
    block, count = max(1, 2048 // R), squares.shape[1]
    _scaled[(-(-k // block), batch)](
        Y, S, squares, peaks, parts, c, peak, k, r, count, parts.stride(0), BLOCK=block, R=R,
        PARTS=power_of_two(count), num_warps=4,
    )  # fmt: skip
    return parts, peak, c.view(-1, 1, 1)


@jit
def _power_sum(  # type: ignore[no-untyped-def]
    u, s, hu, scale, out, columns, k, r, beta, rest, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """The sum over ROWS rows, and the sums of squares of its columns there."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    base = batch.to(tl.int64) * k * r
    i, col = tl.arange(0, R), tl.arange(0, R)
    c = tl.load(scale + batch)
    T = thin_rows(s + batch * r * r, i, col, r, r) / c / c
    e_t, e = exponent(tl.max(tl.abs(T))), exponent(tl.full((), 1.0, dtype=tl.float32))
    t1, t2 = halves(T * bring(e_t))
    squares = tl.zeros((R,), dtype=tl.float32)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        x = thin_rows(u + base, row, col, k, r)
        y = undo(e_t) * mac_tile(x, e, t1, t2, tl.zeros((BLOCK, R), dtype=tl.float32), False, False, FLOAT32_DOTS)
        y = beta * y + rest * (thin_rows(hu + base, row, col, k, r) / c + eps * x)
        squares += tl.sum(y * y, axis=0)
        tl.store(out + base + row[:, None] * r + col[None, :], y, mask=(row[:, None] < k) & (col[None, :] < r))
    tl.store(columns + (batch * parts + part) * R + col, squares)


def power_sum(U: Tensor, S: Tensor, HU: Tensor, c: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """beta U S / c^2 + (1 - beta) (HU / c + eps U), (B, k, r), and what `orthonormal` wants to know of its columns.

    U has entries of at most 1; the product is as exact as in float32.
    """
    batch, k, r = U.shape
    parts, how = plan(k, r)
    U, S, HU = U.contiguous(), S.contiguous(), HU.contiguous()
    Y, columns = torch.empty_like(U), U.new_empty(batch, parts, how["R"])
    _power_sum[(parts, batch)](
        U, S, HU, c, Y, columns, k, r, beta, 1 - beta, torch.finfo(torch.float32).eps,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how, num_warps=warps(how["R"]), num_stages=1,
    )  # fmt: skip
    return Y, columns
