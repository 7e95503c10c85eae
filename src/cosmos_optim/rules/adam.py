"""Adam with decoupled decay (Loshchilov and Hutter 2019), for what is not a hidden matrix.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  D = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

State names are torch.optim.AdamW's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.common import correction, quotient
from cosmos_optim.rules.rule import Hyper, Probe, Rule, Slot, State, check_betas, check_eps

HYPER: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8}


def direction(
    G: Tensor, state: State, t: Tensor, *, h: Hyper, alg: Algebra | None = None, probe: Probe | None = None
) -> tuple[Tensor, State]:
    """One Adam step for a tensor of any shape."""
    (b1, b2), eps = h["betas"], h["eps"]
    m = torch.lerp(state["exp_avg"], G, 1 - b1)
    v = b2 * state["exp_avg_sq"] + (1 - b2) * G * G
    D = quotient(m / correction(b1, t), (v / correction(b2, t)).sqrt() + eps)
    return D, {"exp_avg": m, "exp_avg_sq": v}


def fused_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: dict[str, list[Tensor]],
    steps: Sequence[Tensor],
    *,
    h: Hyper,
    lr: float | Tensor,
    weight_decay: float,
    maximize: bool,
    skip: Tensor | None,
) -> None:
    """The same step in one kernel, for whole tensors that all have one dtype; steps have been advanced already."""
    if isinstance(lr, Tensor):
        lr = lr.to(params[0].device)
    torch._fused_adamw_(
        list(params), list(grads), state["exp_avg"], state["exp_avg_sq"], [], list(steps),
        lr=lr, beta1=h["betas"][0], beta2=h["betas"][1], weight_decay=weight_decay, eps=h["eps"],
        amsgrad=False, maximize=maximize, grad_scale=None, found_inf=None if skip is None else skip.float(),
    )  # fmt: skip


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """Two averages, shaped as the parameter."""
    return {"exp_avg": Slot("*", (m, n)), "exp_avg_sq": Slot("*", (m, n))}


def check(h: Hyper) -> None:
    """Hyper-parameters within their ranges."""
    check_betas(h)
    check_eps(h)


RULE = Rule(
    "adam", HYPER, slots, direction, check=check, elementwise=True, fused=fused_,
    laws=frozenset({"row_permutation", "scale_invariance", "batched_equals_single", "deterministic",
                    "grad_untouched", "odd"}),
)  # fmt: skip
