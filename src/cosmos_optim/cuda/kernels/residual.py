"""c X = c (N - N U U') in half precision, with its squared norm: the input of Newton-Schulz (L9).

N = a M + b G is the momentum (a = 1, b = 0) or Nesterov's form of it. c is a power of two that scales the largest entry
of M and G to about 8; it comes from the block maxima that `momentum_` returned. One kernel does it all, so that M and G
are read once and N is never stored. The work buffer is always tall: for a wide matrix it holds the transpose.

Shapes: M, G (m, n), -N U (m, r), U (n, r); the buffer is (batch, max(m, n), min(m, n)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, padded_row, power_of_two, tl
from cosmos_optim.cuda.kernels.reductions import max_parts
from cosmos_optim.cuda.kernels.tiles import add_outer, exponent, load_parts, load_tile, matrix_start
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.linalg.int8_momentum import BLOCK

LAUNCH = Launch(64, 64, warps=4, stages=3)
UNALIGNED_LAUNCH = Launch(64, 32, warps=4, stages=3)


@jit
def buffer_scale(block_max, batch, blocks, BLOCKS: tl.constexpr):
    """Return the power of two that scales the largest entry to [8, 16)."""
    x_max = max_parts(block_max, batch, blocks, BLOCKS)
    return ((257 - exponent(x_max)) << 23).to(tl.float32, bitcast=True)


@jit
def load_momentum(
    state, scales, i, first, m, n, mom_sm, mom_sn, scale_stride,
    BN: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load the tile of M that begins at column `first`; if M is codes, times the scales of their block."""
    value = load_tile(state, i, first + tl.arange(0, BN), m, n, mom_sm, mom_sn).to(tl.float32)
    if QUANTIZED:
        at = scales + i * scale_stride + first // BLOCK  # one block: BN divides BLOCK
        value = value * tl.load(at, mask=(i < m) & (first < n), other=0.0)[:, None]
    return value


@jit(unaligned=("g",))
def _residual(
    g, mom, scales, minus_nu, u, out, norm_sq_parts, scale, block_max, nu_part_stride, u_part_stride, m, n,
    blocks, sm, sn, mom_sm, mom_sn, scale_stride, a, b, out_batch_stride, out_sm, out_sn,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr, BLEND: tl.constexpr,
    BLOCKS: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    MOMENT: tl.constexpr, M_ALIGNED: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Compute BM rows: g and mom are the tables of G and M, minus_nu and u are -N U and U in bfloat16 parts."""
    block, batch = tl.program_id(0), tl.program_id(1)
    g_start, m_start = matrix_start(g, batch, ELEMENT, ALIGNED), matrix_start(mom, batch, MOMENT, M_ALIGNED)
    scale_start = matrix_start(scales, batch, tl.float32, False)  # not read if M is not quantized
    c = buffer_scale(block_max, batch, blocks, BLOCKS)
    i, k = block * BM + tl.arange(0, BM), tl.arange(0, R)
    if THIN:
        at_nu = minus_nu + (batch.to(tl.int64) * m + i[:, None]) * R + k[None, :]
        nu1, nu2 = load_parts(at_nu, nu_part_stride, i[:, None] < m)
    target = out + batch.to(tl.int64) * out_batch_stride
    squares = tl.zeros((BM, BN), dtype=tl.float32)
    # Triton prefetches only the operands of products, so the code loads the next tile explicitly.
    next_m = load_momentum(m_start, scale_start, i, 0, m, n, mom_sm, mom_sn, scale_stride, BN, QUANTIZED, BLOCK)
    if BLEND:
        next_g = load_tile(g_start, i, tl.arange(0, BN), m, n, sm, sn).to(tl.float32)
    for first in range(0, n, BN):
        j = first + tl.arange(0, BN)
        value = next_m
        next_m = load_momentum(
            m_start, scale_start, i, first + BN, m, n, mom_sm, mom_sn, scale_stride, BN, QUANTIZED, BLOCK)  # fmt: skip
        if BLEND:
            value = a * value + b * next_g
            next_g = load_tile(g_start, i, j + BN, m, n, sm, sn).to(tl.float32)
        if THIN:
            at_u = u + (batch.to(tl.int64) * n + j[:, None]) * R + k[None, :]
            value = add_outer(value, nu1, nu2, at_u, u_part_stride, j[:, None] < n, FLOAT32_DOTS)
        value = value * c
        inside = (i[:, None] < m) & (j[None, :] < n)
        squares += tl.where(inside, value * value, 0.0)
        tl.store(target + i[:, None] * out_sm + j[None, :] * out_sn, value.to(tl.float16), mask=inside)
    tl.store(norm_sq_parts + batch * tl.num_programs(0) + block, tl.sum(squares))
    tl.store(scale + batch, c)


def residual(
    M: MatrixList, G: MatrixList, a: float, b: float, minus_NU: Tensor | None, U: Tensor | None, block_max: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return c X in the work buffer (batch, long, short), |c X|^2 by row blocks (batch, blocks), and c (batch, 1, 1).

    Args:
        M, G: momentum and gradients, (m, n) each; N = a M + b G.
        minus_NU, U: -N U and U in bfloat16 parts (2, batch, m or n, R), or None for X = N.
        block_max: the largest |entry| of M and G by blocks (batch, blocks), from `momentum_`.
    """
    (m, n), batch = M.shape, len(M)
    R = 16 if U is None else U.shape[-1]
    target = M.rows_source()
    how = (LAUNCH if target["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    long, short = max(m, n), min(m, n)
    X = torch.empty(batch, long, padded_row(short, 2), dtype=torch.float16, device=M.device)[:, :, :short]
    blocks = -(-m // how.rows)
    norm_sq_parts = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    c = torch.empty(batch, 1, 1, dtype=torch.float32, device=M.device)
    out_sm, out_sn = (X.stride(1), 1) if m >= n else (1, X.stride(1))
    _residual[(blocks, batch)](
        **G.rows_source(), g=G.table, mom=M.table, scales=(M.scales or M).table,
        minus_nu=X if minus_NU is None else minus_NU, u=X if U is None else U, out=X,
        norm_sq_parts=norm_sq_parts, scale=c, block_max=block_max,
        nu_part_stride=0 if minus_NU is None else minus_NU.stride(0), u_part_stride=0 if U is None else U.stride(0),
        m=m, n=n, blocks=block_max.shape[1], mom_sm=target["sm"], mom_sn=target["sn"],
        scale_stride=0 if M.scales is None else M.scales.tensors[0].stride(0), a=a, b=b, out_batch_stride=X.stride(0),
        out_sm=out_sm, out_sn=out_sn, BM=how.rows, BN=how.cols, R=R, THIN=U is not None,
        BLEND=(a, b) != (1.0, 0.0), BLOCKS=power_of_two(block_max.shape[1]), MOMENT=target["ELEMENT"],
        M_ALIGNED=target["ALIGNED"], QUANTIZED=M.scales is not None, BLOCK=BLOCK,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return X, norm_sq_parts, c
