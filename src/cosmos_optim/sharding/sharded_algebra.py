"""The algebra of matrices whose rows or columns are divided among ranks: local products, then sums over a team.

A product that contracts rows is summed over the ranks that divide the rows, one that contracts columns over those that
divide the columns; everything else is local. Only Newton-Schulz needs more. By owners: each matrix travels once to a
rank that has it whole, and back. By sums: the Gram matrix of the long, divided side is summed and the iteration is
repeated on every rank. `by_sums` counts both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import available
from cosmos_optim.cuda.kernels.syrk import SymmetricProducts
from cosmos_optim.cuda.kernels.syrk import supports as symmetric_supports
from cosmos_optim.cuda.kernels.thin_qr import orthonormal
from cosmos_optim.cuda.kernels.thin_qr import supports as orthonormal_supports
from cosmos_optim.cuda.self_check import at_rank, at_width, sound
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.newton_schulz import (
    HALF_SCALE,
    NewtonSchulz,
    TorchProducts,
    fresh_at,
    gram_count,
    iterate,
    newton_schulz,
)
from cosmos_optim.sharding import collectives as comm

if TYPE_CHECKING:
    from cosmos_optim.sharding.location import ShardedPlace
    from cosmos_optim.sharding.mesh import Team

# Matrices travel with a norm near this power of two: in half precision the largest element then fits, and elements
# have all their digits down to 1e-7 of it.
TRAVEL_EXPONENT = 10


class ShardedAlgebra(Algebra):
    """`local` on each rank's part, sums over the teams of `place`."""

    def __init__(self, local: Algebra, place: ShardedPlace) -> None:
        super().__init__(local.m, local.n, skip=local.skip)
        self.local, self.place = local, place
        self._known: tuple[Any, Tensor] | None = None

    @property
    def T(self) -> Algebra:
        """The algebra of the transposed matrices."""
        return ShardedAlgebra(self.local.T, self.place.T)

    # -- sums over ranks ------------------------------------------------------------------------------------------

    def mm(self, X: Any, U: Tensor) -> Tensor:
        """X U, contracting n."""
        return _total(self.local.mm(X, U), self.place.col_team)

    def tn(self, X: Any, Y: Tensor) -> Tensor:
        """X'Y, contracting m."""
        return _total(self.local.tn(X, Y), self.place.row_team)

    def un(self, A: Tensor, B: Tensor) -> Tensor:
        """A'B, contracting n."""
        return _total(self.local.un(A, B), self.place.col_team)

    def energy(self, X: Any) -> Tensor:
        """Sum of squares over m and n. What `polar` has just summed is not summed again."""
        if self._known is not None and self._known[0] is X:
            return self._known[1]
        return _total(self.local.energy(X), self.place.team)

    def energy_m(self, P: Tensor) -> Tensor:
        """Sum of squares of a thin factor over m and k."""
        return _total(self.local.energy_m(P), self.place.row_team)

    def row_energy(self, X: Any) -> Tensor:
        """Sums of squares over n, (..., m, 1)."""
        return _total(self.local.row_energy(X), self.place.col_team)

    def slice_n(self, Y: Tensor) -> Tensor:
        """The rows of a whole (n, k) matrix that belong to the columns held here."""
        start, length = self.place.my_columns
        return Y.narrow(0, start, length)

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        """Orthonormal columns spanning those of Y (..., n, r); by kernels where all its rows are here."""
        here = self.place.col_team is None and Y.is_cuda and Y.dtype is torch.float32 and available(Y.device)
        if here and orthonormal_supports(Y.shape[-1]) and sound(Y.device, at_rank("basis", Y.shape[-1])):
            return orthonormal(Y, fallback)
        return super().orthonormalize(Y, fallback)

    def eigh_of_gram(self, P: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of P'P; of a sum over ranks where they divide the rows of P."""
        return super().eigh_of_gram(P) if self.place.row_team is None else self.eigh(self.tn(P, P))

    # -- Newton-Schulz --------------------------------------------------------------------------------------------

    def polar(self, X: Any, ns: NewtonSchulz) -> Any:
        """Newton-Schulz of X / |X|_F."""
        energy = self.energy(X)
        self._known = (X, energy)
        dtype, team = ns.working_dtype(X), self.place.team
        if self.place.long_side_only and by_sums(X.shape[0], self.m, self.n, team.size, ns.steps, dtype):
            return self._polar_by_sums(X, ns, energy, dtype, team)
        # A power of two, so that nothing is rounded; Newton-Schulz does not see a factor.
        exponent = TRAVEL_EXPONENT - energy.sqrt().clamp_min(1e-38).log2().round()
        scale = torch.exp2(exponent.clamp(-120, 120)).to(X.dtype)
        journey = self.place.journey(X.shape[0])
        (whole,) = journey.to_owners([(X * scale).to(dtype)])
        if whole.shape[0]:
            whole = whole_polar(whole, ns)
        (B,) = journey.to_shards([whole])
        return B.to(X.dtype)

    def _polar_by_sums(self, X: Tensor, ns: NewtonSchulz, energy: Tensor, dtype: torch.dtype, team: Team) -> Tensor:
        scale = HALF_SCALE if dtype is torch.float16 else 1.0
        gain = torch.where(energy > 0, scale * energy.rsqrt(), torch.zeros_like(energy)).to(X.dtype)
        wider = self.m < self.n
        Y = (X * gain).to(dtype)
        rows = ns.rows()
        fresh = fresh_at(max(self.m, self.n), min(self.m, self.n), rows, dtype)
        Y = iterate(Y.mT if wider else Y, rows, _SummedProducts(team), scale=scale, fresh=fresh)
        return (Y.mT if wider else Y).to(X.dtype) / scale

    # -- local ----------------------------------------------------------------------------------------------------

    def lerp(self, M: Any, G: Any, weight: float) -> Any:
        """M + weight (G - M)."""
        return self.local.lerp(M, G, weight)

    def blend(self, a: float, M: Any, b: float, G: Any) -> Any:
        """a M + b G."""
        return self.local.blend(a, M, b, G)

    def residual(self, X: Any, P: Tensor, U: Tensor) -> Any:
        """X - P U'."""
        return self.local.residual(X, P, U)

    def combine(self, b: Tensor, B: Any, P: Tensor, U: Tensor) -> Any:
        """b B + P U'."""
        return self.local.combine(b, B, P, U)

    def scale(self, D: Any, s: Tensor) -> Any:
        """s D."""
        return self.local.scale(D, s)

    def scale_rows(self, D: Any, g: Tensor) -> Any:
        """D with row i times g_i."""
        return self.local.scale_rows(D, g)

    def load(self, tensors: Any, dtype: torch.dtype) -> Any:
        """Stack same-shape parts."""
        return self.local.load(tensors, dtype)

    def store_(self, tensors: Any, value: Any) -> None:
        """Write a stack back to where `load` took it from."""
        self.local.store_(tensors, value)

    def apply_(self, params: Any, D: Any, lr: Any, decay: Any, *, noise: Any = None, top: Any = None) -> None:
        """W <- decay W - lr D for each part."""
        self.local.apply_(params, D, lr, decay, noise=noise, top=top)


class _SummedProducts(TorchProducts):
    """Gram matrices are sums over the rows that the ranks hold; they are added in float32 or wider."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        """weight X'X over all ranks."""
        R = super().gram(X, weight)
        return comm.total(R.to(torch.promote_types(R.dtype, torch.float32)), self.team.group).to(R.dtype)


def whole_polar(X: Tensor, ns: NewtonSchulz) -> Tensor:
    """Newton-Schulz on an owner, with symmetric products by halves where the GPU has them."""
    wider = X.shape[-2] < X.shape[-1]
    tall = X.mT.contiguous() if wider else X
    B = newton_schulz(tall, ns, SymmetricProducts() if _by_halves(tall) else None)
    return B.mT if wider else B


def by_sums(count: int, m: int, n: int, k: int, steps: int, dtype: torch.dtype) -> bool:
    """Whether summing Gram matrices costs the busiest of k ranks no more than owners do, in bytes and in flops.

    With length l = a s, width s, f Gram matrices formed in T iterations: an owner computes
    c(a) = 3 a f + T + 3 (T - f) (in s^3 flops) for each of ceil(N/k) matrices and moves 2 l s (k-1)/k elements of
    each; by sums every rank computes c(a / k) for all N matrices and moves 2 f s^2 (k-1)/k elements of each.
    """
    long, short = max(m, n), min(m, n)
    f = gram_count(long, short, steps, dtype)
    owned = -(-count // k)
    same = steps + 3 * (steps - f)
    flops = count * (3 * f * long / k + same * short) <= owned * (3 * f * long + same * short)
    widening = max(4, dtype.itemsize) / dtype.itemsize
    return flops and count * f * short * widening <= owned * long


def _total(x: Tensor, team: Team | None) -> Tensor:
    return x if team is None else comm.total(x, team.group)


def _by_halves(X: Tensor) -> bool:
    """Whether symmetric products may be made by halves here."""
    return X.is_cuda and symmetric_supports(X) and sound(X.device, at_width(X.shape[-1]))
