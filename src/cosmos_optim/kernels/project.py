"""Y = X U for a list of matrices, or a half-precision stack with |X|^2 from the same pass: (m, n), (n, r) -> (m, r)."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import INTERPRET, Launch, jit, tl
from cosmos_optim.kernels.split import BASIS_SCALE
from cosmos_optim.kernels.table import Matrices
from cosmos_optim.kernels.tiles import exponent, mac, mac_tile, matrix, tile

LAUNCH = Launch(128, 64, stages=4)
ODD = Launch(64, 64, warps=4, stages=1)


@jit
def _project(  # type: ignore[no-untyped-def]
    x, u, y, top, stride, u_step, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
    TABLE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, KNOWN: tl.constexpr,
    NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, stride, TABLE, ELEMENT, ALIGNED)
    i, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    e = 0
    if KNOWN:
        e = exponent(tl.load(top + batch))
    if not ALIGNED:  # such loads are not worth an asynchronous copy; the next tile is asked for by hand
        ahead = tile(start, i, tl.arange(0, BK), m, n, sm, sn)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        if ALIGNED:
            a = tile(start, i, j, m, n, sm, sn).to(tl.float32)
        else:
            a = ahead.to(tl.float32)
            ahead = tile(start, i, j + BK, m, n, sm, sn)
        at = base + j[:, None] * R + c[None, :]
        b1, b2 = tl.load(at, mask=j[:, None] < n, other=0.0), tl.load(at + u_step, mask=j[:, None] < n, other=0.0)
        if not KNOWN:
            e = exponent(tl.max(tl.abs(a)))
        acc = mac_tile(a, e, b1, b2, acc, NARROW, False, WIDE)
    at = y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))


def project(X: Matrices, U: Tensor, r: int, top: Tensor | None = None) -> Tensor:
    """X U (B, m, r) in float32; U is split in float16 (2, B, n, R) with c = BASIS_SCALE.

    `top`: the largest |entry| of each matrix or a bound not far above it, (B,); without it each tile looks for its own.
    """
    _, batch, n, R = U.shape
    m = X.shape[0]
    source = X.source()
    how = (LAUNCH if source["ALIGNED"] else ODD).fit(R)
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    _project[(-(-m // how.rows), batch)](
        **source, u=U, y=Y, top=U if top is None else top, u_step=U.stride(0), m=m, n=n, r=r, gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R,
        KNOWN=top is not None, NARROW=X.dtype is torch.bfloat16, WIDE=INTERPRET, **how.options,
    )  # fmt: skip
    return Y


@jit
def _overlap(  # type: ignore[no-untyped-def]
    x, u, y, e, stride, m, n, r, sm, sn, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr,
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
        acc = mac(a, tl.load(base + j[:, None] * R + c[None, :], mask=j[:, None] < n, other=0.0), acc, WIDE)
    at = y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
    tl.store(at, acc * gain, mask=(i[:, None] < m) & (c[None, :] < r))
    tl.store(e + batch * tl.num_programs(0) + block, tl.sum(squares))


def overlap(X: Tensor, U: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """X U (B, m, r) to half precision and |X|^2 (B, 1, 1) in float64, for a float16 stack X with any strides."""
    _, batch, n, R = U.shape
    m = X.shape[1]
    how = LAUNCH.fit(R)
    blocks = -(-m // how.rows)
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    E = torch.empty(batch, blocks, dtype=torch.float32, device=U.device)
    _overlap[(blocks, batch)](
        x=X, u=U, y=Y, e=E, stride=X.stride(0), m=m, n=n, r=r, sm=X.stride(1), sn=X.stride(2), gain=1 / BASIS_SCALE,
        BM=how.rows, BK=how.cols, R=R, WIDE=INTERPRET, **how.options,
    )  # fmt: skip
    return Y, E.sum(1, dtype=torch.float64).view(-1, 1, 1)


def project_torch(X: Tensor, U: Tensor) -> Tensor:
    """The same product of a stack in plain torch."""
    return X.float() @ U
