"""The few operations of a rule that depend on where a matrix lives.

Letters: X (..., m, n) a matrix or a stack of them, U (..., n, r) and P (..., m, r) thin factors. A sum over rows or
columns is the only thing that sharding changes, so each product is named after the dimension it contracts. This class
is the plain torch form: whole matrices, stacked. `fused.FusedAlgebra` runs kernels over lists of matrices instead,
`distributed.ShardedAlgebra` adds the sums over processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cosmos_optim.engine.rounding import write_
from cosmos_optim.linalg.cholesky_qr import orthonormalize
from cosmos_optim.linalg.moments import Adam, correction, quotient, real_columns, root, symmetric
from cosmos_optim.linalg.newton_schulz import NewtonSchulz, newton_schulz

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

    def row_energy(self, X: Any) -> Tensor:
        """Sums of squares over n, (..., m, 1)."""
        norm: Tensor = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
        return norm.square()

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        """Orthonormal columns spanning those of Y (..., n, r), or `fallback` where they are dependent."""
        return orthonormalize(Y, self.un, fallback)

    def eigh(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues in ascending order and eigenvectors of small symmetric matrices (..., k, k)."""
        values, vectors = torch.linalg.eigh(A)
        return values, vectors

    def eigh_of_gram(self, P: Tensor) -> tuple[Tensor, Tensor]:
        """The same of P'P (..., k, k), P (..., m, k), by the smaller of P'P and PP'.

        Where PP' is the smaller one P'P has at least k - m eigenvalues 0; what stands for their eigenvectors is 0.
        """
        m, k = P.shape[-2:]
        if m >= k:
            return self.eigh(self.tn(P, P))
        values, left = self.eigh(P @ P.mT)
        right = P.mT @ (left * values.clamp_min(torch.finfo(P.dtype).tiny).rsqrt().unsqueeze(-2))
        return pad(values, (k - m, 0)), pad(right, (k - m, 0))

    def oversampling(self, r: int) -> int:
        """Columns beyond r in the first subspace iteration."""
        return OVERSAMPLING

    def slice_n(self, Y: Tensor) -> Tensor:
        """The rows of a whole (n, k) matrix that belong to the columns held here."""
        return Y

    # -- arithmetic on thin factors -----------------------------------------------------------------------------------

    def scaled(self, Y: Tensor, S: Tensor) -> tuple[Any, Tensor]:
        """Y / c for `tn` and c (..., 1, 1), c^2 = |Y|^2 + trace S; 1 for zeros. Y (..., m, r), S (..., r, r)."""
        trace = S.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        c = (self.energy_m(Y) + trace).sqrt().to(Y.dtype)
        c = torch.where(c > 0, c, torch.ones_like(c))
        return Y / c, c

    def power_sum(self, U: Tensor, S: Tensor, HU: Tensor, c: Tensor, beta2: float) -> Tensor:
        """beta2 U S / c^2 + (1 - beta2) (HU / c + eps U), (..., n, r)."""
        HU = HU / c + torch.finfo(U.dtype).eps * U
        return beta2 * U @ (S / c / c) + (1 - beta2) * HU

    def second_moment(
        self, S: Tensor, U: Tensor, U_old: Tensor, GU: Tensor, beta2: float, guard: bool
    ) -> tuple[Tensor, Tensor]:
        """beta2 C S C' + E, C = U'U_old, E = (1 - beta2) (GU)'(GU), made symmetric, and its `real_columns`."""
        C, E = self.un(U, U_old), self.tn((1 - beta2) * GU, GU)
        S = symmetric(beta2 * C @ S @ C.mT + E)
        return S, real_columns(S, E, guard)

    def adapt(self, V: Tensor, GU: Tensor, NU: Tensor, real: Tensor, t: Tensor, how: Adam) -> tuple[Tensor, Tensor]:
        """V <- beta2 V + (1 - beta2) GU*GU, and NU / (1 - beta1^t) / root(V) in the `real` columns. (..., m, r)."""
        V = how.beta2 * V + (1 - how.beta2) * GU * GU
        return V, quotient(NU / correction(how.beta1, t + how.ahead), root(V, t, how)) * real

    def muon_gain(self, X: Any, NU: Tensor, B: Any, gamma: float, guard: float) -> Tensor:
        """gamma sqrt(mn) / |B|, or 0 where the residual X holds no more than `guard` of the energy |X|^2 + |NU|^2."""
        residual, polar = self.energy(X), self.energy(B)
        real = residual > guard * (residual + self.energy_m(NU))
        return torch.where(real, gamma * self.unit_gain(polar), torch.zeros_like(polar))

    def even_rows(self, D: Any, v: Tensor, beta2: float, eps: float) -> tuple[Any, Tensor]:
        """D's rows divided by sqrt(v) + eps, v <- beta2 v + (1 - beta2) (their mean squares), (..., m, 1); and v.

        NorMuon's second moment (Li et al. 2025). It is not bias-corrected: what follows removes a factor of all rows.
        """
        v = beta2 * v + (1 - beta2) * (self.row_energy(D) / self.n).to(v.dtype)
        return self.scale_rows(D, quotient(torch.ones_like(v), v.sqrt() + eps)), v

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
        return b.to(P.dtype) * B + P @ U.mT

    def scale(self, D: Any, s: Tensor) -> Any:
        """s D, with s of shape (..., 1, 1)."""
        return s * D

    def scale_rows(self, D: Any, g: Tensor) -> Any:
        """D with row i times g_i, g of shape (..., m, 1)."""
        return g * D

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

    def load_state(self, lists: Mapping[str, Sequence[Tensor]], dtype: torch.dtype) -> dict[str, Any]:
        """`load` for every factor of a state."""
        return {name: self.load(tensors, dtype) for name, tensors in lists.items()}

    def store_state_(self, lists: Mapping[str, Sequence[Tensor]], values: Mapping[str, Any]) -> None:
        """`store_` for every factor of a state."""
        for name, tensors in lists.items():
            self.store_(tensors, values[name])

    def apply_(
        self,
        params: Sequence[Tensor],
        D: Any,
        lr: float | Tensor,
        decay: float | Tensor,
        *,
        noise: Sequence[Tensor] | None = None,
        top: Tensor | None = None,
    ) -> None:
        """W <- decay W - lr D for each parameter; `noise` (step counts) asks for stochastic rounding.

        top: the largest |entry| of each gradient (B,); given, a matrix with none is only decayed.
        """
        D = D * (lr if top is None else (top > 0).to(D.dtype).view(-1, 1, 1) * lr)
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
