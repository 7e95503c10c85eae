"""The polynomials of Newton-Schulz: rows (a, b, c) of one iteration each, and shorter ways through several of them."""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[float, float, float]

# K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): a slope of 3.44 at 0, bought with
# singular values that end between 0.7 and 1.2 rather than at 1.
_NS5: tuple[Row, ...] = ((3.4445, -4.7750, 2.0315),)

# N. Amsel, D. Persson, C. Musco, R. Gower, "The Polar Express" (arXiv 2505.16932, 2025): the best composition of
# quintics on [1e-3, 1]. The last row repeats. The paper divides the arguments of all rows but the last by 1.01, so that
# rounding cannot push a singular value out of the interval.
_POLAR_EXPRESS: tuple[Row, ...] = (
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


def _cushioned(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """x -> p(x / 1.01) for all rows but the last."""
    inner = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in rows[:-1])
    return (*inner, rows[-1])


COEFFICIENTS: dict[str, tuple[Row, ...]] = {"ns5": _NS5, "polar-express": _cushioned(_POLAR_EXPRESS)}


@dataclass(frozen=True)
class Start:
    """The first iterations as one polynomial of R by repeated squares, where no eigenvalue of R exceeds `reach`.

    F_0 = R / reach and F_k = a + b F_0 + c F_{k-1}^2, in the last one F_{k-2} for F_0: that is the product of all Z.
    The coefficients have the smallest largest relative error on [0, reach] that a search found.
    """

    rows: tuple[Row, ...]
    reach: float
    squares: tuple[Row, ...]

    def centred(self) -> list[tuple[float, float, float, float]]:
        """(a, b, c, d) with E_k = a + b E_{k-1} + c E_{k-1}^2 + d E_0 for E_k = F_k - F_k(0); a = 0 but in the last.

        Squares double the relative error of what they square. Without its value at 0, which is most of it, half
        precision keeps F_k much better.
        """
        at_0, steps = [0.0], []
        for k, (a, b, c) in enumerate(self.squares):
            last = k + 1 == len(self.squares)
            at_0.append(a + (b * at_0[-2] if last else 0.0) + c * at_0[-1] ** 2)
            steps.append((at_0[-1] if last else 0.0, 2 * c * at_0[k], c, b))
        return steps


STARTS = {
    start.rows: start
    for start in [
        Start(
            _NS5 * 3,
            0.29,  # where the relative error is 5.7e-4 at most
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

Step = Row | Start
