"""COSMOS: the paper's Algorithm 1 (one-sided) and Algorithm 4 (two-sided). This file defines both.

Letters, for each matrix, all with any leading batch dimensions:

    G (m, n)  gradient                       M (m, n)  momentum: its moving average
    U (n, r)  leading eigenbasis of H        S (r, r)  H in that basis; H: the moving average of G'G, never formed
    C (r, r)  U'U_old, its rotation          E (r, r)  what this gradient adds to S
    V (m, r)  second moment of G U           P (m, r)  SOAP half in the basis: A = P U'
    N (m, n)  M, or Nesterov's form of it    X (m, n)  residual: N without its part in the basis
    B (m, n)  Muon half                      D (m, n)  direction of the step
    v (m, 1)  mean squares of D's rows (not in the paper; None if `row_beta2` is None)
    two-sided only: O (m, q) basis of GG', R (q, q) its second moment, V (q, r)

L4, L5, ... at line ends are line numbers of the paper's algorithm. docs/algorithm.md compares each line and lists the
deviations. On a GPU, `cuda/step.py` does the same with kernels; tests compare it with `direction`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.linalg.normalization import bias_correction, norm_sq, normalize_rows, quotient, unit_rms
from cosmos_optim.linalg.subspace import NOISE, or_one, power_step, take_first_bases
from cosmos_optim.rules.rule import Rule, Settings, Slot, as_stored, momentum_slots

DEFAULTS: dict[str, Any] = {
    "betas": (0.9, 0.98), "eps": 1e-8, "rank": 32, "gamma": None, "nesterov": True, "eps_placement": "outside",
    "ns_steps": 5, "ns_coefficients": "ns5", "ns_dtype": None, "momentum_dtype": None, "residual_guard": 1e-5,
    "row_beta2": 0.95, "equal_rows": False,
}  # fmt: skip
# The paper's values where they differ. The defaults performed best in docs/results.md.
PAPER: dict[str, Any] = {"rank": 64, "nesterov": False, "row_beta2": None}
# If gamma is None, `hyperparameters.complete` sets it to lr / adam_lr, with adam_lr at most this: the effective rate of
# the SOAP half is about lr / gamma.
SOAP_LR = 2e-3
# Rows of D have a root mean square of order 1. A row far below this floor has a gradient below `eps`: it is noise,
# and dividing it by its own size would make it as large as any other row.
ROW_FLOOR = 1e-4
DEFLATED = NewtonSchulz(deflated=True)


class CosmosState(NamedTuple):
    """State of one matrix, one-sided: M (m, n), U (n, r), S (r, r), V (m, r), v (m, 1) or None."""

    M: Tensor
    U: Tensor
    S: Tensor
    V: Tensor
    v: Tensor | None = None


class TwoSidedState(NamedTuple):
    """State of one matrix, two-sided: M (m, n), U (n, r), S (r, r), O (m, q), R (q, q), V (q, r), v (m, 1) or None."""

    M: Tensor
    U: Tensor
    S: Tensor
    O: Tensor
    R: Tensor
    V: Tensor
    v: Tensor | None = None


# fmt: off
def direction(
    G: Tensor, state: CosmosState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    eps_placement: str = "outside", gamma: float = 0.25, nesterov: bool = True, row_beta2: float | None = 0.95,
    equal_rows: bool = False, residual_guard: float = 1e-5, momentum_dtype: torch.dtype | None = None,
    ns: NewtonSchulz = DEFLATED, alg: Algebra | None = None,
) -> tuple[Tensor, CosmosState]:
    """Return the direction D of W <- W - lr D, and the new state: Algorithm 1. t counts steps from 1.

    gamma weighs the Muon half against the SOAP half: the paper's is lr / adam_lr, here 5e-4 / 2e-3.

    >>> G = torch.randn(6, 4)
    >>> zeros = CosmosState(*(torch.zeros(shape) for shape in ((6, 4), (4, 2), (2, 2), (6, 2), (6, 1))))
    >>> D, state = direction(G, take_first_bases(G, zeros), torch.tensor(1.0))
    >>> print(f"root mean square {D.square().mean().sqrt():.4f}")
    root mean square 1.0000
    """
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), (M, U_old, S, V, v) = betas, state
    e_in, e_out = (eps, 0.0) if eps_placement == "inside" else (0.0, eps)
    c1, c2 = bias_correction(b1, t + int(nesterov)), bias_correction(b2, t)

    M = as_stored(torch.lerp(M, G, 1 - b1), momentum_dtype)             # L4   b1 M + (1 - b1) G
    U = power_step(G, U_old, S, b2, alg)                                # L5   QR(b2 U S + (1 - b2) G'G U)
    GU, C = alg.mm(G, U), alg.un(U, U_old)
    E = alg.tn((1 - b2) * GU, GU)
    S = symmetric(b2 * C @ S @ C.mT + E)                                # L6   U'(b2 U_old S U_old' + (1 - b2) G'G) U
    V = b2 * V + (1 - b2) * GU * GU                                     # L7
    N = torch.add(b1 * M, G, alpha=1 - b1) if nesterov else M           #      Paper: N = M
    NU = alg.mm(N, U)
    root = ((V + e_in) / c2).sqrt() + e_out                             #      Paper: sqrt((V + eps) / (1 - b2^t))
    P = quotient(NU / c1, root) * resolved(V, GU, residual_guard)       # L8   A = P U'
    P = P * tracked(S, E, residual_guard)                               #      Not in the paper
    X = N - NU @ U.mT                                                   #      Paper: M - M U U'
    X_sq = alg.norm_sq(X)
    B = unit_rms(alg.polar_with_rows(X, X_sq, ns, equal_rows), alg)     # L9   NORM(NS5(X / |X|)) sqrt(m)
    B = B * above_noise(X_sq, alg.norm_sq_m(NU), residual_guard)        #      Not in the paper
    D = gamma * B + P @ U.mT                                            # L10
    D, v = normalize_rows(D, v, row_beta2, max(eps, ROW_FLOOR), alg)    #      Not in the paper
    return unit_rms(D, alg), CosmosState(M, U, S, V, v)                 # L11  NORM(D) sqrt(m)


def direction_two_sided(
    G: Tensor, state: TwoSidedState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    eps_placement: str = "outside", gamma: float = 0.25, nesterov: bool = True, row_beta2: float | None = 0.95,
    equal_rows: bool = False, residual_guard: float = 1e-5, momentum_dtype: torch.dtype | None = None,
    ns: NewtonSchulz = DEFLATED, alg: Algebra | None = None,
) -> tuple[Tensor, TwoSidedState]:
    """Return the direction D and the new state: Algorithm 4, with its misprints corrected (docs/algorithm.md)."""
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), (M, U_old, S, O_old, R, V, v) = betas, state
    e_in, e_out = (eps, 0.0) if eps_placement == "inside" else (0.0, eps)
    c1, c2 = bias_correction(b1, t + int(nesterov)), bias_correction(b2, t)

    M = as_stored(torch.lerp(M, G, 1 - b1), momentum_dtype)             # L4   b1 M + (1 - b1) G
    U = power_step(G, U_old, S, b2, alg)                                # L5   QR(b2 U S + (1 - b2) G'G U)
    O = power_step(G.mT, O_old, R, b2, alg.T)                           # L6   QR(b2 O R + (1 - b2) GG'O); paper: R O
    GU, C = alg.mm(G, U), alg.un(U, U_old)
    GO, C_O = alg.T.mm(G.mT, O), alg.T.un(O, O_old)
    E, E_O = alg.tn((1 - b2) * GU, GU), alg.T.tn((1 - b2) * GO, GO)
    S = symmetric(b2 * C @ S @ C.mT + E)                                # L7   U'(b2 U_old S U_old' + (1 - b2) G'G) U
    R = symmetric(b2 * C_O @ R @ C_O.mT + E_O)                          # L8   O'(b2 O_old R O_old' + (1 - b2) GG') O
    OGU = alg.tn(O, GU)
    V = b2 * V + (1 - b2) * OGU * OGU                                   # L9
    N = torch.add(b1 * M, G, alpha=1 - b1) if nesterov else M           #      Paper: N = M
    ONU = alg.tn(O, alg.mm(N, U))
    root = ((V + e_in) / c2).sqrt() + e_out                             #      Paper: sqrt((V + eps) / (1 - b2^t))
    P = quotient(ONU / c1, root) * resolved(V, OGU, residual_guard)     # L10  A = O P U'
    P = P * tracked(S, E, residual_guard) * tracked(R, E_O, residual_guard).mT  # Not in the paper
    X = N - O @ ONU @ U.mT                                              #      M - O O'M U U'; paper: O'O M
    X_sq = alg.norm_sq(X)
    B = unit_rms(alg.polar_with_rows(X, X_sq, ns, equal_rows), alg)     # L11  NORM(NS5(X / |X|)) sqrt(m)
    B = B * above_noise(X_sq, norm_sq(ONU), residual_guard)             #      Not in the paper
    D = gamma * B + O @ P @ U.mT                                        # L12
    D, v = normalize_rows(D, v, row_beta2, max(eps, ROW_FLOOR), alg)    #      Not in the paper
    return unit_rms(D, alg), TwoSidedState(M, U, S, O, R, V, v)         # L13  Paper: without sqrt(m)


# fmt: on


def symmetric(S: Tensor) -> Tensor:
    """Remove the antisymmetric part that rounding leaves: (S + S') / 2."""
    return (S + S.mT) / 2


def tracked(S: Tensor, E: Tensor, guard: float) -> Tensor:
    """Return (..., 1, r): 1 for basis columns that hold gradient, 0 for columns that hold only rounding noise.

    The paper uses every column. If the gradient has rank below r, the other columns would get quotients of rounding
    noise by rounding noise, as large as real ones; in exact arithmetic they are 0/0. A column counts if it holds a
    share of past gradients (S) or of this one (E): with S alone, one huge gradient would hide all others for hundreds
    of steps. `guard` = 0 keeps all columns.
    """
    floor = noise_floor(S.dtype, guard)
    past, now = (X.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) for X in (S, E))
    return ((past > floor * past.sum(-1, keepdim=True)) | (now > floor * now.sum(-1, keepdim=True))).to(S.dtype)


def resolved(V: Tensor, GU: Tensor, guard: float) -> Tensor:
    """Return, for each element of V, 1 if it holds gradient, and 0 if it holds only rounding noise.

    If a row of the gradient has nothing in a tracked direction, as in a matrix of blocks, its quotient would be noise
    divided by noise too. The noise of an element is relative to the largest of its row. As in `tracked`, an element
    counts if it holds past gradients (V) or this one (G U). `guard` = 0 keeps all elements.
    """
    floor, now = noise_floor(V.dtype, guard), GU / or_one(GU.abs().amax(-1, keepdim=True))
    return ((floor * V.amax(-1, keepdim=True) <= V) | (now.square() > max(floor, 0.0))).to(V.dtype)


def noise_floor(dtype: torch.dtype, guard: float) -> float:
    """Return the share of a sum of squares below which one is rounding noise; -1 without a guard: all exceed it."""
    return NOISE[dtype] ** 2 if guard > 0 else -1.0


def above_noise(X_sq: Tensor, NU_sq: Tensor, guard: float) -> Tensor:
    """Return 1 if the residual X holds more than `guard` of the momentum's energy, else 0.

    The paper always normalizes the residual. If the gradient has rank r or less, the residual is rounding noise, and
    normalizing it would make noise most of the update.
    """
    return (X_sq > guard * (X_sq + NU_sq)).float()


def diagnose(G: Tensor, D: Tensor, old: Any, new: Any, *, eps: float, alg: Algebra) -> dict[str, Tensor]:
    """Describe a step by its gradient, direction, old and new state.

    energy: |G U|^2 / |G|^2, the share of the gradient in the subspace. drift: 1 - |U'U_old|^2 / r, how far the subspace
    turned. ratio: |A| / |gamma B sqrt(m)|, SOAP half over Muon half: B is orthogonal to the basis, so without its row
    factors, D's parts inside and outside of the basis are the two halves.
    """
    G_sq, C = alg.norm_sq(G), alg.un(new.U, old.U)
    if new.v is not None:
        D = D * (new.v.sqrt() + max(eps, ROW_FLOOR))
    DU = alg.mm(D, new.U)
    soap = norm_sq(alg.tn(new.O, DU)) if isinstance(new, TwoSidedState) else alg.norm_sq_m(DU)
    muon = (alg.norm_sq(D) - soap).clamp_min(0)
    return {
        "energy": torch.where(G_sq > 0, alg.norm_sq_m(alg.mm(G, new.U)) / G_sq, 0 * G_sq),
        "drift": (1 - norm_sq(C) / C.shape[-1]).clamp_min(0),
        "ratio": (soap / muon).sqrt(),
    }


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return M (m, n), U (n, r), S (r, r), V (m, r) with r = min(rank, n), and v (m, 1) unless row_beta2 is None."""
    r = min(settings["rank"], n)
    rows = {} if settings["row_beta2"] is None else {"v": Slot("mo", (m, 1))}
    M = momentum_slots(m, n, settings["momentum_dtype"])
    return M | {"U": Slot("nr", (n, r)), "S": Slot("rr", (r, r)), "V": Slot("mr", (m, r)), **rows}


def slots_two_sided(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return the one-sided state with O (m, q), R (q, q), q = min(rank, m), and V (q, r)."""
    one, q = slots(m, n, settings), min(settings["rank"], m)
    r = one["S"].shape[0]
    return one | {"O": Slot("mq", (m, q)), "R": Slot("qq", (q, q)), "V": Slot("qr", (q, r))}


RULE = Rule(
    "cosmos", DEFAULTS, CosmosState, slots, direction, take_first_bases, diagnose, deflates=True,
    one_sided=True, transposes_few_rows=True, constant_size=True,
)  # fmt: skip
TWO_SIDED = Rule(
    "cosmos-two-sided", DEFAULTS, TwoSidedState, slots_two_sided, direction_two_sided, take_first_bases, diagnose,
    deflates=True, constant_size=True,
)  # fmt: skip
