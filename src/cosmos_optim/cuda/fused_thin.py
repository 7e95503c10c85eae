"""The arithmetic on thin factors on a GPU, in one kernel a line of the algorithm.

In plain torch these lines are a hundred launches on tensors that fill nothing, one after the other. What a kernel has
in hand on its way (sums of squares by blocks, half-precision parts) is noted for the next one, which would otherwise
need a launch of its own to make it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import available
from cosmos_optim.cuda.kernels import jacobi as eigen
from cosmos_optim.cuda.kernels.gather import gather, movable, scatter_
from cosmos_optim.cuda.kernels.launch import power_of_two
from cosmos_optim.cuda.kernels.power_step import power_sum, scaled
from cosmos_optim.cuda.kernels.reductions import added, measure
from cosmos_optim.cuda.kernels.row_norm import even_rows, row_squares
from cosmos_optim.cuda.kernels.second_moment import second_moment
from cosmos_optim.cuda.kernels.soap_half import adapt
from cosmos_optim.cuda.kernels.split_precision import split
from cosmos_optim.cuda.kernels.thin_qr import orthonormal, thin_gram
from cosmos_optim.cuda.kernels.thin_qr import supports as rank_supports
from cosmos_optim.cuda.operands import Direction, Polar, Rows, Scaled
from cosmos_optim.cuda.self_check import at_rank, sound
from cosmos_optim.linalg.algebra import Algebra, sum_of_squares
from cosmos_optim.linalg.moments import Adam, noise_floor


@dataclass(eq=False)
class Note:
    """What is known of a thin factor; it keeps the factor alive, so that its id stays its own."""

    of: Tensor
    squares: Tensor | None = None  # |X|^2 by parts (B, parts)
    columns: Tensor | None = None  # the same of each column, as `orthonormal` wants it
    minus: Tensor | None = None  # -X in bfloat16 parts


class FusedThin(Algebra):
    """`Algebra` with kernels for stacks of thin factors on one GPU; plain torch for what they do not take."""

    def __init__(self, m: int, n: int, *, skip: Tensor | None = None) -> None:
        super().__init__(m, n, skip=skip)
        self._notes: dict[int, Note] = {}

    def _note(self, X: Tensor) -> Note:
        return self._notes.setdefault(id(X), Note(X))

    def _squares(self, X: Tensor) -> Tensor:
        """|X|^2 by parts."""
        note = self._notes.get(id(X))
        if note is not None and note.squares is not None:
            return note.squares
        return measure(X)[0] if fits(X) else sum_of_squares(X).flatten(1)

    def _minus(self, X: Tensor) -> Tensor:
        """-X in bfloat16 parts, given away: they are asked for once."""
        note = self._notes.get(id(X))
        if note is None or note.minus is None:
            return split(X, torch.bfloat16, scale=-1.0)
        minus, note.minus = note.minus, None
        return minus

    # -- bases and the power step -------------------------------------------------------------------------------------

    def scaled(self, Y: Tensor, S: Tensor) -> tuple[Any, Tensor]:
        """Y / c in parts, and c."""
        if not fits(Y):
            return super().scaled(Y, S)
        parts, peak, c = scaled(Y, S)
        return Scaled(parts, peak, Y.shape[-1]), c

    def power_sum(self, U: Tensor, S: Tensor, HU: Tensor, c: Tensor, beta2: float) -> Tensor:
        """beta2 U S / c^2 + (1 - beta2) (HU / c + eps U)."""
        if not (fits(U) and columns_fit(U)):
            return super().power_sum(U, S, HU, c, beta2)
        Y, columns = power_sum(U, S, HU, c, beta2)
        self._note(Y).columns = columns
        return Y

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        """Orthonormal columns spanning those of Y, in a few kernels."""
        if columns_fit(Y):
            note = self._notes.pop(id(Y), None)
            return orthonormal(Y, fallback, None if note is None else note.columns)
        return super().orthonormalize(Y, fallback)

    def un(self, A: Tensor, B: Tensor) -> Tensor:
        """A'B of thin factors."""
        if A.shape == B.shape and columns_fit(A):
            return thin_gram(A, B)
        return super().un(A, B)

    def eigh(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of a stack in one launch, and no word from the host."""
        if eigen.supports(A.shape[-1]) and (not A.is_cuda or sound(A.device, at_rank("eigen", A.shape[-1]))):
            return eigen.eigh(A)
        return super().eigh(A)

    def oversampling(self, r: int) -> int:
        """What the kernels, made for powers of two, compute anyway: one column more would cost as much as r more."""
        return min(super().oversampling(r), power_of_two(r) - r)

    # -- both moments -------------------------------------------------------------------------------------------------

    def second_moment(
        self, S: Tensor, U: Tensor, U_old: Tensor, GU: Tensor, beta2: float, guard: bool
    ) -> tuple[Tensor, Tensor]:
        """beta2 C S C' + E and the columns that hold gradient."""
        if not (fits(U) and columns_fit(U)):
            return super().second_moment(S, U, U_old, GU, beta2, guard)
        return second_moment(S, U, U_old, GU, beta2, noise_floor(S.dtype, guard))

    def adapt(self, V: Tensor, GU: Tensor, NU: Tensor, real: Tensor, t: Tensor, how: Adam) -> tuple[Tensor, Tensor]:
        """V and P, with all that is asked of P and NU later."""
        if not fits(V):
            return super().adapt(V, GU, NU, real, t, how)
        V, P, minus, squares = adapt(
            V, GU, NU, real, t, betas=(how.beta1, how.beta2), eps=how.eps, inside=how.inside, ahead=how.ahead
        )
        self._note(P).squares, self._note(NU).squares = squares.unbind(0)
        self._note(NU).minus = minus
        return V, P

    def energy_m(self, P: Tensor) -> Tensor:
        """|P|^2, from the sums of a kernel where it has left some."""
        note = self._notes.get(id(P))
        if note is None or note.squares is None:
            return super().energy_m(P)
        return note.squares.sum(1).view(-1, 1, 1)

    def _root(self) -> float:
        """sqrt(m n), the norm of a matrix of RMS 1."""
        return math.sqrt(self.m * self.n)

    # -- rows of a direction ------------------------------------------------------------------------------------------

    def row_energy(self, X: Any) -> Tensor:
        """Sums of squares over n: of a direction without mixed term, as P U' lies in the span of U and B outside."""
        if isinstance(X, Tensor):
            return super().row_energy(X)
        D = as_direction(X)
        assert D.s is None and D.rows is None and not D.unit
        energy = self._polar_rows(D.B).double().unsqueeze(-1) / D.B.square
        energy = energy if D.b is None else energy * D.b.double().square()
        return energy if D.P is None else energy + D.P.double().square().sum(-1, keepdim=True)

    def scale_rows(self, D: Any, g: Tensor) -> Any:
        """D with row i times g_i."""
        if isinstance(D, Tensor):
            return super().scale_rows(D, g)
        energy = (g.double().square() * self.row_energy(D)).sum(1)
        return replace(as_direction(D), rows=Rows(g, energy))

    def even_rows(self, D: Any, v: Tensor, beta2: float, eps: float) -> tuple[Any, Tensor]:
        """D's rows over the root of their second moment, as factors; in one kernel with the energy of what results."""
        thin = () if isinstance(D, Tensor) else (v, as_direction(D).P)
        if not thin or not all(fits(x) for x in thin if x is not None) or not kernels_at(v, "rows"):
            return super().even_rows(D, v, beta2, eps)
        D = as_direction(D)
        left = self._polar_rows(D.B)
        v, gain, energy = even_rows(v, left, D.B.square, self.n, beta2, eps, b=D.b, P=D.P)
        return replace(D, rows=Rows(gain, energy)), v

    def _polar_rows(self, B: Polar) -> Tensor:
        """norm^2 |B_i|^2 (B, m)."""
        if B.rows is not None:
            return B.rows
        buffer = B.buffer if self.m >= self.n else B.buffer.mT
        return row_squares(buffer) if kernels_at(buffer, "rows") else buffer.float().square().sum(2)

    def _sums(self, D: Direction) -> dict[str, Any]:
        """What `finish` needs to know to bring D to RMS 1."""
        if D.rows is not None:
            return {"squares": D.rows.energy, "root": self._root()}
        squares = None if D.P is None else self._squares(D.P)
        return {"left": D.B.parts, "squares": squares, "root": self._root()}

    def _direction_energy(self, D: Direction) -> Tensor:
        """|D|^2. X U = 0 makes B U = 0, up to the rounding that `Polar` takes out: no mixed term."""
        if D.rows is not None:
            total = added(D.rows.energy)
        else:
            total = D.B.energy if D.b is None else D.b.double().square() * D.B.energy
            total = total if D.P is None else total + self.energy_m(D.P)
        total = total if D.s is None else total * D.s.double().square()
        return total * self.unit_gain(total).square() if D.unit else total

    # -- state --------------------------------------------------------------------------------------------------------

    def _thin(self, lists: Mapping[str, Sequence[Tensor]]) -> list[str]:
        """The factors that one kernel can move."""
        return [name for name, x in lists.items() if x[0].shape != (self.m, self.n) and movable(x) and fits(x[0][None])]

    def load_state(self, lists: Mapping[str, Sequence[Tensor]], dtype: torch.dtype) -> dict[str, Any]:
        """Thin factors are stacked in one launch."""
        thin = self._thin(lists) if dtype is torch.float32 else []
        stacks = gather([lists[name] for name in thin]) if thin else []
        rest = super().load_state({name: x for name, x in lists.items() if name not in thin}, dtype)
        return {name: (rest | dict(zip(thin, stacks, strict=True)))[name] for name in lists}

    def store_state_(self, lists: Mapping[str, Sequence[Tensor]], values: Mapping[str, Any]) -> None:
        """Thin factors are written back in one launch."""
        thin = [name for name in self._thin(lists) if values[name].dtype is torch.float32]
        if thin:
            scatter_([lists[name] for name in thin], [values[name] for name in thin], self.skip)
        super().store_state_({name: x for name, x in lists.items() if name not in thin}, values)


def as_direction(D: Any) -> Direction:
    """A direction, of a polar factor alone too."""
    return D if isinstance(D, Direction) else Direction(None, D, None, None)


def kernels_at(X: Tensor, family: str) -> bool:
    """Whether a family of kernels works where X is; the interpreter's are the tests' business."""
    return available(X.device) and (not X.is_cuda or sound(X.device, family))


def fits(X: Tensor) -> bool:
    """Whether the kernels here take such a stack, and work."""
    return X.dtype is torch.float32 and X.ndim == 3 and kernels_at(X, at_rank("thin", X.shape[-1]))


def columns_fit(Y: Tensor) -> bool:
    """Whether the kernels that factorize take thin factors of so many columns, and work."""
    return rank_supports(Y.shape[-1]) and kernels_at(Y, at_rank("basis", Y.shape[-1]))
