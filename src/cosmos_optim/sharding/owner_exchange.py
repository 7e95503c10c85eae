"""Send the shards of each matrix of a stack to one rank, its owner, and the owner's results back to the shards.

Each of k ranks owns floor(N / k) of N matrices; N mod k ranks, from a given first rank on, own one more. One
all-to-all sends every shard to its owner. Nothing is padded, so shards may be uneven or empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from cosmos_optim.sharding import collectives
from cosmos_optim.sharding.mesh import Cut, Interval, Team

# One rank's part of a tensor: an interval of each dimension.
Part = tuple[Interval, ...]


@dataclass(frozen=True)
class Grid:
    """p x q parts of a x b elements, row by row.

    rank_step: distance between the ranks of neighbouring parts: 1, or more for FSDP2 over other divisions.
    """

    p: int
    q: int
    a: int
    b: int
    rank_step: int

    def join(self, parts: Tensor, count: int) -> Tensor:
        """Return (ranks, count * a * b) as (count, p * a, q * b), by one or two copies for any number of ranks."""
        k = self.p * self.q
        x = parts.reshape(k // self.rank_step, self.rank_step, count, self.a, self.b).transpose(0, 1)
        x = x.reshape(self.p, self.q, count, self.a, self.b).permute(2, 0, 3, 1, 4)
        return x.reshape(count, self.p * self.a, self.q * self.b)

    def split(self, wholes: Tensor) -> Tensor:
        """Return (count, p * a, q * b) as (ranks, count * a * b), the inverse of `join`."""
        k, count = self.p * self.q, wholes.shape[0]
        x = wholes.reshape(count, self.p, self.a, self.q, self.b).permute(1, 3, 0, 2, 4)
        return x.reshape(self.rank_step, k // self.rank_step, -1).transpose(0, 1).reshape(k, -1)


class ShardMap:
    """The parts of one matrix (or state tensor) on the ranks of a team, in the team's order.

    part_shapes, part_numels: the shape and the number of elements of each rank's part.
    whole_shape: the shape of all parts together.
    """

    def __init__(self, cuts: Sequence[Cut], mesh_shape: Sequence[int], team: Team) -> None:
        self.parts: list[Part] = [tuple(cut.part(mesh_shape, at) for cut in cuts) for at in team.coordinates]
        self.part_shapes = [tuple(interval.length for interval in part) for part in self.parts]
        self.part_numels = [math.prod(shape) for shape in self.part_shapes]
        self.whole_shape = tuple(max(x.start + x.length for x in cut) for cut in zip(*self.parts, strict=True))

    @cached_property
    def grid(self) -> Grid | None:
        """The grid that equal parts form; None if they differ, or if their ranks have no regular order."""
        k, shapes = len(self.parts), set(self.part_shapes)
        a, b = next(iter(shapes)) if len(shapes) == 1 and len(self.parts[0]) == 2 else (0, 0)
        if not a * b:
            return None
        p, q = self.whole_shape[0] // a, self.whole_shape[1] // b
        order = sorted(range(k), key=lambda rank: self.parts[rank])
        if [self.parts[rank] for rank in order] != [((i * a, a), (j * b, b)) for i in range(p) for j in range(q)]:
            return None
        step = order[1] - order[0] if k > 1 else 1
        if step < 1 or k % step or order != [i + j * step for i in range(step) for j in range(k // step)]:
            return None
        return Grid(p, q, a, b, step)

    @cached_property
    def axis(self) -> int | None:
        """The divided dimension, if there is only one and parts are in the order of ranks; else None."""
        divided = [a for a in range(len(self.parts[0])) if len({part[a] for part in self.parts}) > 1]
        if len(divided) > 1:
            return None
        axis = divided[0] if divided else 0
        end = 0
        for part in self.parts:
            start, length = part[axis]
            if length and start != end:
                return None
            end += length
        return axis


class Exchange:
    """The exchange of `count` matrices between shards and owners; each matrix is made of tensors with these maps.

    first_owner: the first of the ranks that own one matrix more than the others.
    owned_counts: the number of matrices that each rank owns; owned_slices: which of the stack they are.
    my_count, my_slice: the same for this rank.
    runs: neighbouring ranks with equal parts, which one copy moves.
    """

    def __init__(self, team: Team, count: int, maps: Sequence[ShardMap], first_owner: int = 0) -> None:
        self.team, self.maps = team, maps
        k = team.size
        self.owned_counts = [count // k + ((j - first_owner) % k < count % k) for j in range(k)]
        ends = accumulate(self.owned_counts)
        self.owned_slices = [slice(end - owned, end) for end, owned in zip(ends, self.owned_counts, strict=True)]
        self.my_count, self.my_slice = self.owned_counts[team.rank], self.owned_slices[team.rank]
        # Elements of one matrix on each rank, in all its tensors.
        self.sizes = [sum(x.part_numels[i] for x in maps) for i in range(k)]
        along_axes = all(x.axis is not None for x in maps)
        grids = [x.grid for x in maps]
        self.grids = [] if along_axes or None in grids else [grid for grid in grids if grid is not None]
        alike = [tuple(x.part_shapes[i] for x in maps) if along_axes else i for i in range(k)]
        self.runs = [[i for i, _ in run] for _, run in groupby(enumerate(alike), key=lambda pair: pair[1])]

    def to_owners(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Send stacks (count, *part) of one dtype; return the whole tensors that this rank owns, (owned, *whole)."""
        me, owned = self.team.rank, self.my_count
        send = [count * self.sizes[me] for count in self.owned_counts]
        receive = [owned * size for size in self.sizes]
        if len(stacks) == 1:
            flat = stacks[0].reshape(-1)
        else:
            flat = torch.cat([stack[own].reshape(-1) for own in self.owned_slices for stack in stacks])
        arrived = collectives.exchange(flat, send, receive, self.team.group)
        if not owned:  # true for most ranks if there are more ranks than matrices
            return [arrived.new_empty(0, *x.whole_shape) for x in self.maps]
        if self.grids:
            parts = self._by_tensor(arrived.view(self.team.size, -1), 0, owned)
            return [grid.join(part, owned) for grid, part in zip(self.grids, parts, strict=True)]
        pieces: list[list[Tensor]] = [[] for _ in self.maps]
        offset = 0
        for run in self.runs:
            size = receive[run[0]]
            rows = arrived[offset : offset + len(run) * size].view(len(run), size)
            offset += len(run) * size
            for x, found, part in zip(self.maps, pieces, self._by_tensor(rows, run[0], owned), strict=True):
                shape = (len(run), owned, *x.part_shapes[run[0]])
                axis = 1 + (x.axis or 0)
                found.append(part.reshape(shape).movedim(0, axis).flatten(axis, axis + 1))
        return [_join(found, x, self.runs) for x, found in zip(self.maps, pieces, strict=True)]

    def to_shards(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Send whole tensors (owned, *whole) from their owners; return stacks (count, *part) of this rank's parts."""
        me, owned = self.team.rank, self.my_count
        send = [owned * size for size in self.sizes]
        receive = [count * self.sizes[me] for count in self.owned_counts]
        arrived = collectives.exchange(self._flatten_for_shards(wholes), send, receive, self.team.group)
        shapes = [x.part_shapes[me] for x in self.maps]
        if len(shapes) == 1:
            return [arrived.view(sum(self.owned_counts), *shapes[0])]
        by_owner = [
            self._by_tensor(block.view(1, -1), me, count)
            for count, block in zip(self.owned_counts, arrived.split(receive), strict=True)
        ]
        stacks = [torch.cat([part.view(-1) for part in parts]) for parts in zip(*by_owner, strict=True)]
        return [stack.view(sum(self.owned_counts), *shape) for stack, shape in zip(stacks, shapes, strict=True)]

    def _flatten_for_shards(self, wholes: Sequence[Tensor]) -> Tensor:
        """Return the parts of whole tensors as one vector, ordered by the receiving rank."""
        if not self.my_count:
            return wholes[0].new_empty(0)
        if self.grids:
            blocks = [[grid.split(x) for grid, x in zip(self.grids, wholes, strict=True)]]
        else:
            blocks = [[_split(whole, x, run).reshape(len(run), -1) for whole, x in zip(wholes, self.maps, strict=True)]
                      for run in self.runs]  # fmt: skip
        rows = [(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(-1) for parts in blocks]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _by_tensor(self, rows: Tensor, rank: int, count: int) -> tuple[Tensor, ...]:
        """Split rows, each with `rank`'s parts of `count` matrices, into the tensors of a matrix."""
        return rows.split([count * x.part_numels[rank] for x in self.maps], dim=1)


def _split(wholes: Tensor, shards: ShardMap, run: list[int]) -> Tensor:
    """Return the parts of whole tensors (owned, *whole) for a run of ranks: (run, owned, *part)."""
    axis, first = shards.axis, shards.parts[run[0]]
    if axis is None:
        for dim, (start, length) in enumerate(first):
            wholes = wholes.narrow(dim + 1, start, length)
        return wholes.unsqueeze(0)
    start, length = first[axis]
    if length == 0:
        return wholes.new_empty(len(run), wholes.shape[0], *shards.part_shapes[run[0]])
    parts = wholes.narrow(axis + 1, start, len(run) * length).unflatten(axis + 1, (len(run), length))
    return parts.movedim(axis + 1, 0)


def _join(pieces: list[Tensor], shards: ShardMap, runs: list[list[int]]) -> Tensor:
    """Return the pieces (owned, *part) of all runs as whole tensors: one row of pieces, or a grid of them."""
    if shards.axis is not None:
        return torch.cat(pieces, dim=shards.axis + 1) if len(pieces) > 1 else pieces[0]
    placed = sorted((shards.parts[run[0]], i) for i, run in enumerate(runs) if pieces[i].numel())
    if not placed:
        return pieces[0].new_empty(pieces[0].shape[0], *shards.whole_shape)
    bands = [torch.cat([pieces[i] for _, i in band], dim=-1) for _, band in groupby(placed, key=lambda p: p[0][0])]
    return torch.cat(bands, dim=-2)
