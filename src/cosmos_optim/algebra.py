"""The few operations of a rule that depend on where a matrix lives.

Letters: X (..., m, n) a matrix or a stack of them, U (..., n, r) and P (..., m, r) thin factors. A sum over rows or
columns is the only thing that sharding changes, so each product is named after the dimension it contracts. This class
is the plain torch form: whole matrices, stacked. `fused.FusedAlgebra` runs kernels over lists of matrices instead,
`distributed.ShardedAlgebra` adds the sums over processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.newton_schulz import NewtonSchulz, newton_schulz
from cosmos_optim.linalg.orthonormal import orthonormalize
from cosmos_optim.rounding import write_

# Columns beyond r in the first subspace iteration: they buy convergence where the spectrum is flat around r.
OVERSAMPLING = 16


class Algebra:
    """Plain torch algebra for whole m x n matrices.

    `skip` is None or a boolean scalar on the device: where it holds, `store_` and `apply_` leave everything as it is.
    """

    def __init__(self, m: int, n: int, *, skip: Tensor | None = None) -> None:
        self.m, self.n, self.skip = m, n, skip

    @property
    def T(self) -> Algebra:
        """The algebra of the transposed matrices."""
        return Algebra(self.n, self.m, skip=self.skip)

    # -- products and sums ------------------------------------------------------------------------------------------

    def mm(self, X: Any, U: Tensor) -> Tensor:
        """X U, contracting n: (..., m, n), (..., n, k) -> (..., m, k)."""
        return torch.matmul(X, U)

    def tn(self, X: Any, Y: Tensor) -> Tensor:
        """X'Y, contracting m: (..., m, j), (..., m, k) -> (..., j, k)."""
        return torch.matmul(X.mT, Y)

    def un(self, A: Tensor, B: Tensor) -> Tensor:
        """A'B, contracting n: (..., n, j), (..., n, k) -> (..., j, k)."""
        return A.mT @ B

    def energy(self, X: Any) -> Tensor:
        """Sum of squares over m and n, (..., 1, 1), in double precision: gradients of 1e18 must not overflow it."""
        return sum_of_squares(X)

    def energy_m(self, P: Tensor) -> Tensor:
        """Sum of squares of a thin factor (..., m, k) over m and k."""
        return sum_of_squares(P)

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        """Orthonormal columns spanning those of Y (..., n, r), or `fallback` where they are dependent."""
        return orthonormalize(Y, self.un, fallback)

    def eigh(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues in ascending order and eigenvectors of small symmetric matrices (..., k, k)."""
        values, vectors = torch.linalg.eigh(A)
        return values, vectors

    def oversampling(self, r: int) -> int:
        """Columns beyond r in the first subspace iteration."""
        return OVERSAMPLING

    def slice_n(self, Y: Tensor) -> Tensor:
        """The rows of a whole (n, k) matrix that belong to the columns held here."""
        return Y

    # -- m x n operands, which need not be tensors --------------------------------------------------------------------

    def lerp(self, M: Any, G: Any, weight: float) -> Any:
        """M + weight (G - M): the moving average. Fused forms write it to M at once."""
        return torch.lerp(M, G, weight)

    def blend(self, a: float, M: Any, b: float, G: Any) -> Any:
        """a M + b G."""
        return torch.add(a * M, G, alpha=b)

    def residual(self, X: Any, P: Tensor, U: Tensor) -> Any:
        """X - P U'."""
        return X - P @ U.mT

    def polar(self, X: Any, ns: NewtonSchulz) -> Any:
        """Newton-Schulz of X / |X|_F: X with its singular values moved towards 1 (0 stays 0)."""
        return newton_schulz(X, ns)

    def combine(self, b: Tensor, B: Any, P: Tensor, U: Tensor) -> Any:
        """b B + P U'."""
        return b * B + P @ U.mT

    def scale(self, D: Any, s: Tensor) -> Any:
        """s D, with s of shape (..., 1, 1)."""
        return s * D

    def unit_rms(self, D: Any) -> Any:
        """sqrt(m n) D / |D|_F, the paper's sqrt(m) NORM(D); 0 stays 0."""
        return self.scale(D, self.unit_gain(self.energy(D)).to(D.dtype))

    def unit_gain(self, energy: Tensor) -> Tensor:
        """The factor that brings a matrix of this energy to RMS 1, and 0 for a zero matrix."""
        gain = math.sqrt(self.m * self.n) * energy.rsqrt()
        return torch.where(energy > 0, gain, torch.zeros_like(gain))

    # -- the boundary to parameters and their state -------------------------------------------------------------------

    def load(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """Stack same-shape matrices for computation in `dtype`."""
        if len(tensors) == 1:
            return tensors[0].unsqueeze(0).to(dtype)
        return torch.stack(list(tensors)).to(dtype)

    def store_(self, tensors: Sequence[Tensor], value: Any) -> None:
        """Write a stack back to where `load` took it from."""
        if self.skip is not None:
            value = torch.where(self.skip, self.load(tensors, value.dtype), value)
        torch._foreach_copy_(list(tensors), list(value.unbind(0)))

    def apply_(
        self,
        params: Sequence[Tensor],
        D: Any,
        lr: float | Tensor,
        decay: float | Tensor,
        *,
        noise: Sequence[Tensor] | None = None,
    ) -> None:
        """W <- decay W - lr D for each parameter; `noise` (step counts) asks for stochastic rounding."""
        D = D * lr
        exact = all(p.dtype == D.dtype for p in params)
        if exact and self.skip is None and noise is None:
            if isinstance(decay, Tensor) or decay != 1.0:
                torch._foreach_mul_(list(params), decay)
            torch._foreach_sub_(list(params), list(D.unbind(0)))
            return
        for i, p in enumerate(params):
            new = p.to(D.dtype) * decay - D[i]
            if self.skip is not None:
                new = torch.where(self.skip, p.to(D.dtype), new)
            write_(p, new, None if noise is None else noise[i])


def sum_of_squares(X: Tensor) -> Tensor:
    """Sum of squares over the last two dimensions, kept, accumulated in double precision where the device has it."""
    dtype = X.dtype if X.device.type == "mps" else torch.float64
    norm: Tensor = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=dtype)
    return norm.square()
