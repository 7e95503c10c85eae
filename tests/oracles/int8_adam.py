"""Adam's moments as 8-bit codes: float64 numpy, one element at a time, without bit operations.

A block of 128 neighbours in a row is stored as integers q with one scale s: a first moment is q |q| s with q in
-127..127, the root of a second moment is q^2 s with q in 0..255. s is the block's largest over 127^2 or 255^2, rounded
to float32 and then to 20 significant bits, ties upwards. A real code x between k and k + 1 becomes k + 1 if a number
u(element, step) in (0, 1) is below (x^2 - k^2) / (2 k + 1). A second moment above 0 has a code of at least 2.
"""

import math

import numpy as np

WIDTH = 128
PER_ELEMENT, PER_STEP, PER_STEP_OF_ROOT = 0xC13FA9A9, 0x91E10DA5, 0x9E3779B1


def noise(element: int, step: int, per_step: int) -> float:
    """The upper 13 bits of a sum modulo 2^32, as the middle of one of 8192 intervals of (0, 1)."""
    bits = (element * PER_ELEMENT + step * per_step) % 2**32
    return (bits // 2**19 + 0.5) / 8192


def scale_of(block: np.ndarray, largest_code: int) -> float:
    largest = float(np.max(np.abs(block))) / largest_code**2
    if largest <= 2.0**-126:
        return 2.0**-126
    fraction, exponent = np.frexp(float(np.float32(largest)))  # fraction in [0.5, 1)
    return float(np.ldexp(np.floor(fraction * 2.0**20 + 0.5) / 2.0**20, exponent))


def code_of(size: float, scale: float, u: float, largest_code: int) -> int:
    square = size / scale
    k = math.isqrt(int(square))
    return min(k + (u < (square - k * k) / (2 * k + 1)), largest_code)


def quantize(X: np.ndarray, step: int, root: bool, first_row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The codes (m, n) and scales (m, ceil(n / 128)) of a first moment, or of the root of a second one."""
    (m, n), largest = X.shape, 255 if root else 127
    codes, scales = np.zeros((m, n), np.uint8 if root else np.int8), np.zeros((m, -(-n // WIDTH)))
    for i in range(m):
        for k in range(scales.shape[1]):
            scales[i, k] = scale_of(X[i, k * WIDTH : (k + 1) * WIDTH], largest)
        for j in range(n):
            x, u = float(X[i, j]), noise((first_row + i) * n + j, step, PER_STEP_OF_ROOT if root else PER_STEP)
            code = code_of(abs(x), scales[i, j // WIDTH], u, largest)
            if root and x > 0:
                code = max(code, 2)
            codes[i, j] = code if x >= 0 else -code
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The first moment, or the root of the second one, in float64."""
    wide = codes.astype(np.float64)
    return wide * np.abs(wide) * scales[:, np.arange(codes.shape[1]) // WIDTH]
