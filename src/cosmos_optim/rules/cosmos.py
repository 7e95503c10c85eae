"""COSMOS: the paper's Algorithm 1 (one-sided) and Algorithm 4 (two-sided).

Letters, per matrix, all with any leading batch dimensions:

    G (m, n)  gradient                       M (m, n)  its moving average (momentum)
    U (n, r)  leading eigenbasis of G'G      S (r, r)  second moment G'G in that basis
    V (m, r)  second moment of G U           P (m, r)  the SOAP half in the basis, A = P U'
    X (m, n)  residual momentum              B (m, n)  the MUON half
    two-sided only: O (m, r) basis of GG', R (r, r) its second moment, V (r, r)

docs/algorithm.md sets each line beside the paper's and lists the deviations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.algebra import Algebra, sum_of_squares
from cosmos_optim.linalg.subspace import first_basis, power_step
from cosmos_optim.rules.base import Hyper, Probe, Rule, Slot, State, check_betas, check_eps, require
from cosmos_optim.rules.common import check_newton_schulz, correction, newton_schulz_of, quotient, symmetric

HYPER: dict[str, Any] = {
    "betas": (0.9, 0.98),
    "eps": 1e-8,
    "rank": 64,
    "gamma": None,
    "nesterov": False,
    "eps_placement": "outside",
    "ns_steps": 5,
    "ns_coefficients": "ns5",
    "ns_dtype": None,
    "momentum_dtype": None,
    "residual_guard": 1e-5,
}


# fmt: off
def direction(
    G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Any, State]:
    """Algorithm 1. The numbers at the line ends are the paper's."""
    (b1, b2), M, U_old, S, V = h["betas"], state["M"], state["U"], state["S"], state["V"]
    M = alg.lerp(M, G, 1 - b1)                                              # L4
    U = power_step(G, U_old, S, b2, alg)                                    # L5   QR(b2 U S + (1-b2) G'G U)
    GU, C = alg.mm(G, U), alg.un(U, U_old)
    E = alg.tn((1 - b2) * GU, GU)
    S = symmetric(b2 * C @ S @ C.mT + E)                                    # L6
    V = b2 * V + (1 - b2) * GU * GU                                         # L7
    N, c1 = momentum(M, G, t, h, alg)
    NU = alg.mm(N, U)
    P = quotient(NU / c1, root(V, t, h)) * real_columns(S, E, h)            # L8   A = P U'
    X = alg.residual(N, NU, U)                                              #      M - M U U'
    B = alg.polar(X, newton_schulz_of(h))                                   # L9
    b = muon_gain(alg.energy(X), alg.energy_m(NU), alg.energy(B), h, alg)   #      gamma NORM sqrt(m)
    D = alg.combine(b.to(V.dtype), B, P, U)                                 # L10  A + gamma B sqrt(m)
    if probe is not None:
        probe(G=G, GU=GU, C=C, soap=alg.energy_m(P), muon=b.square() * alg.energy(B), alg=alg)
    return alg.unit_rms(D), {"M": M, "U": U, "S": S, "V": V}                # L11  NORM sqrt(m)


def direction_two_sided(
    G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Any, State]:
    """Algorithm 4, its misprints mended (docs/algorithm.md). The numbers at the line ends are the paper's."""
    (b1, b2), M, U_old, O_old = h["betas"], state["M"], state["U"], state["O"]
    M = alg.lerp(M, G, 1 - b1)                                              # L4
    U = power_step(G, U_old, state["S"], b2, alg)                           # L5
    O = power_step(G.mT, O_old, state["R"], b2, alg.T)                      # L6   (paper: R O; meant: O R)
    GU, OG = alg.mm(G, U), alg.T.mm(G.mT, O)
    C, K = alg.un(U, U_old), alg.tn(O, O_old)
    E, F = alg.tn((1 - b2) * GU, GU), alg.un((1 - b2) * OG, OG)
    S = symmetric(b2 * C @ state["S"] @ C.mT + E)                           # L7
    R = symmetric(b2 * K @ state["R"] @ K.mT + F)                           # L8
    V = b2 * state["V"] + (1 - b2) * alg.tn(O, GU).square()                 # L9
    N, c1 = momentum(M, G, t, h, alg)
    NU = alg.tn(O, alg.mm(N, U))
    P = quotient(NU / c1, root(V, t, h)) * real_columns(S, E, h) * real_columns(R, F, h).mT  # L10  A = O P U'
    X = alg.residual(N, O @ NU, U)                                          #      (paper: O'O M; meant: O O'M)
    B = alg.polar(X, newton_schulz_of(h))                                   # L11
    b = muon_gain(alg.energy(X), sum_of_squares(NU), alg.energy(B), h, alg)
    D = alg.combine(b.to(V.dtype), B, O @ P, U)                             # L12
    if probe is not None:
        probe(G=G, GU=GU, C=C, soap=sum_of_squares(P), muon=b.square() * alg.energy(B), alg=alg)
    return alg.unit_rms(D), {"M": M, "U": U, "O": O, "S": S, "R": R, "V": V}  # L13  (paper: without sqrt(m))

# fmt: on


def momentum(M: Any, G: Any, t: Tensor, h: Hyper, alg: Algebra) -> tuple[Any, Tensor]:
    """The momentum both halves use and its bias correction: M, or Nesterov's look-ahead (1-b1) G + b1 M."""
    b1 = h["betas"][0]
    if h["nesterov"]:
        return alg.blend(b1, M, 1 - b1, G), correction(b1, t + 1)
    return M, correction(b1, t)


def root(V: Tensor, t: Tensor, h: Hyper) -> Tensor:
    """The denominator of L8. Paper: sqrt((V + eps) / (1 - b2^t)), "inside"; here by default sqrt(V / ..) + eps.

    With eps = 1e-8 the printed form has a floor of 1e-4, above the typical gradient of a language model
    (docs/algorithm.md has the one trial there is).
    """
    c2 = correction(h["betas"][1], t)
    if h["eps_placement"] == "inside":
        return ((V + h["eps"]) / c2).sqrt()
    return (V / c2).sqrt() + h["eps"]


def real_columns(S: Tensor, E: Tensor, h: Hyper) -> Tensor:
    """(..., 1, r): 1 for tracked directions that hold gradient, 0 for those that hold rounding, 1 with the guard off.

    Where the gradient has fewer than r directions, the others get quotients of rounding noise by rounding noise, as
    large as any real one. In exact arithmetic they are 0/0. A direction is real that holds a share of the past, S, or
    of this gradient, E: after one huge gradient the past alone would hide everything else for hundreds of steps.
    """
    floor = (64 * torch.finfo(S.dtype).eps) ** 2 if h["residual_guard"] > 0 else -1.0
    past, now = (X.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) for X in (S, E))
    return ((past > floor * past.sum(-1, keepdim=True)) | (now > floor * now.sum(-1, keepdim=True))).to(S.dtype)


def muon_gain(residual: Tensor, tracked: Tensor, polar: Tensor, h: Hyper, alg: Algebra) -> Tensor:
    """gamma sqrt(mn) / |NS5(X)|, or 0 where the residual holds less than `residual_guard` of the momentum's energy.

    Paper: the residual is normalized whatever its energy. Where the gradient has no more than r directions that
    residual is rounding noise, and normalizing it would make noise most of the update.
    """
    real = residual > h["residual_guard"] * (residual + tracked)
    return torch.where(real, h["gamma"] * alg.unit_gain(polar), torch.zeros_like(polar))


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """M (m, n), U (n, r), S (r, r), V (m, r) with r = min(rank, n)."""
    r = min(h["rank"], n)
    return {
        "M": Slot("mn", (m, n), h["momentum_dtype"]),
        "U": Slot("nr", (n, r)),
        "S": Slot("rr", (r, r)),
        "V": Slot("mr", (m, r)),
    }


def slots_two_sided(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """The one-sided state with O (m, q), R (q, q), q = min(rank, m), and V (q, r)."""
    one, q = slots(m, n, h), min(h["rank"], m)
    r = one["S"].shape[0]
    return one | {"O": Slot("mq", (m, q)), "R": Slot("qq", (q, q)), "V": Slot("qr", (q, r))}


def start(G: Any, state: State, *, h: Hyper, alg: Algebra) -> State:
    """U_0: the leading eigenvectors of the first G'G (the paper omits the initialization)."""
    U = state["U"]
    return {"U": first_basis(G, U.shape[-1], alg, like=U)}


def start_two_sided(G: Any, state: State, *, h: Hyper, alg: Algebra) -> State:
    """U_0 and O_0: the leading eigenvectors of the first G'G and GG'."""
    O = state["O"]
    return start(G, state, h=h, alg=alg) | {"O": first_basis(G.mT, O.shape[-1], alg.T, like=O)}


def check(h: Hyper) -> None:
    """Hyper-parameters within their ranges."""
    check_betas(h)
    check_eps(h)
    require(isinstance(h["rank"], int) and h["rank"] >= 1, "rank", h["rank"], "it must be a positive integer")
    require(h["gamma"] is None or h["gamma"] >= 0, "gamma", h["gamma"], "0 or positive, or None for lr / adam_lr")
    require(h["eps_placement"] in ("outside", "inside"), "eps_placement", h["eps_placement"], "'outside' or 'inside'")
    require(0 <= h["residual_guard"] < 1, "residual_guard", h["residual_guard"], "it must lie in [0, 1); 0 is off")
    require(
        h["momentum_dtype"] in (None, torch.float32, torch.bfloat16),
        "momentum_dtype",
        h["momentum_dtype"],
        "torch.float32 or torch.bfloat16",
    )
    check_newton_schulz(h)


LAWS = frozenset(
    {
        "row_permutation",
        "scale_invariance",
        "unit_rms",
        "orthonormal_basis",
        "psd_second_moment",
        "residual_orthogonal",
        "batched_equals_single",
        "deterministic",
        "grad_untouched",
        "odd",
    }
)
RULE = Rule("cosmos", HYPER, slots, direction, start, check, LAWS, lazy=True)
TWO_SIDED = Rule(
    "cosmos-two-sided",
    HYPER,
    slots_two_sided,
    direction_two_sided,
    start_two_sided,
    check,
    LAWS - {"residual_orthogonal"},
)
