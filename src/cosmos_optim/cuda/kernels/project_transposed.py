"""G'Z for a list of gradients and a thin factor Z: with Z = G U / c, the second product of the power step (L5).

Shapes: G (m, n), Z (m, r), G'Z (n, r), for each matrix of the batch.
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


@jit(unaligned=("g",), unspecialized=("m",))
def _project_transposed(
    g, z, out, z_max, grad_max, z_part_stride, m, n, r, sm, sn,
    BN: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
    ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    g_start = matrix_start(g, batch, ELEMENT, ALIGNED)
    j, c = block * BN + tl.arange(0, BN), tl.arange(0, R)
    base = z + batch.to(tl.int64) * m * R
    acc = tl.zeros((R, BN), dtype=tl.float32)
    e = exponent(tl.load(grad_max + batch))
    if not ALIGNED:
        next_tile = load_tile(g_start, tl.arange(0, BK), j, m, n, sm, sn)
    for k in range(0, m, BK):
        i = k + tl.arange(0, BK)
        if ALIGNED:
            grad = load_tile(g_start, i, j, m, n, sm, sn).to(tl.float32)
        else:
            grad = next_tile.to(tl.float32)
            next_tile = load_tile(g_start, i + BK, j, m, n, sm, sn)
        at = base + i[:, None] * R + c[None, :]
        z1, z2 = load_parts(at, z_part_stride, i[:, None] < m)
        acc = dot_split_tile(grad, e, z1, z2, acc, SINGLE_PART, True, FLOAT32_DOTS)
    value = tl.trans(acc) * scale_down(exponent(tl.load(z_max + batch)))
    at = out + (batch.to(tl.int64) * n + j[:, None]) * r + c[None, :]
    tl.store(at, value, mask=(j[:, None] < n) & (c[None, :] < r))


def project_transposed(G: MatrixList, Z: Tensor, z_max: Tensor, r: int, grad_max: Tensor) -> Tensor:
    """Return G'Z (batch, n, r) in float32.

    Args:
        G: a list of matrices (m, n).
        Z: (batch, m, r) in float16 parts (2, batch, m, R), scaled by `z_max`.
        z_max: the largest |entry| of each Z (batch,).
        grad_max: the largest |entry| of each G or a bound not far above it, (batch,).
    """
    _, batch, m, R = Z.shape
    n, source = G.shape[1], G.rows_source()
    how = (LAUNCH if source["ALIGNED"] else UNALIGNED_LAUNCH).fit(R)
    out = torch.empty(batch, n, r, dtype=torch.float32, device=Z.device)
    _project_transposed[(-(-n // how.rows), batch)](
        **source, g=G.table, z=Z, out=out, z_max=z_max, grad_max=grad_max, z_part_stride=Z.stride(0), m=m, n=n, r=r,
        BN=how.rows, BK=how.cols, R=R, SINGLE_PART=G.dtype is torch.bfloat16,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
    return out
