"""Record the step of the matrices as a CUDA graph, and replay it while only numbers change.

A step launches thousands of kernels, and launching them costs the host more time than they cost the GPU. A graph is one
launch. It reads the learning rates, the flag of a skipped step, the largest |g| and the addresses of the gradients from
the device; each step writes them there first. Parameters and state must keep their addresses. Everything else that the
graph depends on is its key. If the key changes, the step is recorded again once the key is stable for a few steps.

A graph keeps the work buffers of its step allocated (`opt.cuda_graph.bytes`); `cuda_graphs=False` avoids that. If state
is in host memory, the graph also holds the copies (see `cuda.staging`), and their slots count as work buffers.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda import pointer_list
from cosmos_optim.cuda.chunk import DeviceInputs, matrices_in_a_chunk, product_bytes, run_chunk
from cosmos_optim.cuda.staging import Lease, StagedBatch, Staging
from cosmos_optim.cuda.step import SCHEDULES
from cosmos_optim.cuda.streams import Streams
from cosmos_optim.cuda.support import supported
from cosmos_optim.engine.batching import Batch, Entry, batches, by_group, decay_of, settings_key, signed_lr
from cosmos_optim.engine.capture import is_capturing
from cosmos_optim.engine.gradients import GradientCheck
from cosmos_optim.engine.layout import Job

# Repeats of a key before recording: by then kernels are compiled, and gradient addresses are stable. The first step of
# a new run has another key (no flag on the device yet), so its fourth step is recorded; after a resume, the third.
STEPS_BEFORE_RECORDING = 2
# Recording stops after this many recordings in a row that were replayed fewer than `WORTH_IT` times each.
MAX_WASTED = 8
WORTH_IT = 20


@dataclass(eq=False)
class Recording:
    """One graph, and the tensors through which a step passes numbers to it."""

    key: Hashable
    inside: set[Tensor]
    addresses: Tensor  # of the gradients, in the order of the chunks
    numbers: Tensor  # signed learning rate and decay of each group
    skip: Tensor
    grad_max: Tensor  # the largest |g| of each block of each entry
    index: Tensor  # positions of these blocks among all blocks of the step
    groups: list[dict[str, Any]]
    offsets: list[tuple[int, int]]  # for each matrix: its entry, and its offset in the entry's gradient
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    leases: list[Lease] = field(default_factory=list)  # they keep slots and state in host memory alive
    kept_tables: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    last_addresses: list[int] = field(default_factory=list)
    last_index: list[int] = field(default_factory=list)
    bytes: int = 0
    launches: int = 0

    def write_inputs(self, entries: Sequence[Entry], index: list[int], check: GradientCheck) -> None:
        """Write the inputs of this step's kernels, on the caller's stream and without synchronization."""
        begins = [e.grad.data_ptr() for e in entries]
        addresses = [begins[i] + offset for i, offset in self.offsets]
        if addresses != self.last_addresses:
            self.addresses.copy_(_pinned(addresses, torch.int64), non_blocking=True)
            self.last_addresses = addresses
        if index != self.last_index:
            self.index.copy_(_pinned(index, torch.int64), non_blocking=True)
            self.last_index = index
        self._write_numbers()
        assert check.skip is not None
        self.skip.copy_(check.skip)
        self.grad_max.copy_(check.grad_max.index_select(0, self.index))

    def _write_numbers(self) -> None:
        values = [x for g in self.groups for x in (signed_lr(g), decay_of(g))]
        on_device = {i: x for i, x in enumerate(values) if isinstance(x, Tensor) and x.is_cuda}
        on_host = [0.0 if i in on_device else float(x) for i, x in enumerate(values)]
        # Round to float32, as a kernel argument is, so that both ways give the same bits.
        rounded = torch.tensor(on_host, dtype=torch.float32, device="cpu").tolist()
        self.numbers.copy_(_pinned(rounded, torch.float64), non_blocking=True)
        for i, x in on_device.items():
            self.numbers[i].copy_(x)

    def launch(self) -> None:
        """Start the graph on the current stream."""
        self.graph.replay()
        self.launches += 1

    def __del__(self) -> None:
        """Wait for copies to host memory: its allocator does not know what a graph writes, and may lend it again."""
        in_use = self.launches and self.leases and not sys.is_finalizing()
        if in_use and not is_capturing(self.skip.device):
            torch.cuda.synchronize(self.skip.device)


def _pinned(values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return pinned host memory with these values; the allocator reuses it only after pending copies."""
    return torch.tensor(values, dtype=dtype, device="cpu").pin_memory()


class GraphedStep:
    """The graph of one optimizer; at most one is alive.

    enabled: whether steps are recorded. Set to False if recording fails or never pays off.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.recording: Recording | None = None
        self._last_key: Hashable = None
        self._repeats = 0
        self._wasted = 0

    @property
    def bytes(self) -> int:
        """GPU memory that the graph keeps for its work buffers."""
        return 0 if self.recording is None else self.recording.bytes

    def prepare(self, check: GradientCheck) -> tuple[set[Tensor], Callable[[], None] | None]:
        """Return the parameters that the graph steps, and its launch function; record it first if due.

        Only steps with a device flag (`check.skip`) are recorded: every parameter has had a non-zero gradient then.
        """
        if not self.enabled or check.skip is None or is_capturing(check.skip.device):
            return set(), None
        matrices: list[Entry] = []
        index: list[int] = []
        end = 0
        for e in check.entries:
            begin, end = end, end + e.layout.count
            if has_schedule(e):
                matrices.append(e)
                index += range(begin, end)
        if not matrices:
            return set(), None
        key = graph_key(matrices)
        if self.recording is None or self.recording.key != key:
            self._drop()
            self._repeats = self._repeats + 1 if key == self._last_key else 0
            self._last_key = key
            if self._repeats < STEPS_BEFORE_RECORDING or not self.enabled or not self._record(matrices, key):
                return set(), None
        recording = self.recording
        assert recording is not None
        recording.write_inputs(matrices, index, check)
        return recording.inside, recording.launch

    def _drop(self) -> None:
        """Drop a recording that no longer matches the step."""
        if self.recording is not None:
            self._wasted = self._wasted + 1 if self.recording.launches < WORTH_IT else 0
            self.enabled = self._wasted < MAX_WASTED
            self.recording = None

    def _record(self, entries: Sequence[Entry], key: Hashable) -> bool:
        """Record the step of all recordable entries; return False if there are none, or if recording fails."""
        inside = recordable(entries)
        if not inside:
            self.enabled = False
            return False
        try:
            self.recording = record(entries, inside, key)
        except RuntimeError as error:  # out of memory, or a call that this driver forbids during capture
            self.enabled = False
            warnings.warn(
                "the optimizer's step could not be recorded as a CUDA graph and runs without one, more slowly: "
                f"{type(error).__name__}: {str(error)[:200]}. Pass cuda_graphs=False to avoid this attempt",
                stacklevel=2,
            )
        return self.recording is not None


def has_schedule(e: Entry) -> bool:
    """Return whether an entry may be part of a graph: a whole parameter, with a rule that has a schedule."""
    return e.rule.name in SCHEDULES and not e.layout.is_sharded


def graph_key(entries: Sequence[Entry]) -> Hashable:
    """Return everything that a recorded step depends on, except what it reads from the device."""
    groups: dict[int, Hashable] = {}
    names: dict[int, list[str]] = {}
    rows = []
    for e in entries:
        group = id(e.group)
        if group not in groups:
            groups[group] = settings_key(e.group)
            names[group] = ["step", *e.layout.slots(e.group)]
        grad, state = e.grad, e.state
        if len(state) != len(names[group]):  # other code keeps something there too
            state = {name: state[name] for name in names[group]}
        rows.append((
            group, e.p.data_ptr(), e.p.dtype, grad.shape, grad.stride(), grad.dtype, grad.data_ptr() % 16,
            tuple([x.data_ptr() for x in state.values()]),
        ))  # fmt: skip
    return tuple(rows), tuple(groups.values())


def recordable(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries with blocks that the kernels support, as views of parameter and gradient."""
    copies: list[tuple[Tensor, Tensor]] = []
    out: set[Tensor] = set()
    for batch in batches(entries, set(), copies):
        able = supported(batch)
        out |= {x.entry.p for x in batch.matrices if not able or not _shares_memory(x.grad, x.entry.grad)}
    out |= {stored for stored, _ in copies}
    return [e for e in entries if e.p not in out]


def _shares_memory(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def record(entries: Sequence[Entry], inside: Sequence[Entry], key: Hashable) -> Recording:
    """Capture the step of `inside` without running it."""
    device = entries[0].p.device
    position = {e.p: i for i, e in enumerate(entries)}
    groups = [members[0].group for members in by_group(inside)]
    number_index = {id(group): 2 * i for i, group in enumerate(groups)}
    count, blocks = sum(e.layout.count for e in inside), sum(e.layout.count for e in entries)
    made = Recording(
        key=key,
        inside={e.p for e in inside},
        addresses=torch.zeros(count, dtype=torch.int64, device=device),
        numbers=torch.zeros(2 * len(groups), dtype=torch.float64, device=device),
        skip=torch.zeros((), dtype=torch.bool, device=device),
        grad_max=torch.zeros(blocks, dtype=torch.float32, device=device),
        index=torch.zeros(blocks, dtype=torch.int64, device=device),
        groups=groups,
        offsets=[],
    )
    maxima = iter(made.grad_max.unbind())
    grad_max_by_parameter = {e.p: [next(maxima) for _ in range(e.layout.count)] for e in entries}

    def run_recorded(placed: StagedBatch, inputs: DeviceInputs) -> None:
        with placed.loaded() as chunk:
            values = torch.stack([grad_max_by_parameter[x.entry.p][x.index] for x in chunk.matrices])
            run_chunk(chunk, values, made.skip, inputs, placed.store_M)

    planned: list[tuple[Batch, DeviceInputs]] = []
    pool_bytes, staging = 0, Staging(device)
    for batch in batches(inside, set(), []):
        i = number_index[id(batch.group)]
        for chunk in batch.split(matrices_in_a_chunk(batch)):
            begin = len(made.offsets)
            made.offsets += [(position[x.entry.p], x.grad.data_ptr() - x.entry.grad.data_ptr()) for x in chunk.matrices]
            inputs = DeviceInputs(made.addresses[begin : len(made.offsets)], made.numbers[i], made.numbers[i + 1])
            planned.append((chunk, inputs))
            pool_bytes = max(pool_bytes, product_bytes(chunk))
            staging.reserve_batch(chunk)
    # Largest first: later jobs reuse its buffers, so the graph keeps less memory.
    planned.sort(key=lambda item: -len(item[0].matrices) * item[0].m * item[0].n)
    staging.allocate()
    staged = [staging.place(chunk) for chunk, _ in planned]
    for placed in staged:
        made.leases += placed.leases.values()
        lists = [*placed.batch.state().values(), placed.batch.corrections or []] if placed.leases else []
        for tensors in filter(None, lists):
            pointer_list.addresses(tensors)  # before the capture: a table made there is copied again at every replay
    jobs = [partial(run_recorded, placed, inputs) for placed, (_, inputs) in zip(staged, planned, strict=True)]
    _capture(made, jobs, pool_bytes, staging)
    return made


def _capture(made: Recording, jobs: Sequence[Job], pool_bytes: int, staging: Staging) -> None:
    """Run the jobs under capture, two at a time as a step does."""
    device = staging.device
    streams, stream = Streams.of(device), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    collects = gc.isenabled()
    gc.disable()  # it might free another graph, which is forbidden during capture
    try:
        with pointer_list.keep_tables_in(made.kept_tables), torch.cuda.stream(stream):
            before = torch.cuda.memory_reserved(device)
            # thread_local: other threads may pin memory or query events during the capture.
            made.graph.capture_begin(capture_error_mode="thread_local")
            try:
                with staging.forked(), streams.forked(pool_bytes):
                    for k, job in enumerate(jobs):
                        with streams.chunk(k):
                            job()
            finally:
                made.graph.capture_end()
            made.bytes = torch.cuda.memory_reserved(device) - before + staging.bytes
    finally:
        if collects:
            gc.enable()
