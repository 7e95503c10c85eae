"""GaLore (Zhao et al. 2024): Adam on the gradient projected to its leading singular vectors.

Letters: G (m, n) gradient; Q (n, r) projector on the shorter side, renewed every `update_gap` steps; m, v (m, r) Adam's
moments of G Q. With m < n everything is done on the transpose.

    D = scale * Adam(G Q) Q'

The moments are kept when Q is renewed, so the sign of a new column matters: it is chosen to agree with the old one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.subspace import first_basis
from cosmos_optim.rules import adam
from cosmos_optim.rules.common import due
from cosmos_optim.rules.rule import Hyper, Probe, Rule, Slot, State, check_betas, check_eps, require

HYPER: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "rank": 128, "update_gap": 200, "scale": 0.25}


def direction(
    G: Tensor, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Tensor, State]:
    """One step of Adam in the projected space."""
    if alg.m < alg.n:
        D, new = direction(G.mT, state, t, h=h, alg=alg.T)
        return D.mT, new
    Q = renew(G, state["Q"], t, h["update_gap"], alg)
    D, moments = adam.direction(alg.mm(G, Q), state, t, h=h)
    return h["scale"] * D @ Q.mT, {"Q": Q, **moments}


def renew(G: Tensor, Q: Tensor, t: Tensor, gap: int, alg: Algebra) -> Tensor:
    """The leading right singular vectors of this gradient, every `gap` steps after the first; a zero one has none."""
    now = due(t, gap) & (t > 1)
    if not bool(now.any()):
        return Q
    new = first_basis(G, Q.shape[-1], alg, like=Q)
    sign = alg.un(new, Q).diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return torch.where(now & (alg.energy(G) > 0), torch.where(sign < 0, -new, new), Q)


def start(G: Tensor, state: State, *, h: Hyper, alg: Algebra) -> State:
    """The first projector."""
    if alg.m < alg.n:
        return start(G.mT, state, h=h, alg=alg.T)
    return {"Q": first_basis(G, state["Q"].shape[-1], alg, like=state["Q"])}


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """The projector on the shorter side, two moments along the longer."""
    r = min(h["rank"], m, n)
    (short, s), (long, l) = (("n", n), ("m", m)) if m >= n else (("m", m), ("n", n))
    moment = Slot(long + "r", (l, r))
    return {"Q": Slot(short + "r", (s, r)), "exp_avg": moment, "exp_avg_sq": moment}


def check(h: Hyper) -> None:
    """Hyper-parameters within their ranges."""
    check_betas(h)
    check_eps(h)
    for name in ("rank", "update_gap"):
        require(isinstance(h[name], int) and h[name] >= 1, name, h[name], "it must be a positive integer")
    require(h["scale"] > 0, "scale", h["scale"], "it must be positive")


LAWS = {"row_permutation", "scale_invariance", "batched_equals_single", "deterministic", "grad_untouched", "odd"}
RULE = Rule("galore", HYPER, slots, direction, start, check, frozenset(LAWS))
