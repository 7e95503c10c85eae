"""The messages between processes. Every one goes through here, so that all can be counted.

Bytes sent are those of the usual algorithms: of k ranks, each sends 2 (k-1)/k of a tensor that is all-reduced (in a
ring), and of an all-to-all what is meant for the others. Nothing here waits on the host for a GPU: a message is
started, another lane may run, and the stream that needs the result waits for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_optim.sharding import overlap as lanes


@dataclass
class Traffic:
    """Messages by kind ("sum", "max", "exchange"): how many, and bytes sent by this rank."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: dict[str, float] = field(default_factory=dict)

    def note(self, kind: str, sent: float) -> None:
        """One more message."""
        self.calls[kind] += 1
        self.sent[kind] = self.sent.get(kind, 0.0) + sent


_counting: list[Traffic] = []


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Count the messages of this process inside the block."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over the group. May write to x."""
    return _all_reduce("sum", x, dist.ReduceOp.SUM, group)


def largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The elementwise maximum of x over the group. May write to x."""
    return _all_reduce("max", x, dist.ReduceOp.MAX, group)


def _all_reduce(kind: str, x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    k = group.size()
    _note(kind, 2 * (k - 1) / k * x.numel() * x.element_size())
    work = dist.all_reduce(x, op=op, group=group, async_op=True)
    lanes.rest()
    work.wait()
    return x


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Cut the vector x into parts of `send` elements, one a rank; returns the parts that arrive, end to end."""
    here = group.rank()
    _note("exchange", float((x.numel() - send[here]) * x.element_size()))
    out = x.new_empty(sum(receive))
    work = dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group, async_op=True)
    lanes.rest()
    work.wait()
    return out


def _note(kind: str, sent: float) -> None:
    for traffic in _counting:
        traffic.note(kind, sent)


def reaches(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the group's backend moves tensors of this device."""
    return device.type in {d.type for d in group._device_types}
