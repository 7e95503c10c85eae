"""Synthetic gradient sequences for the comparisons: a few strong, slowly turning directions over weak noise.

The first basis of COSMOS is only defined where the spectrum of the first gradient has a gap at r and its leading
singular values differ from each other, so the sequences are made that way.
"""

import numpy as np

from tests.oracles.linalg import Matrix


def gradients(steps: int, m: int, n: int, rank: int, seed: int, noise: float = 0.01, turn: float = 0.2) -> Matrix:
    """A `(steps, m, n)` array: `rank` directions of strength 1 ... 0.1 over noise of spectral norm about `noise`."""
    rng = np.random.default_rng(seed)
    k = min(rank, m, n)
    strength = np.geomspace(1.0, 0.1, k)
    left, right = rng.normal(size=(m, k)), rng.normal(size=(n, k))
    out = np.empty((steps, m, n))
    for t in range(steps):
        left, right = left + turn * rng.normal(size=(m, k)), right + turn * rng.normal(size=(n, k))
        signal = np.linalg.qr(left)[0] * strength @ np.linalg.qr(right)[0].T
        out[t] = signal + noise / (np.sqrt(m) + np.sqrt(n)) * rng.normal(size=(m, n))
    return out
