"""Step all parameters on GPUs: some by a recorded CUDA graph, the others by kernels or plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_optim.cuda.chunk import (
    DeviceInputs,
    bases_in_a_chunk,
    matrices_in_a_chunk,
    product_bytes,
    run_chunk,
    start_chunk,
)
from cosmos_optim.cuda.kernels.launch import on_device
from cosmos_optim.cuda.pieces import reserve_pieces, run_elementwise_in_pieces
from cosmos_optim.cuda.precompile import Precompiler
from cosmos_optim.cuda.staging import Staging, StagingByDevice
from cosmos_optim.cuda.streams import Streams
from cosmos_optim.cuda.support import supported
from cosmos_optim.engine.batching import Batch, Entry, batches, settings_key
from cosmos_optim.engine.gradients import GradientCheck
from cosmos_optim.engine.layout import LOCAL, Job, Location
from cosmos_optim.engine.run import (
    Diagnostics,
    LocatedJob,
    advance,
    direction_of,
    located_stacks,
    run_jobs,
    run_stack,
    stacked_grad_max,
    write_back,
)

if TYPE_CHECKING:
    from cosmos_optim.cuda.graph import GraphedStep


@dataclass
class Jobs:
    """The work of a step on matrices.

    starts: jobs that compute first bases; every chunk waits for them.
    jobs: chunks and stacks, each with its batch.
    pool_bytes: bytes of temporaries that the largest chunk's products need, by device.
    start_staging, staging: slots for state that is in host memory, of `starts` and of all other work, by device.
    """

    starts: list[tuple[torch.device, Job]] = field(default_factory=list)
    jobs: list[LocatedJob] = field(default_factory=list)
    pool_bytes: dict[torch.device, int] = field(default_factory=dict)
    start_staging: StagingByDevice = field(default_factory=StagingByDevice)
    staging: StagingByDevice = field(default_factory=StagingByDevice)


def run(entries: Sequence[Entry], check: GradientCheck, diagnostics: Diagnostics | None, graph: GraphedStep) -> None:
    """Take one step of every entry. Entries without a non-zero gradient so far are only decayed."""
    live, fresh = advance(entries, check)
    device = entries[0].p.device
    in_graph: set[Tensor] = set()
    replay: Callable[[], None] | None = None
    if diagnostics is None:
        in_graph, replay = graph.prepare(check)
    copies: list[tuple[Tensor, Tensor]] = []
    with ExitStack() as forks:
        if replay is not None:  # launch it before any other host work, because the GPU is idle
            forks.enter_context(Streams.of(device).forked())
            with Streams.of(device).chunk(0):
                replay()
        left = [e for e in live if not e.rule.elementwise and e.p not in in_graph]
        work = plan_jobs(left, fresh, check, diagnostics, copies)
        reserve_pieces(live, work.staging)
        with ExitStack() as start_forks:
            for staging in work.start_staging.values():
                start_forks.enter_context(staging.forked())
            for start_device, start in work.starts:  # before the streams fork, so every chunk waits for them
                with on_device(start_device):
                    start()
        for staging in work.staging.values():
            forks.enter_context(staging.forked())
        for chunk_device, size in work.pool_bytes.items():  # a model may be on several GPUs
            forks.enter_context(Streams.of(chunk_device).forked(size))
        alone = [(batch, job) for batch, job in work.jobs if batch.location.team is None]
        for k, (batch, job) in enumerate(alone):
            with Streams.of(batch.device).chunk(k):
                job()
        # Launched last, so that it overlaps with the matrices.
        run_elementwise_in_pieces(live, check.skip, work.staging)
    run_jobs([(batch, job) for batch, job in work.jobs if batch.location.team is not None])
    write_back(copies)


def plan_jobs(
    entries: Sequence[Entry], fresh: set[Tensor], check: GradientCheck, diagnostics: Diagnostics | None,
    copies: list[tuple[Tensor, Tensor]],
) -> Jobs:  # fmt: skip
    """Divide the matrices into chunks for the kernels and stacks for plain torch; compile missing kernels."""
    work, precompiler, assigned = Jobs(), Precompiler(), Counter[object]()
    for batch in batches(entries, fresh, copies):
        work.pool_bytes.setdefault(batch.device, 0)
        staging, start_staging = work.staging[batch.device], work.start_staging[batch.device]
        if not supported(batch):
            for stack, location in located_stacks(batch, assigned):
                staging.reserve_batch(stack)
                work.jobs.append((stack, partial(run_staged_stack, stack, location, check, diagnostics, staging)))
            continue
        if batch.fresh and batch.rule.start is not None:
            for chunk in batch.split(bases_in_a_chunk(batch)):
                precompiler.add(chunk.device, kind_of(chunk, "start"), partial(start_empty, chunk, check.skip))
                start_staging.reserve_batch(chunk, ("U",))
                work.starts.append((chunk.device, partial(start_staged_chunk, chunk, check, start_staging)))
        batch = replace(batch, fresh=False)  # `starts` run first
        for chunk in batch.split(matrices_in_a_chunk(batch)):
            precompiler.add(chunk.device, kind_of(chunk, "step"), partial(run_empty, chunk, check.skip))
            work.pool_bytes[chunk.device] = max(work.pool_bytes[chunk.device], product_bytes(chunk))
            staging.reserve_batch(chunk)
            work.jobs.append((chunk, partial(run_staged_chunk, chunk, check, diagnostics, staging)))
    precompiler.run()
    return work


def start_staged_chunk(chunk: Batch, check: GradientCheck, staging: Staging) -> None:
    """Take the first bases of a chunk."""
    with staging.place(chunk, ("U",)).loaded() as staged:
        start_chunk(staged, stacked_grad_max(chunk, check), check.skip)


def run_staged_chunk(chunk: Batch, check: GradientCheck, diagnostics: Diagnostics | None, staging: Staging) -> None:
    """Step a chunk. If diagnostics are on, first compute them with plain torch."""
    placed = staging.place(chunk)
    with placed.loaded() as staged:
        if diagnostics is not None:
            for one in staged.split(1):
                direction_of(one, LOCAL, stacked_grad_max(one, check), diagnostics)
        run_chunk(staged, stacked_grad_max(chunk, check), check.skip, M_done=placed.store_M)


def run_staged_stack(
    stack: Batch, location: Location, check: GradientCheck, diagnostics: Diagnostics | None, staging: Staging
) -> None:  # fmt: skip
    """Step a stack with plain torch."""
    with staging.place(stack).loaded() as staged:
        run_stack(staged, location, check, diagnostics)


# -- empty matrices, to compile the kernels --------------------------------------------------------------------------


def kind_of(chunk: Batch, work: str) -> tuple[object, ...]:
    """Return a key: chunks with equal keys launch the same kernels."""
    x = chunk.matrices[0]
    memory = [(name, t.dtype, t.shape, t.stride()) for name, t in (("", x.p), ("G", x.grad), *x.state.items())]
    return (chunk.rule.name, work, *memory, len(chunk.matrices), settings_key(chunk.group))


def empty_copy(chunk: Batch) -> Batch:
    """Return a chunk of the same kind with uninitialized memory."""

    def empty(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=chunk.device)

    x = chunk.matrices[0]
    state = {name: empty(t) for name, t in x.state.items()}
    return replace(chunk, matrices=[replace(x, p=empty(x.p), grad=empty(x.grad), state=state)] * len(chunk.matrices))


def start_empty(chunk: Batch, skip: Tensor | None) -> None:
    """Run `start_chunk` on empty matrices."""
    copy = empty_copy(chunk)
    start_chunk(copy, torch.zeros(len(copy.matrices), dtype=torch.float32, device=copy.device), skip)


def run_empty(chunk: Batch, skip: Tensor | None) -> None:
    """Run `run_chunk` on empty matrices, once as the host launches it and once as a graph records it."""
    copy, count = empty_copy(chunk), len(chunk.matrices)
    grad_max = torch.zeros(count, dtype=torch.float32, device=copy.device)
    number = torch.zeros((), dtype=torch.float64, device=copy.device)
    address = copy.grads[0].data_ptr()
    addresses = torch.full((count,), address, dtype=torch.int64, device=copy.device)
    for inputs in (None, DeviceInputs(addresses, number, number)):
        run_chunk(copy, grad_max, skip, inputs)
