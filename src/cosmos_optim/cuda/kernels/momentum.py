"""M <- M + w (G - M) in place (L4), and G U, M U and the largest |entry| of G and M in the same pass.

Reads G and M once and writes M once. If `skip` is True, M stays as it is. `momentum_int8` does this for an M of 8 bits.

Shapes: G, M (m, n), U (n, r), G U and M U (m, r), for each matrix of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, false_flag, jit, tl
from cosmos_optim.cuda.kernels.momentum_int8 import momentum_int8_
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE
from cosmos_optim.cuda.kernels.tiles import (
    columns_before_alignment,
    dot_bfloat16_tile,
    dot_split_tile,
    exponent,
    load_full_columns,
    load_tile,
    matrix_start,
    rows_of_class,
)
from cosmos_optim.cuda.pointer_list import MatrixList

LAUNCH = Launch(64, 32, warps=4, stages=3)
UNALIGNED_LAUNCH = Launch(128, 32, stages=2)


@jit(unaligned=("g",), unspecialized=("m",))
def _momentum(
    g, mom, u_f16, u_bf16, gu, mu, block_max, grad_max, skip, u_part_stride, m, n, r, sm, sn, mom_sm, mom_sn, w, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr,
    ELEMENT: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr, ALIGNMENT_CLASSES: tl.constexpr,
    SINGLE_PART: tl.constexpr, M_SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Update M and multiply: g and mom are the tables of G and M, u_f16 and u_bf16 are U in parts for G and for M."""
    block, batch = tl.program_id(0) // ALIGNMENT_CLASSES, tl.program_id(1)
    first = tl.program_id(0) % ALIGNMENT_CLASSES
    q, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    i = first + ALIGNMENT_CLASSES * q
    g_start, m_start = matrix_start(g, batch, ELEMENT, ALIGNED), matrix_start(mom, batch, MOMENT, ALIGNED)
    write = tl.load(skip) == 0
    base = batch.to(tl.int64) * n * R
    acc_g, acc_m = tl.zeros((BM, R), dtype=tl.float32), tl.zeros((BM, R), dtype=tl.float32)
    e = 0
    if THIN:
        e = exponent(tl.load(grad_max + batch))
    largest = 0.0
    if ALIGNED:
        # Rows of one alignment class: full tiles from the first aligned column, then one masked tile for the rest.
        before = columns_before_alignment(first, sm, ELEMENT, ALIGNMENT_CLASSES)
        rows, body = (m - first + ALIGNMENT_CLASSES - 1) // ALIGNMENT_CLASSES, (n - before) // BK * BK
        g_begin, g_stride = rows_of_class(g_start, first, before, sm, ELEMENT, ALIGNMENT_CLASSES)
        m_begin, m_stride = rows_of_class(m_start, first, before, mom_sm, MOMENT, ALIGNMENT_CLASSES)
        tile_max = tl.zeros((BM, BK), dtype=tl.float32)
        for k in range(0, body, BK):
            j = k + tl.arange(0, BK)
            grad = load_full_columns(g_begin, q, j, rows, g_stride, sn).to(tl.float32)
            new = load_full_columns(m_begin, q, j, rows, m_stride, mom_sn).to(tl.float32)
            new = (new + w * (grad - new)).to(MOMENT)
            tl.store(m_begin + q[:, None] * m_stride + j[None, :] * mom_sn, new, mask=(q[:, None] < rows) & write)
            new = new.to(tl.float32)
            tile_max = tl.maximum(tile_max, tl.maximum(tl.abs(grad), tl.abs(new)))
            if THIN:
                at = base + (before + j[:, None]) * R + c[None, :]
                u1, u2 = tl.load(u_f16 + at), tl.load(u_f16 + u_part_stride + at)
                acc_g = dot_split_tile(grad, e, u1, u2, acc_g, SINGLE_PART, False, FLOAT32_DOTS)
                v1, v2 = tl.load(u_bf16 + at), tl.load(u_bf16 + u_part_stride + at)
                acc_m = dot_bfloat16_tile(new, v1, v2, acc_m, M_SINGLE_PART, FLOAT32_DOTS)
        largest = tl.max(tile_max)
        if body < n:
            j = tl.arange(0, 2 * BK)
            j = tl.where(j < before, j, j + body)
            acc_g, acc_m, largest = _masked_tile(
                g_start, m_start, u_f16, u_bf16, base, i, j, acc_g, acc_m, largest, e, write, u_part_stride, m, n,
                sm, sn, mom_sm, mom_sn, w, R, THIN, MOMENT, SINGLE_PART, M_SINGLE_PART, FLOAT32_DOTS)  # fmt: skip
    else:
        for k in range(0, n, BK):
            j = k + tl.arange(0, BK)
            acc_g, acc_m, largest = _masked_tile(
                g_start, m_start, u_f16, u_bf16, base, i, j, acc_g, acc_m, largest, e, write, u_part_stride, m, n,
                sm, sn, mom_sm, mom_sn, w, R, THIN, MOMENT, SINGLE_PART, M_SINGLE_PART, FLOAT32_DOTS)  # fmt: skip
    tl.store(block_max + batch * tl.num_programs(0) + tl.program_id(0), largest)
    if THIN:
        at = (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
        inside = (i[:, None] < m) & (c[None, :] < r)
        tl.store(gu + at, acc_g * gain, mask=inside)
        tl.store(mu + at, acc_m, mask=inside)


@jit
def _masked_tile(
    g_start, m_start, u_f16, u_bf16, base, i, j, acc_g, acc_m, largest, e, write, u_part_stride, m, n,
    sm, sn, mom_sm, mom_sn, w,
    R: tl.constexpr, THIN: tl.constexpr, MOMENT: tl.constexpr, SINGLE_PART: tl.constexpr, M_SINGLE_PART: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Update M at any columns j, some of which may not exist; return both sums and the largest |entry| so far."""
    grad = load_tile(g_start, i, j, m, n, sm, sn).to(tl.float32)
    new = load_tile(m_start, i, j, m, n, mom_sm, mom_sn).to(tl.float32)
    new = (new + w * (grad - new)).to(MOMENT)
    inside = (i[:, None] < m) & (j[None, :] < n) & write
    tl.store(m_start + i[:, None] * mom_sm + j[None, :] * mom_sn, new, mask=inside)
    new = new.to(tl.float32)
    largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(grad), tl.abs(new))))
    if THIN:
        at, held = base + j[:, None] * R + tl.arange(0, R)[None, :], j[:, None] < n
        u1, u2 = tl.load(u_f16 + at, mask=held, other=0.0), tl.load(u_f16 + u_part_stride + at, mask=held, other=0.0)
        acc_g = dot_split_tile(grad, e, u1, u2, acc_g, SINGLE_PART, False, FLOAT32_DOTS)
        v1, v2 = tl.load(u_bf16 + at, mask=held, other=0.0), tl.load(u_bf16 + u_part_stride + at, mask=held, other=0.0)
        acc_m = dot_bfloat16_tile(new, v1, v2, acc_m, M_SINGLE_PART, FLOAT32_DOTS)
    return acc_g, acc_m, largest


def momentum_(
    M: MatrixList, G: MatrixList, w: float, U: tuple[Tensor, Tensor] | None, r: int, skip: Tensor | None,
    grad_max: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Update M in place; return G U, M U (batch, m, r) and the largest |entry| of G and M by row block (batch, blocks).

    Args:
        U: in float16 parts times BASIS_SCALE, for G, and in bfloat16 parts, for M: (2, batch, n, R) each. None updates
            M alone; the products are then empty.
        skip: a boolean scalar on the device, or None; if True, M is not written.
        grad_max: the largest |entry| of each G or a bound not far above it, (batch,); not needed without U.
    """
    if M.scales is not None:
        return momentum_int8_(M, G, w, U, r, skip, grad_max)
    (m, n), batch, R = M.shape, len(M), 16 if U is None else U[0].shape[-1]
    source, target = G.source(), M.source()
    same_rows = G.dtype.itemsize == M.dtype.itemsize and source["sm"] == target["sm"]
    same_classes = same_rows or source["ALIGNMENT_CLASSES"] == target["ALIGNMENT_CLASSES"] == 1
    if not (source["ALIGNED"] and target["ALIGNED"] and same_classes):
        source |= {"ALIGNED": False, "ALIGNMENT_CLASSES": 1}
    how = (LAUNCH if source["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    blocks = source["ALIGNMENT_CLASSES"] * -(-m // (source["ALIGNMENT_CLASSES"] * how.rows))
    GU, MU = (torch.empty(batch, 0 if U is None else m, r, dtype=torch.float32, device=M.device) for _ in range(2))
    block_max = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    _momentum[(blocks, batch)](
        **source, g=G.table, mom=M.table, u_f16=block_max if U is None else U[0],
        u_bf16=block_max if U is None else U[1], gu=GU, mu=MU, block_max=block_max,
        grad_max=block_max if grad_max is None else grad_max, skip=false_flag(M.device) if skip is None else skip,
        u_part_stride=0 if U is None else U[0].stride(0), m=m, n=n, r=r, mom_sm=target["sm"], mom_sn=target["sn"], w=w,
        gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R, THIN=U is not None,
        MOMENT=target["ELEMENT"], SINGLE_PART=G.dtype is torch.bfloat16,
        M_SINGLE_PART=M.dtype is torch.bfloat16, FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return GU, MU, block_max
