"""Decide which matrices the schedules support; plain torch runs the others."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.chunk import rank_of, thin_state
from cosmos_optim.cuda.kernels.gather import can_gather
from cosmos_optim.cuda.kernels.launch import available
from cosmos_optim.cuda.pointer_list import same_layout
from cosmos_optim.cuda.self_check import kernels_work
from cosmos_optim.cuda.step import SCHEDULES
from cosmos_optim.engine.batching import Batch
from cosmos_optim.engine.layout import LOCAL
from cosmos_optim.rules.rule import MOMENTUM

# The kernels keep a block of a thin factor in registers.
MAX_RANK = 256
# Kernels save nothing for matrices with fewer rows or columns.
MIN_SIDE = 16


def supported(batch: Batch) -> bool:
    """Return whether the kernels can run a batch: its rule, device, shapes, memory order, and the self-check."""
    first = batch.matrices[0].p
    if batch.rule.name not in SCHEDULES or batch.location is not LOCAL or not first.is_cuda:
        return False
    if not available(first.device) or batch.group["ns_dtype"] not in (None, torch.float16):
        return False
    state = batch.state()
    lists = [batch.params, batch.grads, *(state[name] for name in MOMENTUM if name in state)]
    lists += [] if batch.corrections is None else [batch.corrections]
    if not all(same_layout(x) for x in lists):
        return False
    if not all(can_gather(tensors) for tensors in thin_state(batch).values()):
        return False
    return shape_supported(first, rank_of(batch)) and kernels_work(
        first, batch.rule, rank_of(batch), batch.group["momentum_dtype"], corrected=batch.corrections is not None,
        equal_rows=batch.group["equal_rows"],
    )  # fmt: skip


def shape_supported(p: Tensor, rank: int) -> bool:
    """Return whether a matrix is large enough, and larger than its basis: the two must not be confused."""
    return min(p.shape) >= MIN_SIDE and 1 <= rank <= MAX_RANK and rank < min(p.shape)
