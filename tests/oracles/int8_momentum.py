"""Blocks of 8-bit integers with one scale each: float64 numpy, one block at a time, without bit operations.

A block of 128 neighbours in a row (the last one may be shorter) is stored as integers q in -127..127 and a scale s:
x = q s. s is absmax / 127 rounded to 17 significant bits, and at least 2^-126, which a block of zeros has.
"""

import numpy as np

WIDTH = 128


def scale_of(block: np.ndarray) -> float:
    largest = float(np.max(np.abs(block.astype(np.float64))))
    if largest / 127 <= 2.0**-126:
        return 2.0**-126
    fraction, exponent = np.frexp(largest / 127)  # fraction in [0.5, 1)
    return float(np.ldexp(np.rint(fraction * 2.0**17) / 2.0**17, exponent))


def quantize(X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes (m, n) and scales (m, ceil(n / 128)) of a matrix."""
    m, n = X.shape
    codes, scales = np.zeros((m, n), np.int8), np.zeros((m, -(-n // WIDTH)))
    for i in range(m):
        for k in range(scales.shape[1]):
            part = slice(k * WIDTH, min(n, (k + 1) * WIDTH))
            scales[i, k] = scale_of(X[i, part])
            codes[i, part] = np.rint(X[i, part].astype(np.float64) / scales[i, k])
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrix of these codes and scales, in float64."""
    columns = np.arange(codes.shape[1]) // WIDTH
    return codes.astype(np.float64) * scales[:, columns]
