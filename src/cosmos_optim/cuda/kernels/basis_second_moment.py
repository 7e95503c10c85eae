"""S <- beta C S C' + E, made symmetric, with C = U'U_old and E = (1 - beta) (G U)'G U (L6); and the columns it tracks.

`thin_qr.thin_product_parts` computes C and E by row blocks. One program per matrix adds the blocks and does the rest,
because these matrices are too small for a launch per product. Ranks above `thin_qr.MAX_COLUMNS` run in plain torch.

Shapes: S, C, E (batch, r, r); R is the next power of two of r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch, thin_qr
from cosmos_optim.cuda.kernels.launch import jit, tl
from cosmos_optim.cuda.kernels.tiles import (
    dot_parts,
    dot_split_tile,
    exponent,
    load_thin,
    scale_down,
    scale_up,
    split_float16,
    store_thin,
)
from cosmos_optim.rules.cosmos import noise_floor, symmetric, tracked

# Blocks of a Gram matrix that are loaded at the same time.
PREFETCHED = 4


@jit
def _sum_gram(parts, batch, count, R: tl.constexpr, PREFETCHED: tl.constexpr):
    """Return the sum of the blocks of matrix `batch`."""
    i, j = tl.arange(0, R), tl.arange(0, R)
    start = parts + batch.to(tl.int64) * count * R * R + i[:, None] * R + j[None, :]
    acc = tl.zeros((R, R), dtype=tl.float32)
    for first in range(0, count, PREFETCHED):
        for offset in tl.static_range(PREFETCHED):
            part = first + offset
            acc += tl.load(start + part * R * R, mask=(i[:, None] < R) & (part < count), other=0.0)
    return acc


@jit
def _second_moment(
    s, c_parts, e_parts, s_new, holds_gradient, c_count, e_count, r, beta, floor,
    R: tl.constexpr, PREFETCHED: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    i, j = tl.arange(0, R), tl.arange(0, R)
    zero = tl.zeros((R, R), dtype=tl.float32)
    S = load_thin(s + batch * r * r, i, j, r, r)
    e_s = exponent(tl.max(tl.abs(S)))
    s1, s2 = split_float16(S * scale_up(e_s))
    C = _sum_gram(c_parts, batch, c_count, R, PREFETCHED)
    e_c = exponent(tl.max(tl.abs(C)))
    c1, c2 = split_float16(C * scale_up(e_c))
    CS = scale_down(e_s) * (scale_down(e_c) * dot_parts(c1, c2, s1, s2, zero, False, False, FLOAT32_DOTS))
    e_cs = exponent(tl.max(tl.abs(CS)))
    CSC = scale_down(e_c) * dot_split_tile(CS, e_cs, tl.trans(c1), tl.trans(c2), zero, False, False, FLOAT32_DOTS)
    E = _sum_gram(e_parts, batch, e_count, R, PREFETCHED)
    S = beta * CSC + E
    S = (S + tl.trans(S)) * 0.5
    store_thin(s_new + batch * r * r, i, j, r, r, S)
    diagonal = i[:, None] == j[None, :]
    past, now = tl.sum(tl.where(diagonal, S, 0.0), axis=0), tl.sum(tl.where(diagonal, E, 0.0), axis=0)
    keep = (past > floor * tl.sum(past)) | (now > floor * tl.sum(now))
    tl.store(holds_gradient + batch * r + j, keep.to(tl.float32), mask=j < r)


def second_moment(S: Tensor, c_parts: Tensor, e_parts: Tensor, beta: float, guard: float) -> tuple[Tensor, Tensor]:
    """Return the new S, and `rules.cosmos.tracked` of it and E: which columns hold gradient, (batch, 1, r).

    Args:
        c_parts, e_parts: C and E by row blocks (batch, parts, R, R), as `thin_qr.thin_product_parts` returns them.
        guard: 0 tracks all columns.
    """
    batch, r = S.shape[:2]
    if not thin_qr.supports(r):
        C, E = c_parts.sum(1), e_parts.sum(1)
        S = symmetric(beta * C @ S @ C.mT + E)
        return S, tracked(S, E, guard)
    R, S = c_parts.shape[-1], S.contiguous()
    S_new, holds_gradient = torch.empty_like(S), S.new_empty(batch, 1, r)
    _second_moment[(batch,)](
        S, c_parts, e_parts, S_new, holds_gradient, c_parts.shape[1], e_parts.shape[1], r, beta,
        noise_floor(S.dtype, guard), R=R, PREFETCHED=PREFETCHED if R <= 64 else PREFETCHED // 2,
        FLOAT32_DOTS=launch.TARGET.float32_dots, num_warps=4 if R <= 32 else 8 if R <= 64 else 16,
    )  # fmt: skip
    return S_new, holds_gradient
