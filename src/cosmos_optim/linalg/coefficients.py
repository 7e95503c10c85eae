"""The polynomials of Newton-Schulz: the coefficients of its iterations, and cheaper polynomials that merge several.

Letters: R (..., s, s) is the Gram matrix X'X, Z = aI + bR + cR^2 the factor of one iteration X <- X Z, x a singular
value of X. An iteration maps x to ax + bx^3 + cx^5.
"""

from __future__ import annotations

from dataclasses import dataclass

# (a, b, c) of one iteration.
Coefficients = tuple[float, float, float]

# K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). The slope at 0 is 3.44; in return,
# the final singular values are between 0.7 and 1.2 instead of 1.
_NS5: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),)

# N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar Express" (arXiv 2505.16932, 2025): the best composition of
# quintics on [1e-3, 1]. The last entry repeats. The paper divides the arguments of all polynomials except the
# last by 1.01, so that rounding cannot push a singular value out of the interval.
_POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01


def _with_safety_factor(table: tuple[Coefficients, ...]) -> tuple[Coefficients, ...]:
    """Return the coefficients of p(x / 1.01) for all polynomials p except the last."""
    inner = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in table[:-1])
    return (*inner, table[-1])


COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    "ns5": _NS5,
    "polar-express": _with_safety_factor(_POLAR_EXPRESS),
}


@dataclass(frozen=True)
class MergedIterations:
    """The first few iterations merged into one polynomial of R, computed by repeated squaring.

    F_0 = R / max_eigenvalue and F_k = a + b F_0 + c F_{k-1}^2; the last one has F_{k-2} instead of F_0. The last F_k
    approximates the product of the factors Z of all merged iterations, if no eigenvalue of R exceeds `max_eigenvalue`.
    Of all coefficients that a search tried, these have the smallest maximum relative error on [0, max_eigenvalue].

    Attributes:
        coefficients: (a, b, c) of the iterations that are merged.
        max_eigenvalue: the largest eigenvalue of R for which the polynomial is accurate.
        squares: (a, b, c) of F_1, F_2, ...
    """

    coefficients: tuple[Coefficients, ...]
    max_eigenvalue: float
    squares: tuple[Coefficients, ...]

    def centred(self) -> list[tuple[float, float, float, float]]:
        """Return (a, b, c, d) of E_k = a + b E_{k-1} + c E_{k-1}^2 + d E_0 for E_k = F_k - F_k(0).

        The last one has E_{k-2} instead of E_0 and is F_k itself: only its a is not 0. Squaring doubles the
        relative error. Half precision is more exact for E_k than for F_k, which is mostly its value at 0.
        """
        at_0, steps = [0.0], []
        for k, (a, b, c) in enumerate(self.squares):
            last = k + 1 == len(self.squares)
            at_0.append(a + (b * at_0[-2] if last else 0.0) + c * at_0[-1] ** 2)
            steps.append((at_0[-1] if last else 0.0, 2 * c * at_0[k], c, b))
        return steps


MERGED = {
    merged.coefficients: merged
    for merged in [
        MergedIterations(
            _NS5 * 3,
            0.29,  # the relative error is at most 5.7e-4
            (
                (31.98, -103.7453, 44.56008),
                (10.74042, -20.79139, 0.02076773),
                (-19.95807, -13.24052, 0.05078423),
                (-3.655689, -29.32745, 0.03484402),
                (4.691824, 0.1079916, 0.03201782),
            ),
        )
    ]
}

Iteration = Coefficients | MergedIterations
