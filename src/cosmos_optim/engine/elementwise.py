"""Take the steps of elementwise rules: by a fused kernel over lists of tensors, or one tensor at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.engine.batching import Entry, by_group, decay_of
from cosmos_optim.engine.rounding import read_weight, write_
from cosmos_optim.rules import adam


def run_elementwise(entries: Sequence[Entry], skip: Tensor | None) -> None:
    """Take the step of all parameters with an elementwise rule."""
    for members in by_group(entries):
        if members[0].rule.elementwise:
            _run_group(members, skip)


def _run_group(entries: Sequence[Entry], skip: Tensor | None) -> None:
    """Step one group, with the rule's fused kernel for the tensors that it supports."""
    rule, group = entries[0].rule, entries[0].group
    names = list(rule.State._fields)
    fused: dict[Any, list[Entry]] = defaultdict(list)
    for e in entries:
        if rule.fused is not None and _can_fuse(e, names):
            fused[e.p.device, e.p.dtype].append(e)
        else:
            run_one(e, skip)
    for together in fused.values():
        assert rule.fused is not None
        rule.fused(
            [e.layout.local(e.p) for e in together], [e.layout.local(e.grad) for e in together],
            {k: [e.layout.local(e.state[k]) for e in together] for k in names}, [e.state["step"] for e in together],
            settings=group, skip=skip,
        )  # fmt: skip


def _can_fuse(e: Entry, names: Sequence[str]) -> bool:
    """Return whether torch's kernel can run an entry.

    The kernel needs one dtype, ignores strides, and divides 0 by 0 if eps is 0.
    """
    if e.p.dtype not in (torch.float32, torch.float64) or e.group["eps"] == 0:
        return False
    local = e.layout.local
    p = local(e.p)
    dtype, stride = p.dtype, p.stride()
    # The state is dense, so tensors with the same strides are dense too.
    others = [local(e.grad), *(local(e.state[name]) for name in names)]
    return p.numel() > 0 and all(x.dtype is dtype and x.stride() == stride for x in others)


def run_one(e: Entry, skip: Tensor | None) -> None:
    """Take the step of one tensor by the rule's own formula, in at least float32."""
    local = e.layout.local
    p, dtype = local(e.p), torch.promote_types(e.p.dtype, torch.float32)
    tensors = {k: local(e.state[k]) for k in e.layout.rule_slots(e.group)}
    t = local(e.state["step"])
    arguments = e.rule.arguments(e.group)
    are_codes = adam.SCALES[0] in tensors
    state = adam.load(tensors, dtype) if are_codes else e.rule.State(**{k: x.to(dtype) for k, x in tensors.items()})
    G = local(e.grad).to(dtype)
    D, new = e.rule.direction(-G if e.group["maximize"] else G, state, t, **arguments)  # as torch's kernel does
    old = read_weight(p, dtype, e.correction)
    value = old * decay_of(e.group) - e.group["lr"] * D
    origin = (e.layout.first_element, e.layout.width)
    for name, changed in (adam.stored(new, tensors, t, *origin) if are_codes else new._asdict()).items():
        tensors[name].copy_(changed if skip is None else torch.where(skip, tensors[name], changed))
    if skip is not None:
        value = torch.where(skip, old, value)
    write_(p, value, t if e.group["stochastic_rounding"] else None, e.correction)
