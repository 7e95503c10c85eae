"""Y = X U for a list (or stack) of matrices: (m, n) x (n, r) -> (m, r), and on request |X|^2 from the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import INTERPRET, Launch, jit, tl
from cosmos_optim.kernels.table import Matrices
from cosmos_optim.kernels.tiles import mac_parts, matrix


LAUNCH = Launch(128, 64)


@jit
def _project(  # type: ignore[no-untyped-def]
    x, u, y, e, stride, u_step, m, n, r, sm, sn,
    BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, ENERGY: tl.constexpr,
    TABLE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, stride, TABLE, ELEMENT, ALIGNED)
    i, c = block * BM + tl.arange(0, BM), tl.arange(0, R)
    base = u + batch.to(tl.int64) * n * R
    acc = tl.zeros((BM, R), dtype=tl.float32)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        a = tl.load(start + i[:, None] * sm + j[None, :] * sn, mask=(i[:, None] < m) & (j[None, :] < n), other=0.0)
        if ENERGY:
            squares += a.to(tl.float32) * a.to(tl.float32)
        acc = mac_parts(a, base + j[:, None] * R + c[None, :], u_step, j[:, None] < n, acc, PARTS, WIDE)
    tl.store(y + (batch.to(tl.int64) * m + i[:, None]) * r + c[None, :], acc, mask=(i[:, None] < m) & (c[None, :] < r))
    if ENERGY:
        tl.store(e + batch * tl.num_programs(0) + block, tl.sum(squares))


def source_of(X: Matrices | Tensor) -> dict[str, Any]:
    """The reading arguments of a list of matrices or of a stack (B, m, n) with any strides."""
    if isinstance(X, Matrices):
        return X.source()
    return {"x": X, "stride": X.stride(0), "sm": X.stride(1), "sn": X.stride(2),
            "TABLE": False, "ELEMENT": tl.float32, "ALIGNED": False}  # fmt: skip


def project(X: Matrices | Tensor, U: Tensor, r: int, *, energy: bool = False) -> tuple[Tensor, Tensor | None]:
    """X U (B, m, r) in float32 for pre-split U (parts, B, n, R), and |X|^2 (B, 1, 1) in float64 if asked.

    The energy is summed in float32 within a block of rows: only for X of moderate size, as Newton-Schulz returns it.
    """
    parts, batch, n, R = U.shape
    m = X.shape[-2]
    how = LAUNCH.fit(R)
    blocks = -(-m // how.rows)
    Y = torch.empty(batch, m, r, dtype=torch.float32, device=U.device)
    E = torch.empty(batch, blocks if energy else 0, dtype=torch.float32, device=U.device)
    _project[(blocks, batch)](
        **source_of(X), u=U, y=Y, e=E, u_step=U.stride(0), m=m, n=n, r=r, BM=how.rows, BK=how.cols, R=R, PARTS=parts,
        ENERGY=energy, WIDE=INTERPRET, **how.options,
    )  # fmt: skip
    return Y, E.sum(1, dtype=torch.float64).view(-1, 1, 1) if energy else None


def project_torch(X: Tensor, U: Tensor) -> Tensor:
    """The same product of a stack in plain torch."""
    return X.float() @ U
