"""Norms, and scaling functions that several rules share.

Shapes: X, D (..., m, n) a matrix or a stack of them, v (..., m, 1) a number for each row, t (..., 1, 1) the step count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cosmos_optim.linalg.algebra import Algebra

# A row with less than this share of the usual size keeps fading: its momentum is an old gradient, or rounding.
LEAST_ROW = 1e-3


def norm_sq(X: Tensor) -> Tensor:
    """Return the sum of squares of each matrix, (..., 1, 1), in double precision if the device supports it."""
    dtype = X.dtype if X.device.type == "mps" else torch.float64
    norm: Tensor = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=dtype)
    return norm.square()


def bias_correction(beta: float, t: Tensor) -> Tensor:
    """Return Adam's 1 - beta^t, computed in double precision: beta = 0.9999 would lose half its digits at t = 1."""
    wide = torch.float32 if t.device.type == "mps" else torch.float64
    return (1 - torch.pow(beta, t.to(wide))).to(t.dtype)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Divide a by b >= 0 with 0/0 = 0, so that eps = 0 is legal."""
    return torch.where(b > 0, a / b, torch.zeros_like(a))


def unit_rms(X: Tensor, alg: Algebra, X_sq: Tensor | None = None) -> Tensor:
    """Scale X to a root mean square of 1: the paper's sqrt(m) NORM(X). A zero matrix stays zero.

    If X is so small that the factor would be infinite in its type, the result is smaller. X_sq: |X|^2, if it is known.
    """
    X_sq = alg.norm_sq(X) if X_sq is None else X_sq
    factor = torch.where(X_sq > 0, math.sqrt(alg.m * alg.n) * X_sq.rsqrt(), torch.zeros_like(X_sq))
    return X * factor.clamp_max(torch.finfo(X.dtype).max).to(X.dtype)


def equalize_rows(X: Tensor, alg: Algebra, X_sq: Tensor | None = None) -> Tensor:
    """Return X with each row divided by its root mean square, but at least by `LEAST_ROW` times that of the matrix.

    A zero matrix stays zero. X_sq: |X|^2, if it is known.
    """
    X = unit_rms(X, alg, X_sq)
    return X * (alg.row_norm_sq(X) / alg.n).clamp_min(LEAST_ROW**2).rsqrt()


def normalize_rows(
    D: Tensor, v: Tensor | None, beta: float | None, floor: float, alg: Algebra
) -> tuple[Tensor, Tensor | None]:
    """Divide each row of D by the root of its running mean square v, plus `floor`; change nothing if `beta` is None.

    This is NorMuon's second moment (Li et al. 2025). It has no bias correction, because a factor common to all rows is
    removed by the normalization that follows.
    """
    if v is None or beta is None:
        return D, v
    v = beta * v + (1 - beta) * (alg.row_norm_sq(D) / alg.n).to(v.dtype)
    return D * quotient(torch.ones_like(v), v.sqrt() + floor), v
