"""SOAP: Adam in the slowly turning eigenbasis of the averaged G'G (the paper's Algorithm 2), and of GG' too.

Letters: G M (m, n), L (n, n) the average of G'G, U (n, n) its eigenbasis, V (m, n) the second moment in that basis;
two-sided: K (m, m) the average of GG' and O (m, m) its basis.

Two points differ from the printed box. Its line 5 averages G'G with itself: meant is b2 L + (1 - b2) G'G. Its lines 7
and 8 average the squares of the projected momentum; published SOAP (Vyas et al. 2024) those of the projected gradient,
which is the default here (`squares`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.cholesky_qr import turned
from cosmos_optim.linalg.subspace import first_basis
from cosmos_optim.rules.common import correction, due, quotient
from cosmos_optim.rules.rule import Hyper, Probe, Rule, Slot, State, check_betas, check_eps, require

HYPER: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "frequency": 1, "squares": "gradient"}


def direction(
    G: Tensor, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Tensor, State]:
    """Algorithm 2 (one-sided)."""
    (b1, b2), U = h["betas"], state["U"]
    M = torch.lerp(state["M"], G, 1 - b1)  # L4
    L = b2 * state["L"] + alg.tn((1 - b2) * G, G)  # L5
    U = turn(U, L, t, h["frequency"])  # L6
    MU = alg.mm(M, U)  # L7
    V = b2 * state["V"] + (1 - b2) * (MU if h["squares"] == "momentum" else alg.mm(G, U)).square()  # L8
    P = quotient(MU / correction(b1, t), (V / correction(b2, t)).sqrt() + h["eps"])  # L9
    return P @ U.mT, {"M": M, "L": L, "U": U, "V": V}


def direction_two_sided(
    G: Tensor, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Tensor, State]:
    """The same with a basis on each side."""
    b1, b2 = h["betas"]
    M = torch.lerp(state["M"], G, 1 - b1)
    L = b2 * state["L"] + alg.tn((1 - b2) * G, G)
    K = b2 * state["K"] + alg.T.tn((1 - b2) * G.mT, G.mT)
    U, O = turn(state["U"], L, t, h["frequency"]), turn(state["O"], K, t, h["frequency"])
    OMU = O.mT @ M @ U
    V = b2 * state["V"] + (1 - b2) * (OMU if h["squares"] == "momentum" else O.mT @ G @ U).square()
    P = quotient(OMU / correction(b1, t), (V / correction(b2, t)).sqrt() + h["eps"])
    return O @ P @ U.mT, {"M": M, "L": L, "K": K, "U": U, "O": O, "V": V}


def turn(U: Tensor, L: Tensor, t: Tensor, frequency: int) -> Tensor:
    """QR(L U) every `frequency` steps after the first, whose basis is already L's own."""
    now = due(t, frequency) & (t > 1)
    if frequency > 1 and not bool(now.any()):
        return U
    return torch.where(now, turned(L @ U, U), U)


def start(G: Tensor, state: State, *, h: Hyper, alg: Algebra) -> State:
    """The eigenvectors of the first G'G."""
    return {"U": first_basis(G, alg.n, alg, like=state["U"])}


def start_two_sided(G: Tensor, state: State, *, h: Hyper, alg: Algebra) -> State:
    """The eigenvectors of the first G'G and GG'."""
    return start(G, state, h=h, alg=alg) | {"O": first_basis(G.mT, alg.m, alg.T, like=state["O"])}


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """M and V (m, n), L and U (n, n)."""
    return {"M": Slot("mn", (m, n)), "V": Slot("mn", (m, n)), "L": Slot("nk", (n, n)), "U": Slot("nk", (n, n))}


def slots_two_sided(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """The one-sided state, and K and O (m, m)."""
    return slots(m, n, h) | {"K": Slot("mq", (m, m)), "O": Slot("mq", (m, m))}


def check(h: Hyper) -> None:
    """Hyper-parameters within their ranges."""
    check_betas(h)
    check_eps(h)
    require(isinstance(h["frequency"], int) and h["frequency"] >= 1, "frequency", h["frequency"], "a positive integer")
    require(h["squares"] in ("gradient", "momentum"), "squares", h["squares"], "'gradient' or 'momentum'")


# Not "row_permutation": where G has fewer than n directions Adam divides rounding noise by rounding noise in the rest.
LAWS = frozenset(
    {"scale_invariance", "orthonormal_basis", "batched_equals_single", "deterministic", "grad_untouched", "odd"}
)
RULE = Rule("soap", HYPER, slots, direction, start, check, LAWS, shardable="rows")
TWO_SIDED = Rule("soap-two-sided", HYPER, slots_two_sided, direction_two_sided, start_two_sided, check, LAWS,
                 shardable="none")  # fmt: skip
