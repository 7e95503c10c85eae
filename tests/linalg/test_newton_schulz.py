"""Newton-Schulz against the published formula in float64, and its Gram form against rounding.

Letters as in `linalg.newton_schulz`: X (B, l, s) the matrices, R = X'X, Z the factor of one iteration.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_optim.linalg.coefficients import COEFFICIENTS, MERGED, Coefficients, MergedIterations
from cosmos_optim.linalg.newton_schulz import (
    EVERY_MATRIX,
    HALF_SCALE,
    NewtonSchulz,
    Selection,
    TorchProducts,
    choose_gram_steps,
    iterate,
    merge_first_iterations,
    newton_schulz,
    normalized,
)

EXACT = 1e-10  # float64, the same polynomial in another order
SINGLE = 2e-4  # float32: 2^-24 times the steepest slopes of five iterations (Polar Express: 22 at 1; Jordan: 3.44 at 0)
HALF = 5e-2  # float16 with R formed twice, at this small size (2e-2 at 2048); plain bfloat16 products lose up to 1e-1
SHAPES = [(7, 5), (5, 7), (6, 6), (48, 16), (1, 9), (9, 1), (2, 3, 8, 4)]


def published(X: Tensor, coefficients: list[Coefficients]) -> Tensor:
    """Run X <- aX + (bA + cA^2) X with A = XX', starting from X / |X|."""
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    for a, b, c in coefficients:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def error(X: Tensor, reference: Tensor) -> float:
    """Return |X - reference| / |reference|."""
    return float((X.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, EXACT), (torch.float32, SINGLE)])
def test_newton_schulz_equals_the_published_formula(
    shape: tuple[int, ...], coefficients: str, dtype: torch.dtype, bound: float
) -> None:
    """Use tall, wide, square and long matrices (the Gram form in float32), vectors and batches."""
    X, ns = torch.randn(shape, dtype=torch.float64), NewtonSchulz(5, coefficients)
    assert error(newton_schulz(X.to(dtype), ns), published(X, ns.coefficients_of_steps())) < bound


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e18])
def test_the_scale_of_the_matrix_does_not_change_the_result(size: float) -> None:
    """Use sizes with squares that overflow or underflow in float32: X is divided by |X| first."""
    X = torch.randn(12, 8)
    expected = published(X.double(), NewtonSchulz().coefficients_of_steps())
    assert error(newton_schulz(X * size, NewtonSchulz()), expected) < SINGLE


def test_small_elements_keep_their_digits_in_half_precision() -> None:
    """X / |X| has elements below float16's smallest normal number, 2^-14: the scale comes before the cast."""
    X = 10.0 ** torch.linspace(-5, 0, 60).view(10, 6)
    scaled = normalized(X, X.square().sum().double().view(1, 1), HALF_SCALE, torch.float16).double() / HALF_SCALE
    normal = X / X.norm() * HALF_SCALE > 2.0**-14
    assert int((X / X.norm() < 2.0**-14)[normal].sum()) > 10
    assert ((scaled * X.norm() / X - 1).abs()[normal] < 2.0**-10).all()


def test_a_zero_matrix_stays_zero_and_does_not_affect_others() -> None:
    """Stack a zero matrix and a random one."""
    X = torch.randn(2, 6, 4)
    X[0] = 0
    Y = newton_schulz(X, NewtonSchulz())
    assert not Y[0].any()
    assert torch.equal(Y[1], newton_schulz(X[1], NewtonSchulz()))


def test_steps_beyond_the_table_repeat_its_last_coefficients() -> None:
    """Use Polar Express, with eight iterations, the last of which has the fixed point 1."""
    a, b, c = COEFFICIENTS["polar-express"][-1]
    assert (a + b + c, a + 3 * b + 5 * c) == (1.0, 0.0)
    assert len(NewtonSchulz(11, "polar-express").coefficients_of_steps()) == 11
    assert NewtonSchulz(11, "polar-express").coefficients_of_steps()[8:] == [(a, b, c)] * 3


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return (a, b, c) with the smallest max |1 - p(x)| on [low, high], by Remez's exchange of four points."""
    powers, signs = np.array([1, 3, 5]), np.array([1, -1, 1, -1])
    points = np.linspace(low, high, 4)
    for _ in range(50):
        a, b, c, _ = np.linalg.solve(np.column_stack([points[:, None] ** powers, signs]), np.ones(4))
        extrema = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a])))  # where p' is 0
        points = np.array([low, *extrema, high])
    return np.array([a, b, c])


def test_the_coefficients_of_polar_express_are_those_of_its_paper() -> None:
    """Each polynomial is the best for what the ones before it leave of [1e-3, 1], as the paper constructs them.

    Where that interval is wide, the paper takes a shorter one, from `cushion` times its upper end, and centres the
    result at 1. Its last entry is the limit, p(1) = 1 with two derivatives of 0.
    """
    low, high, cushion = 1e-3, 1.0, 0.02407327424182761
    *table, last = COEFFICIENTS["polar-express"]
    for found in table[:-1]:
        a, b, c = best_quintic(max(low, cushion * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        scale = 2 / sum(ends)
        expected = scale * np.array([a / 1.01, b / 1.01**3, c / 1.01**5])
        assert found == pytest.approx(expected, rel=1e-6)
        low = scale * ends[0]
        high = 2 - low
    assert last == (1.875, -1.25, 0.375)


def test_polar_express_moves_all_singular_values_from_1e_minus_3_up_to_1() -> None:
    """Map the interval [1e-3, 1] through all eight polynomials; none may leave (0, 2.03)."""
    x = torch.logspace(-3, 0, 2000, dtype=torch.float64)
    for a, b, c in COEFFICIENTS["polar-express"]:
        x = a * x + b * x**3 + c * x**5
        assert x.min() > 0
        assert x.max() < 2.03  # |p| <= 2 - l for an optimal polynomial on [l, 1], times the safety factor
    assert (x - 1).abs().max() < EXACT


class Rounded(TorchProducts):
    """Products as tensor cores compute them: operands and results in half precision, sums in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def _round(self, X: Tensor) -> Tensor:
        return X.to(self.dtype).float()

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        return self._round(super().gram(X, weight))

    def within(self, R: Tensor, bound: float) -> Tensor:
        return torch.linalg.vector_norm(R, dim=(1, 2)) <= bound

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Selection = EVERY_MATRIX, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self._for(only, self._round(super().quadratic(R, a, b, c, d, D)), out)

    def product(self, A: Tensor, B: Tensor, only: Selection = EVERY_MATRIX, out: Tensor | None = None) -> Tensor:
        return self._for(only, self._round(super().product(A, B)), out)

    def _for(self, only: Selection, value: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the selected matrices of `value`; the others are those of `out`, or NaN without `out`."""
        flags, want = only
        other = torch.full_like(value, math.nan) if out is None else out
        return value if flags is None else torch.where((flags == want).view(-1, 1, 1), value, other)

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._round(super().times(X, Q))


def with_spectrum(values: Tensor, length: int) -> Tensor:
    """Return a length x n matrix with these singular values."""
    n = len(values)
    left = torch.linalg.qr(torch.randn(length, n, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]
    return (left * values) @ right.mT


SPECTRA = {
    "flat": torch.ones(96),
    "condition 1e6": torch.logspace(0, -6, 96),
    "1/k": 1 / torch.arange(1.0, 97),
    "a spike": torch.cat([torch.ones(1), torch.full((95,), 1e-3)]),
    "a few": torch.cat([torch.arange(1.0, 13) ** -2, torch.full((84,), 1e-3)]),
    "deflated": torch.cat([torch.linspace(1, 0.1, 80), torch.zeros(16)]),
}


def half_error(
    spectrum: str, coefficients: str, gram_steps: set[int], length: int = 256, merged: bool = False
) -> float:
    """Return the error of five iterations in float16 on a length x 96 matrix; infinite if they break down."""
    X, table = with_spectrum(SPECTRA[spectrum].double(), length), NewtonSchulz(5, coefficients).coefficients_of_steps()
    start = (X / X.norm() * HALF_SCALE).half().float()[None]
    iterations, gram_steps = merge_first_iterations(table, gram_steps) if merged else (list(table), gram_steps)
    Y = iterate(start, iterations, Rounded(torch.float16), scale=HALF_SCALE, gram_steps=gram_steps)[0]
    found = error(Y / HALF_SCALE, published(X, table))
    return found if math.isfinite(found) else math.inf


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_the_gram_form_is_accurate_in_half_precision(spectrum: str, coefficients: str) -> None:
    """Form R from X at the iterations that `choose_gram_steps` chooses; some singular values are zero."""
    gram_steps = choose_gram_steps(256, 96, NewtonSchulz(5, coefficients).coefficients_of_steps(), torch.float16)
    assert half_error(spectrum, coefficients, gram_steps) < HALF


def test_half_precision_is_inaccurate_if_the_gram_matrix_is_never_formed_again() -> None:
    """Update R through all iterations: rounding at its small eigenvalues grows with the square of the slope."""
    assert half_error("a spike", "polar-express", {0}) > 10 * HALF
    assert half_error("a few", "polar-express", {0, 3}) > HALF > half_error("a few", "polar-express", {0, 2})


def test_gram_steps_depend_on_aspect_precision_and_coefficients() -> None:
    """Near-square matrices and float64 form R at every iteration, long ones as rarely as their precision allows."""
    five, four, express = (NewtonSchulz(*ns).coefficients_of_steps() for ns in ((5,), (4,), (5, "polar-express")))
    assert choose_gram_steps(100, 100, five, torch.float16) == {0, 1, 2, 3, 4}
    assert choose_gram_steps(267, 100, five, torch.float64) == {0, 1, 2, 3, 4}
    assert choose_gram_steps(267, 100, five, torch.float32) == {0}
    assert choose_gram_steps(267, 100, five, torch.float16) == {0, 3}
    assert choose_gram_steps(267, 100, four, torch.float16) == {0, 2}
    assert choose_gram_steps(267, 100, five, torch.bfloat16) == {0, 2, 4}
    assert choose_gram_steps(267, 100, express, torch.float16) == {0, 2}  # its first polynomials are the steepest
    assert choose_gram_steps(267, 100, express, torch.bfloat16) == {0, 1, 3}
    assert choose_gram_steps(267, 100, NewtonSchulz(40).coefficients_of_steps(), torch.float16) == set(range(0, 40, 3))


@pytest.mark.parametrize("merged", MERGED.values())
def test_merged_iterations_equal_the_product_of_their_factors(merged: MergedIterations) -> None:
    """Compare to 6e-4 up to `max_eigenvalue`, both in the form F_k of the docstring and as computed by `centred`."""
    x = torch.linspace(0, merged.max_eigenvalue, 20001, dtype=torch.float64)
    exact, R = torch.ones_like(x), x
    for a, b, c in merged.coefficients:
        Z = a + b * R + c * R * R
        exact, R = exact * Z, R * Z * Z
    F = [x / merged.max_eigenvalue]
    for k, (a, b, c) in enumerate(merged.squares):
        F.append(a + b * F[-2 if k + 1 == len(merged.squares) else 0] + c * F[-1] ** 2)
    assert ((F[-1] - exact) / exact).abs().max() < 6e-4
    E = F[:1]
    for k, (a, b, c, d) in enumerate(merged.centred()):
        E.append(a + b * E[-1] + c * E[-1] ** 2 + d * E[-2 if k + 1 == len(merged.squares) else 0])
    assert (E[-1] - F[-1]).abs().max() < EXACT
    assert all(abs(float(e[0])) < EXACT for e in E[:-1])


@pytest.mark.parametrize("length", [96, 256])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_merging_three_iterations_loses_no_accuracy_in_half_precision(spectrum: str, length: int) -> None:
    """Compare with separate iterations, and with R updated through three, as for matrices above `max_eigenvalue`."""
    gram_steps = choose_gram_steps(length, 96, NewtonSchulz().coefficients_of_steps(), torch.float16)
    merged = half_error(spectrum, "ns5", gram_steps, length, merged=True)
    separate = max(half_error(spectrum, "ns5", when, length) for when in (gram_steps, {0, 3}))
    assert merged < min(HALF, 1.5 * separate + 1e-3)


def test_iterations_are_merged_for_each_matrix_by_its_own_norm() -> None:
    """Stack one matrix below `max_eigenvalue`, one above and one with a NaN, which must not affect the others."""
    five = NewtonSchulz().coefficients_of_steps()
    iterations, gram_steps = merge_first_iterations(five, {0, 1, 2, 3, 4})
    X = torch.stack([with_spectrum(SPECTRA[name].double(), 96) for name in ("flat", "a spike", "flat")])
    start = X / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True) * HALF_SCALE
    start[2, 0, 0] = math.nan
    Y = iterate(start.float(), iterations, Rounded(torch.float32), scale=HALF_SCALE, gram_steps=gram_steps) / HALF_SCALE
    merged, separate = (error(Y[i], published(X[i], five)) for i in (0, 1))
    assert 1e-5 < merged < 2e-3  # the polynomial's 6e-4, times the slope of two more iterations
    assert separate < SINGLE
    assert Y[2].isnan().any()


def test_the_first_three_iterations_merge_if_their_coefficients_are_known() -> None:
    """R is formed from X after the merged iterations; fewer than three iterations stay as they are."""
    table = NewtonSchulz(7).coefficients_of_steps()
    merged = MERGED[tuple(table[:3])]
    assert merge_first_iterations(table[:5], {0, 1, 2, 3, 4}) == ([merged, *table[3:5]], {0, 1, 2})
    assert merge_first_iterations(table[:5], {0, 3}) == ([merged, *table[3:5]], {0, 1})
    assert merge_first_iterations(table[:4], {0, 2}) == ([merged, table[3]], {0, 1})
    assert merge_first_iterations(table[:3], {0}) == ([merged], {0})
    assert merge_first_iterations(table[:2], {0, 1}) == (table[:2], {0, 1})
    assert merge_first_iterations(table, {0, 3, 5}) == ([merged, *table[3:]], {0, 1, 3})
    express = NewtonSchulz(5, "polar-express").coefficients_of_steps()
    assert merge_first_iterations(express, {0, 3}) == (express, {0, 3})


def test_the_result_is_the_same_if_it_overwrites_the_argument() -> None:
    """Pass `out=X`: it is used if X is not needed any more, and ignored otherwise."""
    table = NewtonSchulz().coefficients_of_steps()
    X = torch.nn.functional.normalize(torch.randn(2, 8 * 6, dtype=torch.float64)).view(2, 8, 6)
    once = iterate(X, table, TorchProducts(), gram_steps={0})
    assert torch.equal(iterate(X, table, TorchProducts(), gram_steps={0}, out=X), once)
    expected = iterate(X, table, TorchProducts())
    result = iterate(X, table, TorchProducts(), out=X)
    assert result.data_ptr() == X.data_ptr()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("deflated", [False, True])
def test_the_smallest_numbers_give_no_nan(deflated: bool) -> None:
    for count in range(1, 16):
        X = torch.zeros(15)
        X[:count] = 2.0**-149
        for shape in ((5, 3), (3, 5), (15, 1)):
            Y = newton_schulz(X.view(shape), NewtonSchulz(deflated=deflated))
            assert Y.isfinite().all() and torch.linalg.matrix_norm(Y, 2) < 1.5
