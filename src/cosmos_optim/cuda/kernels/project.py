"""Y = X U for a list of matrices: the G U of the power step (L5); and B U with |B - B U U'|^2 for a stack.

    project   Y = X U                          float16 parts of U, as exact as float32
    overlap   Y = X U and |X - X U U'|^2       X a half-precision stack; the squared norm by row blocks and by rows

Shapes: X (m, n), U (n, r), Y (m, r); B matrices each.
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


@jit(unaligned=("x",), unspecialized=("m",))
def _project(
    x, u, y, x_max, u_step, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    ALIGNMENT_CLASSES: tl.constexpr, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0) // ALIGNMENT_CLASSES, tl.program_id(1)
    first = tl.program_id(0) % ALIGNMENT_CLASSES
    q, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    i = first + ALIGNMENT_CLASSES * q
    start = matrix_start(x, batch, ELEMENT, ALIGNED)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    e = exponent(tl.load(x_max + batch))
    if ALIGNED:
        # Rows of one alignment class: full tiles from the first aligned column, then one masked tile for the rest.
        before = columns_before_alignment(first, sm, ELEMENT, ALIGNMENT_CLASSES)
        rows, body = (m - first + ALIGNMENT_CLASSES - 1) // ALIGNMENT_CLASSES, (n - before) // BK * BK
        begin, class_stride = rows_of_class(start, first, before, sm, ELEMENT, ALIGNMENT_CLASSES)
        for k in range(0, body, BK):
            j = k + tl.arange(0, BK)
            a = load_full_columns(begin, q, j, rows, class_stride, sn).to(tl.float32)
            at = base + (before + j[:, None]) * R + c[None, :]
            acc = dot_split_tile(a, e, tl.load(at), tl.load(at + u_step), acc, SINGLE_PART, False, FLOAT32_DOTS)
        if body < n:
            j = tl.arange(0, 2 * BK)
            j = tl.where(j < before, j, j + body)
            acc = _masked_tile(start, base, i, j, acc, e, u_step, m, n, sm, sn, R, SINGLE_PART, FLOAT32_DOTS)
    else:
        for k in range(0, n, BK):
            j = k + tl.arange(0, BK)
            acc = _masked_tile(start, base, i, j, acc, e, u_step, m, n, sm, sn, R, SINGLE_PART, FLOAT32_DOTS)
    at = y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


@jit
def _masked_tile(
    start, base, i, j, acc, e, u_step, m, n, sm, sn,
    R: tl.constexpr, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Return acc + the product over any columns j, some of which may not exist."""
    a = load_tile(start, i, j, m, n, sm, sn).to(tl.float32)
    at, held = base + j[:, None] * R + tl.arange(0, R)[None, :], j[:, None] < n
    b1, b2 = load_parts(at, u_step, held)
    return dot_split_tile(a, e, b1, b2, acc, SINGLE_PART, False, FLOAT32_DOTS)


def project(X: MatrixList, U: Tensor, r: int, x_max: Tensor) -> Tensor:
    """Return X U (B, m, r) in float32.

    Args:
        X: B matrices (m, n).
        U: (B, n, r) in float16 parts (2, B, n, R) times BASIS_SCALE.
        x_max: the largest |entry| of each matrix or a bound not far above it, (B,).
    """
    _, batch, n, R = U.shape
    m, source = X.shape[0], X.source()
    how = (LAUNCH if source["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    blocks = source["ALIGNMENT_CLASSES"] * -(-m // (source["ALIGNMENT_CLASSES"] * how.rows))
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    _project[(blocks, batch)](
        **source, u=U, y=Y, x_max=x_max, u_step=U.stride(0), m=m, n=n, r=r,
        gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R,
        SINGLE_PART=X.dtype is torch.bfloat16, FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return Y


@jit
def _overlap(
    x, u, y, outside_sq, row_outside_sq, stride, u_step, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = x + batch.to(tl.int64) * stride
    i, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        a = load_tile(start, i, j, m, n, sm, sn)
        squares += a.to(tl.float32) * a.to(tl.float32)
        at, held = base + j[:, None] * R + c[None, :], j[:, None] < n
        product = dot_add(a, tl.load(at + u_step, mask=held, other=0.0), tl.zeros_like(acc), FLOAT32_DOTS)
        # Add outside of the dot, so that it has finished. Triton 3.6 counts buffers only by the other use of `a` (the
        # squares): a dot that accumulates into `acc` would still read the buffer that is filled next.
        acc = acc + dot_add(a, tl.load(at, mask=held, other=0.0), product, FLOAT32_DOTS)
    # Sum before storing the product: the other order needs 50 % more registers at R = 128.
    outside = tl.sum(squares) - gain * gain * tl.sum(acc * acc)
    tl.store(outside_sq + batch * tl.num_programs(0) + block, outside)
    outside_rows = tl.sum(squares, axis=1) - gain * gain * tl.sum(acc * acc, axis=1)
    tl.store(row_outside_sq + batch * m + i, outside_rows, mask=i < m)
    at = y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


def overlap(X: Tensor, U: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return X U (B, m, r), and |X - X U U'|^2 by row blocks (B, blocks) and by rows (B, m).

    Args:
        X: float16 stack (B, m, n) of any strides.
        U: (B, n, r) in float16 parts (2, B, n, R) times BASIS_SCALE.
    """
    _, batch, n, R = U.shape
    m = X.shape[1]
    how = OVERLAP_LAUNCH.fit(R)
    blocks = -(-m // how.rows)
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    outside_sq = torch.empty(batch, blocks, dtype=torch.float32, device=U.device)
    rows = torch.empty(batch, m, dtype=torch.float32, device=U.device)
    _overlap[(blocks, batch)](
        x=X, u=U, y=Y, outside_sq=outside_sq, row_outside_sq=rows, stride=X.stride(0), u_step=U.stride(0), m=m, n=n,
        r=r, sm=X.stride(1), sn=X.stride(2), gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return Y, outside_sq, rows
