"""G U of the power step for a list of gradients (L5); and B U with |B - B U U'|^2 for the result of Newton-Schulz.

    project   G U                            float16 parts of U, as exact as float32
    overlap   B U and |B - B U U'|^2         in one pass over B, a half-precision stack; the norm by blocks and by rows

Shapes: G, B (m, n), U (n, r), G U and B U (m, r), for each matrix of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, tl
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE
from cosmos_optim.cuda.kernels.tiles import (
    columns_before_alignment,
    dot_add,
    dot_split_tile,
    exponent,
    load_full_columns,
    load_parts,
    load_tile,
    matrix_start,
    rows_of_class,
)
from cosmos_optim.cuda.pointer_list import MatrixList

LAUNCH = Launch(128, 32, stages=4)
UNALIGNED_LAUNCH = Launch(64, 64, warps=4, stages=1)
OVERLAP_LAUNCH = Launch(128, 64, stages=4)


@jit(unaligned=("g",), unspecialized=("m",))
def _project(
    g, u, gu, grad_max, u_part_stride, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    ALIGNMENT_CLASSES: tl.constexpr, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0) // ALIGNMENT_CLASSES, tl.program_id(1)
    first = tl.program_id(0) % ALIGNMENT_CLASSES
    q, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    i = first + ALIGNMENT_CLASSES * q
    g_start = matrix_start(g, batch, ELEMENT, ALIGNED)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    e = exponent(tl.load(grad_max + batch))
    if ALIGNED:
        # Rows of one alignment class: full tiles from the first aligned column, then one masked tile for the rest.
        before = columns_before_alignment(first, sm, ELEMENT, ALIGNMENT_CLASSES)
        rows, body = (m - first + ALIGNMENT_CLASSES - 1) // ALIGNMENT_CLASSES, (n - before) // BK * BK
        begin, class_stride = rows_of_class(g_start, first, before, sm, ELEMENT, ALIGNMENT_CLASSES)
        for k in range(0, body, BK):
            j = k + tl.arange(0, BK)
            grad = load_full_columns(begin, q, j, rows, class_stride, sn).to(tl.float32)
            at = base + (before + j[:, None]) * R + c[None, :]
            acc = dot_split_tile(
                grad, e, tl.load(at), tl.load(at + u_part_stride), acc, SINGLE_PART, False, FLOAT32_DOTS)  # fmt: skip
        if body < n:
            j = tl.arange(0, 2 * BK)
            j = tl.where(j < before, j, j + body)
            acc = _masked_tile(g_start, base, i, j, acc, e, u_part_stride, m, n, sm, sn, R, SINGLE_PART, FLOAT32_DOTS)
    else:
        for k in range(0, n, BK):
            j = k + tl.arange(0, BK)
            acc = _masked_tile(g_start, base, i, j, acc, e, u_part_stride, m, n, sm, sn, R, SINGLE_PART, FLOAT32_DOTS)
    at = gu + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


@jit
def _masked_tile(
    g_start, base, i, j, acc, e, u_part_stride, m, n, sm, sn,
    R: tl.constexpr, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Return acc + the product over any columns j, some of which may not exist."""
    grad = load_tile(g_start, i, j, m, n, sm, sn).to(tl.float32)
    at, held = base + j[:, None] * R + tl.arange(0, R)[None, :], j[:, None] < n
    u1, u2 = load_parts(at, u_part_stride, held)
    return dot_split_tile(grad, e, u1, u2, acc, SINGLE_PART, False, FLOAT32_DOTS)


def project(G: MatrixList, U: Tensor, r: int, grad_max: Tensor) -> Tensor:
    """Return G U (batch, m, r) in float32.

    Args:
        G: a list of matrices (m, n).
        U: (batch, n, r) in float16 parts (2, batch, n, R) times BASIS_SCALE.
        grad_max: the largest |entry| of each matrix or a bound not far above it, (batch,).
    """
    _, batch, n, R = U.shape
    m, source = G.shape[0], G.source()
    how = (LAUNCH if source["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    blocks = source["ALIGNMENT_CLASSES"] * -(-m // (source["ALIGNMENT_CLASSES"] * how.rows))
    GU = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    _project[(blocks, batch)](
        **source, g=G.table, u=U, gu=GU, grad_max=grad_max, u_part_stride=U.stride(0), m=m, n=n, r=r,
        gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R,
        SINGLE_PART=G.dtype is torch.bfloat16, FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return GU


@jit
def _overlap(
    b, u, bu, outside_sq, row_outside_sq, b_batch_stride, u_part_stride, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    b_start = b + batch.to(tl.int64) * b_batch_stride
    i, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        a = load_tile(b_start, i, j, m, n, sm, sn)
        squares += a.to(tl.float32) * a.to(tl.float32)
        at, held = base + j[:, None] * R + c[None, :], j[:, None] < n
        product = dot_add(a, tl.load(at + u_part_stride, mask=held, other=0.0), tl.zeros_like(acc), FLOAT32_DOTS)
        # Add outside of the dot, so that it has finished. Triton 3.6 counts buffers only by the other use of `a` (the
        # squares): a dot that accumulates into `acc` would still read the buffer that is filled next.
        acc = acc + dot_add(a, tl.load(at, mask=held, other=0.0), product, FLOAT32_DOTS)
    # Sum before storing the product: the other order needs 50 % more registers at R = 128.
    outside = tl.sum(squares) - gain * gain * tl.sum(acc * acc)
    tl.store(outside_sq + batch * tl.num_programs(0) + block, outside)
    outside_rows = tl.sum(squares, axis=1) - gain * gain * tl.sum(acc * acc, axis=1)
    tl.store(row_outside_sq + batch * m + i, outside_rows, mask=i < m)
    at = bu + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


def overlap(B: Tensor, U: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return B U (batch, m, r), and |B - B U U'|^2 by row blocks (batch, blocks) and by rows (batch, m).

    Args:
        B: what Newton-Schulz returned, a float16 stack (batch, m, n) of any strides.
        U: (batch, n, r) in float16 parts (2, batch, n, R) times BASIS_SCALE.
    """
    _, batch, n, R = U.shape
    m = B.shape[1]
    how = OVERLAP_LAUNCH.fit(R)
    blocks = -(-m // how.rows)
    BU = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    outside_sq = torch.empty(batch, blocks, dtype=torch.float32, device=U.device)
    rows = torch.empty(batch, m, dtype=torch.float32, device=U.device)
    _overlap[(blocks, batch)](
        b=B, u=U, bu=BU, outside_sq=outside_sq, row_outside_sq=rows, b_batch_stride=B.stride(0),
        u_part_stride=U.stride(0), m=m, n=n, r=r, sm=B.stride(1), sn=B.stride(2), gain=1 / BASIS_SCALE, BM=how.rows,
        BK=how.cols, R=R, FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return BU, outside_sq, rows
