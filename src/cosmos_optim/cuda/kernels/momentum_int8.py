"""M <- M + w (G - M) for an M of 8 bits (L4), and G U, M U and the largest |entry| of G and M in the same kernel.

The format is that of `linalg.int8_momentum`: codes, and a float32 scale for each block of a row. A new scale needs the
largest |entry| of its whole block, so a tile is read twice: first for the scale, while the block before it is written,
and then, from the cache, to write its codes. One loop does both, because two short loops could not prefetch. The
products use M as it is stored: codes are exact in float16, so M U needs only the float16 parts of U that G U reads. If
`skip` is True, neither codes nor scales are written.

Shapes: G, codes (m, n), scales (m, ceil(n / BLOCK)), U (n, r), G U and M U (m, r), for each matrix of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, false_flag, jit, tl
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE
from cosmos_optim.cuda.kernels.tiles import (
    dot_parts,
    dot_split_tile,
    exponent,
    float32_bits,
    load_parts,
    load_tile,
    matrix_start,
    rounded_scale,
)
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.linalg import int8_momentum
from cosmos_optim.linalg.int8_momentum import BLOCK

LAUNCH = Launch(64, 32, warps=4, stages=3)
UNALIGNED_LAUNCH = Launch(64, 32, warps=4, stages=2)  # a third stage would spill more registers
# The format of `linalg.int8_momentum`.
LARGEST_CODE = tl.constexpr(float(int8_momentum.LARGEST_CODE))
LARGEST_SCALE, SCALE_UNIT = float32_bits(int8_momentum.LARGEST_SCALE), tl.constexpr(1 << int8_momentum.CLEARED_BITS)


@jit
def nearest_code(x):
    """Round to the nearest code, to even if two are equally near."""
    rounded = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: its last bit counts ones
    return tl.minimum(tl.maximum(rounded, -LARGEST_CODE), LARGEST_CODE)


@jit
def _load_updated(g_start, codes, old, i, j, m, n, sm, sn, mom_sm, mom_sn, w):
    """Load a tile of G; return it with the new M, not yet rounded."""
    grad = load_tile(g_start, i, j, m, n, sm, sn).to(tl.float32)
    new = load_tile(codes, i, j, m, n, mom_sm, mom_sn).to(tl.float32) * old[:, None]
    return grad, new + w * (grad - new)


@jit(unaligned=("g",), unspecialized=("m",))
def _momentum_int8(
    g, mom, scales, u, gu, mu, block_max, grad_max, skip, u_part_stride, m, n, r, sm, sn, mom_sm, mom_sn, scale_stride,
    w, gain,
    BM: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, M_ALIGNED: tl.constexpr, SINGLE_PART: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Update M and multiply: g and mom are the tables of G and of the codes of M, u is U in float16 parts."""
    block, batch = tl.program_id(0), tl.program_id(1)
    i, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    g_start, codes = matrix_start(g, batch, ELEMENT, ALIGNED), matrix_start(mom, batch, tl.int8, M_ALIGNED)
    row_scales = matrix_start(scales, batch, tl.float32, False) + i * scale_stride
    write = tl.load(skip) == 0
    base = batch.to(tl.int64) * n * R
    acc_g, acc_m = tl.zeros((BM, R), dtype=tl.float32), tl.zeros((BM, R), dtype=tl.float32)
    e = 0
    if THIN:
        e = exponent(tl.load(grad_max + batch))
    next_old, next_max = tl.load(row_scales, mask=i < m, other=0.0), tl.zeros((BM,), dtype=tl.float32)
    for k in range(0, BLOCK, BK):
        _, new = _load_updated(g_start, codes, next_old, i, k + tl.arange(0, BK), m, n, sm, sn, mom_sm, mom_sn, w)
        next_max = tl.maximum(next_max, tl.max(tl.abs(new), axis=1))
    tl.debug_barrier()  # warps may hold copies of a scale: all must have read it before one writes it
    old, scale = next_old, next_max
    tile_max = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        first = k % BLOCK == 0  # of the tiles of a block
        old = tl.where(first, next_old, old)
        scale = tl.where(first, rounded_scale(next_max / LARGEST_CODE, LARGEST_SCALE, SCALE_UNIT), scale)

        next_k = k + BLOCK
        loaded = tl.load(row_scales + next_k // BLOCK, mask=(i < m) & (next_k < n) & first, other=0.0)
        next_old = tl.where(first, loaded, next_old)
        _, new = _load_updated(g_start, codes, next_old, i, next_k + tl.arange(0, BK), m, n, sm, sn, mom_sm, mom_sn, w)
        next_max = tl.maximum(tl.where(first, 0.0, next_max), tl.max(tl.abs(new), axis=1))

        j = k + tl.arange(0, BK)
        grad, new = _load_updated(g_start, codes, old, i, j, m, n, sm, sn, mom_sm, mom_sn, w)
        code = nearest_code(new * (1.0 / scale)[:, None])
        tl.store(codes + i[:, None] * mom_sm + j[None, :] * mom_sn, code.to(tl.int8),
                 mask=(i[:, None] < m) & (j[None, :] < n) & write)  # fmt: skip
        tl.store(row_scales + k // BLOCK, scale, mask=(i < m) & write & first)  # all have read `old` a block ago
        tile_max = tl.maximum(tile_max, tl.maximum(tl.abs(grad), tl.abs(code * scale[:, None])))
        if THIN:
            u1, u2 = load_parts(u + base + j[:, None] * R + c[None, :], u_part_stride, j[:, None] < n)
            acc_g = dot_split_tile(grad, e, u1, u2, acc_g, SINGLE_PART, False, FLOAT32_DOTS)
            code = code.to(tl.float16)  # one part is exact; the scales of the rows come after the product
            acc_m += scale[:, None] * dot_parts(
                code, code, u1, u2, tl.zeros_like(acc_m), True, False, FLOAT32_DOTS)  # fmt: skip
    tl.store(block_max + batch * tl.num_programs(0) + block, tl.max(tile_max))
    if THIN:
        at = (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
        inside = (i[:, None] < m) & (c[None, :] < r)
        tl.store(gu + at, acc_g * gain, mask=inside)
        tl.store(mu + at, acc_m * gain, mask=inside)


def momentum_int8_(
    M: MatrixList, G: MatrixList, w: float, U: tuple[Tensor, Tensor] | None, r: int, skip: Tensor | None,
    grad_max: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Do what `momentum.momentum_` does, for codes M with `M.scales`."""
    assert M.scales is not None
    (m, n), batch, R = M.shape, len(M), 16 if U is None else U[0].shape[-1]
    source, target = G.rows_source(), M.rows_source()
    how = (LAUNCH if source["ALIGNED"] and target["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    blocks = -(-m // how.rows)
    GU, MU = (torch.empty(batch, 0 if U is None else m, r, dtype=torch.float32, device=M.device) for _ in range(2))
    block_max = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    _momentum_int8[(blocks, batch)](
        **source, g=G.table, mom=M.table, scales=M.scales.table, u=block_max if U is None else U[0], gu=GU, mu=MU,
        block_max=block_max, grad_max=block_max if grad_max is None else grad_max,
        skip=false_flag(M.device) if skip is None else skip,
        u_part_stride=0 if U is None else U[0].stride(0), m=m, n=n, r=r, mom_sm=target["sm"], mom_sn=target["sn"],
        scale_stride=M.scales.tensors[0].stride(0), w=w, gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, BLOCK=BLOCK,
        R=R, THIN=U is not None, M_ALIGNED=target["ALIGNED"], SINGLE_PART=G.dtype is torch.bfloat16,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return GU, MU, block_max
