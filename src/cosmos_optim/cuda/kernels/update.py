"""W <- decay W - gain B + thin U' for a list of parameters: the step along the direction D (L10, L11).

`gains.update_coefficients` returns decay, gain and thin. D is never stored: one pass reads W and B and writes W. If W
has corrections, it is read and written with all 24 bits (see `linalg.weight24`).

Shapes: W (m, n), B the work buffer (max(m, n), min(m, n)), thin (m, r), U (n, r), for each matrix of the batch.
"""

from __future__ import annotations

from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import Launch, false_flag, jit, tl
from cosmos_optim.cuda.kernels.tiles import add_outer, load_parts, load_tile, matrix_start
from cosmos_optim.cuda.kernels.weight24_tiles import join_weight, split_weight
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.engine import rounding

LAUNCH = Launch(64, 32, warps=4, stages=3)
# The hash of `rounding.noise16`.
INDEX_MIX, MIX1, MIX2 = (tl.constexpr(x) for x in (rounding.INDEX_MIX, rounding.MIX1, rounding.MIX2))
LOW16 = tl.constexpr(rounding.LOW16)


@jit
def dither(value, index, seed):
    """Return the float32 that rounds to the bfloat16 that `rounding.stochastic_bfloat16` draws for index and seed."""
    x = index * INDEX_MIX + seed * MIX1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * MIX1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * MIX2
    x = (x ^ ((x >> 16) & LOW16)) & LOW16
    truncated = (value.to(tl.int32, bitcast=True) + x) & ~LOW16
    return tl.where(tl.abs(value) < float("inf"), truncated.to(tl.float32, bitcast=True), value)


@jit
def _load_weights(w_start, low, i, j, m, n, sm, sn, low_sm, low_sn, CORRECTED: tl.constexpr):
    """Load a tile of W in float32; `low` is where its corrections begin."""
    w = load_tile(w_start, i, j, m, n, sm, sn)
    if CORRECTED:
        return join_weight(w, load_tile(low, i, j, m, n, low_sm, low_sn))
    return w.to(tl.float32)


@jit
def _update(
    w, corrections, b, thin, u, coefficients, row_gain, skip, seeds, b_batch_stride, thin_part_stride, u_part_stride,
    m, n, sm, sn, low_sm, low_sn, b_sm, b_sn,
    BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr, THIN: tl.constexpr, SEEDED: tl.constexpr,
    ROW_GAIN: tl.constexpr, CORRECTED: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr,
    LOW_ALIGNED: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    w_start = matrix_start(w, batch, ELEMENT, ALIGNED)
    low = w_start
    if CORRECTED:
        low = matrix_start(corrections, batch, tl.int8, LOW_ALIGNED)
    b_start = b + batch.to(tl.int64) * b_batch_stride
    decay, gain = tl.load(coefficients + batch * 2), tl.load(coefficients + batch * 2 + 1)
    write = tl.load(skip) == 0
    seed = 0
    if SEEDED:
        seed = tl.load(seeds + batch)
    i, k = block * BM + tl.arange(0, BM), tl.arange(0, R)
    if ROW_GAIN:
        gain = gain * tl.load(row_gain + batch * m + i, mask=i < m, other=0.0)[:, None]
    if THIN:
        at_thin = thin + (batch.to(tl.int64) * m + i[:, None]) * R + k[None, :]
        thin1, thin2 = load_parts(at_thin, thin_part_stride, i[:, None] < m)
    # Triton prefetches only the operands of products, so the code loads the next tiles explicitly.
    next_w = _load_weights(w_start, low, i, tl.arange(0, BN), m, n, sm, sn, low_sm, low_sn, CORRECTED)
    next_b = load_tile(b_start, i, tl.arange(0, BN), m, n, b_sm, b_sn).to(tl.float32)
    for first in range(0, n, BN):
        j = first + tl.arange(0, BN)
        value = decay * next_w - gain * next_b
        next_w = _load_weights(w_start, low, i, j + BN, m, n, sm, sn, low_sm, low_sn, CORRECTED)
        next_b = load_tile(b_start, i, j + BN, m, n, b_sm, b_sn).to(tl.float32)
        if THIN:
            at_u = u + (batch.to(tl.int64) * n + j[:, None]) * R + k[None, :]
            value = add_outer(value, thin1, thin2, at_u, u_part_stride, j[:, None] < n, FLOAT32_DOTS)
        inside = (i[:, None] < m) & (j[None, :] < n) & write
        if SEEDED:
            value = dither(value, i[:, None] * n + j[None, :], seed)
        if CORRECTED:
            value, correction = split_weight(value)
            tl.store(low + i[:, None] * low_sm + j[None, :] * low_sn, correction, mask=inside)
        tl.store(w_start + i[:, None] * sm + j[None, :] * sn, value.to(ELEMENT), mask=inside)


def update_(
    W: MatrixList, B: Tensor, thin: Tensor | None, U: Tensor | None, coefficients: Tensor, skip: Tensor | None,
    seeds: Tensor | None = None, row_gain: Tensor | None = None,
) -> None:  # fmt: skip
    """Update W in place.

    Args:
        W: a list of matrices (m, n), and their corrections if they have some.
        B: the tall work buffer (batch, max(m, n), min(m, n)).
        thin, U: in bfloat16 parts (2, batch, m or n, R), or None; thin has its sign and scale.
        coefficients: (batch, 2) float32, decay and gain of each matrix.
        skip: a boolean scalar on the device, or None; if True, nothing is written.
        seeds: (batch,) int32, or None; if given, bfloat16 parameters are rounded stochastically.
        row_gain: (batch, m, 1) float32, or None: a factor for each row of gain B.
    """
    (m, n), batch = W.shape, len(W)
    R = 16 if U is None else U.shape[-1]
    how = LAUNCH.fit(R)
    b_sm, b_sn = (B.stride(1), 1) if m >= n else (1, B.stride(1))
    low = (W.corrections or W).rows_source()
    _update[(-(-m // how.rows), batch)](
        **W.rows_source(), w=W.table, corrections=(W.corrections or W).table, low_sm=low["sm"], low_sn=low["sn"],
        LOW_ALIGNED=low["ALIGNED"], CORRECTED=W.corrections is not None, b=B, thin=B if thin is None else thin,
        u=B if U is None else U, coefficients=coefficients, row_gain=coefficients if row_gain is None else row_gain,
        skip=false_flag(W.device) if skip is None else skip, seeds=coefficients if seeds is None else seeds,
        b_batch_stride=B.stride(0), thin_part_stride=0 if thin is None else thin.stride(0),
        u_part_stride=0 if U is None else U.stride(0), m=m, n=n, b_sm=b_sm, b_sn=b_sn, BM=how.rows, BN=how.cols, R=R,
        THIN=U is not None, SEEDED=seeds is not None, ROW_GAIN=row_gain is not None,
        FLOAT32_DOTS=launch.TARGET.float32_dots, **how.options,
    )  # fmt: skip
