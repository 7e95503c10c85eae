"""Running elementwise rules: lists of whole or local tensors through a fused kernel, or one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.engine.entries import Entry, decay_of, signed_lr
from cosmos_optim.engine.rounding import write_
from cosmos_optim.linalg.algebra import Algebra


def run_elementwise(entries: list[Entry], skip: Tensor | None) -> None:
    """An elementwise rule over whole (or local) tensors: its fused kernel where dtypes allow, else one by one."""
    rule, group = entries[0].rule, entries[0].group
    names = list(rule.slots(1, 1, group))
    plain: dict[Any, list[Entry]] = defaultdict(list)
    for e in entries:
        if rule.fused is not None and _fusable(e, names):
            plain[e.p.device, e.p.dtype].append(e)
        else:
            run_one(e, skip)
    for here in plain.values():
        assert rule.fused is not None
        rule.fused(
            [e.layout.local(e.p) for e in here], [e.layout.local(e.grad) for e in here],
            {k: [e.layout.local(e.state[k]) for e in here] for k in names}, [e.state["step"] for e in here],
            h=group, lr=group["lr"], weight_decay=group["weight_decay"], maximize=group["maximize"], skip=skip,
        )  # fmt: skip


def _fusable(e: Entry, names: Sequence[str]) -> bool:
    """Torch's kernel wants one dtype throughout, runs over memory whatever the strides, and divides 0 by 0 at eps 0."""
    if e.p.dtype not in (torch.float32, torch.float64) or e.group["eps"] == 0:
        return False
    local = e.layout.local
    p = local(e.p)
    dtype, stride = p.dtype, p.stride()
    # The state is dense, so whatever has its strides is dense too.
    others = [local(e.grad), *(local(e.state[name]) for name in names)]
    return p.numel() > 0 and all(x.dtype is dtype and x.stride() == stride for x in others)


def run_one(e: Entry, skip: Tensor | None) -> None:
    """One tensor by the rule's own formula, in at least float32."""
    local = e.layout.local
    p, dtype = local(e.p), torch.promote_types(e.p.dtype, torch.float32)
    names = e.rule.slots(1, 1, e.group)
    state = {k: local(e.state[k]) for k in names}
    t = local(e.state["step"])
    D, new = e.rule.direction(local(e.grad).to(dtype), state, t, h=e.group, alg=Algebra(1, 1))
    value = p.to(dtype) * decay_of(e.group) - signed_lr(e.group) * D
    for k in names:
        state[k].copy_(new[k] if skip is None else torch.where(skip, state[k], new[k]))
    if skip is not None:
        value = torch.where(skip, p.to(dtype), value)
    write_(p, value, t if e.group["stochastic_rounding"] else None)
