"""The algebra of matrices with rows or columns divided among ranks: local products, then sums over a team.

A product that contracts rows is summed over the ranks that divide the rows, one that contracts columns over those that
divide the columns; everything else is local. Only Newton-Schulz needs more, in one of two ways. At owners: each
matrix is sent to one rank, its owner, which sends back the result. By sums: the Gram matrix of the long, divided side
is summed, and every rank repeats the iteration. `prefer_sums` compares their costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.newton_schulz import (
    HALF_SCALE,
    NewtonSchulz,
    TorchProducts,
    choose_gram_steps,
    gram_count,
    iterate,
    newton_schulz,
    normalized,
)
from cosmos_optim.sharding import collectives

if TYPE_CHECKING:
    from cosmos_optim.sharding.location import ShardedLocation
    from cosmos_optim.sharding.mesh import Team

# Matrices are sent to their owners with a norm near 2 to this power. In half precision, the largest element then fits,
# and elements down to 1e-7 of it keep all their digits.
EXCHANGE_EXPONENT = 10


class ShardedAlgebra(Algebra):
    """Local products on each rank's part, then sums over the teams of a location."""

    def __init__(self, m: int, n: int, location: ShardedLocation) -> None:
        super().__init__(m, n)
        self.location = location

    @property
    def T(self) -> Algebra:
        return ShardedAlgebra(self.n, self.m, self.location.T)

    def mm(self, X: Tensor, U: Tensor) -> Tensor:
        return _sum_over(self.location.col_team, super().mm(X, U))

    def tn(self, X: Tensor, Y: Tensor) -> Tensor:
        return _sum_over(self.location.row_team, super().tn(X, Y))

    def un(self, A: Tensor, B: Tensor) -> Tensor:
        return _sum_over(self.location.col_team, super().un(A, B))

    def norm_sq(self, X: Tensor) -> Tensor:
        return _sum_over(self.location.team, super().norm_sq(X))

    def norm_sq_m(self, P: Tensor) -> Tensor:
        return _sum_over(self.location.row_team, super().norm_sq_m(P))

    def row_norm_sq(self, X: Tensor) -> Tensor:
        return _sum_over(self.location.col_team, super().row_norm_sq(X))

    def slice_n(self, Y: Tensor) -> Tensor:
        start, length = self.location.local_columns
        return Y.narrow(0, start, length)

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        """Return orthonormal columns with the span of Y; by kernels if a GPU holds all rows of Y."""
        if self.location.col_team is None and Y.is_cuda:
            from cosmos_optim.cuda.for_shards import orthonormalize

            return orthonormalize(Y, fallback)
        return super().orthonormalize(Y, fallback)

    def eigh_gram(self, P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the eigenvalues and eigenvectors of P'P, a sum over ranks if they divide the rows of P."""
        if self.location.row_team is None:
            return super().eigh_gram(P)
        return self._eigh(self.tn(P, P))

    # -- Newton-Schulz --------------------------------------------------------------------------------------------

    def polar(self, X: Tensor, X_sq: Tensor, ns: NewtonSchulz) -> Tensor:
        """Return Newton-Schulz of X / |X|, by sums or at owners, whichever is cheaper."""
        dtype, team = ns.working_dtype(X), self.location.team
        if self.location.only_long_side_is_cut and prefer_sums(X.shape[0], self.m, self.n, team.size, ns.steps, dtype):
            return self._polar_by_sums(X, X_sq, ns, dtype, team)
        # Scale by a power of two, which is exact; Newton-Schulz is invariant to scale.
        exponent = EXCHANGE_EXPONENT - X_sq.sqrt().clamp_min(1e-38).log2().round()
        scale = torch.exp2(exponent.clamp(-120, 120)).to(X.dtype)
        exchange = self.location.exchange(X.shape[0])
        (whole,) = exchange.to_owners([(X * scale).to(dtype)])
        if len(whole):
            whole = polar_at_owner(whole, ns)
        (B,) = exchange.to_shards([whole])
        return B.to(X.dtype)

    def _polar_by_sums(self, X: Tensor, X_sq: Tensor, ns: NewtonSchulz, dtype: torch.dtype, team: Team) -> Tensor:
        """Return Newton-Schulz of X / |X| with the longer side divided over ranks."""
        scale = HALF_SCALE if dtype is torch.float16 else 1.0
        is_wide, Y = self.m < self.n, normalized(X, X_sq, scale, dtype)
        coefficients = ns.coefficients_of_steps()
        gram_steps = choose_gram_steps(max(self.m, self.n), min(self.m, self.n), coefficients, dtype)
        tall = Y.mT if is_wide else Y
        Y = iterate(tall, coefficients, _SummedProducts(team), scale=scale, gram_steps=gram_steps)
        return (Y.mT if is_wide else Y).to(X.dtype) / scale


class _SummedProducts(TorchProducts):
    """Products with Gram matrices summed over the ranks that divide the rows, in float32 or wider."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        R = super().gram(X, weight)
        return collectives.total(R.to(torch.promote_types(R.dtype, torch.float32)), self.team.group).to(R.dtype)


def polar_at_owner(X: Tensor, ns: NewtonSchulz) -> Tensor:
    """Run Newton-Schulz on whole matrices at their owner; on a GPU with half the work for symmetric products."""
    if X.is_cuda:
        from cosmos_optim.cuda.for_shards import newton_schulz as newton_schulz_by_kernels

        return newton_schulz_by_kernels(X, ns)
    return newton_schulz(X, ns)


def prefer_sums(count: int, m: int, n: int, k: int, steps: int, dtype: torch.dtype) -> bool:
    """Return whether sums of Gram matrices cost the busiest of k ranks no more than owners, in bytes and in flops.

    The longer side has l = a s elements, the shorter s. T iterations form f Gram matrices. An owner computes
    c(a) = 3 a f + T + 3 (T - f) (in s^3 flops) for each of ceil(N/k) matrices, and sends 2 l s (k-1)/k elements of
    each. By sums, every rank computes c(a / k) for all N matrices, and sends 2 f s^2 (k-1)/k elements of each.
    """
    long, short = max(m, n), min(m, n)
    f = gram_count(long, short, steps, dtype)
    owned = -(-count // k)
    same = steps + 3 * (steps - f)
    flops = count * (3 * f * long / k + same * short) <= owned * (3 * f * long + same * short)
    widening = max(4, dtype.itemsize) / dtype.itemsize
    return flops and count * f * short * widening <= owned * long


def _sum_over(team: Team | None, x: Tensor) -> Tensor:
    return x if team is None else collectives.total(x, team.group)
