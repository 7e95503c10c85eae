"""Give the rows of the input of Newton-Schulz equal norm: `linalg.normalization.equalize_rows`, in place.

    q_i = |X_i|^2 / n,  q = mean of q_i,  X_i <- X_i / sqrt(max(q_i, LEAST_ROW^2 q))

One program reads its rows twice: for their norms, and to scale them.

Shapes: X (batch, m, n), half precision; sums by parts (batch, parts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import Launch, jit, power_of_two, tl
from cosmos_optim.cuda.kernels.reductions import sum_parts
from cosmos_optim.cuda.kernels.tiles import load_tile
from cosmos_optim.linalg.normalization import LEAST_ROW

ROWS_IN_MEMORY = Launch(16, 256, warps=4, stages=3)
COLUMNS_IN_MEMORY = Launch(64, 64, warps=4, stages=3)


@jit
def _equalize_rows(
    x, norm_sq_parts, new_norm_sq_parts, batch_stride, m, n, sm, sn, parts, least,
    PARTS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    start, i = x + batch.to(tl.int64) * batch_stride, block * BM + tl.arange(0, BM)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        value = load_tile(start, i, k + tl.arange(0, BK), m, n, sm, sn).to(tl.float32)
        squares += value * value
    q = tl.sum(squares, axis=1) / n
    mean = (sum_parts(norm_sq_parts, batch, parts, PARTS) / m / n).to(tl.float32)
    divisor_sq = tl.maximum(q, least * mean)
    gain = tl.where(divisor_sq > 0, 1.0 / tl.sqrt_rn(tl.where(divisor_sq > 0, divisor_sq, 1.0)), 0.0)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        value = load_tile(start, i, j, m, n, sm, sn).to(tl.float32) * gain[:, None]
        inside = (i[:, None] < m) & (j[None, :] < n)
        tl.store(start + i[:, None] * sm + j[None, :] * sn, value.to(tl.float16), mask=inside)
    tl.store(new_norm_sq_parts + batch * tl.num_programs(0) + block, tl.sum(q * gain * gain) * n)


def equalize_rows_(X: Tensor, norm_sq: Tensor) -> Tensor:
    """Scale the rows of a stack X (batch, m, n) of any strides, and return the new |X|^2 by parts (batch, parts).

    norm_sq: |X|^2 by parts (batch, parts), as `residual` returns it.
    """
    (batch, m, n), parts = X.shape, norm_sq.shape[1]
    how = (ROWS_IN_MEMORY if X.stride(2) == 1 else COLUMNS_IN_MEMORY).fit(16)
    new_norm_sq = torch.empty(batch, -(-m // how.rows), dtype=torch.float32, device=X.device)
    _equalize_rows[(new_norm_sq.shape[1], batch)](
        X, norm_sq, new_norm_sq, X.stride(0), m, n, X.stride(1), X.stride(2), parts, LEAST_ROW**2,
        PARTS=power_of_two(parts), BM=how.rows, BK=how.cols, **how.options,
    )  # fmt: skip
    return new_norm_sq
