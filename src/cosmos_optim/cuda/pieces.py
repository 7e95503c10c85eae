"""Take the steps of elementwise rules with state in host memory, a piece of a parameter at a time.

A piece is some rows of the parameter, its gradient and its state, so that an embedding passes through slots of a few
megabytes. Elementwise arithmetic gives the same bits for a piece as for the whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cosmos_optim.cuda.adam_run import run_adam
from cosmos_optim.cuda.staging import StagingByDevice, in_host_memory
from cosmos_optim.engine.batching import Entry

# State of one piece: a copy of it takes far longer than its launch, and three slots are little memory.
PIECE_BYTES = 16 << 20


def reserve_pieces(entries: Sequence[Entry], staging: StagingByDevice) -> None:
    """Make the slots large enough for the pieces of all entries with an elementwise rule."""
    for e in entries:
        if e.rule.elementwise and _names(e):
            first = next(pieces(e))  # no other is larger
            staging[e.p.device].reserve("pieces", [first.state[name] for name in _names(e)], any_address=True)


def run_elementwise_in_pieces(entries: Sequence[Entry], skip: Tensor | None, staging: StagingByDevice) -> None:
    """Step all entries with an elementwise rule: those with state in host memory in pieces, the others whole."""
    elementwise = [(e, _names(e)) for e in entries if e.rule.elementwise]
    run_adam([e for e, names in elementwise if not names], skip)
    for e, names in elementwise:
        for piece in pieces(e) if names else ():
            lease = staging[e.p.device].rings["pieces"].lend([piece.state[name] for name in names])
            lease.load()
            state = piece.state | dict(zip(names, lease.tensors, strict=True))
            run_adam([piece._replace(state=state)], skip)
            lease.store()


def pieces(e: Entry) -> Iterator[Entry]:
    """Cut an entry into entries of some of its rows, with state of at most `PIECE_BYTES` or one row.

    It stays whole if its state has no such rows, if it is a vector of codes, or if its rounding is a hash of the
    position in the parameter.
    """
    state = {name: e.state[name] for name in e.layout.slots(e.group)}
    hashed = e.group["stochastic_rounding"] and e.p.dtype is torch.bfloat16
    vector = e.p.dim() < 2 and any(x.shape != e.p.shape for x in state.values())
    if hashed or vector or not all(x.is_contiguous() and x.shape[:1] == e.p.shape[:1] for x in state.values()):
        yield e
        return
    total = sum(x.numel() * x.element_size() for x in state.values())
    rows = max(1, PIECE_BYTES * len(e.p) // max(1, total))
    for begin in range(0, len(e.p), rows):
        part = slice(begin, begin + rows)
        layout = copy.copy(e.layout)
        layout.first_element = (begin * math.prod(e.p.shape[1:-1]), 0)  # the rounding of codes depends on the place
        cut = {name: x[part] for name, x in state.items()}
        state_of_part = {"step": e.state["step"], **cut}
        yield e._replace(p=e.p.detach()[part], grad=e.grad[part], state=state_of_part, layout=layout)


def _names(e: Entry) -> list[str]:
    """Return the names of an entry's state that is in host memory. Without `offload` there is none, found quickly."""
    on_host = {name for name, x in e.state.items() if isinstance(x, Tensor) and in_host_memory(x, e.p.device)}
    return [name for name in e.layout.slots(e.group) if name in on_host] if on_host else []
