"""Y = X U for a list of matrices, (m, n), (n, r) -> (m, r); for a half-precision stack with |X - X U U'|^2 besides."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, tl
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE
from cosmos_optim.cuda.kernels.tiles import class_rows, exponent, lead, mac, mac_tile, matrix, tile, whole
from cosmos_optim.cuda.pointer_list import Matrices

LAUNCH = Launch(128, 32, stages=4)
ODD = Launch(64, 64, warps=4, stages=1)
OVERLAP = Launch(128, 64, stages=4)


@jit(unaligned=("x",), unspecialized=("m",))
def _project(  # type: ignore[no-untyped-def]
    x, u, y, top, u_step, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    CLASSES: tl.constexpr, KNOWN: tl.constexpr, NARROW: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0) // CLASSES, tl.program_id(1)
    first = tl.program_id(0) % CLASSES
    q, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    i = first + CLASSES * q
    start = matrix(x, batch, ELEMENT, ALIGNED)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    e = 0
    if KNOWN:
        e = exponent(tl.load(top + batch))
    if ALIGNED:
        # Rows of one class, from their first aligned column on; what is left over in front and behind comes last.
        skip = lead(first, sm, ELEMENT, CLASSES)
        rows, body = (m - first + CLASSES - 1) // CLASSES, (n - skip) // BK * BK
        begin, pitch = class_rows(start, first, skip, sm, ELEMENT, CLASSES)
        for k in range(0, body, BK):
            j = k + tl.arange(0, BK)
            a = whole(begin, q, j, rows, pitch, sn).to(tl.float32)
            at = base + (skip + j[:, None]) * R + c[None, :]
            if not KNOWN:
                e = exponent(tl.max(tl.abs(a)))
            acc = mac_tile(a, e, tl.load(at), tl.load(at + u_step), acc, NARROW, False, FLOAT32_DOTS)
        if body < n:
            j = tl.arange(0, 2 * BK)
            j = tl.where(j < skip, j, j + body)
            acc = _masked(start, base, i, j, acc, e, u_step, m, n, sm, sn, R, KNOWN, NARROW, FLOAT32_DOTS)
    else:
        for k in range(0, n, BK):
            j = k + tl.arange(0, BK)
            acc = _masked(start, base, i, j, acc, e, u_step, m, n, sm, sn, R, KNOWN, NARROW, FLOAT32_DOTS)
    at = y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


@jit
def _masked(  # type: ignore[no-untyped-def]
    start, base, i, j, acc, e, u_step, m, n, sm, sn,
    R: tl.constexpr, KNOWN: tl.constexpr, NARROW: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """acc + the product over the columns j, wherever they are."""
    a = tile(start, i, j, m, n, sm, sn).to(tl.float32)
    if not KNOWN:
        e = exponent(tl.max(tl.abs(a)))
    at, held = base + j[:, None] * R + tl.arange(0, R)[None, :], j[:, None] < n
    b1, b2 = tl.load(at, mask=held, other=0.0), tl.load(at + u_step, mask=held, other=0.0)
    return mac_tile(a, e, b1, b2, acc, NARROW, False, FLOAT32_DOTS)


def project(X: Matrices, U: Tensor, r: int, top: Tensor | None = None) -> Tensor:
    """X U (B, m, r) in float32; U is split in float16 (2, B, n, R) with c = BASIS_SCALE.

    `top`: the largest |entry| of each matrix or a bound not far above it, (B,); without it each tile looks for its own.
    """
    _, batch, n, R = U.shape
    m, source = X.shape[0], X.source()
    how = (LAUNCH if source["ALIGNED"] else ODD).fit(R)
    blocks = source["CLASSES"] * -(-m // (source["CLASSES"] * how.rows))
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    _project[(blocks, batch)](
        **source, u=U, y=Y, top=U if top is None else top, u_step=U.stride(0), m=m, n=n, r=r, gain=1 / BASIS_SCALE,
        BM=how.rows, BK=how.cols, R=R, KNOWN=top is not None, NARROW=X.dtype is torch.bfloat16,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return Y


@jit
def _overlap(  # type: ignore[no-untyped-def]
    x, u, y, e, rows, stride, u_step, m, n, r, sm, sn, gain,
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
        a = tile(start, i, j, m, n, sm, sn)
        squares += a.to(tl.float32) * a.to(tl.float32)
        at, held = base + j[:, None] * R + c[None, :], j[:, None] < n
        product = mac(a, tl.load(at + u_step, mask=held, other=0.0), tl.zeros_like(acc), FLOAT32_DOTS)
        # Added outside the product, which is over then. Triton 3.6 looks at the other use of `a`, the squares, alone
        # when it counts buffers: carried on in `acc`, the product would still read the one that is filled next.
        acc = acc + mac(a, tl.load(at, mask=held, other=0.0), product, FLOAT32_DOTS)
    # The sums first: after the product is stored they would take half as many registers again at R = 128.
    left = tl.sum(squares) - gain * gain * tl.sum(acc * acc)
    tl.store(e + batch * tl.num_programs(0) + block, left)
    left_rows = tl.sum(squares, axis=1) - gain * gain * tl.sum(acc * acc, axis=1)
    tl.store(rows + batch * m + i, left_rows, mask=i < m)
    at = y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


def overlap(X: Tensor, U: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """X U (B, m, r) and |X - X U U'|^2 by row blocks (B, blocks), for a float16 stack X of any strides.

    `rows` (B, m) float32 takes the same by rows: who will ask for them is not known yet, and they cost nothing.
    """
    _, batch, n, R = U.shape
    m = X.shape[1]
    how = OVERLAP.fit(R)
    blocks = -(-m // how.rows)
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    E = torch.empty(batch, blocks, dtype=torch.float32, device=U.device)
    rows = torch.empty(batch, m, dtype=torch.float32, device=U.device)
    _overlap[(blocks, batch)](
        x=X, u=U, y=Y, e=E, rows=rows, stride=X.stride(0), u_step=U.stride(0), m=m, n=n, r=r, sm=X.stride(1),
        sn=X.stride(2), gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return Y, E, rows


def project_torch(X: Tensor, U: Tensor) -> Tensor:
    """The same product of a stack in plain torch."""
    return X.float() @ U
