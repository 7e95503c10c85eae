"""Newton-Schulz: move the singular values of a matrix towards 1 by matrix products only.

Letters, for a stack of B matrices:

    X (B, l, s)  the matrices, l >= s after a transposition
    R (B, s, s)  X'X, the Gram matrix
    Z (B, s, s)  aI + bR + cR^2, the factor of one iteration X <- X Z
    Q (B, s, s)  the product of all Z since R was last formed from X

R, Z and Q are polynomials in one symmetric matrix, so they are symmetric and commute, and computing half of every
product among them is enough.

One loop serves two forms. The direct form computes R = X'X at every iteration. The Gram form updates R <- R Z Z and
multiplies X only at the end. With l = alpha s and symmetric products, five iterations cost, in s^3 flops, 15 alpha + 5
(direct), 6 alpha + 14 (Gram, with R recomputed from X once) and 3 alpha + 17 (Gram, R never recomputed).

If no singular value is far above the others, the first three iterations work near 0, and another polynomial
replaces them with five products of R instead of nine (`MergedIterations`): 9 alpha + 7 (direct), 6 alpha + 10 (Gram).
COSMOS removes the leading directions from X first, so it can use that polynomial; Muon cannot.
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
from cosmos_optim.linalg.normalization import norm_sq

# Which matrices of a stack to compute: those with a flag of the given value, or all if the flags are None.
Selection = tuple[Tensor | None, bool]
EVERY_MATRIX: Selection = (None, True)
# If length / width is at least this, the Gram form saves more time than it costs accuracy.
GRAM_ASPECT = 1.5
# Iterations before R must be formed from X again. Rounding adds noise of about eps to the zero eigenvalues of R,
# and every iteration multiplies it by a^2 = 12: to 4e-2 after three in float16, to 1e-1 after two in bfloat16.
GRAM_SPAN = {torch.float16: 3, torch.bfloat16: 2, torch.float32: 6}
# Half precision loses digits below 2^-14, so X is stored times 32 and R times 1024. Both stay below 2^13, because the
# singular values of a normalized X never exceed 1.3.
HALF_SCALE = 32.0


@dataclass(frozen=True)
class NewtonSchulz:
    """Which iterations to run, and in which precision.

    Attributes:
        steps: number of iterations.
        coefficients: a name in `COEFFICIENTS`. If that table is shorter than `steps`, its last entry repeats.
        dtype: dtype of the products. None is half precision on CUDA (float16 with a scale has three more bits than
            bfloat16 at the same speed), and elsewhere the dtype of the matrix, at least float32.
        deflated: whether the leading directions have been removed from the matrices, so that `MergedIterations` are
            likely to be accurate.
    """

    steps: int = 5
    coefficients: str = "ns5"
    dtype: torch.dtype | None = None
    deflated: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, deflated: bool = False) -> NewtonSchulz:
        """Return the settings of Newton-Schulz in a parameter group."""
        return cls(settings["ns_steps"], settings["ns_coefficients"], settings["ns_dtype"], deflated)

    def coefficients_of_steps(self) -> list[Coefficients]:
        """Return (a, b, c) of each iteration."""
        table = COEFFICIENTS[self.coefficients]
        return [table[min(k, len(table) - 1)] for k in range(self.steps)]

    def working_dtype(self, X: Tensor) -> torch.dtype:
        """Return the dtype of the products for this matrix."""
        if self.dtype is not None:
            return self.dtype
        return torch.float16 if X.is_cuda else torch.promote_types(X.dtype, torch.float32)


class Products(Protocol):
    """The products of the loop, over stacks (B, l, s) and (B, s, s).

    If a result is symmetric, half of it may be computed and mirrored.

    Attributes:
        selective: whether a product can skip matrices that are not selected, which then costs no time.
    """

    selective: bool

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """Return weight X'X; weight (B, 1, 1), or None for 1."""

    def within(self, R: Tensor, bound: float) -> Tensor:
        """Return whether |R|_F <= bound for each matrix of R, the last result of `gram`."""

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Selection = EVERY_MATRIX, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return aI + bR + cR^2 + dD for symmetric R and D, in `out` if given, for the matrices selected by `only`."""

    def product(self, A: Tensor, B: Tensor, only: Selection = EVERY_MATRIX, out: Tensor | None = None) -> Tensor:
        """Return A B for symmetric matrices that commute, in `out` if given, for the matrices selected by `only`."""

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        """Return X Q for symmetric Q, in `out` if given."""


class TorchProducts:
    """`Products` by torch's batched products, on any device and in any dtype. They ignore `only`."""

    selective = False

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """Return weight X'X; the weight multiplies one factor first, so that the product cannot overflow."""
        return torch.bmm(X.mT, X if weight is None else (X * weight).to(X.dtype))

    def within(self, R: Tensor, bound: float) -> Tensor:
        """Return False for each matrix: these products cannot skip any, so all run the full iterations."""
        return torch.zeros(len(R), dtype=torch.bool, device=R.device)

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Selection = EVERY_MATRIX, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c, out=out)
        Z.diagonal(dim1=-2, dim2=-1).add_(a)
        return Z if D is None else Z.add_(D, alpha=d)

    def product(self, A: Tensor, B: Tensor, only: Selection = EVERY_MATRIX, out: Tensor | None = None) -> Tensor:
        return torch.bmm(A, B) if out is None else torch.bmm(A, B, out=out)

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.bmm(X, Q) if out is None else torch.bmm(X, Q, out=out)


def gram_count(length: int, width: int, steps: int, dtype: torch.dtype) -> int:
    """Return how many iterations form R from X: all of them (direct), or as few as rounding allows (Gram)."""
    if dtype not in GRAM_SPAN or length < GRAM_ASPECT * width:
        return steps
    return -(-steps // GRAM_SPAN[dtype])


def choose_gram_steps(length: int, width: int, coefficients: Sequence[Coefficients], dtype: torch.dtype) -> set[int]:
    """Return the iterations that form R from X, chosen so that the noise in R grows least between them.

    The first polynomials of Polar Express are the steepest. Three of them amplify noise eight times as much as three of
    Jordan's.
    """
    most = gram_count(length, width, len(coefficients), dtype) - 1
    return {0, *_later_gram_steps(tuple(coefficients), most)}


@cache
def _later_gram_steps(coefficients: tuple[Coefficients, ...], most: int) -> tuple[int, ...]:
    """Return at most `most` iterations after the first that form R from X.

    The largest growth of noise between two of them is as small as possible. Each is as late as that growth allows.
    """
    slopes = [math.log(a * a) for a, _, _ in coefficients]
    count = len(slopes)
    for bound in sorted({sum(slopes[i:j]) for i in range(count) for j in range(i, count)}):
        chosen, growth = [], 0.0
        for k, slope in enumerate(slopes[:-1], 1):
            growth += slope
            if growth > bound + 1e-9:  # tolerance: the same slopes added in another order
                chosen.append(k)
                growth = 0.0
        if len(chosen) <= most:
            return tuple(chosen)
    return ()


def iterations_for(
    ns: NewtonSchulz, length: int, width: int, dtype: torch.dtype, selective: bool
) -> tuple[list[Iteration], set[int]]:
    """Return the iterations for matrices length x width, and which of them form R from X.

    Args:
        dtype: dtype of the products.
        selective: whether the products can skip matrices. Otherwise, merged iterations would save no time.
    """
    coefficients = ns.coefficients_of_steps()
    gram_steps = choose_gram_steps(length, width, coefficients, dtype)
    if not (ns.deflated and selective and dtype is torch.float16):
        return list(coefficients), gram_steps
    return merge_first_iterations(coefficients, gram_steps)


def merge_first_iterations(
    coefficients: Sequence[Coefficients], gram_steps: set[int]
) -> tuple[list[Iteration], set[int]]:
    """Return the iterations with the first three merged into one, and which of the result form R from X.

    If `MERGED` has no polynomial for these coefficients, both are unchanged.
    """
    merged = MERGED.get(tuple(coefficients[:3]))
    if merged is None:
        return list(coefficients), gram_steps
    later = {k - 2 for k in {3, *gram_steps} if 3 <= k < len(coefficients)}
    return [merged, *coefficients[3:]], {0} | later


def iterate(
    X: Tensor, iterations: Sequence[Iteration], products: Products, *, weight: Tensor | None = None, scale: float = 1.0,
    gram_steps: set[int] | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run all iterations on X / |X| for a stack X (B, l, s), l >= s, and return |X| times the result.

    Args:
        weight: scale^2 / |X|^2, (B, 1, 1), or None if |X| = scale already.
        scale: R is stored times scale^2, to avoid small numbers in half precision.
        gram_steps: the iterations that form R from X; all by default.
        out: memory for the result, used if possible. It may be X itself, which is overwritten after its last use.
    """
    gram_steps = set(range(len(iterations))) if gram_steps is None else gram_steps
    Q: Tensor | None = None
    T: Tensor | None
    for k, iteration in enumerate(iterations):
        if k in gram_steps:
            X = X if Q is None else products.times(X, Q)
            R = Z = Q = None  # release their memory before the next ones are allocated
            R = products.gram(X, weight)
        assert R is not None
        update_R = k + 1 < len(iterations) and k + 1 not in gram_steps
        if isinstance(iteration, MergedIterations):
            assert not update_R, "merged iterations use up all updates of R that rounding allows"
            Z = _merged_factor(R, iteration, products, scale)
        else:
            Z = products.quadratic(R, *_rescale(iteration, scale))
        if update_R:
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


def _merged_factor(R: Tensor, merged: MergedIterations, products: Products, scale: float) -> Tensor:
    """Return the product of the factors Z of merged iterations, for each matrix in the cheapest accurate way.

    If |R|_F, and so every eigenvalue, is at most `max_eigenvalue`, that is the polynomial by squares, otherwise the
    product of all Z. Flags on the device select it without host synchronization, and products skip the other matrices.
    R is overwritten, and at most three other stacks exist at the same time.
    """
    unit = merged.max_eigenvalue * scale**2
    small = products.within(R, unit)
    others: Selection = (small, False)
    total = Q = _polynomial_by_squares(R, merged, products, unit, (small, True))
    for k, coefficients in enumerate(merged.coefficients):
        last = k + 1 == len(merged.coefficients)
        Z = products.quadratic(R, *_rescale(coefficients, scale), only=others, out=None if k else Q)
        if not last:
            T = products.product(R, Z, others)
            R = products.product(T, Z, others, R)
            del T  # release its memory before the next one is allocated
        total = products.product(total, Z, others, Q if last else None) if k else Z
        del Z
    return total


def _polynomial_by_squares(
    R: Tensor, merged: MergedIterations, products: Products, unit: float, only: Selection
) -> Tensor:
    """Return the polynomial of merged iterations, for R stored times unit / max_eigenvalue."""
    E = [R]
    squares = merged.centred()
    for k, (a, b, c, d) in enumerate(squares):
        if k == 0:
            E.append(products.quadratic(R, a, d / unit, c / unit**2, only=only))
        elif k + 1 < len(squares):
            E = [*E[-1:], products.quadratic(E[-1], a, b, c, d / unit, R, only=only)]
        else:
            E.append(products.quadratic(E[-1], a, b, c, d, E[-2], only=only))
    return E[-1]


def _rescale(coefficients: Coefficients, scale: float) -> Coefficients:
    """Return the coefficients for an R that is stored times scale^2."""
    a, b, c = coefficients
    return a, b / scale**2, c / scale**4


def normalized(X: Tensor, X_sq: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return scale X / |X| in a type that may be narrower; a zero matrix stays zero."""
    norm = X_sq.sqrt().to(torch.promote_types(X.dtype, torch.float32))
    # Divide before the cast, because 1e18 and 1e-30 do not fit in the narrower type.
    # Below the smallest normal number, the norm is rounded so much that X / norm may be too long to converge.
    Y = torch.where(norm > 0, X / norm.clamp_min(torch.finfo(norm.dtype).tiny), torch.zeros_like(norm))
    return (Y * scale).to(dtype)


def newton_schulz(X: Tensor, ns: NewtonSchulz, products: Products | None = None, X_sq: Tensor | None = None) -> Tensor:
    """Run the iterations of `ns` on X / |X|_F, for any (..., m, n). A zero matrix stays zero.

    Args:
        products: the products of the loop; torch's batched products by default.
        X_sq: |X|^2, (..., 1, 1), if it is known.

    >>> X = torch.linspace(1, 2, 6, dtype=torch.float64).view(3, 2) ** 3
    >>> Y = newton_schulz(X, NewtonSchulz(steps=8, coefficients="polar-express"))
    >>> [round(v, 6) for v in torch.linalg.svdvals(Y).tolist()]
    [1.0, 1.0]
    """
    dtype, shape = ns.working_dtype(X), X.shape
    scale = HALF_SCALE if dtype is torch.float16 else 1.0
    is_wide, Y = shape[-2] < shape[-1], normalized(X, norm_sq(X) if X_sq is None else X_sq, scale, dtype)
    Y = (Y.mT if is_wide else Y).reshape(-1, max(shape[-2:]), min(shape[-2:]))
    products = products or TorchProducts()
    iterations, gram_steps = iterations_for(ns, Y.shape[-2], Y.shape[-1], dtype, products.selective)
    Y = iterate(Y, iterations, products, scale=scale, gram_steps=gram_steps)
    Y = Y.to(torch.promote_types(X.dtype, dtype)) / scale
    return (Y.mT if is_wide else Y).reshape(shape).to(X.dtype)
