"""One step of all parameters: matrices in chunks, beside each other where a GPU can, and all else handed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_optim import sharding as distributed
from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.kernels.launch import current
from cosmos_optim.cuda.rehearsal import Rehearsal
from cosmos_optim.cuda.streams import Lanes
from cosmos_optim.engine.batching import (
    Tops,
    buckets,
    chunks,
    local_algebra,
    room_for,
    run_chunk,
    start_chunk,
    starting_chunks,
    tops_of,
)
from cosmos_optim.engine.elementwise import run_elementwise
from cosmos_optim.engine.entries import Entry, by_group, decay_of, settings

# A team whose messages the work needs (None: none), the device it is done on, and the work.
Job = tuple[object, torch.device, Callable[[], None]]


class Recorder(Protocol):
    """Who may take some of the work of a step off the host."""

    def take(
        self, entries: Sequence[Entry], skip: Tensor | None, peaks: Tensor
    ) -> tuple[set[Tensor], Callable[[], None] | None]:
        """The parameters it will step, and how to start that."""


def run(
    entries: Sequence[Entry], found: Any, record: dict[str, dict[str, float]] | None, recorder: Recorder | None = None
) -> None:
    """One step of every entry. Those still waiting for a first gradient are only decayed."""
    live = [e for e, s in zip(entries, found.started, strict=True) if s]
    fresh = {e.p for e, f in zip(entries, found.fresh, strict=True) if f}
    steps = [e.state["step"] for e in live]
    if live and found.skip is None:
        torch._foreach_add_(steps, 1.0)
    elif live:  # without alpha the tensor would be taken as a number, which makes the host wait for it
        torch._foreach_add_(steps, 1.0 - found.skip.float(), alpha=1.0)
    for e, started in zip(entries, found.started, strict=True):
        if not started and e.group["weight_decay"]:
            e.layout.local(e.p).mul_(decay_of(e.group))
    copies: list[tuple[Tensor, Tensor]] = []
    device = entries[0].p.device
    apart: set[Tensor] = set()
    replay: Callable[[], None] | None = None
    if recorder is not None and record is None and found.skip is not None:
        apart, replay = recorder.take(live, found.skip, found.peaks)
    with ExitStack() as forks:
        if replay is not None:  # before all else that the host has to do: the GPU is waiting
            forks.enter_context(Lanes.of(device).forked())
            with Lanes.of(device).lane(0):
                replay()
        left = [e for e in live if not e.rule.elementwise and e.p not in apart]
        tops = tops_of(entries, found.peaks) if left else {}
        starts, jobs, rooms = chunk_jobs(left, fresh, found.skip, tops, record, copies)
        for where, start in starts:  # before the lanes fork, so that every chunk waits for them
            with current(where):
                start()
        for where, room in rooms.items():  # a model may lie on several GPUs
            forks.enter_context(Lanes.of(where).forked(room))
        for k, (where, job) in enumerate([(where, job) for team, where, job in jobs if team is None]):
            with Lanes.of(where).lane(k):
                job()
        for held in by_group(live):  # after the others are asked for: a GPU does both at once
            if held[0].rule.elementwise:
                run_elementwise(held, found.skip)
    distributed.run([(team, job) for team, _, job in jobs if team is not None], device)
    for home, flat in copies:
        home.copy_(flat)


def chunk_jobs(
    entries: Sequence[Entry],
    fresh: set[Tensor],
    skip: Tensor | None,
    tops: Tops,
    record: dict[str, dict[str, float]] | None,
    copies: list[tuple[Tensor, Tensor]],
) -> tuple[list[tuple[torch.device, Callable[[], None]]], list[Job], dict[torch.device, int]]:
    """First bases by kernels, the chunks of these matrices, and the room for products of the largest on each device."""
    starts: list[tuple[torch.device, Callable[[], None]]] = []
    jobs: list[Job] = []
    rooms: dict[torch.device, int] = {}
    taken: Counter[object] = Counter()
    rehearsal = Rehearsal(skip, tops)
    for held in by_group(entries):
        for (m, n), matrices in buckets(held, fresh, copies):
            local = local_algebra(matrices)
            made = settings(held[0].group) if local is FusedAlgebra else None
            if local is FusedAlgebra and matrices[0].fresh and held[0].rule.start is not None:
                for chunk in starting_chunks(matrices):
                    rehearsal.add(chunk, m, n, made, start=True)
                    starts.append((chunk[0].p.device, partial(start_chunk, chunk, m, n, skip, tops)))
                matrices = [replace(x, fresh=False) for x in matrices]
            for chunk in chunks(matrices, local):
                place = chunk[0].place
                turn = place.after(taken[place.team])
                taken[place.team] += len(chunk)
                there = chunk[0].p.device
                rooms.setdefault(there, 0)
                if local is FusedAlgebra:
                    rooms[there] = max(rooms[there], room_for(chunk))
                    rehearsal.add(chunk, m, n, made, start=False)
                work = partial(run_chunk, chunk, turn, m, n, skip, record, local, tops)
                jobs.append((place.team, there, work))
    rehearsal.run()
    return starts, jobs, rooms
