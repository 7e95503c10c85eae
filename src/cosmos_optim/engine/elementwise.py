"""Take the steps of elementwise rules, one tensor at a time or, for AdamW, by torch's kernel over lists of tensors.

AdamW is the only such rule of the package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.engine import adam_state
from cosmos_optim.engine.batching import Entry, by_group, decay_of
from cosmos_optim.engine.rounding import read_weight, write_
from cosmos_optim.rules.adam import has_codes
from cosmos_optim.rules.rule import Settings


def run_elementwise(entries: Sequence[Entry], skip: Tensor | None) -> None:
    """Take the step of all parameters with an elementwise rule."""
    for members in by_group(entries):
        if members[0].rule.elementwise:
            _run_group(members, skip)


def _run_group(entries: Sequence[Entry], skip: Tensor | None) -> None:
    """Step one group, with torch's kernel for the tensors that it supports."""
    rule, group = entries[0].rule, entries[0].group
    names = list(rule.State._fields)
    fused: dict[Any, list[Entry]] = defaultdict(list)
    for e in entries:
        if rule.name == "adam" and _can_fuse(e, names):
            fused[e.p.device, e.p.dtype].append(e)
        else:
            run_one(e, skip)
    for together in fused.values():
        _fused_adam_(
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


def _fused_adam_(
    params: Sequence[Tensor], grads: Sequence[Tensor], state: dict[str, list[Tensor]], steps: Sequence[Tensor], *,
    settings: Settings, skip: Tensor | None,
) -> None:  # fmt: skip
    """Take Adam's step with torch's fused kernel, for tensors of one dtype; `steps` are already advanced."""
    lr, betas = settings["lr"], settings["betas"]
    if isinstance(lr, Tensor):
        lr = lr.to(params[0].device)
    torch._fused_adamw_(
        list(params), list(grads), state["exp_avg"], state["exp_avg_sq"], [], list(steps),
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=settings["weight_decay"], eps=settings["eps"],
        amsgrad=False, maximize=bool(settings["maximize"]), grad_scale=None,  # it may be 1, or a bool of numpy
        found_inf=None if skip is None else skip.float(),
    )  # fmt: skip


def run_one(e: Entry, skip: Tensor | None) -> None:
    """Take the step of one tensor by the rule's own formula, in at least float32."""
    local = e.layout.local
    p, dtype = local(e.p), torch.promote_types(e.p.dtype, torch.float32)
    tensors = {k: local(e.state[k]) for k in e.layout.rule_slots(e.group)}
    t = local(e.state["step"])
    arguments = e.rule.arguments(e.group)
    if are_codes := has_codes(tensors):
        state: Any = adam_state.load(tensors, dtype)
    else:
        state = e.rule.State(**{k: x.to(dtype) for k, x in tensors.items()})
    G = local(e.grad).to(dtype)
    D, new = e.rule.direction(-G if e.group["maximize"] else G, state, t, **arguments)  # as torch's kernel does
    old = read_weight(p, dtype, e.correction)
    value = old * decay_of(e.group) - e.group["lr"] * D
    origin = (e.layout.first_element, e.layout.width)
    for name, changed in (adam_state.stored(new, tensors, t, *origin) if are_codes else new._asdict()).items():
        tensors[name].copy_(changed if skip is None else torch.where(skip, tensors[name], changed))
    if skip is not None:
        value = torch.where(skip, old, value)
    write_(p, value, t if e.group["stochastic_rounding"] else None, e.correction)
