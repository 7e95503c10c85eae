"""Q = orthonormal columns of Y by Cholesky, (B, k, r) -> the same, and A'B of thin factors.

The three passes of `linalg.orthonormal` in eight launches instead of fifty: columns scaled to norm 1, then
Q <- Q L^-T where L L' = Q'Q (+ a shift in the first pass). Products are of float16 parts with float32 sums (`tiles`),
which is as exact as float32; the factorization itself is float32. Sums over rows are made in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import bring, exponent, halves, mac_parts, mac_tile, thin_rows, undo

# One block holds the Gram matrix and its inverse factor in registers.
MAX_COLUMNS = 128
# Rows that one block sums: few enough that a dozen matrices fill the machine, many enough that little is left to add.
BLOCK, BLOCKS_PER_PROGRAM = 64, 4


@jit(unspecialized=("k",))
def _columns(y, out, k, r, ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of squares of the columns over ROWS rows."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    col = tl.arange(0, R)
    total = tl.zeros((R,), dtype=tl.float32)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        value = thin_rows(y + batch.to(tl.int64) * k * r, row, col, k, r)
        total += tl.sum(value * value, axis=0)
    tl.store(out + (batch * parts + part) * R + col, total)


@jit
def _unit(columns, batch, parts, R: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / norm of each column, 0 for a zero one."""
    p, col = tl.arange(0, PARTS), tl.arange(0, R)
    at = columns + (batch * parts + p[:, None]) * R + col[None, :]
    total = tl.sum(tl.load(at, mask=p[:, None] < parts, other=0.0), axis=0)
    return tl.where(total > 0, 1 / tl.sqrt_rn(tl.maximum(total, 1e-37)), 0.0)


@jit(unspecialized=("k",))
def _gram(  # type: ignore[no-untyped-def]
    a, b, columns, out, k, r, gain,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """gain A'B over ROWS rows; with UNIT, A = B and its columns are scaled to norm 1 instead."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    col = tl.arange(0, R)
    acc = tl.zeros((R, R), dtype=tl.float32)
    scale = tl.full((R,), 1.0, dtype=tl.float32) * gain
    if UNIT:
        scale = _unit(columns, batch, parts, R, PARTS)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        x = thin_rows(a + batch.to(tl.int64) * k * r, row, col, k, r) * scale[None, :]
        e = exponent(tl.max(tl.abs(x)))
        x1, x2 = halves(x * bring(e))
        if UNIT:
            acc = acc + undo(e) * undo(e) * mac_parts(x1, x2, x1, x2, tl.zeros_like(acc), False, True, FLOAT32_DOTS)
        else:
            y = thin_rows(b + batch.to(tl.int64) * k * r, row, col, k, r)
            e_y = exponent(tl.max(tl.abs(y)))
            acc = acc + undo(e) * mac_tile(y, e_y, x1, x2, tl.zeros_like(acc), False, True, FLOAT32_DOTS)
    i = tl.arange(0, R)
    tl.store(out + ((batch * parts + part) * R + i[:, None]) * R + col[None, :], acc)


@jit(unspecialized=("turn", "parts", "r"))
def _factor(gram, factor, fine, parts, r, shift, turn, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """L^-T of the Cholesky factor of the summed Gram matrix; notes what fails in `fine`.

    By elimination on [G | I], one column after the other. Near the identity, where the second and third pass begin,
    the first-order factor L^-1 = I - (the lower half of E, its diagonal halved), E = G - I, is as good and needs no
    elimination: it leaves |E|^2 for the next pass, and after the last one less than rounding.
    """
    batch = tl.program_id(0)
    i, j = tl.arange(0, R), tl.arange(0, R)
    diagonal = i[:, None] == j[None, :]
    G = tl.zeros((R, R), dtype=tl.float32)
    for part in range(parts):
        G += tl.load(gram + ((batch * parts + part) * R + i[:, None]) * R + j[None, :])
    E = tl.where((i[:, None] < r) & (j[None, :] < r), G - tl.where(diagonal, 1.0, 0.0), 0.0)
    ok = tl.where((turn < 2) | (tl.max(tl.abs(E)) < 0.5), 1, 0)  # at last; false for NaN as well
    near = tl.sum(E * E) < tl.where(turn < 2, 1e-4, 1e-7)
    W = tl.where(i[:, None] > j[None, :], -E, tl.where(diagonal, 1 - 0.5 * E, 0.0))
    W = tl.where(near, W, tl.where(diagonal, 1.0, 0.0))
    root = tl.full((R,), 1.0, dtype=tl.float32)
    G = E + tl.where(diagonal, 1.0 + tl.where(i < r, shift, 0.0)[:, None], 0.0)
    for p in range(tl.where(near, 0, R)):
        line = tl.sum(tl.where(i[:, None] == p, G, 0.0), axis=0)  # what is left to eliminate stays symmetric
        done = tl.sum(tl.where(i[:, None] == p, W, 0.0), axis=0)
        pivot = tl.sum(tl.where(j == p, line, 0.0))
        good = (pivot > 0) & (pivot < float("inf"))
        ok = tl.where(good, ok, 0)
        pivot = tl.where(good, pivot, 1.0)
        ratio = tl.where(j > p, line / pivot, 0.0)
        G -= ratio[:, None] * line[None, :]
        W -= ratio[:, None] * done[None, :]
        root = tl.where(i == p, 1 / tl.sqrt_rn(pivot), root)
    W = W * root[:, None]
    tl.store(factor + (batch * R + j[None, :]) * R + i[:, None], W)
    tl.store(fine + batch, ok & tl.load(fine + batch, mask=turn > 0, other=1))


@jit(unspecialized=("turn", "k"))
def _apply(  # type: ignore[no-untyped-def]
    y, factor, columns, fine, fallback, out, gram, k, r, turn,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Q = Y L^-T over ROWS rows and its Gram matrix there; at last the fallback where a factorization failed."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    base = batch.to(tl.int64) * k * r
    i, col = tl.arange(0, R), tl.arange(0, R)
    scale = tl.where(turn == 0, _unit(columns, batch, parts, R, PARTS), 1.0)
    T = tl.load(factor + (batch * R + i[:, None]) * R + col[None, :])
    e_t = exponent(tl.max(tl.abs(T)))
    t1, t2 = halves(T * bring(e_t))
    e = exponent(tl.full((), 1.0, dtype=tl.float32))
    fit = (turn < 2) | (tl.load(fine + batch) != 0)
    acc = tl.zeros((R, R), dtype=tl.float32)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        x = thin_rows(y + base, row, col, k, r) * scale[None, :]
        q = undo(e_t) * mac_tile(x, e, t1, t2, tl.zeros((BLOCK, R), dtype=tl.float32), False, False, FLOAT32_DOTS)
        q1, q2 = halves(q * bring(e))
        acc = acc + undo(e) * undo(e) * mac_parts(q1, q2, q1, q2, tl.zeros_like(acc), False, True, FLOAT32_DOTS)
        q = tl.where(fit, q, thin_rows(fallback + base, row, col, tl.where(fit, 0, k), r))
        tl.store(out + base + row[:, None] * r + col[None, :], q, mask=(row[:, None] < k) & (col[None, :] < r))
    tl.store(gram + ((batch * parts + part) * R + i[:, None]) * R + col[None, :], acc)


def plan(k: int, r: int) -> tuple[int, dict[str, int]]:
    """The number of row blocks, and the constants of the kernels."""
    block = launch.TARGET.tile(BLOCK)
    rows = BLOCKS_PER_PROGRAM * block
    parts = -(-k // rows)
    return parts, {"ROWS": rows, "BLOCK": block, "R": power_of_two(r)}


def warps(R: int) -> int:
    return 4 if R <= 64 else 8


def supports(r: int) -> bool:
    """Whether the factorization fits."""
    return r <= MAX_COLUMNS


def gram_parts(A: Tensor, B: Tensor, gain: float = 1.0) -> Tensor:
    """gain A'B by row blocks, (B, k, r) x 2 -> (B, blocks, R, R), zeros beyond r."""
    batch, k, r = A.shape
    parts, how = plan(k, r)
    A, B = A.contiguous(), B.contiguous()
    out = torch.empty(batch, parts, how["R"], how["R"], dtype=torch.float32, device=A.device)
    _gram[(parts, batch)](
        A, B, out, out, k, r, gain, PARTS=16, UNIT=False, FLOAT32_DOTS=launch.TARGET.float32_dots, **how,
        num_warps=warps(how["R"]),
    )  # fmt: skip
    return out


def thin_gram(A: Tensor, B: Tensor) -> Tensor:
    """A'B, (B, k, r) x 2 -> (B, r, r), as exact as in float32."""
    r = A.shape[-1]
    return gram_parts(A, B).sum(1)[:, :r, :r]


def orthonormal(Y: Tensor, fallback: Tensor, columns: Tensor | None = None) -> Tensor:
    """Orthonormal columns spanning those of Y in order; `fallback` for a matrix whose columns are dependent.

    `columns`: the sums of squares of its columns by row blocks (B, blocks, R), where a kernel has left them.
    """
    batch, k, r = Y.shape
    parts, how = plan(k, r)
    R, grid = how["R"], (parts, batch)
    # One kernel for all lengths up to 8,192.
    few = {**how, "PARTS": power_of_two(parts, 32), "FLOAT32_DOTS": launch.TARGET.float32_dots, "num_warps": warps(R)}
    Y, fallback = Y.contiguous(), fallback.contiguous()
    gram, factor = Y.new_empty(batch, parts, R, R), Y.new_empty(batch, R, R)
    fine = torch.empty(batch, dtype=torch.int32, device=Y.device)
    Q = torch.empty_like(Y)
    if columns is None:
        columns = Y.new_empty(batch, parts, R)
        _columns[grid](Y, columns, k, r, **how, num_warps=4)
    _gram[grid](Y, Y, columns, gram, k, r, 1.0, UNIT=True, **few)
    shifts = (10 * r * torch.finfo(torch.float32).eps, 0.0, 0.0)
    for turn, shift in enumerate(shifts):
        _factor[(batch,)](gram, factor, fine, parts, r, shift, turn, R=R, num_warps=warps(R))
        _apply[grid](Y if turn == 0 else Q, factor, columns, fine, fallback, Q, gram, k, r, turn, **few)
    return Q


def thin_gram_torch(A: Tensor, B: Tensor) -> Tensor:
    """The same as `thin_gram` in plain torch."""
    return A.mT @ B
