"""S <- (T + T')/2, T = beta C S C' + E with C = U'U_old and E = (1 - beta) Y'Y, and the columns that hold gradient.

Three launches: the two Gram matrices by row blocks, then one program a matrix that adds the blocks and does the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, tl
from cosmos_optim.cuda.kernels.thin_qr import gram_parts
from cosmos_optim.cuda.kernels.tiles import bring, exponent, halves, mac_parts, mac_tile, thin_rows, undo

# Blocks of a Gram matrix on their way at a time.
AHEAD = 4


@jit
def _added(parts, batch, count, R: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the blocks of matrix `batch`."""
    i, j = tl.arange(0, R), tl.arange(0, R)
    start = parts + batch.to(tl.int64) * count * R * R + i[:, None] * R + j[None, :]
    acc = tl.zeros((R, R), dtype=tl.float32)
    for first in range(0, count, AHEAD):
        for more in tl.static_range(AHEAD):
            part = first + more
            acc += tl.load(start + part * R * R, mask=(i[:, None] < R) & (part < count), other=0.0)
    return acc


@jit
def _moment(  # type: ignore[no-untyped-def]
    s, turns, now, out, real, turn_count, now_count, r, beta, floor,
    R: tl.constexpr, AHEAD: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    i, j = tl.arange(0, R), tl.arange(0, R)
    zero = tl.zeros((R, R), dtype=tl.float32)
    S = thin_rows(s + batch * r * r, i, j, r, r)
    e_s = exponent(tl.max(tl.abs(S)))
    s1, s2 = halves(S * bring(e_s))
    C = _added(turns, batch, turn_count, R, AHEAD)
    e_c = exponent(tl.max(tl.abs(C)))
    c1, c2 = halves(C * bring(e_c))
    T = undo(e_s) * (undo(e_c) * mac_parts(c1, c2, s1, s2, zero, False, False, FLOAT32_DOTS))
    e_t = exponent(tl.max(tl.abs(T)))
    T = undo(e_c) * mac_tile(T, e_t, tl.trans(c1), tl.trans(c2), zero, False, False, FLOAT32_DOTS)
    E = _added(now, batch, now_count, R, AHEAD)
    T = beta * T + E
    T = (T + tl.trans(T)) * 0.5
    tl.store(out + batch * r * r + i[:, None] * r + j[None, :], T, mask=(i[:, None] < r) & (j[None, :] < r))
    diagonal = i[:, None] == j[None, :]
    past, held = tl.sum(tl.where(diagonal, T, 0.0), axis=0), tl.sum(tl.where(diagonal, E, 0.0), axis=0)
    keep = (past > floor * tl.sum(past)) | (held > floor * tl.sum(held))
    tl.store(real + batch * r + j, keep.to(tl.float32), mask=j < r)


def second_moment(S: Tensor, turns: Tensor, now: Tensor, beta: float, floor: float) -> tuple[Tensor, Tensor]:
    """The new S (B, r, r), and (B, 1, r): 1 where its diagonal or E's exceeds `floor` of the trace, else 0."""
    batch, r = S.shape[:2]
    R, S = turns.shape[-1], S.contiguous()
    out, real = torch.empty_like(S), S.new_empty(batch, 1, r)
    _moment[(batch,)](
        S, turns, now, out, real, turns.shape[1], now.shape[1], r, beta, floor, R=R,
        AHEAD=AHEAD if R <= 64 else AHEAD // 2, FLOAT32_DOTS=launch.TARGET.float32_dots,
        num_warps=4 if R <= 32 else 8 if R <= 64 else 16,
    )  # fmt: skip
    return out, real
