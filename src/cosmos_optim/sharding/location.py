"""Where the matrices of a sharded stack are, and where a rule runs: on the shards, or on whole matrices at owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cosmos_optim.engine.capture import is_capturing
from cosmos_optim.engine.layout import Job, Location, TakeStep, Tensors
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.sharding import overlap
from cosmos_optim.sharding.mesh import Coordinate, Cut, Interval, Team, team_of
from cosmos_optim.sharding.owner_exchange import Exchange, ShardMap
from cosmos_optim.sharding.sharded_algebra import ShardedAlgebra

# Bytes of gradients in one stack on one rank. Large, because each stack costs a round of messages; but COSMOS
# needs ten times as much work memory, and two stacks run at a time.
SHARDED_STACK_BYTES = 1 << 28

# The name of each state tensor of a matrix, and the cut of each of its dimensions.
StateCuts = tuple[tuple[str, tuple[Cut, ...]], ...]


@dataclass(frozen=True)
class ShardedLocation(Location):
    """A matrix with rows and columns cut over a mesh: the rule runs on the shards.

    coordinate: this rank's place in the mesh.
    team, row_team, col_team: the ranks that divide the matrix, its rows, its columns; None if not divided.
    first_owner: the first of the ranks that own one matrix more than the others.
    """

    rows: Cut
    cols: Cut
    mesh_shape: tuple[int, ...]
    coordinate: Coordinate
    team: Team = field()  # not the default of `Location`
    row_team: Team | None
    col_team: Team | None
    first_owner: int = 0
    stack_bytes = SHARDED_STACK_BYTES
    _by_first_owner: dict[int, ShardedLocation] = field(default_factory=dict, init=False, compare=False, repr=False)
    _exchanges: dict[int, Exchange] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def T(self) -> ShardedLocation:
        """The location of the transposed matrix."""
        return replace(self, rows=self.cols, cols=self.rows, row_team=self.col_team, col_team=self.row_team)

    @cached_property
    def local_columns(self) -> Interval:
        """The columns held on this rank."""
        return self.cols.part(self.mesh_shape, self.coordinate)

    @property
    def only_long_side_is_cut(self) -> bool:
        """Whether the shorter side is whole on every rank."""
        m, n = self.rows.high - self.rows.low, self.cols.high - self.cols.low
        return (self.col_team is None and m >= n) or (self.row_team is None and n >= m)

    def after(self, others: int) -> ShardedLocation:
        """Return this location with the next ranks as owners, so that small stacks use different ranks."""
        first = others % self.team.size
        if first not in self._by_first_owner:
            self._by_first_owner[first] = replace(self, first_owner=first)
        return self._by_first_owner[first]

    def exchange(self, count: int) -> Exchange:
        """Return the exchange of `count` such matrices with their owners."""
        if count not in self._exchanges:
            self._exchanges[count] = Exchange(self.team, count, self.exchanged, self.first_owner)
        return self._exchanges[count]

    @cached_property
    def exchanged(self) -> list[ShardMap]:
        """The tensors that an owner needs of each matrix: only the matrix itself."""
        return [ShardMap((self.rows, self.cols), self.mesh_shape, self.team)]

    def numel(self, p: Tensor) -> int:
        """Return the elements of the largest part that is exchanged."""
        return max(max(shards.part_numels) for shards in self.exchanged)

    def algebra(self, m: int, n: int) -> Algebra:
        """Return local products and sums over ranks."""
        return ShardedAlgebra(m, n, self)

    def run_jobs(self, jobs: Sequence[Job], device: torch.device) -> None:
        """Run the jobs of all stacks of this team; on a GPU two at a time, so that messages and products overlap.

        Only jobs of one team overlap: its ranks have the same jobs, so they alternate in the same order.
        """
        overlapping = device.type == "cuda" and not is_capturing(device)
        overlap.run(jobs, device, width=2 if overlapping else 1)


@dataclass(frozen=True)
class OwnerLocation(ShardedLocation):
    """A matrix that its rule needs whole: gradient and state are sent to its owner, the results are sent back.

    state: the cuts of each state tensor. All of them are divided over the whole team.
    """

    state: StateCuts = ()

    def algebra(self, m: int, n: int) -> Algebra:
        """Return the plain algebra: the rule sees whole matrices."""
        return Algebra(m, n)

    @cached_property
    def exchanged(self) -> list[ShardMap]:
        """The tensors that an owner needs of each matrix: the gradient and the state."""
        cuts = [(self.rows, self.cols), *(cuts for _, cuts in self.state)]
        return [ShardMap(x, self.mesh_shape, self.team) for x in cuts]

    def run(self, take_step: TakeStep, alg: Algebra, G: Tensor, state: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        """Take the step on the matrices that this rank owns."""
        names = [name for name, _ in self.state]
        exchange = self.exchange(G.shape[0])
        G_whole, *values = exchange.to_owners([G, *(state[name] for name in names)])
        D_whole, new = G_whole, dict(zip(names, values, strict=True))  # empty, if this rank owns no matrix
        if len(G_whole):
            D_whole, new = take_step(alg, G_whole, new, t[exchange.my_slice], exchange.my_slice)
        D, *values = exchange.to_shards([D_whole, *(new[name] for name in names)])
        return D, dict(zip(names, values, strict=True))


def sharded_location(mesh: DeviceMesh, rows: Cut, cols: Cut, owner_state: StateCuts | None = None) -> ShardedLocation:
    """Return the location of a matrix on a mesh. Create missing process groups: every rank of the mesh must call it.

    owner_state: the cuts of each state tensor, if the rule needs whole matrices.
    """
    team = team_of(mesh, sorted({*rows.mesh_dims, *cols.mesh_dims}))
    assert team is not None, "nothing is cut"
    coordinate = tuple(mesh.get_coordinate() or ())
    row_team, col_team = team_of(mesh, rows.mesh_dims), team_of(mesh, cols.mesh_dims)
    location = (rows, cols, tuple(mesh.shape), coordinate, team, row_team, col_team)
    return ShardedLocation(*location) if owner_state is None else OwnerLocation(*location, state=owner_state)
