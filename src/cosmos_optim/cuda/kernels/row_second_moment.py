"""Divide each row of an update D by the root of its second moment, as NorMuon does (not in the paper).

    q_i = b^2 |B_i|^2 + |P_i|^2                       squared norms of the rows of D = b B + P U', because B U = 0
    v_i <- beta v_i + (1 - beta) q_i / n,  g_i = 1 / (sqrt(v_i) + eps)
    |g D|^2 = sum of g_i^2 q_i                        for NORM (L11)

B = (buffer - (buffer U) U') / norm, see `gains`. `project.overlap` returns norm^2 |B_i|^2 if there is a basis U;
`row_norm_sq` computes it if there is none. One kernel does the rest, because a row needs only its own sums.

Shapes: v, g (batch, m, 1), P (batch, m, r), squared norms of rows (batch, m).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import Launch, jit, power_of_two, thin_rows, tl
from cosmos_optim.cuda.kernels.tiles import load_thin, load_tile

LAUNCH = Launch(64, 64, warps=4, stages=3)


@jit
def _row_norm_sq(x, out, stride, m, n, sm, sn, BM: tl.constexpr, BK: tl.constexpr):
    block, batch = tl.program_id(0), tl.program_id(1)
    start, i = x + batch.to(tl.int64) * stride, block * BM + tl.arange(0, BM)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        a = load_tile(start, i, k + tl.arange(0, BK), m, n, sm, sn).to(tl.float32)
        squares += a * a
    tl.store(out + batch * m + i, tl.sum(squares, axis=1), mask=i < m)


def row_norm_sq(X: Tensor) -> Tensor:
    """Return the squared norms (batch, m) of the rows of a half-precision stack X (batch, m, n) of any strides."""
    (batch, m, n), how = X.shape, LAUNCH.fit(16)
    out = torch.empty(batch, m, dtype=torch.float32, device=X.device)
    _row_norm_sq[(-(-m // how.rows), batch)](
        X, out, X.stride(0), m, n, X.stride(1), X.stride(2), BM=how.rows, BK=how.cols, **how.options
    )
    return out


@jit
def _row_gains(
    p, b_row_sq, v, b, norm_sq, v_new, gain, d_sq, m, r, n, beta, one_minus_beta, eps,
    BLOCK: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr,
):  # fmt: skip
    block, batch, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = batch * m + row, row < m
    scale = 1.0 / tl.load(norm_sq + batch)
    if THIN:
        factor = tl.load(b + batch).to(tl.float64)
        scale = scale * factor * factor
    # `overlap` computes b_row_sq as the difference of two sums, which rounding may make negative.
    q = tl.load(b_row_sq + at, mask=inside, other=0.0).to(tl.float64)
    q = tl.where(q > 0, q * scale, 0.0)
    if THIN:
        P = load_thin(p + batch.to(tl.int64) * m * r, row, tl.arange(0, R), m, r)
        q += tl.sum(P * P, axis=1).to(tl.float64)
    moment = beta * tl.load(v + at, mask=inside, other=0.0) + one_minus_beta * (q / n).to(tl.float32)
    root = tl.sqrt_rn(moment) + eps
    g = tl.where(root > 0, 1.0 / tl.where(root > 0, root, 1.0), 0.0)
    tl.store(v_new + at, moment, mask=inside)
    tl.store(gain + at, g, mask=inside)
    wide = g.to(tl.float64)
    tl.store(d_sq + batch * blocks + block, tl.sum(wide * wide * q))


def row_gains(
    v: Tensor, B_row_sq: Tensor, norm_sq: Tensor, n: int, beta: float, eps: float, *,
    b: Tensor | None = None, P: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return v and g (batch, m, 1), and |g D|^2 by row blocks (batch, blocks) in float64.

    Args:
        v: (batch, m, 1) float32, the second moment so far.
        B_row_sq: norm_sq |B_i|^2 (batch, m).
        norm_sq: (batch, 1, 1) float64, from `gains.norm_and_weight`.
        b, P: (batch, 1, 1) and (batch, m, r), or both None for b = 1 and P = 0.
    """
    batch, m, r = (*v.shape[:2], 16) if P is None else P.shape
    v, R = v.contiguous(), power_of_two(r)
    v_new, gain, block = torch.empty_like(v), torch.empty_like(v), thin_rows(R)
    blocks = -(-m // block)
    D_sq = torch.empty(batch, blocks, dtype=torch.float64, device=v.device)
    _row_gains[(blocks, batch)](
        v if P is None else P.contiguous(), B_row_sq, v, v if b is None else b, norm_sq, v_new, gain, D_sq, m, r, n,
        beta, 1 - beta, eps, BLOCK=block, R=R, THIN=P is not None, num_warps=4,
    )  # fmt: skip
    return v_new, gain, D_sq
