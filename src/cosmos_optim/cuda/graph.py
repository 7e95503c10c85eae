"""The step of the matrices as a CUDA graph: recorded once, replayed for as long as nothing but numbers changes.

A step asks for thousands of kernels, and asking costs the host more time than the kernels cost the GPU. A graph asks
once. It reads the rates, the flag for a skipped step, the largest entries and the addresses of the gradients from the
device, where each step writes them first; parameters and state it finds where they were. Everything else that it
depends on is its key: the step is recorded anew when that changes, after it has stayed the same for a few steps.

A graph keeps the work buffers of its step (`opt.replays.bytes`) for itself; `cuda_graphs=False` gives them up.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda import pointer_list as table
from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.streams import Lanes
from cosmos_optim.engine.batching import Moving, buckets, chunks, local_algebra, room_for, run_chunk, tops_of
from cosmos_optim.engine.entries import Entry, by_group, decay_of, settings, signed_lr
from cosmos_optim.engine.layout import HERE, Layout

# Steps with the same key before it is recorded: kernels are compiled by then, and gradients lie where they will.
SETTLED = 2
# Recordings that were given up early, after which steps are no longer recorded: something changes all the time.
PATIENCE = 8
WORTH_IT = 20


@dataclass(eq=False)
class Recording:
    """One graph and the tensors through which a step talks to it."""

    key: Hashable
    inside: set[Tensor]
    addresses: Tensor  # of the gradients, in the order of the chunks
    numbers: Tensor  # signed rate and decay of each group
    skip: Tensor
    tops: Tensor  # the largest |g| of each block of each entry
    index: Tensor  # where those stand among all of the step's
    groups: list[dict[str, Any]]
    offsets: list[tuple[int, int]]  # for each matrix, which entry it is of and where in its gradient it begins
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    held: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    where: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    bytes: int = 0
    replayed: int = 0

    def prepare(self, entries: Sequence[Entry], order: list[int], skip: Tensor, peaks: Tensor) -> None:
        """Write what this step's kernels will read; on the caller's stream, without waiting for it."""
        places = [e.grad.data_ptr() for e in entries]
        where = [places[i] + offset for i, offset in self.offsets]
        if where != self.where:
            self.addresses.copy_(_pinned(where, torch.int64), non_blocking=True)
            self.where = where
        if order != self.order:
            self.index.copy_(_pinned(order, torch.int64), non_blocking=True)
            self.order = order
        self._write_numbers()
        self.skip.copy_(skip)
        self.tops.copy_(peaks.index_select(0, self.index))

    def _write_numbers(self) -> None:
        values = [x for g in self.groups for x in (signed_lr(g), decay_of(g))]
        there = {i: x for i, x in enumerate(values) if isinstance(x, Tensor) and x.is_cuda}
        known = [0.0 if i in there else float(x) for i, x in enumerate(values)]
        # A kernel that gets a number from the host gets it in float32: the same here, bit for bit.
        rounded = torch.tensor(known, dtype=torch.float32, device="cpu").tolist()
        self.numbers.copy_(_pinned(rounded, torch.float64), non_blocking=True)
        for i, x in there.items():
            self.numbers[i].copy_(x)

    def replay(self) -> None:
        """Start the graph on the current stream."""
        self.graph.replay()
        self.replayed += 1


def _pinned(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Host memory that a copy may read later: the allocator reuses it only after that."""
    return torch.tensor(values, dtype=dtype, device="cpu").pin_memory()


class Replays:
    """The graphs of one optimizer: at most one is alive."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.recording: Recording | None = None
        self._last: Hashable = None
        self._seen = 0
        self._wasted = 0

    @property
    def bytes(self) -> int:
        """GPU memory that the graph keeps for its work buffers."""
        return 0 if self.recording is None else self.recording.bytes

    def take(
        self, entries: Sequence[Entry], skip: Tensor | None, peaks: Tensor
    ) -> tuple[set[Tensor], Callable[[], None] | None]:
        """The parameters whose step is a replay, and the replay."""
        if not self.on or skip is None or torch.cuda.is_current_stream_capturing():
            return set(), None
        matrices: list[Entry] = []
        order: list[int] = []
        end = 0
        for e in entries:
            begin, end = end, end + e.layout.count
            if e.rule.lazy and type(e.layout) is Layout:
                matrices.append(e)
                order += range(begin, end)
        if not matrices:
            return set(), None
        key = signature(matrices)
        if self.recording is None or self.recording.key != key:
            self._drop()
            self._seen = self._seen + 1 if key == self._last else 0
            self._last = key
            if self._seen < SETTLED or not self.on or not self._record(matrices, key):
                return set(), None
        recording = self.recording
        assert recording is not None
        recording.prepare(matrices, order, skip, peaks)
        return recording.inside, recording.replay

    def _drop(self) -> None:
        """Forget a recording that no longer fits."""
        if self.recording is not None:
            self._wasted = self._wasted + 1 if self.recording.replayed < WORTH_IT else 0
            self.on = self._wasted < PATIENCE
            self.recording = None

    def _record(self, entries: Sequence[Entry], key: Hashable) -> bool:
        """Record the step of those that can be recorded; False if none can, or if it fails."""
        inside = recordable(entries)
        if not inside:
            self.on = False
            return False
        try:
            self.recording = record(entries, inside, key)
        except RuntimeError as error:  # out of memory, or a call that this driver does not allow in a capture
            self.on = False
            warnings.warn(
                f"the optimizer's step could not be recorded as a CUDA graph and runs without one, slower: "
                f"{type(error).__name__}: {str(error)[:200]}. cuda_graphs=False keeps it from trying",
                stacklevel=2,
            )
        return self.recording is not None


def signature(entries: Sequence[Entry]) -> Hashable:
    """All that a recorded step depends on and does not read from the device."""
    groups: dict[int, Hashable] = {}
    rows = []
    for e in entries:
        group = id(e.group)
        if group not in groups:
            groups[group] = settings(e.group)
        grad = e.grad
        rows.append((
            group, e.p.data_ptr(), e.p.dtype, grad.shape, grad.stride(), grad.dtype, grad.data_ptr() % 16,
            tuple([x.data_ptr() for x in e.state.values()]),
        ))  # fmt: skip
    return tuple(rows), tuple(groups.values())


def recordable(entries: Sequence[Entry]) -> list[Entry]:
    """Those whose every block is a view that the kernels can run on, of a gradient that can be found again."""
    copies: list[tuple[Tensor, Tensor]] = []
    out: set[Tensor] = set()
    for held in by_group(entries):
        for _, matrices in buckets(held, set(), copies):
            fused = local_algebra(matrices) is FusedAlgebra and matrices[0].place is HERE
            out |= {x.entry.p for x in matrices if not fused or not _inside(x.grad, x.entry.grad)}
    out |= {home for home, _ in copies}
    return [e for e in entries if e.p not in out]


def _inside(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def record(entries: Sequence[Entry], inside: Sequence[Entry], key: Hashable) -> Recording:
    """Capture the step of `inside`; nothing runs."""
    device = entries[0].p.device
    index = {e.p: i for i, e in enumerate(entries)}
    groups = [held[0].group for held in by_group(inside)]
    count, blocks = sum(e.layout.count for e in inside), sum(e.layout.count for e in entries)
    made = Recording(
        key, {e.p for e in inside}, torch.zeros(count, dtype=torch.int64, device=device),
        torch.zeros(2 * len(groups), dtype=torch.float64, device=device),
        torch.zeros((), dtype=torch.bool, device=device), torch.zeros(blocks, dtype=torch.float32, device=device),
        torch.zeros(blocks, dtype=torch.int64, device=device), groups, [],
    )  # fmt: skip
    tops = tops_of(entries, made.tops)
    jobs: list[tuple[int, Callable[[], None]]] = []
    room = 0
    for i, held in enumerate(by_group(inside)):
        lr, decay = made.numbers[2 * i], made.numbers[2 * i + 1]
        for (m, n), matrices in buckets(held, set(), []):
            for chunk in chunks(matrices, FusedAlgebra):
                begin = len(made.offsets)
                made.offsets += [(index[x.entry.p], x.grad.data_ptr() - x.entry.grad.data_ptr()) for x in chunk]
                moving = Moving(made.addresses[begin : len(made.offsets)], lr, decay)
                job = partial(run_chunk, chunk, HERE, m, n, made.skip, None, FusedAlgebra, tops, moving)
                jobs.append((len(chunk) * m * n, job))
                room = max(room, room_for(chunk))
    # The largest first: the buffers of the others then fit into theirs, and the graph keeps less memory.
    _capture(made, [job for _, job in sorted(jobs, key=lambda item: -item[0])], room, device)
    return made


def _capture(made: Recording, jobs: Sequence[Callable[[], None]], room: int, device: torch.device) -> None:
    """Run the jobs under capture, two at a time as a step does."""
    lanes, stream = Lanes.of(device), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    collects = gc.isenabled()
    gc.disable()  # what it frees may belong to another graph, and a capture allows no such call
    try:
        with table.keeping(made.held), torch.cuda.stream(stream):
            before = torch.cuda.memory_reserved(device)
            # Other threads may pin memory or ask for events meanwhile: only this one is held to the rules.
            made.graph.capture_begin(capture_error_mode="thread_local")
            try:
                with lanes.forked(room):
                    for k, job in enumerate(jobs):
                        with lanes.lane(k):
                            job()
            finally:
                made.graph.capture_end()
            made.bytes = torch.cuda.memory_reserved(device) - before
    finally:
        if collects:
            gc.enable()
