"""Which part of a tensor lies on which rank, from a DTensor's mesh and placements.

A `Cut` says how one dimension is divided, a `Team` which ranks divide something among them. FSDP2, HSDP, tensor
parallelism and their products all divide a dimension into nested intervals, so that a rank's part is an interval too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cosmos_optim.sharding import collectives

Interval = tuple[int, int]
WORKS = (
    "What works: Shard (each dimension of a matrix may be cut, over one mesh dimension or several), Replicate, and "
    "FSDP2 over tensor parallelism, as fully_shard and parallelize_module make them"
)


@dataclass(frozen=True)
class Cut:
    """A dimension of `size` elements, divided over the mesh dimensions `over`, the outermost first.

    [low, high) is the block of it that is looked at: a fused weight is cut over the ranks as a whole, and its blocks
    get whatever part falls to them.
    """

    size: int
    over: tuple[int, ...]
    low: int
    high: int

    def part(self, mesh_shape: Sequence[int], at: Sequence[int]) -> Interval:
        """(start, length) of the part at this mesh coordinate, counted from `low`. Parts are torch.chunk's."""
        start, length = 0, self.size
        for dim in self.over:
            chunk = -(-length // mesh_shape[dim])
            offset = min(chunk * at[dim], length)
            start, length = start + offset, min(chunk, length - offset)
        first, last = max(start, self.low), min(start + length, self.high)
        if last <= first:
            return min(max(start, self.low), self.high) - self.low, 0
        return first - self.low, last - first

    def block(self, low: int, high: int) -> Cut:
        """The same division, seen from one block of the dimension."""
        return Cut(self.size, self.over, low, high)


def whole(size: int) -> Cut:
    """A dimension that nobody divides."""
    return Cut(size, (), 0, size)


def cuts_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Cut]:
    """The cut of each dimension of a tensor; raises ValueError for placements that are not nested intervals."""
    for placement in placements:
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(f"its placement {placement} is neither Shard nor Replicate. {WORKS}")
    cuts = []
    for dim, size in enumerate(shape):
        shards = ((i, p) for i, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard)))
        over = [i for i, p in shards if p.dim % len(shape) == dim]
        cuts.append(Cut(size, tuple(_order(over, mesh, placements)), 0, size))
    return cuts


def _order(over: list[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """Mesh dimensions in the order they divide a tensor dimension, the outermost first.

    Shards divide from left to right. FSDP2 divides what tensor parallelism has left of a dimension, though its mesh
    dimension stands to the left: torch marks that by a strided shard, whose split factor is the number of parts that
    the dimensions to its right make.
    """
    if not over:
        return []
    first, rest = over[0], over[1:]
    placement = placements[first]
    if not isinstance(placement, _StridedShard):
        return [i for i in (first, *_order(rest, mesh, placements)) if mesh.size(i) > 1]
    parts = 1
    for i in rest:
        parts *= mesh.size(i)
    if placement.split_factor != parts:
        raise ValueError(
            f"its placement {placement} interleaves {placement.split_factor} parts where the mesh dimensions to its "
            f"right make {parts}: that is not FSDP2 over tensor parallelism. {WORKS}"
        )
    return [i for i in (*_order(rest, mesh, placements), first) if mesh.size(i) > 1]


# -- ranks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks that differ from this one only in some mesh dimensions: their group, and where each stands."""

    group: dist.ProcessGroup
    at: tuple[tuple[int, ...], ...]
    me: int

    @property
    def size(self) -> int:
        """Ranks in the team."""
        return len(self.at)


def team_of(mesh: DeviceMesh, dims: Sequence[int]) -> Team | None:
    """The team over these mesh dimensions; None for nobody but this rank. All ranks of the mesh must ask alike."""
    dims = [d for d in dims if mesh.size(d) > 1]
    here = mesh.get_coordinate()
    if not dims or here is None:
        return None
    key = (_world(), mesh, tuple(dims))
    if key not in _teams:
        ranks = _ranks_of(mesh, dims, here)
        group = mesh.get_group(dims[0]) if len(dims) == 1 else _group_of(mesh, dims, sorted(ranks))
        order = dist.get_process_group_ranks(group)
        _teams[key] = Team(group, tuple(ranks[r] for r in order), order.index(dist.get_rank()))
    return _teams[key]


_teams: dict[object, Team] = {}


def _world() -> object:
    """The default group: after destroy_process_group everything made with it is void."""
    return dist.group.WORLD


def agreeing(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Groups over which a maximum, taken one after the other, is that of all ranks of the mesh."""
    if mesh.size() == dist.get_world_size() and mesh.ndim > 1 and dist.group.WORLD is not None:
        return [dist.group.WORLD]
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def _ranks_of(mesh: DeviceMesh, dims: Sequence[int], at: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The ranks that differ from the one at this coordinate in these dimensions only, and their coordinates."""
    ranks: dict[int, tuple[int, ...]] = {}
    for values in _coordinates([mesh.size(d) for d in dims]):
        full = list(at)
        for dim, value in zip(dims, values, strict=True):
            full[dim] = value
        ranks[int(mesh.mesh[tuple(full)])] = tuple(full)
    return ranks


def _group_of(mesh: DeviceMesh, dims: Sequence[int], ranks: list[int]) -> dist.ProcessGroup:
    """A group of ranks over several mesh dimensions, which torch has none of."""
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    if mesh.size() < dist.get_world_size():
        return _group_by_itself(mesh, dims, ranks)
    mine = None
    others = [1 if d in dims else mesh.size(d) for d in range(mesh.ndim)]
    for at in _coordinates(others):  # all ranks are here, and each must take part in the making of every group
        members = sorted(_ranks_of(mesh, dims, at))
        group = dist.new_group(members)
        mine = group if members == ranks else mine
    assert mine is not None
    return mine


def _group_by_itself(mesh: DeviceMesh, dims: Sequence[int], ranks: list[int]) -> dist.ProcessGroup:
    """The same while other ranks do other things.

    torch then names a group by its ranks and the number of groups that a rank is in already: where that differs they
    would wait for ever. And it must not split the group of all ranks, for which all would have to be here.
    """
    held = len(dist.distributed_c10d._world.pg_names)
    counts = torch.tensor([held, -held], dtype=torch.float32, device=mesh.device_type)
    for dim in dims:
        counts = collectives.maximum(counts, mesh.get_group(dim))
    most, least = counts.tolist()
    if most != -least:
        raise ValueError(
            f"the ranks {ranks} need a process group of their own, which torch cannot make while they are in "
            f"different numbers of groups ({-least:.0f} to {most:.0f}): make all of them members of equally many "
            "before the optimizer is built, or build it before the other groups"
        )
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        return dist.new_group(ranks, use_local_synchronization=True)
    world.bound_device_id = None  # type: ignore[union-attr]
    try:
        return dist.new_group(ranks, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound  # type: ignore[union-attr]


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        found = [(*at, i) for at in found for i in range(size)]
    return found
