"""The operations of a rule that depend on how a matrix is stored.

Shapes: X (..., m, n) a matrix or a stack of them, P (..., m, k) and U (..., n, k) thin factors.

Sharding only affects sums over rows or columns: `mm` and `un` sum over the columns n, `tn` over the rows m. `Algebra`
handles whole matrices; `sharding.sharded_algebra.ShardedAlgebra` adds sums over processes, and
`cuda.first_basis.ListAlgebra` uses kernels on lists of matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cosmos_optim.linalg.cholesky_qr import orthonormalize
from cosmos_optim.linalg.newton_schulz import NewtonSchulz, newton_schulz
from cosmos_optim.linalg.normalization import equalize_rows, norm_sq


class Algebra:
    """Operations on whole m x n matrices, or stacks of them, with plain torch."""

    def __init__(self, m: int, n: int) -> None:
        self.m, self.n = m, n

    @property
    def T(self) -> Algebra:
        """The operations on the transposed matrices."""
        return Algebra(self.n, self.m)

    def mm(self, X: Tensor, U: Tensor) -> Tensor:
        """Return X U, a sum over n: (..., m, n), (..., n, k) -> (..., m, k)."""
        return torch.matmul(X, U)

    def tn(self, X: Tensor, Y: Tensor) -> Tensor:
        """Return X'Y, a sum over m: (..., m, j), (..., m, k) -> (..., j, k)."""
        return torch.matmul(X.mT, Y)

    def un(self, A: Tensor, B: Tensor) -> Tensor:
        """Return A'B, a sum over n: (..., n, j), (..., n, k) -> (..., j, k)."""
        return A.mT @ B

    def norm_sq(self, X: Tensor) -> Tensor:
        """Return |X|^2, a sum over m and n, (..., 1, 1) in double precision: gradients of 1e18 must not overflow."""
        return norm_sq(X)

    def norm_sq_m(self, P: Tensor) -> Tensor:
        """Return |P|^2 of a thin factor (..., m, k), a sum over m and k, (..., 1, 1) in double precision."""
        return norm_sq(P)

    def row_norm_sq(self, X: Tensor) -> Tensor:
        """Return the squared norm of each row, a sum over n, (..., m, 1)."""
        norm: Tensor = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        return norm.square()

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        """Return orthonormal columns with the span of Y (..., n, r), or `fallback` if they are dependent."""
        return orthonormalize(Y, self.un, fallback)

    def eigh_gram(self, P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues of P'P, ascending, and its eigenvectors; P (..., m, k).

        If m < k, the smaller P P' is decomposed. P'P then has at least k - m zero eigenvalues; their eigenvectors are
        returned as zeros.
        """
        m, k = P.shape[-2:]
        if m >= k:
            return self._eigh(self.tn(P, P))
        values, left = self._eigh(P @ P.mT)
        right = P.mT @ (left * values.clamp_min(torch.finfo(P.dtype).tiny).rsqrt().unsqueeze(-2))
        return pad(values, (k - m, 0)), pad(right, (k - m, 0))

    def _eigh(self, A: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(A)
        return values, vectors

    def polar(self, X: Tensor, X_sq: Tensor, ns: NewtonSchulz) -> Tensor:
        """Return Newton-Schulz of X / |X|: X with its singular values moved towards 1. A zero matrix stays zero."""
        return newton_schulz(X, ns, X_sq=X_sq)

    def polar_with_rows(self, X: Tensor, X_sq: Tensor, ns: NewtonSchulz, equal_rows: bool) -> Tensor:
        """Return `polar` of X, or with `equal_rows` of X with rows of equal norm (MuonEq, arXiv 2603.28254)."""
        if equal_rows:
            X = equalize_rows(X, self, X_sq)
            X_sq = self.norm_sq(X)
        return self.polar(X, X_sq, ns)

    def slice_n(self, Y: Tensor) -> Tensor:
        """Return the rows of a whole (n, k) matrix that belong to the local columns of X."""
        return Y
