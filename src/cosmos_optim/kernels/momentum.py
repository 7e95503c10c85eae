"""M <- M + w (G - M) in place, with G U, M U and the largest entry of both from the same pass.

Reads G and M once and writes M once. Where `skip` holds, M is left as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import INTERPRET, Launch, jit, tl
from cosmos_optim.kernels.table import Matrices
from cosmos_optim.kernels.tiles import mac_parts, matrix


LAUNCH = Launch(128, 32)


@jit
def _momentum(  # type: ignore[no-untyped-def]
    x, mom, u, gu, mu, peak, skip, stride, u_step, m, n, r, sm, sn, mm, mn, w,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, SKIP: tl.constexpr,
    TABLE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    MOMENT: tl.constexpr, MALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, stride, TABLE, ELEMENT, ALIGNED)
    state = matrix(mom, batch, stride, True, MOMENT, MALIGNED)
    write = True
    if SKIP:
        write = tl.load(skip) == 0
    i = block * BM + tl.arange(0, BM)
    if PARTS > 0:
        c = tl.arange(0, R)
        base = u + batch.to(tl.int64) * n * R
        acc_g = tl.zeros((BM, R), dtype=tl.float32)
        acc_m = tl.zeros((BM, R), dtype=tl.float32)
    top = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        inside = (i[:, None] < m) & (j[None, :] < n)
        g = tl.load(start + i[:, None] * sm + j[None, :] * sn, mask=inside, other=0.0).to(tl.float32)
        at = state + i[:, None] * mm + j[None, :] * mn
        new = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        new = (new + w * (g - new)).to(MOMENT)
        tl.store(at, new, mask=inside & write)
        new = new.to(tl.float32)
        top = tl.maximum(top, tl.maximum(tl.abs(g), tl.abs(new)))
        if PARTS > 0:
            at_u = base + j[:, None] * R + c[None, :]
            acc_g = mac_parts(g, at_u, u_step, j[:, None] < n, acc_g, PARTS, WIDE)
            acc_m = mac_parts(new, at_u, u_step, j[:, None] < n, acc_m, PARTS, WIDE)
    tl.store(peak + batch * tl.num_programs(0) + block, tl.max(top))
    if PARTS > 0:
        at = (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
        inside = (i[:, None] < m) & (c[None, :] < r)
        tl.store(gu + at, acc_g, mask=inside)
        tl.store(mu + at, acc_m, mask=inside)


def momentum_(
    M: Matrices, G: Matrices, w: float, U: Tensor | None, r: int, skip: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Update M; return G U, M U (B, m, r), and the largest |entry| of G and M by row block (B, blocks).

    U is pre-split (parts, B, n, R), or None for the average alone (the products are then empty).
    """
    (m, n), batch = M.shape, len(M)
    parts, R = (0, 16) if U is None else (U.shape[0], U.shape[-1])
    how = LAUNCH.fit(R)
    blocks = -(-m // how.rows)
    GU, MU = (torch.empty(batch, m if parts else 0, r, dtype=torch.float32, device=M.device) for _ in range(2))
    peak = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    target = M.source()
    _momentum[(blocks, batch)](
        **G.source(), mom=M.table, u=peak if U is None else U, gu=GU, mu=MU, peak=peak,
        skip=peak if skip is None else skip, u_step=0 if U is None else U.stride(0), m=m, n=n, r=r,
        mm=target["sm"], mn=target["sn"], w=w, BM=how.rows, BK=how.cols, R=R, PARTS=parts, SKIP=skip is not None,
        MOMENT=target["ELEMENT"], MALIGNED=target["ALIGNED"], WIDE=INTERPRET, **how.options,
    )  # fmt: skip
    return GU, MU, peak


def momentum_torch(M: Tensor, G: Tensor, w: float, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new average of a stack, G U and M U in plain torch."""
    M = torch.lerp(M, G, w)
    return M, G @ U, M @ U
