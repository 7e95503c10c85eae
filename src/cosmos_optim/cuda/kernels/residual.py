"""X = c (a M + b G + P U') in half precision, with |X|^2, for a list of matrices, in one pass.

c is a power of two that brings the largest entry of M and G near 8, read from the block maxima that `momentum` left.
The result goes to a work buffer that is always tall, (B, max(m, n), min(m, n)): of a wide matrix it holds X'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import add_outer, exponent, matrix, tile
from cosmos_optim.cuda.pointer_list import Matrices

LAUNCH = Launch(64, 64, warps=4, stages=3)
ODD = Launch(64, 32, warps=4, stages=3)


@jit
def unit(peak, batch, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The power of two that brings the largest entry to [8, 16)."""
    at = tl.arange(0, BLOCKS)
    top = tl.max(tl.load(peak + batch * blocks + at, mask=at < blocks, other=0.0))
    return ((257 - exponent(top)) << 23).to(tl.float32, bitcast=True)


@jit(unaligned=("x",))
def _residual(  # type: ignore[no-untyped-def]
    x, mom, p, u, out, energy, scale, peak, p_step, u_step, m, n, blocks, sm, sn, mm, mn, a, b,
    out_stride, om, on,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr, BLEND: tl.constexpr,
    BLOCKS: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    MOMENT: tl.constexpr, MALIGNED: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, ELEMENT, ALIGNED)
    state = matrix(mom, batch, MOMENT, MALIGNED)
    c = unit(peak, batch, blocks, BLOCKS)
    i, k = block * BM + tl.arange(0, BM), tl.arange(0, R)
    if THIN:
        at_p = p + (batch.to(tl.int64) * m + i[:, None]) * R + k[None, :]
        p1 = tl.load(at_p, mask=i[:, None] < m, other=0.0)
        p2 = tl.load(at_p + p_step, mask=i[:, None] < m, other=0.0)
    target = out + batch.to(tl.int64) * out_stride
    squares = tl.zeros((BM, BN), dtype=tl.float32)
    # Triton fetches ahead only what a product multiplies, so the next tile is asked for by hand.
    ahead = tile(state, i, tl.arange(0, BN), m, n, mm, mn).to(tl.float32)
    if BLEND:
        ahead_g = tile(start, i, tl.arange(0, BN), m, n, sm, sn).to(tl.float32)
    for first in range(0, n, BN):
        j = first + tl.arange(0, BN)
        value = ahead
        ahead = tile(state, i, j + BN, m, n, mm, mn).to(tl.float32)
        if BLEND:
            value = a * value + b * ahead_g
            ahead_g = tile(start, i, j + BN, m, n, sm, sn).to(tl.float32)
        if THIN:
            at_u = u + (batch.to(tl.int64) * n + j[:, None]) * R + k[None, :]
            value = add_outer(value, p1, p2, at_u, u_step, j[:, None] < n, FLOAT32_DOTS)
        value = value * c
        inside = (i[:, None] < m) & (j[None, :] < n)
        squares += tl.where(inside, value * value, 0.0)
        tl.store(target + i[:, None] * om + j[None, :] * on, value.to(out.dtype.element_ty), mask=inside)
    tl.store(energy + batch * tl.num_programs(0) + block, tl.sum(squares))
    tl.store(scale + batch, c)


def residual(
    M: Matrices, G: Matrices, a: float, b: float, P: Tensor | None, U: Tensor | None, peak: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The work buffer (B, long, short), |X|^2 in its units by row blocks (B, blocks), and the factor c (B, 1, 1).

    P (with its sign) and U are pre-split (2, B, m or n, R), or None for a M + b G alone. `peak` comes from `momentum_`.
    """
    (m, n), batch = M.shape, len(M)
    R = 16 if U is None else U.shape[-1]
    target = M.rows_source()
    how = (LAUNCH if target["ALIGNED"] else ODD).fit(R)
    X = work_buffer(batch, m, n, dtype, M.device)
    blocks = -(-m // how.rows)
    squares = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    c = torch.empty(batch, 1, 1, dtype=torch.float32, device=M.device)
    om, on = (X.stride(1), 1) if m >= n else (1, X.stride(1))
    _residual[(blocks, batch)](
        **G.rows_source(), mom=M.table, p=X if P is None else P, u=X if U is None else U, out=X, energy=squares,
        scale=c, peak=peak, p_step=0 if P is None else P.stride(0), u_step=0 if U is None else U.stride(0), m=m, n=n,
        blocks=peak.shape[1], mm=target["sm"], mn=target["sn"], a=a, b=b, out_stride=X.stride(0), om=om, on=on,
        BM=how.rows, BN=how.cols, R=R, THIN=U is not None, BLEND=(a, b) != (1.0, 0.0),
        BLOCKS=power_of_two(peak.shape[1]), MOMENT=target["ELEMENT"], MALIGNED=target["ALIGNED"],
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return X, squares, c


def work_buffer(batch: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty (B, long, short) stack whose rows begin at multiples of 16 bytes."""
    long, short = max(m, n), min(m, n)
    return torch.empty(batch, long, -(-short // 8) * 8, dtype=dtype, device=device)[:, :, :short]


def residual_torch(N: Tensor, P: Tensor, U: Tensor) -> Tensor:
    """N + P U' of a stack in plain torch."""
    return N + P @ U.mT
