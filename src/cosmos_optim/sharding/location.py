"""Where the matrices of a sharded stack lie, and which way their rule runs: on the shards, or whole on owners."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cosmos_optim.engine.layout import Place, Step
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.rule import State
from cosmos_optim.sharding.mesh import Cut, Interval, Team, team_of
from cosmos_optim.sharding.owner_exchange import Exchange, Tiling, tiling
from cosmos_optim.sharding.sharded_algebra import ShardedAlgebra

# Gradients of one stack on one rank. Larger than on a single device, for a stack is a round of messages; but COSMOS
# works in ten times as much, and two stacks run at a time.
STACK_BYTES = 1 << 28


@dataclass(frozen=True)
class ShardedPlace(Place):
    """A matrix whose rows and columns are cut over a mesh: the rule runs on the shards."""

    rows: Cut
    cols: Cut
    mesh_shape: tuple[int, ...]
    here: tuple[int, ...]
    whole_team: Team
    row_team: Team | None
    col_team: Team | None
    first: int = 0
    stack_bytes = STACK_BYTES

    @property
    def team(self) -> Team:
        """The ranks that hold parts of the matrix."""
        return self.whole_team

    @cached_property
    def T(self) -> ShardedPlace:
        """The place of the transposed matrix."""
        return replace(self, rows=self.cols, cols=self.rows, row_team=self.col_team, col_team=self.row_team)

    @cached_property
    def tiles(self) -> Tiling:
        """Every rank's part of the matrix."""
        return tiling((self.rows, self.cols), self.mesh_shape, self.team)

    @cached_property
    def my_columns(self) -> Interval:
        """The columns held here."""
        return self.cols.part(self.mesh_shape, self.here)

    @property
    def long_side_only(self) -> bool:
        """Whether nothing but the longer side is divided."""
        m, n = self.rows.high - self.rows.low, self.cols.high - self.cols.low
        return (self.col_team is None and m >= n) or (self.row_team is None and n >= m)

    def after(self, others: int) -> ShardedPlace:
        """The same place with the next ranks in turn as owners: stacks of few matrices keep different ranks busy."""
        first = others % self.team.size
        if first not in self._turns:
            self._turns[first] = replace(self, first=first)
        return self._turns[first]

    @cached_property
    def _turns(self) -> dict[int, ShardedPlace]:
        return {}

    def journey(self, count: int) -> Exchange:
        """To the owners of `count` such matrices and back."""
        if count not in self._journeys:
            self._journeys[count] = Exchange(self.team, count, self.travelling, self.first)
        return self._journeys[count]

    @cached_property
    def travelling(self) -> list[Tiling]:
        """What an owner needs."""
        return [self.tiles]

    @cached_property
    def _journeys(self) -> dict[int, Exchange]:
        return {}

    @cached_property
    def _largest(self) -> int:
        return max(torch.Size(shape).numel() for tiles in self.travelling for shape in tiles.shapes)

    def numel(self, p: Tensor) -> int:
        """Elements of the largest part of what travels."""
        return self._largest

    def algebra(self, m: int, n: int, *, skip: Tensor | None, local: type[Algebra]) -> Algebra:
        """Local products and sums over ranks."""
        return ShardedAlgebra(local(m, n, skip=skip), self)


@dataclass(frozen=True)
class OwnedPlace(ShardedPlace):
    """A matrix whose rule wants it whole: gradient and state travel to an owner, direction and new state back.

    state: the cuts of each state tensor; all of them are divided over the whole team.
    """

    state: tuple[tuple[str, tuple[Cut, ...]], ...] = ()

    def algebra(self, m: int, n: int, *, skip: Tensor | None, local: type[Algebra]) -> Algebra:
        """Plain: the rule sees whole matrices."""
        return local(m, n, skip=skip)

    @cached_property
    def travelling(self) -> list[Tiling]:
        """The gradient and the state."""
        return [self.tiles, *(tiling(cuts, self.mesh_shape, self.team) for _, cuts in self.state)]

    def run(self, step: Step, alg: Algebra, G: Any, state: State, t: Tensor) -> tuple[Any, State]:
        """Step on the matrices owned here."""
        names = [name for name, _ in self.state]
        journey = self.journey(G.shape[0])
        whole, *values = journey.to_owners([G, *(state[name] for name in names)])
        new = dict(zip(names, values, strict=True))
        if whole.shape[0]:
            whole, new = step(alg, whole, new, t[journey.mine], journey.mine)
        D, *values = journey.to_shards([whole, *(new[name] for name in names)])
        return D, dict(zip(names, values, strict=True))


def sharded_place(mesh: DeviceMesh, rows: Cut, cols: Cut) -> ShardedPlace:
    """The place of a matrix on a mesh. Makes groups of processes where they are missing: every rank must ask alike."""
    team = team_of(mesh, sorted({*rows.over, *cols.over}))
    assert team is not None, "nothing is cut"
    return ShardedPlace(
        rows, cols, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), team,
        team_of(mesh, rows.over), team_of(mesh, cols.over),
    )  # fmt: skip


def owned_place(mesh: DeviceMesh, rows: Cut, cols: Cut, state: tuple[tuple[str, tuple[Cut, ...]], ...]) -> OwnedPlace:
    """The same for a rule that wants whole matrices."""
    base = sharded_place(mesh, rows, cols)
    return OwnedPlace(**{f.name: getattr(base, f.name) for f in fields(base)}, state=state)
