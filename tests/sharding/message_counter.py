"""Count the messages that a process sends through `collectives`."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cosmos_optim.sharding import collectives

KINDS = {str(dist.ReduceOp.SUM): "sum", str(dist.ReduceOp.MAX): "max"}


@dataclass
class Messages:
    """Messages by kind ("sum", "max", "exchange"): how many, and the bytes that this rank sends.

    Bytes are those of the usual algorithms. Of k ranks, each sends 2 (k-1)/k of a tensor that is all-reduced in a ring,
    and of an all-to-all the parts for the other ranks.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, kind: str, sent: float) -> None:
        """Count one more message."""
        self.calls[kind] += 1
        self.sent[kind] += sent


@contextlib.contextmanager
def count_messages() -> Iterator[Messages]:
    """Count the messages of this process inside the block."""
    messages = Messages()
    all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single

    def counted_all_reduce(x: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool) -> Any:
        k = group.size()
        messages.note(KINDS[str(op)], 2 * (k - 1) / k * x.numel() * x.element_size())
        return all_reduce(x, op=op, group=group, async_op=async_op)

    def counted_all_to_all(
        out: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        messages.note("exchange", (x.numel() - send[group.rank()]) * x.element_size())
        return all_to_all(out, x, receive, send, group=group, async_op=async_op)

    collectives.dist.all_reduce, collectives.dist.all_to_all_single = counted_all_reduce, counted_all_to_all
    try:
        yield messages
    finally:
        collectives.dist.all_reduce, collectives.dist.all_to_all_single = all_reduce, all_to_all
