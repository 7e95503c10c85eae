"""Newton-Schulz: a matrix with its singular values moved towards 1, by matrix products alone.

Letters: X (..., l, s) with l >= s after a transposition, R = X'X its Gram matrix, Z = aI + bR + cR^2 the factor of one
iteration X <- X Z, and Q the product of the factors since R was last formed from X. R, Z and Q are polynomials in one
symmetric matrix: symmetric and commuting, so that half of every product among them is enough.

One loop serves two forms. The direct form makes R afresh from X at every iteration. The Gram form carries R along as
R <- R Z Z and multiplies X only at the end; with l = alpha s, five iterations cost, in s^3 flops with symmetric
products, 15 alpha + 5 (direct), 6 alpha + 14 (Gram, R made afresh once on the way) and 3 alpha + 17 (never).

If no singular value is far above the others, the first three iterations work near 0, and another polynomial does the
same with five products of R instead of nine (`MergedIterations`): 9 alpha + 7 (direct), 6 alpha + 10 (Gram). COSMOS
removes the leading directions from X first, so it can use that polynomial; Muon cannot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_optim.linalg.coefficients import COEFFICIENTS, MERGED, Coefficients, Iteration, MergedIterations

# Which matrices of a stack a product is for: a flag of each, and the value it must have. No flags: all of them.
Only = tuple[Tensor | None, bool]
ALL: Only = (None, True)
# From this length over width on, the Gram form is cheaper by more than it costs in accuracy.
GRAM_ASPECT = 1.5
# Iterations before R must be formed from X again. Rounding of R puts noise of about eps around its zero eigenvalues,
# and every iteration multiplies that by a^2 = 12: three leave 4e-2 of noise in half precision, two 1e-1 in bfloat16.
GRAM_SPAN = {torch.float16: 3, torch.bfloat16: 2, torch.float32: 6}
# Half precision has no exponents below 2^-14 to spare: X is kept times 32 and R times 1024. Both stay below 2^13,
# because the singular values of a normalized X never exceed 1.3 on the way.
HALF_SCALE = 32.0


@dataclass(frozen=True)
class NewtonSchulz:
    """How to iterate: `steps` rows of `COEFFICIENTS[coefficients]` (the last repeats), in `dtype`.

    `dtype=None` is half precision on CUDA (float16, scaled: three more bits than bfloat16 at the same speed), else the
    dtype of the matrix and at least float32. `deflated`: the leading directions have been taken out of the matrices, so
    that a `MergedIterations` is likely to do.
    """

    steps: int = 5
    coefficients: str = "ns5"
    dtype: torch.dtype | None = None
    deflated: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, deflated: bool = False) -> NewtonSchulz:
        """Return how a parameter group with these settings iterates."""
        return cls(settings["ns_steps"], settings["ns_coefficients"], settings["ns_dtype"], deflated)

    def rows(self) -> list[Coefficients]:
        """Return (a, b, c) of each iteration."""
        table = COEFFICIENTS[self.coefficients]
        return [table[min(k, len(table) - 1)] for k in range(self.steps)]

    def working_dtype(self, X: Tensor) -> torch.dtype:
        """The dtype of the products for this matrix."""
        if self.dtype is not None:
            return self.dtype
        return torch.float16 if X.is_cuda else torch.promote_types(X.dtype, torch.float32)


class Products(Protocol):
    """The products of the loop, over stacks (B, l, s) and (B, s, s); symmetric results may be made by halves.

    `selective`: whether a product can be of some matrices of a stack alone, so that leaving out the others saves time.
    """

    selective: bool

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """weight X'X, weight (B, 1, 1) or 1."""

    def within(self, R: Tensor, bound: float) -> Tensor:
        """Whether |R|_F <= bound, for each matrix of the last `gram`."""

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Only = ALL, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """aI + bR + cR^2 + dD for symmetric R and D, in `out` if given."""

    def product(self, A: Tensor, B: Tensor, only: Only = ALL, out: Tensor | None = None) -> Tensor:
        """A B for symmetric matrices that commute, in `out` if given."""

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        """X Q for symmetric Q, in `out` if given."""


class TorchProducts:
    """`Products` by torch's batched products, on any device and in any dtype."""

    selective = False

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """weight X'X; the weight is put on one factor, where it cannot overflow."""
        return torch.bmm(X.mT, X if weight is None else (X * weight).to(X.dtype))

    def within(self, R: Tensor, bound: float) -> Tensor:
        """None of them: every product here is of all matrices."""
        return torch.zeros(len(R), dtype=torch.bool, device=R.device)

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Only = ALL, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """aI + bR + cR^2 + dD."""
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c, out=out)
        Z.diagonal(dim1=-2, dim2=-1).add_(a)
        return Z if D is None else Z.add_(D, alpha=d)

    def product(self, A: Tensor, B: Tensor, only: Only = ALL, out: Tensor | None = None) -> Tensor:
        """A B."""
        return torch.bmm(A, B) if out is None else torch.bmm(A, B, out=out)

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        """X Q."""
        return torch.bmm(X, Q) if out is None else torch.bmm(X, Q, out=out)


def gram_count(length: int, width: int, steps: int, dtype: torch.dtype) -> int:
    """In how many iterations R is formed from X: in all of them (direct), or in as few as rounding allows."""
    if dtype not in GRAM_SPAN or length < GRAM_ASPECT * width:
        return steps
    return -(-steps // GRAM_SPAN[dtype])


def fresh_at(length: int, width: int, rows: Sequence[Coefficients], dtype: torch.dtype) -> set[int]:
    """The iterations that form R from X, where noise in R grows least while R is carried along between them.

    Polar Express has its steepest rows first: through three of them noise grows eight times as much as with Jordan's.
    """
    return {0, *_cuts(tuple(rows), gram_count(length, width, len(rows), dtype) - 1)}


@cache
def _cuts(rows: tuple[Coefficients, ...], most: int) -> tuple[int, ...]:
    """At most so many places between rows, each as late as the smallest possible growth allows."""
    slopes = [math.log(a * a) for a, _, _ in rows]
    for bound in sorted({sum(slopes[i:j]) for i in range(len(rows)) for j in range(i, len(rows))}):
        cuts, growth = [], 0.0
        for k, slope in enumerate(slopes[:-1], 1):
            growth += slope
            if growth > bound + 1e-9:  # sums of the same slopes in another order
                cuts.append(k)
                growth = 0.0
        if len(cuts) <= most:
            return tuple(cuts)
    return ()


def schedule(
    ns: NewtonSchulz, length: int, width: int, dtype: torch.dtype, selective: bool
) -> tuple[list[Iteration], set[int]]:
    """The steps for matrices of a shape and products of a kind, and which of the steps form R from X."""
    rows = ns.rows()
    fresh = fresh_at(length, width, rows, dtype)
    if not (ns.deflated and selective and dtype is torch.float16):
        return list(rows), fresh
    return with_start(rows, fresh)


def with_start(rows: Sequence[Coefficients], fresh: set[int]) -> tuple[list[Iteration], set[int]]:
    """The same iterations with the first ones as one step, and which steps form R; unchanged where none is known."""
    merged = MERGED.get(tuple(rows[:3]))
    if merged is None:
        return list(rows), fresh
    return [merged, *rows[3:]], {0} | {k - 2 for k in {3, *fresh} if 3 <= k < len(rows)}


def iterate(
    X: Tensor, steps: Sequence[Iteration], products: Products, *, weight: Tensor | None = None, scale: float = 1.0,
    fresh: set[int] | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """All steps on a stack X (B, l, s), l >= s, which stands for X / |X|: returns |X| times the result.

    Args:
        weight: scale^2 / |X|^2, (B, 1, 1); None where |X| = scale already.
        scale: R is kept times scale^2, so that half precision need not hold small numbers.
        fresh: steps that form R from X; all by default.
        out: where the result goes if it can; X itself is allowed, and is then overwritten once it is not needed.
    """
    fresh = set(range(len(steps))) if fresh is None else fresh
    Q: Tensor | None = None
    T: Tensor | None
    for k, step in enumerate(steps):
        if k in fresh:
            X = X if Q is None else products.times(X, Q)
            R = Z = Q = None  # free them before the next ones are made
            R = products.gram(X, weight)
        assert R is not None
        carried = k + 1 < len(steps) and k + 1 not in fresh
        if isinstance(step, MergedIterations):
            assert not carried, "a start takes as many iterations as R may be carried through"
            Z = _begin(R, step, products, scale)
        else:
            Z = products.quadratic(R, *_scaled(step, scale))
        if carried:
            T = products.product(R, Z)
            R = None
            R = products.product(T, Z)
            T = None
        else:
            R = None
        Q = Z if Q is None else products.product(Q, Z)
    R = Z = None
    assert Q is not None
    return products.times(X, Q, None if out is X else out)


def _begin(R: Tensor, merged: MergedIterations, products: Products, scale: float) -> Tensor:
    """The factor of the first iterations, by squares where |R|, and so every eigenvalue, is within reach; else in full.

    Which way a matrix goes is decided where the matrix is: the products of the other way find nothing to do for it.
    R is overwritten, and never more than three other stacks are held.
    """
    unit = merged.max_eigenvalue * scale**2
    small = products.within(R, unit)
    rest: Only = (small, False)
    so_far = Q = _by_squares(R, merged, products, unit, (small, True))
    for k, row in enumerate(merged.coefficients):
        last = k + 1 == len(merged.coefficients)
        Z = products.quadratic(R, *_scaled(row, scale), only=rest, out=None if k else Q)
        if not last:
            T = products.product(R, Z, rest)
            R = products.product(T, Z, rest, R)
            del T  # free it before the next one is made
        so_far = products.product(so_far, Z, rest, Q if last else None) if k else Z
        del Z
    return so_far


def _by_squares(R: Tensor, merged: MergedIterations, products: Products, unit: float, only: Only) -> Tensor:
    """The polynomial of a start, for R kept times unit / reach."""
    E = [R]
    steps = merged.centred()
    for k, (a, b, c, d) in enumerate(steps):
        if k == 0:
            E.append(products.quadratic(R, a, d / unit, c / unit**2, only=only))
        elif k + 1 < len(steps):
            E = [*E[-1:], products.quadratic(E[-1], a, b, c, d / unit, R, only=only)]
        else:
            E.append(products.quadratic(E[-1], a, b, c, d, E[-2], only=only))
    return E[-1]


def _scaled(row: Coefficients, scale: float) -> Coefficients:
    """The coefficients for an R that is kept times scale^2."""
    a, b, c = row
    return a, b / scale**2, c / scale**4


def newton_schulz(
    X: Tensor, ns: NewtonSchulz, products: Products | None = None, norm_sq: Tensor | None = None
) -> Tensor:
    """Run the iterations of `ns` on X / |X|_F, for any (..., m, n). A zero matrix stays zero.

    Args:
        products: how to multiply; torch's batched products by default.
        norm_sq: |X|^2, (..., 1, 1), if it is known.

    >>> X = torch.linspace(1, 2, 6, dtype=torch.float64).view(3, 2) ** 3
    >>> Y = newton_schulz(X, NewtonSchulz(steps=8, coefficients="polar-express"))
    >>> [round(v, 6) for v in torch.linalg.svdvals(Y).tolist()]
    [1.0, 1.0]
    """
    dtype, shape = ns.working_dtype(X), X.shape
    scale = HALF_SCALE if dtype is torch.float16 else 1.0
    if norm_sq is None:
        wide = X.dtype if X.device.type == "mps" else torch.float64
        norm_sq = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=wide).square()
    norm = norm_sq.sqrt().to(torch.promote_types(X.dtype, torch.float32))
    # Divide first and cast after: neither 1e18 nor 1e-30 may leave the range of the narrower type.
    Y = torch.where(norm > 0, X / norm, torch.zeros_like(norm))
    is_wide = shape[-2] < shape[-1]
    Y = (Y.mT if is_wide else Y).reshape(-1, max(shape[-2:]), min(shape[-2:]))
    Y = (Y * scale).to(dtype)
    products = products or TorchProducts()
    steps, fresh = schedule(ns, Y.shape[-2], Y.shape[-1], dtype, products.selective)
    Y = iterate(Y, steps, products, scale=scale, fresh=fresh)
    Y = Y.to(torch.promote_types(X.dtype, dtype)) / scale
    return (Y.mT if is_wide else Y).reshape(shape).to(X.dtype)
