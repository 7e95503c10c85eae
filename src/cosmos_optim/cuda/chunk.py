"""Step one chunk, a batch of matrices that runs as a unit: gather thin state, run the schedule, scatter it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.cuda.first_basis import first_basis
from cosmos_optim.cuda.kernels.gather import gather, scatter_
from cosmos_optim.cuda.memory_pool import newton_schulz_bytes
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.cuda.step import SCHEDULES, do_nothing
from cosmos_optim.engine.batching import Batch, decay_of, signed_lr
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.rules.rule import MOMENTUM

# Limit for the work buffers in use at any time.
WORK_BYTES = 1000 << 20


class DeviceInputs(NamedTuple):
    """What a recorded step reads from the device: gradient addresses, learning rate and decay of a chunk."""

    addresses: Tensor
    lr: Tensor
    decay: Tensor


def run_chunk(
    chunk: Batch, grad_max: Tensor, skip: Tensor | None, inputs: DeviceInputs | None = None,
    M_done: Callable[[], None] = do_nothing,
) -> None:  # fmt: skip
    """Take the step of a chunk. A recorded step passes `inputs` instead of host values."""
    W, M = MatrixList.weights(chunk.params, chunk.corrections), MatrixList.momentum(chunk.state())
    G = MatrixList.of(chunk.grads, None if inputs is None else inputs.addresses)
    if inputs is None:
        lr, decay = signed_lr(chunk.group), decay_of(chunk.group)
    else:
        lr, decay = inputs.lr, inputs.decay
    steps = torch.stack(chunk.steps)
    rounded = chunk.group["stochastic_rounding"] and W.dtype is torch.bfloat16 and W.corrections is None
    thin = thin_state(chunk)
    stacks = dict(zip(thin, gather(list(thin.values())), strict=True)) if thin else {}
    new = SCHEDULES[chunk.rule.name](
        W, G, chunk.rule.State(M=M, **stacks), steps.float().view(-1, 1, 1), lr=lr, decay=decay,
        grad_max=grad_max.float(), skip=skip, seeds=steps.int() if rounded else None, M_done=M_done,
        **chunk.rule.arguments(chunk.group),
    )  # fmt: skip
    if thin:
        scatter_(list(thin.values()), [getattr(new, name) for name in thin], skip)


def start_chunk(chunk: Batch, grad_max: Tensor, skip: Tensor | None) -> None:
    """Take the first bases of a chunk."""
    U = chunk.state()["U"]
    (stack,) = gather([U])
    scatter_([U], [first_basis(MatrixList.of(chunk.grads), stack, grad_max.float())], skip)


def thin_state(chunk: Batch) -> dict[str, list[Tensor]]:
    """Return the state of a chunk except M and its scales, by name."""
    return {name: tensors for name, tensors in chunk.state().items() if name not in MOMENTUM}


def rank_of(batch: Batch) -> int:
    """Return the number of columns of the tracked basis, or 1 if there is none."""
    state: dict[str, Any] = batch.matrices[0].state
    return state["U"].shape[-1] if "U" in state else 1


def matrices_in_a_chunk(batch: Batch) -> int:
    """Return how many matrices keep the work buffers within `WORK_BYTES`."""
    m, n = batch.params[0].shape
    return max(1, WORK_BYTES // bytes_per_matrix(m, n, rank_of(batch)))


def bases_in_a_chunk(batch: Batch) -> int:
    """Return the chunk size for first bases: larger, because they need only thin factors and launches are slow."""
    m, n = batch.params[0].shape
    return max(1, WORK_BYTES // thin_bytes(m, n, rank_of(batch)))


def bytes_per_matrix(m: int, n: int, r: int) -> int:
    """Return the transient memory of one matrix in a chunk: work buffers, Gram matrices, thin factors.

    Two chunks run at a time, but their products run one after the other.
    """
    return 2 * (2 * m * n + thin_bytes(m, n, r)) + newton_schulz_bytes(1, m, n, NewtonSchulz())


def thin_bytes(m: int, n: int, r: int) -> int:
    """Return the bytes of one matrix's thin factors and of the temporaries that kernels derive from them."""
    return 4 * r * 9 * (m + n)


def product_bytes(chunk: Batch) -> int:
    """Return the bytes that the products of a chunk need in addition to its work buffers."""
    m, n = chunk.params[0].shape
    return newton_schulz_bytes(len(chunk.matrices), m, n, NewtonSchulz.of(chunk.group))
