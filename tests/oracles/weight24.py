"""Weights of 24 bits: float64 numpy, by rounding values, without bit operations.

A number with 16 significant bits (fewer below 2^-126) is stored as the nearest number with 8 of them and a multiple of
a 256th of that one's last place. Halves are rounded away from zero. The last place of a power of two is that of the
numbers above it; below it numbers lie twice as close, so there a unit of the correction counts half.
"""

import numpy as np

LEAST_EXPONENT = -126


def unit(x: np.ndarray, digits: int) -> np.ndarray:
    """The distance of neighbouring numbers with this many significant bits, above |x|."""
    exponent = np.maximum(np.frexp(x)[1] - 1, LEAST_EXPONENT)
    return np.ldexp(1.0, exponent - digits + 1)


def rounded(x: np.ndarray, digits: int) -> np.ndarray:
    step = unit(x, digits)
    return np.copysign(np.floor(np.abs(x) / step + 0.5) * step, x)


def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bfloat16 values, in float64, and the corrections of finite numbers that stay finite."""
    wide = rounded(x.astype(np.float64), 16)
    p = rounded(wide, 8)
    difference = np.abs(wide) - np.abs(p)
    below_p = np.nextafter(np.abs(p), 0)
    step = np.where(difference < 0, unit(below_p, 16), unit(p, 16))
    return p, (difference / step).astype(np.int64)


def join(p: np.ndarray, correction: np.ndarray) -> np.ndarray:
    """The float64 values of finite numbers and corrections that belong to them."""
    below_p = np.nextafter(np.abs(p), 0)
    step = np.where(correction < 0, unit(below_p, 16), unit(p, 16))
    return np.copysign(np.abs(p) + correction * step, p)
