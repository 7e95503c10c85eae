"""M <- M + w (G - M) in place, with G U, M U and the largest entry of both from the same pass.

Reads G and M once and writes M once. Where `skip` holds, M is left as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, never, tl
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE
from cosmos_optim.cuda.kernels.tiles import class_rows, exponent, lead, mac_tile, mac_wide, matrix, tile, whole
from cosmos_optim.cuda.pointer_list import Matrices

LAUNCH = Launch(64, 32, warps=4, stages=3)
ODD = Launch(128, 32, stages=2)


@jit(unaligned=("x",), unspecialized=("m",))
def _momentum(  # type: ignore[no-untyped-def]
    x, mom, u, v, gu, mu, peak, top, skip, u_step, m, n, r, sm, sn, mm, mn, w, gain,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr,
    ELEMENT: tl.constexpr, MOMENT: tl.constexpr, ALIGNED: tl.constexpr, CLASSES: tl.constexpr, KNOWN: tl.constexpr,
    NARROW: tl.constexpr, MNARROW: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0) // CLASSES, tl.program_id(1)
    first = tl.program_id(0) % CLASSES
    q, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    i = first + CLASSES * q
    start, state = matrix(x, batch, ELEMENT, ALIGNED), matrix(mom, batch, MOMENT, ALIGNED)
    write = tl.load(skip) == 0
    base = batch.to(tl.int64) * n * R
    acc_g, acc_m = tl.zeros((BM, R), dtype=tl.float32), tl.zeros((BM, R), dtype=tl.float32)
    e = 0
    if KNOWN:
        e = exponent(tl.load(top + batch))
    largest = 0.0
    if ALIGNED:
        # Rows of one class, from their first aligned column on; what is left over in front and behind comes last.
        before = lead(first, sm, ELEMENT, CLASSES)
        rows, body = (m - first + CLASSES - 1) // CLASSES, (n - before) // BK * BK
        g_begin, g_pitch = class_rows(start, first, before, sm, ELEMENT, CLASSES)
        m_begin, m_pitch = class_rows(state, first, before, mm, MOMENT, CLASSES)
        seen = tl.zeros((BM, BK), dtype=tl.float32)
        for k in range(0, body, BK):
            j = k + tl.arange(0, BK)
            g = whole(g_begin, q, j, rows, g_pitch, sn).to(tl.float32)
            new = whole(m_begin, q, j, rows, m_pitch, mn).to(tl.float32)
            new = (new + w * (g - new)).to(MOMENT)
            tl.store(m_begin + q[:, None] * m_pitch + j[None, :] * mn, new, mask=(q[:, None] < rows) & write)
            new = new.to(tl.float32)
            seen = tl.maximum(seen, tl.maximum(tl.abs(g), tl.abs(new)))
            if THIN:
                at = base + (before + j[:, None]) * R + c[None, :]
                if not KNOWN:
                    e = exponent(tl.max(tl.abs(g)))
                acc_g = mac_tile(g, e, tl.load(u + at), tl.load(u + u_step + at), acc_g, NARROW, False, FLOAT32_DOTS)
                acc_m = mac_wide(new, tl.load(v + at), tl.load(v + u_step + at), acc_m, MNARROW, FLOAT32_DOTS)
        largest = tl.max(seen)
        if body < n:
            j = tl.arange(0, 2 * BK)
            j = tl.where(j < before, j, j + body)
            acc_g, acc_m, largest = _masked(
                start, state, u, v, base, i, j, acc_g, acc_m, largest, e, write, u_step, m, n, sm, sn, mm, mn, w,
                R, THIN, MOMENT, KNOWN, NARROW, MNARROW, FLOAT32_DOTS)  # fmt: skip
    else:
        for k in range(0, n, BK):
            j = k + tl.arange(0, BK)
            acc_g, acc_m, largest = _masked(
                start, state, u, v, base, i, j, acc_g, acc_m, largest, e, write, u_step, m, n, sm, sn, mm, mn, w,
                R, THIN, MOMENT, KNOWN, NARROW, MNARROW, FLOAT32_DOTS)  # fmt: skip
    tl.store(peak + batch * tl.num_programs(0) + tl.program_id(0), largest)
    if THIN:
        at = (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :]
        inside = (i[:, None] < m) & (c[None, :] < r)
        tl.store(gu + at, acc_g * gain, mask=inside)
        tl.store(mu + at, acc_m, mask=inside)


@jit
def _masked(  # type: ignore[no-untyped-def]
    start, state, u, v, base, i, j, acc_g, acc_m, largest, e, write, u_step, m, n, sm, sn, mm, mn, w,
    R: tl.constexpr, THIN: tl.constexpr, MOMENT: tl.constexpr, KNOWN: tl.constexpr, NARROW: tl.constexpr,
    MNARROW: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """One tile at the columns j, wherever they are: M written there, products and largest entry carried on."""
    g, new = tile(start, i, j, m, n, sm, sn).to(tl.float32), tile(state, i, j, m, n, mm, mn).to(tl.float32)
    new = (new + w * (g - new)).to(MOMENT)
    inside = (i[:, None] < m) & (j[None, :] < n) & write
    tl.store(state + i[:, None] * mm + j[None, :] * mn, new, mask=inside)
    new = new.to(tl.float32)
    largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(g), tl.abs(new))))
    if THIN:
        if not KNOWN:
            e = exponent(tl.max(tl.abs(g)))
        at, held = base + j[:, None] * R + tl.arange(0, R)[None, :], j[:, None] < n
        u1, u2 = tl.load(u + at, mask=held, other=0.0), tl.load(u + u_step + at, mask=held, other=0.0)
        acc_g = mac_tile(g, e, u1, u2, acc_g, NARROW, False, FLOAT32_DOTS)
        v1, v2 = tl.load(v + at, mask=held, other=0.0), tl.load(v + u_step + at, mask=held, other=0.0)
        acc_m = mac_wide(new, v1, v2, acc_m, MNARROW, FLOAT32_DOTS)
    return acc_g, acc_m, largest


def momentum_(
    M: Matrices, G: Matrices, w: float, U: tuple[Tensor, Tensor] | None, r: int, skip: Tensor | None,
    top: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Update M; return G U, M U (B, m, r), and the largest |entry| of G and M by row block (B, blocks).

    U is split twice, in float16 with c = BASIS_SCALE for G and in bfloat16 for M, (2, B, n, R) each; None asks for the
    average alone (the products are then empty). `top`: the largest |entry| of each G or a bound near it, (B,).
    """
    (m, n), batch, R = M.shape, len(M), 16 if U is None else U[0].shape[-1]
    source, target = G.source(), M.source()
    same = G.dtype.itemsize == M.dtype.itemsize and source["sm"] == target["sm"]
    alike = same or source["CLASSES"] == target["CLASSES"] == 1
    if not (source["ALIGNED"] and target["ALIGNED"] and alike):
        source |= {"ALIGNED": False, "CLASSES": 1}
    how = (LAUNCH if source["ALIGNED"] else ODD).fit(R)
    blocks = source["CLASSES"] * -(-m // (source["CLASSES"] * how.rows))
    GU, MU = (torch.empty(batch, 0 if U is None else m, r, dtype=torch.float32, device=M.device) for _ in range(2))
    peak = torch.empty(batch, blocks, dtype=torch.float32, device=M.device)
    _momentum[(blocks, batch)](
        **source, mom=M.table, u=peak if U is None else U[0], v=peak if U is None else U[1], gu=GU, mu=MU, peak=peak,
        top=peak if top is None else top, skip=never(M.device) if skip is None else skip,
        u_step=0 if U is None else U[0].stride(0), m=m, n=n, r=r, mm=target["sm"], mn=target["sn"], w=w,
        gain=1 / BASIS_SCALE, BM=how.rows, BK=how.cols, R=R, THIN=U is not None,
        MOMENT=target["ELEMENT"], KNOWN=top is not None, NARROW=G.dtype is torch.bfloat16,
        MNARROW=M.dtype is torch.bfloat16, FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return GU, MU, peak


def momentum_torch(M: Tensor, G: Tensor, w: float, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new average of a stack, G U and M U in plain torch."""
    M = torch.lerp(M, G, w)
    return M, G @ U, M @ U
