"""Q = QR(Y) with a positive diagonal, by Cholesky: the QR of the power step (L5); and A'B of thin factors.

These are the three passes of `linalg.cholesky_qr.orthonormalize` in eight launches instead of fifty. The columns are
scaled to norm 1, then each pass computes Q <- Q L^-T with L L' = Q'Q (plus a shift in the first pass). Products use
float16 parts and float32 sums (`tiles`), as exact as float32; the factorization itself is float32. Sums over rows have
a fixed order. More than MAX_COLUMNS columns run in plain torch.

Shapes: Y, Q and any thin A, B (batch, k, r); R is the next power of two of r. Sums over rows are returned by row
blocks: (batch, parts, R) for columns, (batch, parts, R, R) for Gram matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import (
    dot_parts,
    dot_split_tile,
    exponent,
    load_thin,
    scale_down,
    scale_up,
    split_float16,
    store_thin,
)
from cosmos_optim.linalg import cholesky_qr

# One block holds the Gram matrix and its inverse factor in registers.
MAX_COLUMNS = 128
# Rows that one program reads at a time, and how many times: few enough that a dozen matrices fill the GPU, and enough
# to leave few partial sums.
BLOCK, BLOCKS_PER_PROGRAM = 64, 4


@jit(unspecialized=("k",))
def _column_norms(y, out, k, r, ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """Sum the squares of each column over ROWS rows."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    col = tl.arange(0, R)
    norm_sq = tl.zeros((R,), dtype=tl.float32)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        value = load_thin(y + batch.to(tl.int64) * k * r, row, col, k, r)
        norm_sq += tl.sum(value * value, axis=0)
    tl.store(out + (batch * parts + part) * R + col, norm_sq)


@jit
def _inverse_norms(columns, batch, parts, R: tl.constexpr, PARTS: tl.constexpr):
    """Return 1 / norm of each column, 0 for a zero column."""
    p, col = tl.arange(0, PARTS), tl.arange(0, R)
    at = columns + (batch * parts + p[:, None]) * R + col[None, :]
    norm_sq = tl.sum(tl.load(at, mask=p[:, None] < parts, other=0.0), axis=0)
    return tl.where(norm_sq > 0, 1 / tl.sqrt_rn(tl.maximum(norm_sq, 1e-37)), 0.0)


@jit(unspecialized=("k",))
def _gram(
    a, b, columns, out, k, r, gain,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Compute gain A'B over ROWS rows; or A'A (UNIT), with the columns of A scaled to norm 1."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    col = tl.arange(0, R)
    acc = tl.zeros((R, R), dtype=tl.float32)
    scale = tl.full((R,), 1.0, dtype=tl.float32) * gain
    if UNIT:
        scale = _inverse_norms(columns, batch, parts, R, PARTS)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        x = load_thin(a + batch.to(tl.int64) * k * r, row, col, k, r) * scale[None, :]
        e = exponent(tl.max(tl.abs(x)))
        x1, x2 = split_float16(x * scale_up(e))
        if UNIT:
            scale_sq = scale_down(e) * scale_down(e)
            acc = acc + scale_sq * dot_parts(x1, x2, x1, x2, tl.zeros_like(acc), False, True, FLOAT32_DOTS)
        else:
            y = load_thin(b + batch.to(tl.int64) * k * r, row, col, k, r)
            e_y = exponent(tl.max(tl.abs(y)))
            zeros = tl.zeros_like(acc)
            acc = acc + scale_down(e) * dot_split_tile(y, e_y, x1, x2, zeros, False, True, FLOAT32_DOTS)
    i = tl.arange(0, R)
    tl.store(out + ((batch * parts + part) * R + i[:, None]) * R + col[None, :], acc)


@jit(unspecialized=("pass_index", "parts", "r"))
def _inverse_factor(gram_parts, factor, ok, parts, r, shift, pass_index, R: tl.constexpr):
    """Compute L^-T of the Cholesky factor of the summed Gram matrix; write to `ok` whether all passes succeeded so far.

    It eliminates [gram | I] column by column. The second and third pass start near the identity. There, the first-order
    factor L^-1 = I - (lower half of excess, its diagonal halved), with excess = gram - I, is as good and needs no
    elimination: its error is |excess|^2, which the next pass removes, and below rounding in the last pass. A column
    that depends on those before it, with more than half of its pivot from the shift, gets a column of zeros.
    """
    batch = tl.program_id(0)
    i, j = tl.arange(0, R), tl.arange(0, R)
    diagonal = i[:, None] == j[None, :]
    gram = tl.zeros((R, R), dtype=tl.float32)
    for part in range(parts):
        gram += tl.load(gram_parts + ((batch * parts + part) * R + i[:, None]) * R + j[None, :])
    excess = tl.where((i[:, None] < r) & (j[None, :] < r), gram - tl.where(diagonal, 1.0, 0.0), 0.0)
    success = tl.where((pass_index < 2) | (tl.max(tl.abs(excess)) < 0.5), 1, 0)  # the last test is also false for NaN
    near_identity = tl.sum(excess * excess) < tl.where(pass_index < 2, 1e-4, 1e-7)
    inverse = tl.where(i[:, None] > j[None, :], -excess, tl.where(diagonal, 1 - 0.5 * excess, 0.0))
    inverse = tl.where(near_identity, inverse, tl.where(diagonal, 1.0, 0.0))
    inverse_root = tl.full((R,), 1.0, dtype=tl.float32)
    gram = excess + tl.where(diagonal, 1.0 + tl.where(i < r, shift, 0.0)[:, None], 0.0)
    for p in range(tl.where(near_identity, 0, R)):
        row_gram = tl.sum(tl.where(i[:, None] == p, gram, 0.0), axis=0)  # the part not yet eliminated stays symmetric
        row_inverse = tl.sum(tl.where(i[:, None] == p, inverse, 0.0), axis=0)
        pivot = tl.sum(tl.where(j == p, row_gram, 0.0))
        positive = (pivot > 0) & (pivot < float("inf"))
        success = tl.where(positive, success, 0)
        pivot = tl.where(positive, pivot, 1.0)
        ratio = tl.where(j > p, row_gram / pivot, 0.0)
        gram -= ratio[:, None] * row_gram[None, :]
        inverse -= ratio[:, None] * row_inverse[None, :]
        inverse_root = tl.where(i == p, 1 / tl.sqrt_rn(pivot), inverse_root)
    inverse = inverse * inverse_root[:, None]
    inverse = tl.where((shift * tl.sum(inverse * inverse, axis=1) > 0.5)[:, None], 0.0, inverse)
    tl.store(factor + (batch * R + j[None, :]) * R + i[:, None], inverse)
    tl.store(ok + batch, success & tl.load(ok + batch, mask=pass_index > 0, other=1))


@jit(unspecialized=("pass_index", "k"))
def _apply_factor(
    y, factor, columns, ok, fallback, out, gram, k, r, pass_index,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Compute Q = Y L^-T over ROWS rows and its Gram matrix; the last pass writes `fallback` after a failed one.

    If the factor has a column of zeros, that column of Q is the one of `fallback`.
    """
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    base = batch.to(tl.int64) * k * r
    i, col = tl.arange(0, R), tl.arange(0, R)
    scale = tl.where(pass_index == 0, _inverse_norms(columns, batch, parts, R, PARTS), 1.0)
    T = tl.load(factor + (batch * R + i[:, None]) * R + col[None, :])
    e_t = exponent(tl.max(tl.abs(T)))
    t1, t2 = split_float16(T * scale_up(e_t))
    e = exponent(tl.full((), 1.0, dtype=tl.float32))
    replaced = (tl.max(tl.abs(T), axis=0) == 0) | ((pass_index == 2) & (tl.load(ok + batch) == 0))
    acc = tl.zeros((R, R), dtype=tl.float32)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        x = load_thin(y + base, row, col, k, r) * scale[None, :]
        zeros = tl.zeros((BLOCK, R), dtype=tl.float32)
        q = scale_down(e_t) * dot_split_tile(x, e, t1, t2, zeros, False, False, FLOAT32_DOTS)
        old = fallback + base + row[:, None] * r + col[None, :]
        old = tl.load(old, mask=(row[:, None] < k) & (col[None, :] < r) & replaced[None, :], other=0.0)
        q = tl.where(replaced[None, :], old, q)
        q1, q2 = split_float16(q * scale_up(e))
        scale_sq = scale_down(e) * scale_down(e)
        acc = acc + scale_sq * dot_parts(q1, q2, q1, q2, tl.zeros_like(acc), False, True, FLOAT32_DOTS)
        store_thin(out + base, row, col, k, r, q)
    tl.store(gram + ((batch * parts + part) * R + i[:, None]) * R + col[None, :], acc)


def row_blocks(k: int, r: int) -> tuple[int, dict[str, int]]:
    """Return the number of row blocks of a (k, r) factor, and the constants of the kernels."""
    block = launch.TARGET.tile(BLOCK)
    rows = BLOCKS_PER_PROGRAM * block
    return -(-k // rows), {"ROWS": rows, "BLOCK": block, "R": power_of_two(r)}


def warps(R: int) -> int:
    """Return the number of warps for factors of R columns."""
    return 4 if R <= 64 else 8


def supports(r: int) -> bool:
    """Return whether the kernels factorize r columns."""
    return r <= MAX_COLUMNS


def thin_product_parts(A: Tensor, B: Tensor, gain: float = 1.0) -> Tensor:
    """Return gain A'B by row blocks: (batch, k, r) x 2 -> (batch, parts, R, R), zeros beyond r.

    It is as exact as in float32. Ranks above `MAX_COLUMNS` run in plain torch, as one part of r columns.
    """
    batch, k, r = A.shape
    if not supports(r):
        return ((gain * A).mT @ B).unsqueeze(1)
    parts, how = row_blocks(k, r)
    A, B = A.contiguous(), B.contiguous()
    out = torch.empty(batch, parts, how["R"], how["R"], dtype=torch.float32, device=A.device)
    _gram[(parts, batch)](
        A, B, out, out, k, r, gain, PARTS=16, UNIT=False, FLOAT32_DOTS=launch.TARGET.float32_dots, **how,
        num_warps=warps(how["R"]),
    )  # fmt: skip
    return out


def orthonormalize(Y: Tensor, fallback: Tensor, columns: Tensor | None = None) -> Tensor:
    """Return the Q of Y = Q R, (batch, k, r) -> the same, as `cholesky_qr.orthonormalize` does.

    A column that depends on those before it is replaced by the column of `fallback`, made orthogonal to the others. If
    the factorization fails, the result is all of `fallback`.

    columns: the squared norms of the columns of Y by row blocks (batch, parts, R), if `power_sum` has computed them.
    """
    batch, k, r = Y.shape
    if not supports(r):
        return cholesky_qr.orthonormalize(Y, lambda A, B: A.mT @ B, fallback)
    parts, how = row_blocks(k, r)
    R, grid = how["R"], (parts, batch)
    # With PARTS at least 32, one kernel serves all k up to 8,192.
    common = {**how, "PARTS": power_of_two(parts, 32), "FLOAT32_DOTS": launch.TARGET.float32_dots,
              "num_warps": warps(R)}  # fmt: skip
    stages = 3 if R <= 64 else 2  # shared memory holds no third tile of 128 columns
    Y, fallback = Y.contiguous(), fallback.contiguous()
    gram, factor = Y.new_empty(batch, parts, R, R), Y.new_empty(batch, R, R)
    ok = torch.empty(batch, dtype=torch.int32, device=Y.device)
    Q = torch.empty_like(Y)
    if columns is None:
        columns = Y.new_empty(batch, parts, R)
        _column_norms[grid](Y, columns, k, r, **how, num_warps=4)
    _gram[grid](Y, Y, columns, gram, k, r, 1.0, UNIT=True, **common)
    shifts = (10 * r * torch.finfo(torch.float32).eps, 0.0, 0.0)
    for pass_index, shift in enumerate(shifts):
        _inverse_factor[(batch,)](gram, factor, ok, parts, r, shift, pass_index, R=R, num_warps=warps(R))
        X = Y if pass_index == 0 else Q
        _apply_factor[grid](X, factor, columns, ok, fallback, Q, gram, k, r, pass_index, **common, num_stages=stages)
    return Q
