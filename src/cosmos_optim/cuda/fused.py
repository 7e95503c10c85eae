"""The algebra of large matrices on a GPU: kernels over lists of matrices, nothing stacked, as few passes as possible.

What a rule writes as M = lerp(M, G), G U, M U, X = N - N U U', NS(X), b B + P U' becomes, per matrix:

    read G          Y = G U                                       (project)
    read G          G'Y                                           (correlate)
    read G, M; write M      M <- lerp, G U_new, M U_new           (momentum)
    read M; write X         X = M - M U U' in half precision      (residual)
    products of X           Newton-Schulz, half the work where a product is symmetric
    read B                  B U, |B|^2                            (overlap)
    read B, W; write W      W <- decay W - lr (b B + P U')        (update)

The operands below only remember what is asked for until a kernel can answer several questions in one pass. The thin
factors U, S, V, P are ordinary stacked tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.fused_thin import FusedThin, as_direction, fits, kernels_at
from cosmos_optim.cuda.kernels import available
from cosmos_optim.cuda.kernels.correlate import correlate
from cosmos_optim.cuda.kernels.gains import finish, finish_torch, muon_gain, norms, norms_torch
from cosmos_optim.cuda.kernels.jacobi import supports as eigen_supports
from cosmos_optim.cuda.kernels.momentum import momentum_
from cosmos_optim.cuda.kernels.project import overlap, project
from cosmos_optim.cuda.kernels.reductions import added
from cosmos_optim.cuda.kernels.residual import residual, work_buffer
from cosmos_optim.cuda.kernels.split_precision import split
from cosmos_optim.cuda.kernels.syrk import SymmetricProducts
from cosmos_optim.cuda.kernels.syrk import supports as symmetric_supports
from cosmos_optim.cuda.kernels.update import update_
from cosmos_optim.cuda.memory_pool import newton_schulz_bytes
from cosmos_optim.cuda.operands import Basis, Blend, Direction, Mean, Polar, Residual, Scaled
from cosmos_optim.cuda.pointer_list import Matrices, uniform
from cosmos_optim.cuda.self_check import ask, at_rank, at_width, sound
from cosmos_optim.cuda.streams import Lanes
from cosmos_optim.linalg.algebra import sum_of_squares
from cosmos_optim.linalg.newton_schulz import (
    HALF_SCALE,
    NewtonSchulz,
    TorchProducts,
    gram_count,
    iterate,
    schedule,
)

# The kernels keep a block of a thin factor in registers.
MAX_RANK = 256
# Thin factors whose parts are kept at a time: a step asks for those of the old basis and of the new one.
BASES = 4
# Where a work buffer is all zeros its norm is taken as this: what is divided by it stays finite, and then meets a zero.
TINY = 1e-30
HALF = (torch.float16, torch.bfloat16)


def fusable(lists: Sequence[Sequence[Tensor]], rank: int, ns: NewtonSchulz, rows: bool = False) -> bool:
    """Whether kernels can run these equal-length lists of (m, n) matrices: parameters, gradients, momenta.

    `rows`: their rows have second moments.
    """
    t = lists[0][0]
    if not (t.is_cuda and available(t.device)) or not all(uniform(x) for x in lists) or ns.dtype not in (None, *HALF):
        return False
    # Below 16 rows or columns nothing is left to save; r >= min(m, n) would make U look like a matrix.
    if min(t.shape) < 16 or not 1 <= rank <= MAX_RANK or rank >= min(t.shape):
        return False
    return _checked(t, rank, rows)


def _checked(t: Tensor, rank: int, rows: bool) -> bool:
    """Ask here for all that such a matrix needs: later, in a lane or a capture, would be too late to compare."""
    families = [at_rank("passes", rank), at_width(min(t.shape)), at_rank("basis", rank), at_rank("thin", rank)]
    families.append("thin")  # norms and single columns
    if eigen_supports(rank):
        families.append(at_rank("eigen", rank))
    if max(t.stride()) * t.element_size() % 16:
        families.append("odd_rows")
    if rows:
        families.append("rows")
    return ask(t.device, families)[0]


def polar_bytes(batch: int, m: int, n: int, ns: NewtonSchulz) -> int:
    """Memory of the temporaries of Newton-Schulz on such a stack in half precision."""
    long, short = max(m, n), min(m, n)
    fresh = gram_count(long, short, ns.steps, ns.dtype or torch.float16)
    return newton_schulz_bytes(batch, long, short, 2, fresh, ns.steps)


def bytes_per_matrix(m: int, n: int, r: int) -> int:
    """Transient memory of one matrix in flight, from the shapes: work buffers, Gram matrices, thin factors."""
    # Two chunks are on the way at a time, their products one after the other.
    return 2 * (2 * m * n + thin_bytes(m, n, r)) + polar_bytes(1, m, n, NewtonSchulz())


def thin_bytes(m: int, n: int, r: int) -> int:
    """The thin factors of one matrix, and what kernels make of them on the way."""
    return 4 * r * 9 * (m + n)


def chunk_matrices(m: int, n: int, r: int, budget_bytes: int) -> int:
    """How many matrices a chunk may hold for a transient of at most `budget_bytes`."""
    return max(1, budget_bytes // bytes_per_matrix(m, n, r))


class FusedAlgebra(FusedThin):
    """`Algebra` over lists of whole matrices on one GPU; one instance serves one chunk of one step.

    `top` may be set to the largest |entry| of each gradient, (B,): who has looked for non-finite ones knows it.
    """

    def __init__(self, m: int, n: int, *, skip: Tensor | None = None) -> None:
        super().__init__(m, n, skip=skip)
        self.top: Tensor | None = None
        self._bases: dict[int, Basis] = {}
        self._loaded: dict[int, Tensor] = {}
        self._mean: Mean | None = None
        self._projected = False

    # -- products and sums ------------------------------------------------------------------------------------------

    def mm(self, X: Any, U: Tensor) -> Tensor:
        """X U. The second projection of a gradient takes its momentum along: one pass for both."""
        if isinstance(X, Tensor):
            return super().mm(X, U)
        basis = self._basis(U)
        if isinstance(X, Blend):
            return torch.add(X.a * self.mm(X.mean, U), self.mm(X.mean.G, U), alpha=X.b)
        if isinstance(X, Mean):
            return self._both(X, basis)[1]
        mean = self._mean
        if mean is not None and mean.G is X:
            if basis in mean.products:
                return mean.products[basis][0]
            if mean.peak is None and self._projected:
                return self._both(mean, basis)[0]
        self._projected = True
        return project(X, basis.half, basis.r, self.top)

    def _both(self, mean: Mean, basis: Basis) -> tuple[Tensor, Tensor]:
        """G U and M U, with M written on the way if it is not yet."""
        if basis not in mean.products:
            if mean.peak is None:
                GU, MU, mean.peak = momentum_(mean.M, mean.G, mean.w, basis.both, basis.r, self.skip, self.top)
            else:
                GU = project(mean.G, basis.half, basis.r, self.top)
                MU = project(mean.M, basis.half, basis.r)
            mean.products[basis] = (GU, MU)
        return mean.products[basis]

    def tn(self, X: Any, Y: Any) -> Tensor:
        """X'Y."""
        if isinstance(X, Tensor):
            return self.un(X, Y)
        assert isinstance(X, Matrices), f"X'Y of a {type(X).__name__} is not needed by any rule"
        if isinstance(Y, Scaled):
            return correlate(X, Y.parts, Y.peak, Y.r, self.top)
        peak = torch.linalg.vector_norm(Y, float("inf"), dim=(1, 2))
        return correlate(X, split(Y, torch.float16, peak=peak), peak, Y.shape[-1], self.top)

    def energy(self, X: Any) -> Tensor:
        """|X|^2 in float64, from sums that a kernel left on its way where there are some."""
        if isinstance(X, Tensor):
            return sum_of_squares(X)
        if isinstance(X, Residual):
            square, factor = self._in_buffer(X, torch.float16)[1:]
            return added(square) / factor.double().square()
        if isinstance(X, Polar):
            return X.energy
        if isinstance(X, Direction):
            return self._direction_energy(X)
        M = X.M if isinstance(X, Mean) else X
        assert isinstance(M, Matrices) and not M.moves
        self._written(X)
        return torch.stack(torch._foreach_norm(M.tensors, 2, torch.float64)).square().view(-1, 1, 1)

    # -- m x n operands -----------------------------------------------------------------------------------------------

    def lerp(self, M: Any, G: Any, weight: float) -> Any:
        """M + weight (G - M), to be written to M by the pass that needs it first."""
        self._mean, self._projected = Mean(M, G, weight), False
        return self._mean

    def blend(self, a: float, M: Any, b: float, G: Any) -> Any:
        """a M + b G."""
        assert isinstance(M, Mean) and M.G is G
        return Blend(a, M, b)

    def residual(self, X: Any, P: Tensor, U: Tensor) -> Any:
        """X - P U', made when its energy or its polar factor is asked for."""
        return Residual(_as_blend(X), P, self._basis(U))

    def polar(self, X: Any, ns: NewtonSchulz) -> Any:
        """Newton-Schulz of X / |X|_F in half precision, on the stream of the heavy products."""
        dtype = ns.dtype or torch.float16
        X = X if isinstance(X, Residual) else Residual(_as_blend(X))
        buffer, square, _ = self._in_buffer(X, dtype)
        X.buffer = None
        scale = HALF_SCALE if dtype is torch.float16 else 1.0
        make = norms if kernels_at(buffer, "thin") else norms_torch
        square, weight = make(square, scale**2, TINY)
        halves = symmetric_supports(buffer) and (not buffer.is_cuda or sound(buffer.device, at_width(buffer.shape[2])))
        steps, fresh = schedule(ns, buffer.shape[1], buffer.shape[2], dtype, selective=halves)
        # What the lane reads afterwards must be the lane's: the other stream reuses its own memory too early for that.
        out = buffer if len(fresh) > 1 else work_buffer(len(buffer), self.m, self.n, dtype, buffer.device)
        lanes = Lanes.of(buffer.device)
        with lanes.heavy():
            room = polar_bytes(len(buffer), self.m, self.n, ns)
            products = SymmetricProducts(lanes.slab(room).like) if halves else TorchProducts()
            Y = iterate(buffer, steps, products, weight=weight, scale=scale, fresh=fresh, out=out)
        if X.basis is None or dtype is not torch.float16:
            return Polar(Y, square)
        rows = torch.empty(len(Y), self.m, dtype=torch.float32, device=Y.device)
        BU, left = overlap(Y if self.m >= self.n else Y.mT, X.basis.half, X.basis.r, rows)
        return Polar(Y, square, X.basis, BU, left, rows)

    def combine(self, b: Tensor, B: Any, P: Tensor, U: Tensor) -> Any:
        """b B + P U'."""
        return Direction(b, B, P, self._basis(U))

    def scale(self, D: Any, s: Tensor) -> Any:
        """s D."""
        if isinstance(D, Polar):
            return Direction(s, D, None, None)
        return replace(D, s=s if D.s is None else s * D.s)

    def unit_rms(self, D: Any) -> Any:
        """D at RMS 1, by a factor that is made when the parameters are updated."""
        D = as_direction(D)
        return replace(D, unit=True) if D.s is None else super().unit_rms(D)

    def muon_gain(self, X: Any, NU: Tensor, B: Any, gamma: float, guard: float) -> Tensor:
        """gamma sqrt(mn) / |B|, or 0 for a residual of noise."""
        if not fits(NU):
            return super().muon_gain(X, NU, B, gamma, guard)
        square, factor = self._in_buffer(X, torch.float16)[1:]
        return muon_gain(square, factor, self._squares(NU), B.parts, B.square, gamma * self._root(), guard)

    def _basis(self, U: Tensor) -> Basis:
        """The parts of U, made once; the entry keeps U alive, so that its id stays its own. The last few are kept."""
        if id(U) not in self._bases and len(self._bases) == BASES:
            del self._bases[next(iter(self._bases))]
        return self._bases.setdefault(id(U), Basis(U))

    def _written(self, X: Any) -> None:
        """See to it that a mean is in memory."""
        mean = X.mean if isinstance(X, Blend) else X
        if isinstance(mean, Mean) and mean.peak is None:
            mean.peak = momentum_(mean.M, mean.G, mean.w, None, 1, self.skip)[2]

    def _in_buffer(self, X: Residual, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The residual in its work buffer, |buffer|^2 and the factor between them."""
        if X.square is None or X.factor is None:
            self._written(X.N)
            mean = X.N.mean
            assert mean.peak is not None
            P = None if X.P is None else self._minus(X.P)
            U = None if X.basis is None else X.basis.wide
            X.buffer, X.square, X.factor = residual(mean.M, mean.G, X.N.a, X.N.b, P, U, mean.peak, dtype)
        return X.buffer, X.square, X.factor  # type: ignore[return-value]

    # -- the boundary to parameters and their state -------------------------------------------------------------------

    def follow(self, tensors: Sequence[Tensor], table: Tensor) -> Matrices:
        """Matrices like these, wherever `table` says that they are when a kernel reads it."""
        return Matrices.of(tensors, table)

    def load(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
        """Matrices stay where they are; thin factors are stacked."""
        if tuple(tensors[0].shape) == (self.m, self.n):
            return Matrices.of(tensors)
        stack = super().load(tensors, dtype)
        self._loaded[tensors[0].data_ptr()] = stack
        return stack

    def store_(self, tensors: Sequence[Tensor], value: Any) -> None:
        """Write back; a mean is where it belongs once a kernel has run."""
        if isinstance(value, Mean):
            self._written(value)
            return
        if self.skip is not None:
            value = torch.where(self.skip, self._loaded[tensors[0].data_ptr()], value)
        torch._foreach_copy_(list(tensors), list(value.unbind(0)))

    def apply_(
        self, params: Sequence[Tensor], D: Any, lr: float | Tensor, decay: float | Tensor, *,
        noise: Sequence[Tensor] | None = None, top: Tensor | None = None,
    ) -> None:  # fmt: skip
        """W <- decay W - lr D in one pass; where `top` is 0, decay W."""
        D = as_direction(D)
        B, W, rows = D.B, Matrices.of(params), None if D.rows is None else D.rows.gain
        sums = self._sums(D) if D.unit else {}
        make = finish if kernels_at(B.buffer, "thin") else finish_torch
        coefficients, parts = make(D.b, B.square, lr, decay, P=D.P, BU=B.BU, s=D.s, rows=rows, top=top, **sums)
        seeds = None if noise is None or W.dtype is not torch.bfloat16 else torch.stack(list(noise)).int().view(-1)
        basis = D.basis or B.basis
        update_(W, B.buffer, parts, None if basis is None else basis.wide, coefficients, self.skip, seeds, rows)


def _as_blend(X: Any) -> Blend:
    return X if isinstance(X, Blend) else Blend(1.0, X, 0.0)
