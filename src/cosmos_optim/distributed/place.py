"""Where the matrices of a sharded stack lie, and which way their rule runs: on the shards, or whole on owners."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cosmos_optim.algebra import Algebra
from cosmos_optim.distributed.algebra import ShardedAlgebra
from cosmos_optim.distributed.owners import Exchange, Tiling, tiling
from cosmos_optim.distributed.shards import Cut, Interval, Team, team_of
from cosmos_optim.layout import Place, Step
from cosmos_optim.rules.base import State

# Gradients of one stack on one rank. Larger than on a single device: a stack is a round of messages.
STACK_BYTES = 1 << 30


@dataclass(frozen=True)
class ShardedPlace(Place):
    """A matrix whose rows and columns are cut over a mesh: the rule runs on the shards."""

    mesh: DeviceMesh
    rows: Cut
    cols: Cut
    stack_bytes = STACK_BYTES

    @cached_property
    def row_team(self) -> Team | None:
        """The ranks that divide the rows."""
        return team_of(self.mesh, self.rows.over)

    @cached_property
    def col_team(self) -> Team | None:
        """The ranks that divide the columns."""
        return team_of(self.mesh, self.cols.over)

    @cached_property
    def team(self) -> Team | None:
        """The ranks that hold parts of the matrix."""
        return team_of(self.mesh, sorted({*self.rows.over, *self.cols.over}))

    @cached_property
    def T(self) -> ShardedPlace:
        """The place of the transposed matrix."""
        return replace(self, rows=self.cols, cols=self.rows)

    @cached_property
    def tiles(self) -> Tiling:
        """Every rank's part of the matrix."""
        assert self.team is not None
        return tiling((self.rows, self.cols), self.mesh.shape, self.team)

    @cached_property
    def my_columns(self) -> Interval:
        """The columns held here."""
        return self.cols.part(self.mesh.shape, self.mesh.get_coordinate() or ())

    @property
    def long_side_only(self) -> bool:
        """Whether nothing but the longer side is divided."""
        m, n = self.rows.high - self.rows.low, self.cols.high - self.cols.low
        return (self.col_team is None and m >= n) or (self.row_team is None and n >= m)

    def journey(self, count: int) -> Exchange:
        """To the owners of `count` such matrices and back."""
        assert self.team is not None
        if count not in self._journeys:
            self._journeys[count] = Exchange(self.team, count, [self.tiles])
        return self._journeys[count]

    @cached_property
    def _journeys(self) -> dict[int, Exchange]:
        return {}

    def numel(self, p: Tensor) -> int:
        """Elements of the largest part."""
        if self.team is None:
            return p.numel()
        return max(torch.Size(shape).numel() for shape in self.tiles.shapes)

    def algebra(self, m: int, n: int, *, skip: Tensor | None, local: type[Algebra]) -> Algebra:
        """Local products and sums over ranks."""
        return ShardedAlgebra(local(m, n, skip=skip), self)


@dataclass(frozen=True)
class OwnedPlace(ShardedPlace):
    """A matrix whose rule wants it whole: gradient and state travel to an owner, direction and new state back.

    state: the cuts of each state tensor; all of them are divided over the whole team.
    """

    state: tuple[tuple[str, tuple[Cut, ...]], ...]

    def algebra(self, m: int, n: int, *, skip: Tensor | None, local: type[Algebra]) -> Algebra:
        """Plain: the rule sees whole matrices."""
        return local(m, n, skip=skip)

    def journey(self, count: int) -> Exchange:
        """To the owners of `count` such matrices and their state, and back."""
        assert self.team is not None
        if count not in self._journeys:
            tilings = [tiling(cuts, self.mesh.shape, self.team) for _, cuts in self.state]
            self._journeys[count] = Exchange(self.team, count, [self.tiles, *tilings])
        return self._journeys[count]

    def run(self, step: Step, alg: Algebra, G: Any, state: State, t: Tensor) -> tuple[Any, State]:
        """Step on the matrices owned here."""
        if self.team is None:
            return step(alg, G, state, t, slice(None))
        names = [name for name, _ in self.state]
        journey = self.journey(G.shape[0])
        whole, *values = journey.to_owners([G, *(state[name] for name in names)])
        new = dict(zip(names, values, strict=True))
        if whole.shape[0]:
            whole, new = step(alg, whole, new, t[journey.mine], journey.mine)
        D, *values = journey.to_shards([whole, *(new[name] for name in names)])
        return D, dict(zip(names, values, strict=True))
