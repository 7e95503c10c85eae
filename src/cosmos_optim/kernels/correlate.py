"""C = X'Y for a list (or stack) of matrices: (m, n), (m, r) -> (n, r), the other half of G'(G U)."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import INTERPRET, Launch, jit, tl
from cosmos_optim.kernels.project import source_of
from cosmos_optim.kernels.table import Matrices
from cosmos_optim.kernels.tiles import mac_left, matrix


LAUNCH = Launch(64, 64, warps=4)


@jit
def _correlate(  # type: ignore[no-untyped-def]
    x, y, out, stride, y_step, m, n, r, sm, sn,
    BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    TABLE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix(x, batch, stride, TABLE, ELEMENT, ALIGNED)
    j, c = block * BN + tl.arange(0, BN), tl.arange(0, R)
    base = y + batch.to(tl.int64) * m * R
    acc = tl.zeros((R, BN), dtype=tl.float32)
    for k in range(0, m, BK):
        i = k + tl.arange(0, BK)
        a = tl.load(start + i[:, None] * sm + j[None, :] * sn, mask=(i[:, None] < m) & (j[None, :] < n), other=0.0)
        acc = mac_left(base + i[:, None] * R + c[None, :], a, y_step, i[:, None] < m, acc, PARTS, WIDE)
    at = out + (batch.to(tl.int64) * n + j[:, None]) * r + c[None, :]
    tl.store(at, tl.trans(acc), mask=(j[:, None] < n) & (c[None, :] < r))


def correlate(X: Matrices | Tensor, Y: Tensor, r: int) -> Tensor:
    """X'Y (B, n, r) in float32 for pre-split Y (parts, B, m, R)."""
    parts, batch, m, R = Y.shape
    n = X.shape[-1]
    how = LAUNCH.fit(R)
    C = torch.empty(batch, n, r, dtype=torch.float32, device=Y.device)
    _correlate[(-(-n // how.rows), batch)](
        **source_of(X), y=Y, out=C, y_step=Y.stride(0), m=m, n=n, r=r, BN=how.rows, BK=how.cols, R=R, PARTS=parts,
        WIDE=INTERPRET, **how.options,
    )  # fmt: skip
    return C


def correlate_torch(X: Tensor, Y: Tensor) -> Tensor:
    """The same product of a stack in plain torch."""
    return X.float().mT @ Y
