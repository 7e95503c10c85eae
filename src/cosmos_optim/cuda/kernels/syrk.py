"""C = alpha A'B + beta D + delta E + gamma I for stacks of matrices whose product is known to be symmetric.

A and B are (K, s) with A = B (a Gram matrix), or symmetric (s, s) and commuting (factors of Newton-Schulz). Only the
tiles on and above the diagonal are computed; a tile above it is also written transposed, below. That is 53 % of the
work of a full product at s = 2048.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import TensorDescriptor, jit, never, tl

# Which matrices of a stack a product is for: a flag of each, and the value it must have. No flags: all of them.
Only = tuple[Tensor | None, bool]
ALL: Only = (None, True)


@jit(unaligned=("turn_ptr",), unspecialized=("want",))
def _symmetric(  # type: ignore[no-untyped-def]
    a_desc, b_desc, half_desc, c_ptr, d_desc, e_desc, d_half, e_half, alpha_ptr, sum_ptr, turn_ptr, tile_ptr,
    want, tiles, K, s, stride, batch_stride, beta, delta, gamma, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    batch, pair, weight, idle = _turn(tile_ptr, alpha_ptr, turn_ptr, tiles, alpha, want, WEIGHTED)
    if idle:
        return
    row, col = (pair >> 16) * BM, ((pair & 0xFFFF) >> 1) * BN
    base = batch.to(tl.int64) * batch_stride
    if pair & 1:  # the left half lies below the diagonal
        half = _addend(d_half, e_half, batch, row, col + BN // 2, beta, delta, gamma, BM, BN // 2, ADD)
        half = _product(a_desc, half_desc, half, batch, row, col + BN // 2, K, BM, BN // 2, BK, FLOAT32_DOTS)
        _finish(half, c_ptr + base, sum_ptr, row, col + BN // 2, s, stride, weight, BM, BN // 2, WEIGHTED)
    else:
        acc = _addend(d_desc, e_desc, batch, row, col, beta, delta, gamma, BM, BN, ADD)
        acc = _product(a_desc, b_desc, acc, batch, row, col, K, BM, BN, BK, FLOAT32_DOTS)
        _finish(acc, c_ptr + base, sum_ptr, row, col, s, stride, weight, BM, BN, WEIGHTED)


@jit(unaligned=("turn_ptr",), unspecialized=("want",))
def _symmetric_squares(  # type: ignore[no-untyped-def]
    a_desc, b_desc, c_desc, d_desc, e_desc, alpha_ptr, sum_ptr, turn_ptr, tile_ptr, want, tiles, K,
    beta, delta, gamma, alpha,
    BM: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """The same in square tiles, two of which share a processor: one is stored, by bulk copies, while one multiplies."""
    batch, pair, weight, idle = _turn(tile_ptr, alpha_ptr, turn_ptr, tiles, alpha, want, WEIGHTED)
    if idle:
        return
    row, col = (pair >> 16) * BM, ((pair & 0xFFFF) >> 1) * BM
    value = tl.zeros((BM, BM), dtype=tl.float32)
    value = _product(a_desc, b_desc, value, batch, row, col, K, BM, BM, BK, FLOAT32_DOTS) * weight
    if WEIGHTED:
        tl.store(sum_ptr + tl.program_id(0), tl.sum(value * value) * tl.where(col > row, 2.0, 1.0))
    if ADD:  # after the product here: these tiles come by bulk copies
        value += beta * d_desc.load([batch, row, col]).reshape(BM, BM).to(tl.float32)
        if delta != 0.0:
            value += delta * e_desc.load([batch, row, col]).reshape(BM, BM).to(tl.float32)
        i, j = row + tl.arange(0, BM), col + tl.arange(0, BM)
        value += tl.where(i[:, None] == j[None, :], gamma, 0.0)
    value = value.to(c_desc.dtype)
    c_desc.store([batch, row, col], value.reshape(1, BM, BM))
    if col > row:
        c_desc.store([batch, col, row], tl.trans(value).reshape(1, BM, BM))


@jit
def _turn(tile_ptr, alpha_ptr, turn_ptr, tiles, alpha, want, WEIGHTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's matrix, the code of its tile, the factor of the product, and whether there is nothing to do."""
    t = tl.program_id(0)
    batch = t // tiles
    weight = alpha
    if WEIGHTED:
        weight = weight * tl.load(alpha_ptr + batch)
    idle = (want >= 0) & (tl.load(turn_ptr + batch, mask=want >= 0, other=0).to(tl.int32) != want)
    return batch, tl.load(tile_ptr + t % tiles), weight, idle


@jit
def _addend(  # type: ignore[no-untyped-def]
    d_desc, e_desc, batch, row, col, beta, delta, gamma, BM: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """What the sums of a tile begin with. Added afterwards, it would not fit in the registers beside them."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if ADD:
        acc = beta * d_desc.load([batch, row, col]).reshape(BM, BN).to(tl.float32)
        if delta != 0.0:
            acc += delta * e_desc.load([batch, row, col]).reshape(BM, BN).to(tl.float32)
        i, j = row + tl.arange(0, BM), col + tl.arange(0, BN)
        acc += tl.where(i[:, None] == j[None, :], gamma, 0.0)
    return acc


@jit
def _product(  # type: ignore[no-untyped-def]
    a_desc, b_desc, acc, batch, row, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """The tile of A'B at (row, col), added to `acc`."""
    for k in range(tl.cdiv(K, BK)):
        a = a_desc.load([batch, k * BK, row]).reshape(BK, BM)
        b = b_desc.load([batch, k * BK, col]).reshape(BK, BN)
        if FLOAT32_DOTS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a.T, b, acc)
    return acc


@jit
def _finish(  # type: ignore[no-untyped-def]
    acc, c, sums, row, col, s, stride, weight, BM: tl.constexpr, BN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Scale and store a tile, and its mirror image where no other tile computes that; the squares of both."""
    i, j = row + tl.arange(0, BM), col + tl.arange(0, BN)
    inside = (i[:, None] < s) & (j[None, :] < s)
    value = acc * weight
    if SUMS:
        tl.store(sums + tl.program_id(0), tl.sum(value * value * tl.where(j >= row + BM, 2.0, 1.0)[None, :]))
    value = value.to(c.dtype.element_ty)
    tl.store(c + i[:, None] * stride + j[None, :], value, mask=inside)
    below = (j[:, None] < s) & (i[None, :] < s) & (j[:, None] >= row + BM)
    tl.store(c + j[:, None] * stride + i[None, :], tl.trans(value), mask=below)


@dataclass(frozen=True)
class Tiling:
    """Block shape and launch options of one kind of problem; square blocks have a kernel of their own."""

    BM: int = 128
    BN: int = 256
    BK: int = 64
    warps: int = 8
    stages: int = 3


def tiling(s: int, K: int) -> Tiling:
    """The block shape for s x s results of K products: large blocks unless they would leave most of the tile empty.

    A fourth stage pays where sums are long (measured on an H200).
    """
    side, depth = launch.TARGET.tile(128), launch.TARGET.tile(64)
    if s <= 1024:
        return Tiling(side, side, depth, warps=4)
    return Tiling(side, 2 * side, depth, stages=4 if 2 * s < K else 3)


@cache
def _tiles(s: int, BM: int, BN: int, device: torch.device) -> tuple[Tensor, int]:
    """(row << 16) + (column << 1) + half of every tile that reaches the diagonal or lies above it.

    half: the tile's left half lies below the diagonal and is left out; such tiles come last.
    """
    pairs = [(i, j) for j in range(-(-s // BN)) for i in range(-(-s // BM)) if (j + 1) * BN > i * BM]
    half = {(i, j) for i, j in pairs if BN == 2 * BM and i * BM >= j * BN + BN // 2}
    order = [pair for pair in pairs if pair not in half] + [pair for pair in pairs if pair in half]
    codes = [(i << 16) + (j << 1) + ((i, j) in half) for i, j in order]
    return torch.tensor(codes, dtype=torch.int32, device=device), len(codes)


def supports(X: Tensor) -> bool:
    """Hopper's bulk copies want 16-byte rows of a 16-bit type."""
    rows = X.ndim == 3 and X.stride(-1) == 1 and X.stride(-2) % 8 == 0 and X.data_ptr() % 16 == 0
    return rows and X.dtype in (torch.float16, torch.bfloat16) and launch.capability(X.device) >= (9, 0)


def symmetric_product(
    A: Tensor, B: Tensor, *, alpha: float = 1.0, weight: Tensor | None = None, beta: float = 0.0,
    D: Tensor | None = None, delta: float = 0.0, E: Tensor | None = None, gamma: float = 0.0,
    tiles: Tiling | None = None, out: Tensor | None = None, only: Only = ALL, squares: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """weight alpha A'B + beta D + delta E + gamma I, (batch, K, s) x 2 -> (batch, s, s), where that is symmetric.

    Args:
        weight: a factor for each matrix, (batch, 1, 1) float32 on the device.
        D: added beta times, together with gamma I and delta E; without it there is nothing to add.
        out: where the result goes, with 16-byte rows; new memory by default.
        only: the matrices it is for, by a flag on the device; nothing is written for the others.
        squares: takes parts of the sum of squares of each result, as `squares_of` makes it; with a weight alone.
    """
    batch, K, s = A.shape
    how = tiles or tiling(s, K)
    C = like(A, s) if out is None else out
    table, count = _tiles(s, how.BM, how.BN, A.device)
    flags, want = only
    given: list[Any] = [C, C] if weight is None else [weight, squares_of(A, how) if squares is None else squares]
    given += [never(A.device), table, -1] if flags is None else [flags, table, int(want)]
    common = {"ADD": D is not None, "WEIGHTED": weight is not None, "FLOAT32_DOTS": launch.TARGET.float32_dots,
              "num_warps": how.warps, "num_stages": how.stages}  # fmt: skip
    added = [C if X is None else X for X in (D, E)]
    if how.BM == how.BN:
        _symmetric_squares[(batch * count,)](
            _descriptor(A, how.BK, how.BM), _descriptor(B, how.BK, how.BM),
            *(_descriptor(X, how.BM, how.BM) for X in (C, *added)), *given, count, K, beta, delta, gamma, alpha,
            BM=how.BM, BK=how.BK, **common,
        )  # fmt: skip
        return C
    # The sums begin with what is to be added, and are multiplied by alpha afterwards.
    _symmetric[(batch * count,)](
        _descriptor(A, how.BK, how.BM), _descriptor(B, how.BK, how.BN), _descriptor(B, how.BK, how.BN // 2), C,
        *(_descriptor(X, how.BM, cols) for cols in (how.BN, how.BN // 2) for X in added), *given, count, K, s,
        C.stride(1), C.stride(0), beta / alpha, delta / alpha, gamma / alpha, alpha,
        BM=how.BM, BN=how.BN, BK=how.BK, **common,
    )  # fmt: skip
    return C


def squares_of(A: Tensor, tiles: Tiling | None = None) -> Tensor:
    """Memory for the sums of squares of A'A, a part from each tile."""
    batch, K, s = A.shape
    how = tiles or tiling(s, K)
    return torch.empty(batch, _tiles(s, how.BM, how.BN, A.device)[1], dtype=torch.float32, device=A.device)


def like(A: Tensor, rows: int) -> Tensor:
    """An empty stack of `rows` x s matrices with rows padded to 16 bytes, as A has them."""
    batch, s = A.shape[0], A.shape[2]
    return A.new_empty(batch, rows, -(-s // 8) * 8)[:, :, :s]


def _descriptor(X: Tensor, rows: int, cols: int) -> Any:
    return TensorDescriptor(X, list(X.shape), list(X.stride()), [1, rows, cols])


class SymmetricProducts:
    """The products of Newton-Schulz, with half the work where the result is symmetric; `empty` makes their memory."""

    selective = True

    def __init__(self, empty: Callable[[Tensor, int], Tensor] = like) -> None:
        self.empty = empty
        self._squares: Tensor | None = None

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """weight X'X; with a weight its sum of squares comes along."""
        self._squares = None if weight is None else squares_of(X)
        return symmetric_product(X, X, weight=weight, out=self.empty(X, X.shape[2]), squares=self._squares)

    def within(self, R: Tensor, bound: float) -> Tensor:
        """Whether |R|_F <= bound, of each matrix that `gram` made last."""
        squares = R.float().square().sum((1, 2)) if self._squares is None else self._squares.sum(1)
        return squares <= bound**2

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Only = ALL, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """aI + bR + cR^2 + dD."""
        out = self.empty(R, R.shape[2]) if out is None else out
        return symmetric_product(R, R, alpha=c, beta=b, D=R, delta=d, E=D, gamma=a, out=out, only=only)

    def product(self, A: Tensor, B: Tensor, only: Only = ALL, out: Tensor | None = None) -> Tensor:
        """A B = A'B."""
        return symmetric_product(A, B, out=self.empty(A, A.shape[2]) if out is None else out, only=only)

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        """X Q, by torch: nothing is symmetric here."""
        return torch.bmm(X, Q, out=self.empty(X, X.shape[1]) if out is None else out)
