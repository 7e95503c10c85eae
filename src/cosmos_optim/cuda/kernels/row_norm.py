"""A second moment for each row of an update (`Algebra.even_rows`): row sums of squares, then all of it in one launch.

    q_i = b^2 |B_i|^2 + |P_i|^2                       sums of squares of the rows of D = b B + P U', B U = 0
    v_i <- beta v_i + (1 - beta) q_i / n,  g_i = 1 / (sqrt(v_i) + eps)
    sum of g_i^2 q_i                                  what is asked of g D next

B = (buffer - (buffer U) U') / norm (`operands.Polar`); `project.overlap` leaves norm^2 |B_i|^2 where there is a U.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import Launch, jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import thin_rows, tile

LAUNCH = Launch(64, 64, warps=4, stages=3)


@jit
def _row_squares(  # type: ignore[no-untyped-def]
    x, out, stride, m, n, sm, sn, BM: tl.constexpr, BK: tl.constexpr
):
    block, batch = tl.program_id(0), tl.program_id(1)
    start, i = x + batch.to(tl.int64) * stride, block * BM + tl.arange(0, BM)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        a = tile(start, i, k + tl.arange(0, BK), m, n, sm, sn).to(tl.float32)
        squares += a * a
    tl.store(out + batch * m + i, tl.sum(squares, axis=1), mask=i < m)


def row_squares(X: Tensor) -> Tensor:
    """Sums of squares of the rows (B, m) in float32, for a half-precision stack X (B, m, n) of any strides."""
    (batch, m, n), how = X.shape, LAUNCH.fit(16)
    out = torch.empty(batch, m, dtype=torch.float32, device=X.device)
    _row_squares[(-(-m // how.rows), batch)](
        X, out, X.stride(0), m, n, X.stride(1), X.stride(2), BM=how.rows, BK=how.cols, **how.options
    )
    return out


@jit
def _even_rows(  # type: ignore[no-untyped-def]
    p, left, v, b, norm, new, gain, energy, k, r, n, b_step, beta, rest, eps,
    BLOCK: tl.constexpr, R: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    block, batch, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    at, inside = batch * k + row, row < k
    size = 1.0 / tl.load(norm + batch)
    if B:
        factor = tl.load(b + batch * b_step).to(tl.float64)
        size = size * factor * factor
    # The difference of two sums that `left` is may be below zero by rounding.
    square = tl.load(left + at, mask=inside, other=0.0).to(tl.float64)
    square = tl.where(square > 0, square * size, 0.0)
    if P:
        value = thin_rows(p + batch.to(tl.int64) * k * r, row, tl.arange(0, R), k, r)
        square += tl.sum(value * value, axis=1).to(tl.float64)
    V = beta * tl.load(v + at, mask=inside, other=0.0) + rest * (square / n).to(tl.float32)
    root = tl.sqrt_rn(V) + eps
    g = tl.where(root > 0, 1.0 / tl.where(root > 0, root, 1.0), 0.0)
    tl.store(new + at, V, mask=inside)
    tl.store(gain + at, g, mask=inside)
    wide = g.to(tl.float64)
    tl.store(energy + batch * blocks + block, tl.sum(wide * wide * square))


def even_rows(
    v: Tensor, left: Tensor, norm: Tensor, n: int, beta: float, eps: float, *,
    b: Tensor | None = None, P: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """v and g (B, m, 1), and |g D|^2 by row blocks (B, blocks) in float64.

    Args:
        v: (B, m, 1) float32.
        left, norm: norm |B_i|^2 (B, m), and norm (B, 1, 1) in float64.
        b, P: (B or 1, 1, 1) and (B, m, r), None for 1 and for nothing.
    """
    batch, k, r = (*v.shape[:2], 16) if P is None else P.shape
    v, R = v.contiguous(), power_of_two(r)
    new, gain, block = torch.empty_like(v), torch.empty_like(v), max(1, 2048 // R)
    blocks = -(-k // block)
    energy = torch.empty(batch, blocks, dtype=torch.float64, device=v.device)
    _even_rows[(blocks, batch)](
        v if P is None else P.contiguous(), left, v, v if b is None else b, norm, new, gain, energy, k, r, n,
        int(b is not None and b.numel() > 1), beta, 1 - beta, eps, BLOCK=block, R=R, B=b is not None, P=P is not None,
        num_warps=4,
    )  # fmt: skip
    return new, gain, energy
