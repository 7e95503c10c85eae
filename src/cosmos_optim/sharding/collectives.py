"""The messages between processes: every message of a step is sent by this file.

The host never waits for a GPU: a message is started, another stack may compute, and the stream that needs the result
waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_optim.sharding import overlap


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over the group. May write to x."""
    return _all_reduce(x, dist.ReduceOp.SUM, group)


def maximum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the elementwise maximum of x over the group. May write to x."""
    return _all_reduce(x, dist.ReduceOp.MAX, group)


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    work = dist.all_reduce(x, op=op, group=group, async_op=True)
    overlap.let_others_run()
    work.wait()
    return x


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send parts of the vector x, `send[i]` elements to rank i; return the received parts, concatenated."""
    out = x.new_empty(sum(receive))
    work = dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group, async_op=True)
    overlap.let_others_run()
    work.wait()
    return out


def supports(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether the group's backend can send tensors on this device."""
    return device.type in {d.type for d in group._device_types}
