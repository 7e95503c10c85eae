"""Take the steps of elementwise rules with state in host memory, a piece of a parameter at a time.

A piece is some rows of the parameter, its gradient and its state, so that an embedding passes through slots of a few
megabytes. Elementwise arithmetic gives the same bits for a piece as for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cosmos_optim.cuda.staging import StagingByDevice, in_host_memory
from cosmos_optim.engine.batching import Entry, by_group
from cosmos_optim.engine.elementwise import run_elementwise

# State of one piece: a copy of it takes far longer than its launch, and three slots are little memory.
PIECE_BYTES = 16 << 20


def reserve_pieces(entries: Sequence[Entry], staging: StagingByDevice) -> None:
    """Make the slots large enough for the pieces of all entries with an elementwise rule."""
    for e in entries:
        if e.rule.elementwise and _names(e):
            for piece in pieces(e):  # the last may be smaller
                staging[e.p.device].reserve("pieces", [piece.state[name] for name in _names(e)])
                break


def run_elementwise_in_pieces(
    entries: Sequence[Entry], skip: Tensor | None, staging: StagingByDevice
) -> None:  # fmt: skip
    """Step all entries with an elementwise rule: those with state in host memory in pieces, the others as ever."""
    for held in by_group(entries):
        if not held[0].rule.elementwise:
            continue
        if resident := [e for e in held if not _names(e)]:
            run_elementwise(resident, skip)
        for e in held:
            if names := _names(e):
                ring = staging[e.p.device].rings["pieces"]
                for piece in pieces(e):
                    lease = ring.lend([piece.state[name] for name in names])
                    lease.load()
                    state = piece.state | dict(zip(names, lease.tensors, strict=True))
                    run_elementwise([piece._replace(state=state)], skip)
                    lease.store()


def pieces(e: Entry) -> Iterator[Entry]:
    """Cut an entry into entries of some of its rows, with state of at most `PIECE_BYTES` or one row.

    It stays whole if its state has no such rows, or if its rounding is a hash of the position in the parameter.
    """
    state = {name: x for name, x in e.state.items() if name in e.rule.slots(1, 1, e.group)}
    hashed = e.group["stochastic_rounding"] and e.p.dtype is torch.bfloat16
    if hashed or not all(x.is_contiguous() and x.shape[:1] == e.p.shape[:1] for x in state.values()):
        yield e
        return
    total = sum(x.numel() * x.element_size() for x in state.values())
    rows = max(1, PIECE_BYTES * len(e.p) // max(1, total))
    for begin in range(0, len(e.p), rows):
        part = slice(begin, begin + rows)
        cut = {name: x[part] for name, x in state.items()}
        yield e._replace(p=e.p.detach()[part], grad=e.grad[part], state={"step": e.state["step"], **cut})


def _names(e: Entry) -> list[str]:
    """Return the names of an entry's state that is in host memory."""
    names = e.rule.slots(1, 1, e.group)
    return [name for name in names if in_host_memory(e.state[name], e.p.device)]
