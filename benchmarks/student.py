"""Student's t for the few seeds of a comparison, without scipy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def probability(t: float, freedom: int) -> float:
    """Return P(T <= t) for a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for i in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (i - 1) / i
    between = math.sin(angle) * total  # P(-t <= T <= t)
    if odd:
        between = 2 / math.pi * (angle + between)
    return (1 + between) / 2


def quantile(p: float, freedom: int) -> float:
    """Return t with P(T <= t) = p, for p above one half, by bisection.

    >>> round(quantile(0.975, 2), 3)
    4.303
    """
    if not 0.5 < p < 1 or freedom < 1:
        raise ValueError(f"p must be between 0.5 and 1 and freedom at least 1, got {p} and {freedom}")
    low, high = 0.0, 1.0
    while probability(high, freedom) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle, freedom) < p else (low, middle)
    return high


def half_width(values: Sequence[float], comparisons: int = 1) -> float:
    """Return half of the 95 % interval of the mean, by Student's t, corrected for several comparisons (Bonferroni)."""
    t = quantile(1 - 0.025 / comparisons, len(values) - 1)
    return t * statistics.stdev(values) / math.sqrt(len(values))
