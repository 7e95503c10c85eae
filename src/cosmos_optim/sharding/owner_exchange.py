"""Whole matrices from shards: each matrix of a stack travels to one rank, its owner, and the result travels back.

Of N matrices on k ranks each rank owns floor(N / k), and N mod k of them one more, counted from a given first rank. One
all-to-all takes every shard where it belongs; nothing is padded, so shards may be uneven or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from cosmos_optim.sharding import collectives
from cosmos_optim.sharding.mesh import Cut, Interval, Team

Parts = tuple[Interval, ...]


@dataclass(frozen=True)
class Grid:
    """p x q parts of a x b elements, row by row; ranks of neighbours are `step` apart (1, or FSDP2 over others)."""

    p: int
    q: int
    a: int
    b: int
    step: int

    def join(self, parts: Tensor, owned: int) -> Tensor:
        """(ranks, owned * a * b) -> (owned, p * a, q * b), by one copy or two, however many ranks there are."""
        k = self.p * self.q
        x = parts.reshape(k // self.step, self.step, owned, self.a, self.b).transpose(0, 1)
        x = x.reshape(self.p, self.q, owned, self.a, self.b).permute(2, 0, 3, 1, 4)
        return x.reshape(owned, self.p * self.a, self.q * self.b)

    def cut(self, whole: Tensor) -> Tensor:
        """The way back."""
        k, owned = self.p * self.q, whole.shape[0]
        x = whole.reshape(owned, self.p, self.a, self.q, self.b).permute(1, 3, 0, 2, 4)
        return x.reshape(self.step, k // self.step, -1).transpose(0, 1).reshape(k, -1)


@dataclass(frozen=True)
class ShardMap:
    """The parts of one whole matrix (or state tensor) on the ranks of a team, in the team's order."""

    parts: tuple[Parts, ...]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each rank's part."""
        return [tuple(length for _, length in part) for part in self.parts]

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The shape of all parts together."""
        return tuple(max(start + length for start, length in along) for along in zip(*self.parts, strict=True))

    @cached_property
    def grid(self) -> Grid | None:
        """How equal parts lie in the whole matrix; None where they differ, or the ranks follow no order."""
        k, shapes = len(self.parts), set(self.shapes)
        a, b = next(iter(shapes)) if len(shapes) == 1 and len(self.parts[0]) == 2 else (0, 0)
        if not a * b:
            return None
        p, q = self.whole[0] // a, self.whole[1] // b
        order = sorted(range(k), key=lambda rank: self.parts[rank])
        if [self.parts[rank] for rank in order] != [((i * a, a), (j * b, b)) for i in range(p) for j in range(q)]:
            return None
        step = order[1] - order[0] if k > 1 else 1  # between the ranks of neighbours
        if step < 1 or k % step or order != [i + j * step for i in range(step) for j in range(k // step)]:
            return None
        return Grid(p, q, a, b, step)

    @cached_property
    def axis(self) -> int | None:
        """The one dimension that is divided, where the parts follow each other in the ranks' order."""
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


def shard_map(cuts: Sequence[Cut], mesh_shape: Sequence[int], team: Team) -> ShardMap:
    """The parts that these cuts give to each rank of a team."""
    return ShardMap(tuple(tuple(cut.part(mesh_shape, at) for cut in cuts) for at in team.at))


class Exchange:
    """The journey of `count` matrices to their owners and back, each made of tensors with these maps.

    first: the rank from which on some ranks own a matrix more than others.
    """

    def __init__(self, team: Team, count: int, maps: Sequence[ShardMap], first: int = 0) -> None:
        self.team, self.maps = team, maps
        k = team.size
        self.counts = [count // k + ((j - first) % k < count % k) for j in range(k)]
        ends = list(accumulate(self.counts))
        self.owned = [slice(end - held, end) for end, held in zip(ends, self.counts, strict=True)]
        self.mine = self.owned[team.me]
        # Elements of one matrix on each rank, and neighbours with equal parts: those are moved by one copy.
        self.sizes = [sum(torch.Size(t.shapes[i]).numel() for t in maps) for i in range(k)]
        rows = all(t.axis is not None for t in maps)
        grids = [t.grid for t in maps]
        self.grids = [] if rows or None in grids else [grid for grid in grids if grid is not None]
        alike = [tuple(t.shapes[i] for t in maps) if rows else i for i in range(k)]
        self.runs = [[i for i, _ in run] for _, run in groupby(enumerate(alike), key=lambda pair: pair[1])]

    def to_owners(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Stacks (count, *part) of one dtype -> the whole tensors owned here, (owned, *whole) each."""
        here = self.team.me
        owned = self.counts[here]
        send = [self.counts[j] * self.sizes[here] for j in range(self.team.size)]
        receive = [owned * size for size in self.sizes]
        if len(stacks) == 1:
            flat = stacks[0].reshape(-1)
        else:
            flat = torch.cat([stack[own].reshape(-1) for own in self.owned for stack in stacks])
        arrived = collectives.exchange(flat, send, receive, self.team.group)
        if not owned:  # most ranks, where there are more of them than matrices
            return [arrived.new_empty(0, *t.whole) for t in self.maps]
        if self.grids:
            parts = self._columns(arrived.view(self.team.size, -1), 0, owned)
            return [grid.join(part, owned) for grid, part in zip(self.grids, parts, strict=True)]
        pieces: list[list[Tensor]] = [[] for _ in self.maps]
        offset = 0
        for run in self.runs:
            size = receive[run[0]]
            rows = arrived[offset : offset + len(run) * size].view(len(run), size)
            offset += len(run) * size
            for t, found, part in zip(self.maps, pieces, self._columns(rows, run[0], owned), strict=True):
                shape = (len(run), owned, *t.shapes[run[0]])
                axis = 1 + (t.axis or 0)
                found.append(part.reshape(shape).movedim(0, axis).flatten(axis, axis + 1))
        return [_join(found, t, self.runs) for t, found in zip(self.maps, pieces, strict=True)]

    def to_shards(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """The way back: (owned, *whole) tensors -> stacks (count, *part)."""
        here = self.team.me
        owned = self.counts[here]
        send = [owned * size for size in self.sizes]
        receive = [self.counts[j] * self.sizes[here] for j in range(self.team.size)]
        arrived = collectives.exchange(self._outgoing(wholes), send, receive, self.team.group)
        shapes = [t.shapes[here] for t in self.maps]
        if len(shapes) == 1:
            return [arrived.view(sum(self.counts), *shapes[0])]
        stacks: list[list[Tensor]] = [[] for _ in shapes]
        for count, block in zip(self.counts, arrived.split(receive), strict=True):
            for stack, part in zip(stacks, self._columns(block.view(1, -1), here, count), strict=True):
                stack.append(part)
        return [torch.cat([p.view(-1) for p in s]).view(-1, *shape) if torch.Size(shape).numel() else
                s[0].new_empty(sum(self.counts), *shape) for s, shape in zip(stacks, shapes, strict=True)]  # fmt: skip

    def _outgoing(self, wholes: Sequence[Tensor]) -> Tensor:
        """What the ranks are sent, one after the other."""
        if not self.counts[self.team.me]:
            return wholes[0].new_empty(0)
        if self.grids:
            cuts = [[grid.cut(x) for grid, x in zip(self.grids, wholes, strict=True)]]
        else:
            cuts = [[_cut(x, t, run).reshape(len(run), -1) for x, t in zip(wholes, self.maps, strict=True)]
                    for run in self.runs]  # fmt: skip
        rows = [(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).reshape(-1) for parts in cuts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _columns(self, rows: Tensor, rank: int, count: int) -> tuple[Tensor, ...]:
        """Cut the bytes of one rank (each row) into the tensors they hold."""
        return rows.split([count * torch.Size(t.shapes[rank]).numel() for t in self.maps], dim=1)


def _cut(x: Tensor, t: ShardMap, run: list[int]) -> Tensor:
    """The parts of whole tensors x (owned, *whole) for a run of ranks: (run, owned, *part)."""
    if t.axis is None:
        for axis, (start, length) in enumerate(t.parts[run[0]]):
            x = x.narrow(axis + 1, start, length)
        return x.unsqueeze(0)
    start, length = t.parts[run[0]][t.axis]
    if length == 0:
        return x.new_empty(len(run), x.shape[0], *t.shapes[run[0]])
    parts = x.narrow(t.axis + 1, start, len(run) * length).unflatten(t.axis + 1, (len(run), length))
    return parts.movedim(t.axis + 1, 0)


def _join(pieces: list[Tensor], t: ShardMap, runs: list[list[int]]) -> Tensor:
    """The pieces (owned, *part) of all runs as whole tensors: one row of pieces, or a grid of them."""
    if t.axis is not None:
        return torch.cat(pieces, dim=t.axis + 1) if len(pieces) > 1 else pieces[0]
    placed = sorted((t.parts[run[0]], i) for i, run in enumerate(runs) if pieces[i].numel())
    if not placed:
        return pieces[0].new_empty(pieces[0].shape[0], *t.whole)
    bands = [torch.cat([pieces[i] for _, i in band], dim=-1) for _, band in groupby(placed, key=lambda p: p[0][0])]
    return torch.cat(bands, dim=-2)
