"""M <- M + w (G - M) in place, with G U, M U and the largest entry of both from the same pass.

Reads G and M once and writes M once. Where `skip` holds, M is left as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import INTERPRET, Launch, jit, tl
from cosmos_optim.kernels.split import BASIS_SCALE
from cosmos_optim.kernels.table import Matrices
from cosmos_optim.kernels.tiles import mac_tile, matrix, tile


LAUNCH = Launch(128, 32, stages=4)
ODD = Launch(64, 32, warps=4, stages=1)


@jit
def _momentum(  # type: ignore[no-untyped-def]
    x, mom, u, gu, mu, peak, skip, stride, u_step, m, n, r, sm, sn, mm, mn, w, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr, SKIP: tl.constexpr,
    TABLE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, MOMENT: tl.constexpr,
    NARROW: tl.constexpr, MNARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, stride, TABLE, ELEMENT, ALIGNED)
    state = matrix(mom, batch, stride, True, MOMENT, ALIGNED)
    write = True
    if SKIP:
        write = tl.load(skip) == 0
    i = block * BM + tl.arange(0, BM)
    if THIN:
        c = tl.arange(0, R)
        base = u + batch.to(tl.int64) * n * R
        acc_g = tl.zeros((BM, R), dtype=tl.float32)
        acc_m = tl.zeros((BM, R), dtype=tl.float32)
    top = 0.0
    if not ALIGNED:
        ahead_g = tile(start, i, tl.arange(0, BK), m, n, sm, sn)
        ahead_m = tile(state, i, tl.arange(0, BK), m, n, mm, mn)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        if ALIGNED:
            g = tile(start, i, j, m, n, sm, sn).to(tl.float32)
            new = tile(state, i, j, m, n, mm, mn).to(tl.float32)
        else:
            g, new = ahead_g.to(tl.float32), ahead_m.to(tl.float32)
            ahead_g = tile(start, i, j + BK, m, n, sm, sn)
            ahead_m = tile(state, i, j + BK, m, n, mm, mn)
        new = (new + w * (g - new)).to(MOMENT)
        inside = (i[:, None] < m) & (j[None, :] < n) & write
        tl.store(state + i[:, None] * mm + j[None, :] * mn, new, mask=inside)
        new = new.to(tl.float32)
        top_g, top_m = tl.max(tl.abs(g)), tl.max(tl.abs(new))
        top = tl.maximum(top, tl.maximum(top_g, top_m))
        if THIN:
            at = base + j[:, None] * R + c[None, :]
            b1, b2 = tl.load(at, mask=j[:, None] < n, other=0.0), tl.load(at + u_step, mask=j[:, None] < n, other=0.0)
            acc_g = mac_tile(g, top_g, b1, b2, acc_g, NARROW, False, WIDE)
            acc_m = mac_tile(new, top_m, b1, b2, acc_m, MNARROW, False, WIDE)
    tl.store(peak + batch * tl.num_programs(0) + block, top)
    if THIN:
        at = (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
        inside = (i[:, None] < m) & (c[None, :] < r)
        tl.store(gu + at, acc_g * gain, mask=inside)
        tl.store(mu + at, acc_m * gain, mask=inside)


def momentum_(
    M: Matrices, G: Matrices, w: float, U: Tensor | None, r: int, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Update M; return G U, M U (B, m, r), and the largest |entry| of G and M by row block (B, blocks).

    U is split in float16 (2, B, n, R) with c = BASIS_SCALE, or None for the average alone (the products are empty).
    """
    (m, n), batch, R = M.shape, len(M), 16 if U is None else U.shape[-1]
    source, target = G.source(), M.source()
    source["ALIGNED"] = source["ALIGNED"] and target["ALIGNED"]
    how = (LAUNCH if source["ALIGNED"] else ODD).fit(R)
    blocks = -(-m // how.rows)
    GU, MU = (torch.empty(batch, 0 if U is None else m, r, dtype=torch.float32, device=M.device) for _ in range(2))
    peak = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    _momentum[(blocks, batch)](
        **source, mom=M.table, u=peak if U is None else U, gu=GU, mu=MU, peak=peak,
        skip=peak if skip is None else skip, u_step=0 if U is None else U.stride(0), m=m, n=n, r=r,
        mm=target["sm"], mn=target["sn"], w=w, gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R,
        THIN=U is not None, SKIP=skip is not None, MOMENT=target["ELEMENT"], NARROW=G.dtype is torch.bfloat16,
        MNARROW=M.dtype is torch.bfloat16, WIDE=INTERPRET, **how.options,
    )  # fmt: skip
    return GU, MU, peak


def momentum_torch(M: Tensor, G: Tensor, w: float, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new average of a stack, G U and M U in plain torch."""
    M = torch.lerp(M, G, w)
    return M, G @ U, M @ U
