"""GaLore (Zhao et al. 2024): Adam on the gradient projected to its leading singular vectors.

Letters: G (m, n) gradient; Q (n, r) projector on the shorter side, renewed every `update_gap` steps; Adam's moments of
G Q, (m, r). If m < n, everything works on the transpose.

    D = scale * Adam(G Q) Q'

The moments are kept when Q is renewed, so the sign of a new column matters: it is chosen to agree with the old one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.subspace import NOISE, first_basis
from cosmos_optim.rules import adam
from cosmos_optim.rules.rule import Rule, Settings, Slot

DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "rank": 128, "update_gap": 200, "scale": 0.25}


class GaLoreState(NamedTuple):
    """The projector on the shorter side, and Adam's moments along the longer."""

    Q: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def direction(
    G: Tensor, state: GaLoreState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    update_gap: int = 200, scale: float = 0.25, alg: Algebra | None = None,
) -> tuple[Tensor, GaLoreState]:  # fmt: skip
    """Return the direction of one Adam step in the projected space, and the new state."""
    alg = alg or Algebra(*G.shape[-2:])
    if alg.m < alg.n:
        D, new = direction(G.mT, state, t, betas=betas, eps=eps, update_gap=update_gap, scale=scale, alg=alg.T)
        return D.mT, new
    Q = renew(G, state, t, update_gap, alg)
    D, moments = adam.direction(alg.mm(G, Q), adam.AdamState(*state[1:]), t, betas=betas, eps=eps)
    return scale * D @ Q.mT, GaLoreState(Q, *moments)


def renew(G: Tensor, state: GaLoreState, t: Tensor, gap: int, alg: Algebra) -> Tensor:
    """Return the leading right singular vectors of this gradient every `gap` steps after the first, else Q.

    A zero gradient has no singular vectors, so it keeps Q. A matrix that had none before, such as an expert without
    tokens, gets Q from its first one. At every step the host waits for a GPU, to know whether an update is due; most
    steps then save the eigenvectors.
    """
    Q, is_new = state.Q, alg.norm_sq_m(state.exp_avg_sq) == 0
    due = (((t - 1).remainder(gap) == 0) | is_new) & (t > 1)
    if not bool(due.any()):
        return Q
    due = due & (alg.norm_sq(G) > 0)
    if not bool(due.any()):
        return Q
    new = first_basis(G, Q.shape[-1], alg, like=Q)
    sign = alg.un(new, Q).diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    agreeing = torch.where(sign < -NOISE[Q.dtype], -new, new)  # an overlap of 0 decides nothing, nor may its rounding
    return torch.where(due, agreeing, Q)


def start(G: Tensor, state: GaLoreState, *, alg: Algebra | None = None) -> GaLoreState:
    """Return the state with the first projector."""
    alg = alg or Algebra(*G.shape[-2:])
    if alg.m < alg.n:
        return start(G.mT, state, alg=alg.T)
    return state._replace(Q=first_basis(G, state.Q.shape[-1], alg, like=state.Q))


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return the projector on the shorter side, and two moments along the longer."""
    r = min(settings["rank"], m, n)
    (short, s), (long, l) = (("n", n), ("m", m)) if m >= n else (("m", m), ("n", n))
    moment = Slot(long + "r", (l, r))
    return {"Q": Slot(short + "r", (s, r)), "exp_avg": moment, "exp_avg_sq": moment}


RULE = Rule("galore", DEFAULTS, GaLoreState, slots, direction, start)
