"""C = X'Y for a list of matrices: the second product of G'(G U) in the power step (L5).

Shapes: X (m, n), Y (m, r), C (n, r); B matrices each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, jit, tl
from cosmos_optim.cuda.kernels.tiles import dot_split_tile, exponent, load_parts, load_tile, matrix_start, scale_down
from cosmos_optim.cuda.pointer_list import MatrixList

LAUNCH = Launch(128, 32, warps=4, stages=4)
UNALIGNED_LAUNCH = Launch(64, 32, warps=4, stages=1)


@jit(unaligned=("x",), unspecialized=("m",))
def _project_transposed(
    x, y, out, y_max, x_max, y_step, m, n, r, sm, sn,
    BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start = matrix_start(x, batch, ELEMENT, ALIGNED)
    j, c = block * BN + tl.arange(0, BN), tl.arange(0, R)
    base = y + batch.to(tl.int64) * m * R
    acc = tl.zeros((R, BN), dtype=tl.float32)
    e = exponent(tl.load(x_max + batch))
    if not ALIGNED:
        next_tile = load_tile(start, tl.arange(0, BK), j, m, n, sm, sn)
    for k in range(0, m, BK):
        i = k + tl.arange(0, BK)
        if ALIGNED:
            a = load_tile(start, i, j, m, n, sm, sn).to(tl.float32)
        else:
            a = next_tile.to(tl.float32)
            next_tile = load_tile(start, i + BK, j, m, n, sm, sn)
        at = base + i[:, None] * R + c[None, :]
        b1, b2 = load_parts(at, y_step, i[:, None] < m)
        acc = dot_split_tile(a, e, b1, b2, acc, SINGLE_PART, True, FLOAT32_DOTS)
    value = tl.trans(acc) * scale_down(exponent(tl.load(y_max + batch)))
    at = out + (batch.to(tl.int64) * n + j[:, None]) * r + c[None, :]
    tl.store(at, value, mask=(j[:, None] < n) & (c[None, :] < r))


def project_transposed(X: MatrixList, Y: Tensor, y_max: Tensor, r: int, x_max: Tensor) -> Tensor:
    """Return X'Y (B, n, r) in float32.

    Args:
        X: B matrices (m, n).
        Y: (B, m, r) in float16 parts (2, B, m, R), scaled by `y_max`.
        y_max: the largest |entry| of each Y (B,).
        x_max: the largest |entry| of each X or a bound not far above it, (B,).
    """
    _, batch, m, R = Y.shape
    n = X.shape[1]
    source = X.rows_source()
    how = (LAUNCH if source["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    C = torch.empty(batch, n, r, dtype=torch.float32, device=Y.device)
    _project_transposed[(-(-n // how.rows), batch)](
        **source, y=Y, out=C, y_max=y_max, x_max=x_max, y_step=Y.stride(0), m=m, n=n, r=r,
        BN=how.rows, BK=how.cols, R=R, SINGLE_PART=X.dtype is torch.bfloat16,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return C
