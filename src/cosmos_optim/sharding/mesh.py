"""Which part of a tensor is on which rank, from a DTensor's mesh and placements.

A `Cut` says how one dimension is divided, a `Team` which ranks share it. FSDP2, HSDP, tensor
parallelism and their products all divide a dimension into nested intervals, so a rank's part is an interval too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cosmos_optim.sharding import collectives

SUPPORTED = (
    "Supported are Shard (each dimension of a matrix may be cut, over one mesh dimension or several), Replicate, and "
    "FSDP2 over tensor parallelism, as fully_shard and parallelize_module make them"
)
Coordinate = tuple[int, ...]


class Interval(NamedTuple):
    """The indices start, ..., start + length - 1 of a dimension."""

    start: int
    length: int


@dataclass(frozen=True)
class Cut:
    """A dimension of `size` elements, divided over the mesh dimensions `mesh_dims`, the outermost first.

    [low, high) is the block that this cut describes: a fused weight is cut over the ranks as one matrix, so a rank's
    part of a block is the intersection of its interval with the block.
    """

    size: int
    mesh_dims: tuple[int, ...]
    low: int
    high: int

    def part(self, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Interval:
        """Return the part at a mesh coordinate, counted from `low`. Parts are those of torch.chunk."""
        start, length = 0, self.size
        for dim in self.mesh_dims:
            chunk = -(-length // mesh_shape[dim])
            offset = min(chunk * coordinate[dim], length)
            start, length = start + offset, min(chunk, length - offset)
        first, last = max(start, self.low), min(start + length, self.high)
        return Interval(min(first, self.high) - self.low, max(last - first, 0))


def cuts_of(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Cut]:
    """Return the cut of each dimension of a tensor. Raise ValueError for placements that are not nested intervals."""
    for placement in placements:
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise ValueError(f"its placement {placement} is neither Shard nor Replicate. {SUPPORTED}")
    cuts = []
    for dim, size in enumerate(shape):
        shards = ((i, p) for i, p in enumerate(placements) if isinstance(p, (Shard, _StridedShard)))
        mesh_dims = [i for i, p in shards if p.dim % len(shape) == dim]
        cuts.append(Cut(size, tuple(_outermost_first(mesh_dims, mesh, placements)), 0, size))
    return cuts


def _outermost_first(mesh_dims: list[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """Return mesh dimensions in the order in which they divide a tensor dimension, the outermost first.

    Shards divide from left to right. FSDP2 divides the parts made by tensor parallelism, although its mesh
    dimension is to the left. torch marks this with a strided shard: its split factor is the number of parts made by the
    dimensions to its right.
    """
    if not mesh_dims:
        return []
    first, others = mesh_dims[0], mesh_dims[1:]
    placement = placements[first]
    inner = _outermost_first(others, mesh, placements)
    if not isinstance(placement, _StridedShard):
        return [i for i in (first, *inner) if mesh.size(i) > 1]
    parts = math.prod(mesh.size(i) for i in others)
    if placement.split_factor != parts:
        raise ValueError(
            f"its placement {placement} interleaves {placement.split_factor} parts, but the mesh dimensions to its "
            f"right make {parts}: that is not FSDP2 over tensor parallelism. {SUPPORTED}"
        )
    return [i for i in (*inner, first) if mesh.size(i) > 1]


# -- ranks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks that differ from this one only in some mesh dimensions.

    group: their process group.
    coordinates: the mesh coordinate of each, in the group's order.
    rank: the position of this process in that order.
    """

    group: dist.ProcessGroup
    coordinates: tuple[Coordinate, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks in the team."""
        return len(self.coordinates)


# Teams by default group, mesh and dimensions. destroy_process_group invalidates all groups; afterwards, the
# default group is a different one.
_teams: dict[object, Team] = {}


def team_of(mesh: DeviceMesh, dims: Sequence[int]) -> Team | None:
    """Return the team over these mesh dimensions; None if it is only this rank. All ranks of the mesh must call it."""
    dims = [d for d in dims if mesh.size(d) > 1]
    coordinate = mesh.get_coordinate()
    if not dims or coordinate is None:
        return None
    key = (dist.group.WORLD, mesh, tuple(dims))
    if key not in _teams:
        members = _members(mesh, dims, coordinate)
        group = mesh.get_group(dims[0]) if len(dims) == 1 else _group_over(mesh, dims, sorted(members))
        order = dist.get_process_group_ranks(group)
        _teams[key] = Team(group, tuple(members[r] for r in order), order.index(dist.get_rank()))
    return _teams[key]


def ranks_in(mesh: DeviceMesh) -> set[int]:
    """Return all ranks of a mesh."""
    return set(mesh.mesh.flatten().tolist())


def groups_covering(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return groups: taking the maximum over each in turn gives the maximum over all ranks of the mesh."""
    if mesh.size() == dist.get_world_size() and mesh.ndim > 1 and dist.group.WORLD is not None:
        return [dist.group.WORLD]
    return [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]


def _members(mesh: DeviceMesh, dims: Sequence[int], coordinate: Sequence[int]) -> dict[int, Coordinate]:
    """Return the ranks that differ from the one at this coordinate in these dimensions only, and their coordinates."""
    members: dict[int, Coordinate] = {}
    for values in product(*(range(mesh.size(d)) for d in dims)):
        full = list(coordinate)
        for dim, value in zip(dims, values, strict=True):
            full[dim] = value
        members[int(mesh.mesh[tuple(full)])] = tuple(full)
    return members


def _group_over(mesh: DeviceMesh, dims: Sequence[int], ranks: list[int]) -> dist.ProcessGroup:
    """Return a group of these ranks over several mesh dimensions, because a mesh only has groups for single ones."""
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    if mesh.size() < dist.get_world_size():
        return _group_of_some_ranks(mesh, dims, ranks)
    # All ranks are in the mesh, and each must take part in creating every group.
    others = (range(1 if d in dims else mesh.size(d)) for d in range(mesh.ndim))
    group, _ = dist.new_subgroups_by_enumeration([sorted(_members(mesh, dims, at)) for at in product(*others)])
    return group


def _group_of_some_ranks(mesh: DeviceMesh, dims: Sequence[int], ranks: list[int]) -> dist.ProcessGroup:
    """Create a group without the ranks outside of the mesh.

    torch then names a group by its ranks and by the number of groups that a rank is in already. If that number differs,
    the ranks wait forever. Also, torch must not split the group of all ranks, which all would have to join.
    """
    held = len(dist.distributed_c10d._world.pg_names)
    counts = torch.tensor([held, -held], dtype=torch.float32, device=mesh.device_type)
    for dim in dims:
        counts = collectives.maximum(counts, mesh.get_group(dim))
    most, least = counts.tolist()
    if most != -least:
        raise ValueError(
            f"the ranks {ranks} need their own process group, which torch cannot make while they are in different "
            f"numbers of groups ({-least:.0f} to {most:.0f}): make each of them a member of equally many groups "
            "before you build the optimizer, or build it before the other groups"
        )
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(ranks, use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
