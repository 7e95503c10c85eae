"""Where the matrices of a sharded stack are, and how their rule runs: on the shards, or on whole matrices at owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cosmos_optim.engine.layout import Job, Location, TakeStep, Tensors
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.sharding import overlap
from cosmos_optim.sharding.mesh import Cut, Interval, Team, team_of
from cosmos_optim.sharding.owner_exchange import Exchange, ShardMap, shard_map
from cosmos_optim.sharding.sharded_algebra import ShardedAlgebra

# Bytes of gradients in one stack on one rank. More than on a single device, because each stack costs a round of
# messages; but COSMOS needs ten times as much to work in, and two stacks run at a time.
STACK_BYTES = 1 << 28


@dataclass(frozen=True)
class ShardedLocation(Location):
    """A matrix with rows and columns cut over a mesh: the rule runs on the shards."""

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
    def T(self) -> ShardedLocation:
        """The location of the transposed matrix."""
        return replace(self, rows=self.cols, cols=self.rows, row_team=self.col_team, col_team=self.row_team)

    @cached_property
    def parts(self) -> ShardMap:
        """Every rank's part of the matrix."""
        return shard_map((self.rows, self.cols), self.mesh_shape, self.team)

    @cached_property
    def my_columns(self) -> Interval:
        """The columns held here."""
        return self.cols.part(self.mesh_shape, self.here)

    @property
    def long_side_only(self) -> bool:
        """Whether nothing but the longer side is divided."""
        m, n = self.rows.high - self.rows.low, self.cols.high - self.cols.low
        return (self.col_team is None and m >= n) or (self.row_team is None and n >= m)

    def after(self, others: int) -> ShardedLocation:
        """Return this location with the next ranks as owners, so that small stacks keep different ranks busy."""
        first = others % self.team.size
        if first not in self._turns:
            self._turns[first] = replace(self, first=first)
        return self._turns[first]

    @cached_property
    def _turns(self) -> dict[int, ShardedLocation]:
        return {}

    def exchange(self, count: int) -> Exchange:
        """Return the exchange of `count` such matrices with their owners."""
        if count not in self._exchanges:
            self._exchanges[count] = Exchange(self.team, count, self.exchanged, self.first)
        return self._exchanges[count]

    @cached_property
    def exchanged(self) -> list[ShardMap]:
        """What an owner needs of each matrix."""
        return [self.parts]

    @cached_property
    def _exchanges(self) -> dict[int, Exchange]:
        return {}

    @cached_property
    def _largest(self) -> int:
        return max(torch.Size(shape).numel() for parts in self.exchanged for shape in parts.shapes)

    def numel(self, p: Tensor) -> int:
        """Return the elements of the largest part that is exchanged."""
        return self._largest

    def algebra(self, m: int, n: int) -> Algebra:
        """Return local products and sums over ranks."""
        return ShardedAlgebra(m, n, self)

    def run_jobs(self, jobs: Sequence[Job], device: torch.device) -> None:
        """Run the jobs of all stacks of this team; on a GPU two at a time, so that messages and products overlap.

        Only jobs of one team overlap: its ranks all have the same ones, so they take the same turns.
        """
        at_once = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        overlap.run(jobs, device, width=2 if at_once else 1)


@dataclass(frozen=True)
class OwnerLocation(ShardedLocation):
    """A matrix with a rule that needs it whole: gradient and state go to an owner, direction and new state come back.

    state: the cuts of each state tensor; all of them are divided over the whole team.
    """

    state: tuple[tuple[str, tuple[Cut, ...]], ...] = ()

    def algebra(self, m: int, n: int) -> Algebra:
        """Return the plain algebra: the rule sees whole matrices."""
        return Algebra(m, n)

    @cached_property
    def exchanged(self) -> list[ShardMap]:
        """The gradient and the state."""
        return [self.parts, *(shard_map(cuts, self.mesh_shape, self.team) for _, cuts in self.state)]

    def run(self, take_step: TakeStep, alg: Algebra, G: Tensor, state: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        """Take the step on the matrices owned here."""
        names = [name for name, _ in self.state]
        exchange = self.exchange(G.shape[0])
        whole, *values = exchange.to_owners([G, *(state[name] for name in names)])
        new = dict(zip(names, values, strict=True))
        if whole.shape[0]:
            whole, new = take_step(alg, whole, new, t[exchange.mine], exchange.mine)
        D, *values = exchange.to_shards([whole, *(new[name] for name in names)])
        return D, dict(zip(names, values, strict=True))


def sharded_location(mesh: DeviceMesh, rows: Cut, cols: Cut) -> ShardedLocation:
    """Return the location of a matrix on a mesh. Makes missing process groups, so every rank must call it alike."""
    team = team_of(mesh, sorted({*rows.over, *cols.over}))
    assert team is not None, "nothing is cut"
    return ShardedLocation(
        rows, cols, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), team,
        team_of(mesh, rows.over), team_of(mesh, cols.over),
    )  # fmt: skip


def owner_location(
    mesh: DeviceMesh, rows: Cut, cols: Cut, state: tuple[tuple[str, tuple[Cut, ...]], ...]
) -> OwnerLocation:
    """Return the location for a rule that needs whole matrices."""
    base = sharded_location(mesh, rows, cols)
    return OwnerLocation(**{f.name: getattr(base, f.name) for f in fields(base)}, state=state)
