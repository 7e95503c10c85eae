"""Step AdamW's tensors on GPUs: 8-bit moments, and weights that are not float32, by our kernel, the others by torch's.

Our kernel reads learning rate, step counts and the flag of a skipped step from the device, so the host never waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.adam_update import adam_
from cosmos_optim.cuda.kernels.launch import available, on_device
from cosmos_optim.cuda.pointer_list import ELEMENT_TYPES
from cosmos_optim.cuda.precompile import launches_disabled
from cosmos_optim.cuda.self_check import relative_error, within_bound
from cosmos_optim.engine import adam_state
from cosmos_optim.engine.batching import Entry, by_group, decay_of
from cosmos_optim.engine.capture import is_capturing
from cosmos_optim.engine.elementwise import run_elementwise
from cosmos_optim.linalg.normalization import bias_correction
from cosmos_optim.linalg.weight24 import join_weight
from cosmos_optim.rules import adam

# Codes of 8 bits leave an error of about 1 % in v. A wrong kernel has a far larger one.
CLOSE = 5e-2

_results: dict[Hashable, bool] = {}


def run_adam(entries: Sequence[Entry], skip: Tensor | None) -> None:
    """Take the step of entries with an elementwise rule."""
    rest = []
    for members in by_group(entries):
        alike: dict[Hashable, list[Entry]] = defaultdict(list)
        for e in members:
            if kernel_supports(e):
                p, grad = e.layout.local(e.p), e.layout.local(e.grad)
                origin = (e.layout.first_element, e.layout.width)
                alike[p.device, p.shape, p.dtype, grad.dtype, origin].append(e)
            else:
                rest.append(e)
        for together in alike.values():
            step_alike(together, skip)
    run_elementwise(rest, skip)


def kernel_supports(e: Entry) -> bool:
    """Return whether our kernel steps an entry: AdamW, not float32 throughout, and contiguous in memory."""
    names, correction = state_names(e), e.correction
    if e.rule.name != adam.RULE.name or not available(e.p.device):
        return False
    if e.p.dtype is torch.float32 and names == adam.AdamState._fields:
        return False
    tensors = [e.layout.local(x) for x in (e.p, e.grad, *(e.state[k] for k in names))]
    p, grad, m = tensors[:3]
    known = {p.dtype, grad.dtype} <= ELEMENT_TYPES.keys() and m.dtype in (torch.int8, torch.float32)
    if p.numel() == 0 or not known:
        return False
    if not all(x.is_contiguous() for x in tensors) or not (correction is None or correction.is_contiguous()):
        return False
    return adam_kernel_works(p.device, p.dtype, grad.dtype, m.dtype is torch.int8, correction is not None)


def state_names(e: Entry) -> tuple[str, ...]:
    """Return the names of the moments, and of their scales if they are codes."""
    return adam_state.QUANTIZED if adam.has_codes(e.state) else adam.AdamState._fields


def step_alike(entries: Sequence[Entry], skip: Tensor | None) -> None:
    """Step tensors of one group, shape and kind in one launch."""
    layout, group = entries[0].layout, entries[0].group
    steps = torch.stack([e.layout.local(e.state["step"]) for e in entries])
    state = {name: [e.layout.local(e.state[name]) for e in entries] for name in state_names(entries[0])}
    corrections = [x for e in entries if (x := e.correction) is not None] or None
    grads = [e.layout.local(e.grad) for e in entries]
    if group["maximize"]:  # moments of -G, as torch's kernel has them
        grads = list(torch._foreach_neg(grads))
    with on_device(steps.device):
        adam_(
            [e.layout.local(e.p) for e in entries], grads, state,
            coefficients(steps, group), steps.int(), betas=group["betas"], eps=group["eps"], skip=skip,
            corrections=corrections, seeded=bool(group["stochastic_rounding"]), first=layout.first_element,
            width=layout.width,
        )  # fmt: skip


def coefficients(steps: Tensor, group: dict[str, Any]) -> Tensor:
    """Return (batch, 3) float32 on the device of the steps (batch,): decay, lr / (1 - b1^t) and 1 / sqrt(1 - b2^t)."""
    b1, b2 = group["betas"]
    ones = torch.ones_like(steps)
    columns = (
        ones * decay_of(group), group["lr"] / bias_correction(b1, steps), bias_correction(b2, steps).rsqrt()
    )
    return torch.stack([x.float() for x in columns], dim=1)


# -- the comparison before the first use -------------------------------------------------------------------------------


def adam_kernel_works(
    device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype, quantized: bool, corrected: bool
) -> bool:  # fmt: skip
    """Return whether the kernel agrees with the definition; compare once for each kind of tensor."""
    key = (device, dtype, grad_dtype, quantized, corrected)
    if key not in _results:
        if launches_disabled() or is_capturing(device):
            return True
        _results[key] = within_bound(partial(step_error, *key), adam.RULE, device, CLOSE)
    return _results[key]


def step_error(
    device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype, quantized: bool = True, corrected: bool = False
) -> float:  # fmt: skip
    """Return the largest relative error of the kernel's moments and update after one step, against plain torch.

    quantized: whether the moments have 8 bits.
    corrected: whether the weights have 24 bits.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    g, m, v = (torch.randn(40, 200, generator=generator, dtype=torch.float32, device="cpu").to(device)
               for _ in range(3))  # fmt: skip
    t, origin = torch.full((1,), 3.0, dtype=torch.float32, device=device), ((0, 0), 200)
    slots = adam.slots(40, 200, {"adam_dtype": torch.int8 if quantized else None})
    empty = {name: g.new_empty(0) for name in slots}
    state = adam_state.stored(adam.AdamState(m, v.square()), empty, t[0], *origin)
    group = {"lr": 1.0, "weight_decay": 0.0, "maximize": False, **adam.DEFAULTS}
    grad, p = g.to(grad_dtype), torch.zeros_like(g, dtype=dtype)
    corrections = [torch.zeros_like(g, dtype=torch.int8)] if corrected else None
    D, new = adam.direction(grad.float(), adam_state.load(state, torch.float32), t[0])
    adam_([p], [grad], {name: [x] for name, x in state.items()}, coefficients(t, group), t.int(),
          betas=group["betas"], eps=group["eps"], skip=None, corrections=corrections)  # fmt: skip
    found, moved = adam_state.load(state, torch.float32), p if corrections is None else join_weight(p, corrections[0])
    return max(relative_error(x, y) for x, y in zip((moved, *found), (-D, *new), strict=True))
