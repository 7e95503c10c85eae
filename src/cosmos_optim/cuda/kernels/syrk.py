"""C = alpha A'B + beta D + delta E + gamma I for stacks of matrices with a symmetric product: Newton-Schulz (L9).

A = B is (K, s) (a Gram matrix), or A and B are symmetric (s, s) and commute (factors of Newton-Schulz). Only the tiles
on and above the diagonal are computed; a tile above it is also written, transposed, below it. That is 53 % of the work
of a full product at s = 2048. The letters are those of a general product, not of Algorithm 1.

Shapes: A, B (batch, K, s), C, D, E (batch, s, s). A tile of C is (BM, BN), summed over blocks of BK.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import TensorDescriptor, false_flag, jit, padded_row, tl
from cosmos_optim.linalg.newton_schulz import EVERY_MATRIX, Selection


@jit(unaligned=("flag_ptr",), unspecialized=("wanted_flag",))
def _symmetric(
    a_desc, b_desc, b_half_desc, c_ptr, d_desc, e_desc, d_half_desc, e_half_desc, weight_ptr, norm_sq_ptr, flag_ptr,
    tile_ptr, wanted_flag, tiles, K, s, stride, batch_stride, beta, delta, gamma, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    batch, code, factor, idle = _assignment(tile_ptr, weight_ptr, flag_ptr, tiles, alpha, wanted_flag, WEIGHTED)
    if idle:
        return
    row, col = (code >> 16) * BM, ((code & 0xFFFF) >> 1) * BN
    base = batch.to(tl.int64) * batch_stride
    if code & 1:  # skip the left half of the tile, which is below the diagonal
        half = _addend(d_half_desc, e_half_desc, batch, row, col + BN // 2, beta, delta, gamma, BM, BN // 2, ADD)
        half = _product(a_desc, b_half_desc, half, batch, row, col + BN // 2, K, BM, BN // 2, BK, FLOAT32_DOTS)
        _store(half, c_ptr + base, norm_sq_ptr, row, col + BN // 2, s, stride, factor, BM, BN // 2, WEIGHTED)
    else:
        acc = _addend(d_desc, e_desc, batch, row, col, beta, delta, gamma, BM, BN, ADD)
        acc = _product(a_desc, b_desc, acc, batch, row, col, K, BM, BN, BK, FLOAT32_DOTS)
        _store(acc, c_ptr + base, norm_sq_ptr, row, col, s, stride, factor, BM, BN, WEIGHTED)


@jit(unaligned=("flag_ptr",), unspecialized=("wanted_flag",))
def _symmetric_squares(
    a_desc, b_desc, c_desc, d_desc, e_desc, weight_ptr, norm_sq_ptr, flag_ptr, tile_ptr, wanted_flag, tiles, K,
    beta, delta, gamma, alpha,
    BM: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Compute the same in square tiles, two per processor: bulk copies store one while the other multiplies."""
    batch, code, factor, idle = _assignment(tile_ptr, weight_ptr, flag_ptr, tiles, alpha, wanted_flag, WEIGHTED)
    if idle:
        return
    row, col = (code >> 16) * BM, ((code & 0xFFFF) >> 1) * BM
    value = tl.zeros((BM, BM), dtype=tl.float32)
    value = _product(a_desc, b_desc, value, batch, row, col, K, BM, BM, BK, FLOAT32_DOTS) * factor
    if WEIGHTED:
        tl.store(norm_sq_ptr + tl.program_id(0), tl.sum(value * value) * tl.where(col > row, 2.0, 1.0))
    if ADD:  # after the product, because bulk copies load these tiles
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
def _assignment(tile_ptr, weight_ptr, flag_ptr, tiles, alpha, wanted_flag, WEIGHTED: tl.constexpr):
    """Return this program's matrix, the code of its tile, the factor of the product, and whether to do nothing."""
    program = tl.program_id(0)
    batch = program // tiles
    factor = alpha
    if WEIGHTED:
        factor = factor * tl.load(weight_ptr + batch)
    flag = tl.load(flag_ptr + batch, mask=wanted_flag >= 0, other=0).to(tl.int32)
    idle = (wanted_flag >= 0) & (flag != wanted_flag)
    return batch, tl.load(tile_ptr + program % tiles), factor, idle


@jit
def _addend(
    d_desc, e_desc, batch, row, col, beta, delta, gamma, BM: tl.constexpr, BN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Return the initial value of a tile's sums: adding D and E after the product would need too many registers."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if ADD:
        acc = beta * d_desc.load([batch, row, col]).reshape(BM, BN).to(tl.float32)
        if delta != 0.0:
            acc += delta * e_desc.load([batch, row, col]).reshape(BM, BN).to(tl.float32)
        i, j = row + tl.arange(0, BM), col + tl.arange(0, BN)
        acc += tl.where(i[:, None] == j[None, :], gamma, 0.0)
    return acc


@jit
def _product(
    a_desc, b_desc, acc, batch, row, col, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Return acc + the tile of A'B at (row, col)."""
    for k in range(tl.cdiv(K, BK)):
        a = a_desc.load([batch, k * BK, row]).reshape(BK, BM)
        b = b_desc.load([batch, k * BK, col]).reshape(BK, BN)
        if FLOAT32_DOTS:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a.T, b, acc)
    return acc


@jit
def _store(
    acc, c, norm_sq, row, col, s, stride, factor, BM: tl.constexpr, BN: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Scale and store a tile, its mirror image unless another tile computes it, and the squared norm of both."""
    i, j = row + tl.arange(0, BM), col + tl.arange(0, BN)
    inside = (i[:, None] < s) & (j[None, :] < s)
    value = acc * factor
    if WEIGHTED:
        tl.store(norm_sq + tl.program_id(0), tl.sum(value * value * tl.where(j >= row + BM, 2.0, 1.0)[None, :]))
    value = value.to(c.dtype.element_ty)
    tl.store(c + i[:, None] * stride + j[None, :], value, mask=inside)
    below = (j[:, None] < s) & (i[None, :] < s) & (j[:, None] >= row + BM)
    tl.store(c + j[:, None] * stride + i[None, :], tl.trans(value), mask=below)


@dataclass(frozen=True)
class TileShape:
    """The tile of a product and its launch options; square tiles have their own kernel."""

    BM: int = 128
    BN: int = 256
    BK: int = 64
    warps: int = 8
    stages: int = 3


def tile_shape(s: int, K: int) -> TileShape:
    """Return the tile for (s, s) results summed over K: large, except for small s, which would leave most of it empty.

    A fourth stage pays off if sums are long (measured on an H200).
    """
    side, depth = launch.TARGET.tile(128), launch.TARGET.tile(64)
    if s <= 1024:
        return TileShape(side, side, depth, warps=4)
    return TileShape(side, 2 * side, depth, stages=4 if 2 * s < K else 3)


@cache
def _tiles(s: int, BM: int, BN: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the codes of the tiles on and above the diagonal, and their number.

    A code is (row << 16) + (column << 1) + half. half = 1: the left half of the tile is below the diagonal and skipped;
    such tiles come last.
    """
    pairs = [(i, j) for j in range(-(-s // BN)) for i in range(-(-s // BM)) if (j + 1) * BN > i * BM]
    half = {(i, j) for i, j in pairs if BN == 2 * BM and i * BM >= j * BN + BN // 2}
    order = [pair for pair in pairs if pair not in half] + [pair for pair in pairs if pair in half]
    codes = [(i << 16) + (j << 1) + ((i, j) in half) for i, j in order]
    return torch.tensor(codes, dtype=torch.int32, device=device), len(codes)


def supports(X: Tensor) -> bool:
    """Return whether the kernels support X: Hopper's bulk copies need a 16-bit type and rows of 16 k bytes."""
    aligned = X.ndim == 3 and X.stride(-1) == 1 and X.stride(-2) % 8 == 0 and X.data_ptr() % 16 == 0
    return aligned and X.dtype in (torch.float16, torch.bfloat16) and launch.capability(X.device) >= (9, 0)


def symmetric_product(
    A: Tensor, B: Tensor, *, alpha: float = 1.0, weight: Tensor | None = None, beta: float = 0.0,
    D: Tensor | None = None, delta: float = 0.0, E: Tensor | None = None, gamma: float = 0.0,
    out: Tensor, only: Selection = EVERY_MATRIX, norm_sq_parts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return weight alpha A'B + beta D + delta E + gamma I, (batch, K, s) x 2 -> (batch, s, s); it must be symmetric.

    Args:
        A, B: half-precision stacks, see `supports`.
        weight: a factor for each matrix, (batch, 1, 1) float32 on the device, or None.
        D, E: (batch, s, s) or None. Without D, gamma I and delta E are not added either.
        out: the result, with rows of a multiple of 16 bytes.
        only: the matrices to compute, by flags on the device; nothing is written for the others.
        norm_sq_parts: with a weight, the squared norm of each product is written here, see `empty_norm_sq_parts`.
    """
    (batch, K, s), C = A.shape, out
    how = tile_shape(s, K)
    table, count = _tiles(s, how.BM, how.BN, A.device)
    flags, wanted_flag = only
    given: list[Any] = [C, C] if weight is None else [weight, norm_sq_parts]
    given += [false_flag(A.device), table, -1] if flags is None else [flags, table, int(wanted_flag)]
    common = {"ADD": D is not None, "WEIGHTED": weight is not None, "FLOAT32_DOTS": launch.TARGET.float32_dots,
              "num_warps": how.warps, "num_stages": how.stages}  # fmt: skip
    addends = [C if X is None else X for X in (D, E)]
    if how.BM == how.BN:
        _symmetric_squares[(batch * count,)](
            _descriptor(A, how.BK, how.BM), _descriptor(B, how.BK, how.BM),
            *(_descriptor(X, how.BM, how.BM) for X in (C, *addends)), *given, count, K, beta, delta, gamma, alpha,
            BM=how.BM, BK=how.BK, **common,
        )  # fmt: skip
        return C
    # The accumulator starts with the addends and is multiplied by alpha at the end, so divide them by alpha first.
    _symmetric[(batch * count,)](
        _descriptor(A, how.BK, how.BM), _descriptor(B, how.BK, how.BN), _descriptor(B, how.BK, how.BN // 2), C,
        *(_descriptor(X, how.BM, cols) for cols in (how.BN, how.BN // 2) for X in addends), *given, count, K, s,
        C.stride(1), C.stride(0), beta / alpha, delta / alpha, gamma / alpha, alpha,
        BM=how.BM, BN=how.BN, BK=how.BK, **common,
    )  # fmt: skip
    return C


def empty_norm_sq_parts(A: Tensor) -> Tensor:
    """Return memory for |A'A|^2 by parts, one part from each tile."""
    batch, K, s = A.shape
    how = tile_shape(s, K)
    return torch.empty(batch, _tiles(s, how.BM, how.BN, A.device)[1], dtype=torch.float32, device=A.device)


def empty_stack(A: Tensor, rows: int) -> Tensor:
    """Return an empty stack of (rows, s) matrices with rows padded to 16 bytes; s and dtype are those of A."""
    batch, s = A.shape[0], A.shape[2]
    return A.new_empty(batch, rows, padded_row(s, A.element_size()))[:, :, :s]


def _descriptor(X: Tensor, rows: int, cols: int) -> Any:
    """Return the descriptor by which bulk copies load tiles (rows, cols) of X."""
    return TensorDescriptor(X, list(X.shape), list(X.stride()), [1, rows, cols])


class SymmetricProducts:
    """The products of Newton-Schulz, with half the work if the result is symmetric; `empty` allocates their memory."""

    selective = True

    def __init__(self, empty: Callable[[Tensor, int], Tensor] = empty_stack) -> None:
        self.empty = empty
        self._norm_sq_parts: Tensor | None = None

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """Return weight X'X. With a weight, its squared norm is kept for `within`."""
        self._norm_sq_parts = None if weight is None else empty_norm_sq_parts(X)
        return symmetric_product(X, X, weight=weight, out=self.empty(X, X.shape[2]), norm_sq_parts=self._norm_sq_parts)

    def within(self, R: Tensor, bound: float) -> Tensor:
        """Return whether |R|_F <= bound for each matrix of R, the last result of `gram`."""
        parts = self._norm_sq_parts
        norm_sq = R.float().square().sum((1, 2)) if parts is None else parts.sum(1)
        return norm_sq <= bound**2

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Selection = EVERY_MATRIX, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = self.empty(R, R.shape[2]) if out is None else out
        return symmetric_product(R, R, alpha=c, beta=b, D=R, delta=d, E=D, gamma=a, out=out, only=only)

    def product(self, A: Tensor, B: Tensor, only: Selection = EVERY_MATRIX, out: Tensor | None = None) -> Tensor:
        return symmetric_product(A, B, out=self.empty(A, A.shape[2]) if out is None else out, only=only)

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        """Return X Q by torch, because the result is not symmetric."""
        return torch.bmm(X, Q, out=self.empty(X, X.shape[1]) if out is None else out)
