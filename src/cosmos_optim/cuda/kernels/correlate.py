"""C = X'Y for a list of matrices: (m, n), (m, r) -> (n, r), the other half of G'(G U)."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, tl
from cosmos_optim.cuda.kernels.tiles import exponent, mac_tile, matrix, tile, undo
from cosmos_optim.cuda.pointer_list import Matrices

LAUNCH = Launch(128, 32, warps=4, stages=4)
ODD = Launch(64, 32, warps=4, stages=1)


@jit(unaligned=("x",), unspecialized=("m",))
def _correlate(  # type: ignore[no-untyped-def]
    x, y, out, peak, top, y_step, m, n, r, sm, sn,
    BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, KNOWN: tl.constexpr,
    NARROW: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, ELEMENT, ALIGNED)
    j, c = block * BN + tl.arange(0, BN), tl.arange(0, R)
    base = y + batch.to(tl.int64) * m * R
    acc = tl.zeros((R, BN), dtype=tl.float32)
    e = 0
    if KNOWN:
        e = exponent(tl.load(top + batch))
    if not ALIGNED:
        ahead = tile(start, tl.arange(0, BK), j, m, n, sm, sn)
    for k in range(0, m, BK):
        i = k + tl.arange(0, BK)
        if ALIGNED:
            a = tile(start, i, j, m, n, sm, sn).to(tl.float32)
        else:
            a = ahead.to(tl.float32)
            ahead = tile(start, i + BK, j, m, n, sm, sn)
        at = base + i[:, None] * R + c[None, :]
        b1, b2 = tl.load(at, mask=i[:, None] < m, other=0.0), tl.load(at + y_step, mask=i[:, None] < m, other=0.0)
        if not KNOWN:
            e = exponent(tl.max(tl.abs(a)))
        acc = mac_tile(a, e, b1, b2, acc, NARROW, True, FLOAT32_DOTS)
    value = tl.trans(acc) * undo(exponent(tl.load(peak + batch)))
    at = out + (batch.to(tl.int64) * n + j[:, None]) * r + c[None, :]
    tl.store(at, value, mask=(j[:, None] < n) & (c[None, :] < r))


def correlate(X: Matrices, Y: Tensor, peak: Tensor, r: int, top: Tensor | None = None) -> Tensor:
    """X'Y (B, n, r) in float32; Y is split in float16 (2, B, m, R) with this largest entry by matrix (B,).

    `top`: the largest |entry| of each X, or a bound not far above it, (B,); without it each tile looks for its own.
    """
    _, batch, m, R = Y.shape
    n = X.shape[1]
    source = X.rows_source()
    how = (LAUNCH if source["ALIGNED"] else ODD).fit(R)
    C = torch.empty(batch, n, r, dtype=torch.float32, device=Y.device)
    _correlate[(-(-n // how.rows), batch)](
        **source, y=Y, out=C, peak=peak, top=peak if top is None else top, y_step=Y.stride(0), m=m, n=n, r=r,
        BN=how.rows, BK=how.cols, R=R,
        KNOWN=top is not None, NARROW=X.dtype is torch.bfloat16, FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return C


def correlate_torch(X: Tensor, Y: Tensor) -> Tensor:
    """The same product of a stack in plain torch."""
    return X.float().mT @ Y
