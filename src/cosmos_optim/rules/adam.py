"""Adam with decoupled weight decay (Loshchilov and Hutter 2019), for everything that is not a hidden matrix.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  D = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

State names are torch.optim.AdamW's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.normalization import bias_correction, quotient
from cosmos_optim.rules.rule import Rule, Settings, Slot

DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8}


class AdamState(NamedTuple):
    """Both moments, shaped like the parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


def direction(
    G: Tensor, state: AdamState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    alg: Algebra | None = None,
) -> tuple[Tensor, AdamState]:  # fmt: skip
    """Return the direction of one Adam step, for a tensor of any shape, and the new state."""
    b1, b2 = betas
    m = torch.lerp(state.exp_avg, G, 1 - b1)
    v = b2 * state.exp_avg_sq + (1 - b2) * G * G
    D = quotient(m / bias_correction(b1, t), (v / bias_correction(b2, t)).sqrt() + eps)
    return D, AdamState(m, v)


def fused_(
    params: Sequence[Tensor], grads: Sequence[Tensor], state: dict[str, list[Tensor]], steps: Sequence[Tensor], *,
    settings: Settings, skip: Tensor | None,
) -> None:  # fmt: skip
    """Take the same step with torch's fused kernel, for tensors of one dtype; `steps` are already advanced."""
    lr, betas = settings["lr"], settings["betas"]
    if isinstance(lr, Tensor):
        lr = lr.to(params[0].device)
    torch._fused_adamw_(
        list(params), list(grads), state["exp_avg"], state["exp_avg_sq"], [], list(steps),
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=settings["weight_decay"], eps=settings["eps"],
        amsgrad=False, maximize=settings["maximize"], grad_scale=None,
        found_inf=None if skip is None else skip.float(),
    )  # fmt: skip


def slots(m: int, n: int, h: Settings) -> dict[str, Slot]:
    """Return two moments, shaped like the parameter."""
    return {"exp_avg": Slot("*", (m, n)), "exp_avg_sq": Slot("*", (m, n))}


RULE = Rule("adam", DEFAULTS, AdamState, slots, direction, elementwise=True, fused=fused_)
