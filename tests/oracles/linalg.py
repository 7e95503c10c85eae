"""The few matrix functions that the oracles share: NS5, NORM, equal rows, QR of one sign, leading eigenvectors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

NS5 = ((3.4445, -4.7750, 2.0315),) * 5  # the paper's coefficients, one triple an iteration


def ratio(numerator: Matrix, denominator: Matrix) -> Matrix:
    """Element-wise quotient with 0/0 = 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def newton_schulz(X: Matrix, coefficients: Sequence[tuple[float, float, float]] = NS5) -> Matrix:
    """X <- aX + bXX'X + cXX'XX'X, after division by |X|_F; zero stays zero."""
    size = np.linalg.norm(X)
    X = X / size if size else X
    for a, b, c in coefficients:
        XX = X @ X.T
        X = a * X + b * XX @ X + c * XX @ XX @ X
    return X


def unit_rms(X: Matrix) -> Matrix:
    """NORM(X) sqrt(m) = sqrt(n) X / |X|_F * sqrt(m): the entries' root mean square becomes 1 (0 stays 0)."""
    m, n = X.shape
    size = np.linalg.norm(X)
    return np.sqrt(n) * X / size * np.sqrt(m) if size else X


def equal_rows(X: Matrix) -> Matrix:
    """Each row over its norm (MuonEq, arXiv 2603.28254), or over 1e-3 of the norms' root mean square if larger."""
    norms = np.linalg.norm(X, axis=1, keepdims=True)
    least = 1e-3 * np.sqrt(np.mean(norms**2))
    return ratio(X, np.broadcast_to(np.maximum(norms, least), X.shape))


def qr(Y: Matrix) -> Matrix:
    """The orthonormal factor of Y whose triangular factor has a non-negative diagonal."""
    Q, T = np.linalg.qr(Y)
    return Q * np.where(np.diag(T) < 0, -1.0, 1.0)


def leading_eigenvectors(H: Matrix, r: int) -> Matrix:
    """Eigenvectors of the symmetric H for its r largest eigenvalues, in descending order."""
    return np.linalg.eigh(H)[1][:, ::-1][:, :r]
