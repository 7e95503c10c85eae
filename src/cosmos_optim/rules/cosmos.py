"""COSMOS: the paper's Algorithm 1 (one-sided) and Algorithm 4 (two-sided).

Letters, per matrix, all with any leading batch dimensions:

    G (m, n)  gradient                       M (m, n)  its moving average (momentum)
    U (n, r)  leading eigenbasis of G'G      S (r, r)  second moment G'G in that basis
    V (m, r)  second moment of G U           P (m, r)  the SOAP half in the basis, A = P U'
    X (m, n)  residual momentum              B (m, n)  the MUON half
    v (m, 1)  mean squares of D's rows (not in the paper; not with `row_beta2=None`)
    two-sided only: O (m, r) basis of GG', R (r, r) its second moment, V (r, r)

docs/algorithm.md sets each line beside the paper's and lists the deviations.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra, sum_of_squares
from cosmos_optim.linalg.moments import Adam
from cosmos_optim.linalg.subspace import first_basis, power_step
from cosmos_optim.rules.common import check_momentum, check_newton_schulz, look_ahead, newton_schulz_of
from cosmos_optim.rules.rule import Hyper, Probe, Rule, Slot, State, check_betas, check_eps, require, require_number

HYPER: dict[str, Any] = {
    "betas": (0.9, 0.98),
    "eps": 1e-8,
    "rank": 32,
    "gamma": None,
    "nesterov": True,
    "eps_placement": "outside",
    "ns_steps": 5,
    "ns_coefficients": "ns5",
    "ns_dtype": None,
    "momentum_dtype": None,
    "residual_guard": 1e-5,
    "row_beta2": 0.95,
}
SOAP_LR = 2e-3  # with gamma=None the SOAP half, which moves at about lr / gamma, is no faster, whatever `adam_lr` is
ROW_FLOOR = 1e-4  # added to the root mean squares of D's rows, which are of order 1, where rows are divided by them
# Where the paper has other values. The defaults are those that docs/results.md found best.
PAPER: dict[str, Any] = {"rank": 64, "nesterov": False, "row_beta2": None}


# fmt: off
def direction(
    G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Any, State]:
    """Algorithm 1. The numbers at the line ends are the paper's."""
    (b1, b2), M, U_old, S, V = h["betas"], state["M"], state["U"], state["S"], state["V"]
    M = alg.lerp(M, G, 1 - b1)                                              # L4
    U = power_step(G, U_old, S, b2, alg)                                    # L5   QR(b2 U S + (1-b2) G'G U)
    GU = alg.mm(G, U)
    S, real = alg.second_moment(S, U, U_old, GU, b2, guarded(h))            # L6   U'(b2 U_old S U_old' + (1-b2) G'G) U
    N = momentum(M, G, h, alg)
    NU = alg.mm(N, U)
    V, P = alg.adapt(V, GU, NU, real, t, adam(h))                           # L7   b2 V + (1-b2) GU*GU,  L8  A = P U'
    X = alg.residual(N, NU, U)                                              #      M - M U U'
    B = alg.polar(X, newton_schulz_of(h, deflated=True))                    # L9
    b = alg.muon_gain(X, NU, B, h["gamma"], h["residual_guard"])            #      gamma NORM sqrt(m)
    D = alg.combine(b, B, P, U)                                             # L10  A + gamma B sqrt(m)
    D, rows = even_rows(D, state, h, alg)                                   #      not in the paper
    if probe is not None:
        C = alg.un(U, U_old)
        probe(G=G, GU=GU, C=C, soap=alg.energy_m(P), muon=b.square() * alg.energy(B), alg=alg)
    return alg.unit_rms(D), {"M": M, "U": U, "S": S, "V": V} | rows         # L11  NORM sqrt(m)


def direction_two_sided(
    G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Any, State]:
    """Algorithm 4, its misprints mended (docs/algorithm.md). The numbers at the line ends are the paper's."""
    (b1, b2), M, U_old, O_old = h["betas"], state["M"], state["U"], state["O"]
    M = alg.lerp(M, G, 1 - b1)                                              # L4
    U = power_step(G, U_old, state["S"], b2, alg)                           # L5
    O = power_step(G.mT, O_old, state["R"], b2, alg.T)                      # L6   (paper: R O; meant: O R)
    GU, OG = alg.mm(G, U), alg.T.mm(G.mT, O)
    S, real = alg.second_moment(state["S"], U, U_old, GU, b2, guarded(h))   # L7
    R, real_O = alg.T.second_moment(state["R"], O, O_old, OG, b2, guarded(h))  # L8
    N = momentum(M, G, h, alg)
    NU = alg.tn(O, alg.mm(N, U))
    V, P = alg.adapt(state["V"], alg.tn(O, GU), NU, real * real_O.mT, t, adam(h))  # L9, L10  A = O P U'
    X = alg.residual(N, O @ NU, U)                                          #      (paper: O'O M; meant: O O'M)
    B = alg.polar(X, newton_schulz_of(h, deflated=True))                    # L11
    b = alg.muon_gain(X, O @ NU, B, h["gamma"], h["residual_guard"])
    D = alg.combine(b, B, O @ P, U)                                         # L12
    D, rows = even_rows(D, state, h, alg)
    if probe is not None:
        C = alg.un(U, U_old)
        probe(G=G, GU=GU, C=C, soap=sum_of_squares(P), muon=b.square() * alg.energy(B), alg=alg)
    return alg.unit_rms(D), {"M": M, "U": U, "O": O, "S": S, "R": R, "V": V} | rows  # L13  (paper: without sqrt(m))

# fmt: on


def momentum(M: Any, G: Any, h: Hyper, alg: Algebra) -> Any:
    """The momentum both halves use: M, or with `nesterov` its look-ahead."""
    return look_ahead(M, G, h["betas"][0], h["nesterov"], alg)


def even_rows(D: Any, state: State, h: Hyper, alg: Algebra) -> tuple[Any, State]:
    """With `row_beta2`, NorMuon's second moment of each row before the last normalization; its state.

    Rows of D are of order 1. One far below that has a gradient below `eps`: what is left of it is noise, which its own
    size as the divisor would make as large as any other row.
    """
    if h["row_beta2"] is None:
        return D, {}
    D, v = alg.even_rows(D, state["v"], h["row_beta2"], max(h["eps"], ROW_FLOOR))
    return D, {"v": v}


def adam(h: Hyper) -> Adam:
    """The constants of L8. What looks a step ahead is an average over a step more."""
    b1, b2 = h["betas"]
    return Adam(b1, b2, h["eps"], inside=h["eps_placement"] == "inside", ahead=float(h["nesterov"]))


def guarded(h: Hyper) -> bool:
    """Whether noise is kept out of both halves.

    Paper: the residual is normalized whatever its energy. Where the gradient has no more than r directions that
    residual is rounding noise, and normalizing it would make noise most of the update; so are the tracked directions
    beyond the gradient's.
    """
    return bool(h["residual_guard"] > 0)


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """M (m, n), U (n, r), S (r, r), V (m, r) with r = min(rank, n), and v (m, 1) if rows have a second moment."""
    r = min(h["rank"], n)
    rows = {} if h["row_beta2"] is None else {"v": Slot("mo", (m, 1))}
    return {
        "M": Slot("mn", (m, n), h["momentum_dtype"]),
        "U": Slot("nr", (n, r)),
        "S": Slot("rr", (r, r)),
        "V": Slot("mr", (m, r)),
    } | rows


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
    if h["gamma"] is not None:
        require_number("gamma", h["gamma"])
        require(h["gamma"] >= 0, "gamma", h["gamma"], "0 or positive, or None for the rule")
    require(h["eps_placement"] in ("outside", "inside"), "eps_placement", h["eps_placement"], "'outside' or 'inside'")
    require(0 <= h["residual_guard"] < 1, "residual_guard", h["residual_guard"], "it must lie in [0, 1); 0 is off")
    beta = h["row_beta2"]
    number = isinstance(beta, (int, float)) and not isinstance(beta, bool)
    require(beta is None or (number and 0 <= beta < 1), "row_beta2", beta, "it must lie in [0, 1); None is off")
    check_momentum(h)
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
RULE = Rule("cosmos", HYPER, slots, direction, start, check, LAWS, lazy=True, constant_size=True)
TWO_SIDED = Rule(
    "cosmos-two-sided",
    HYPER,
    slots_two_sided,
    direction_two_sided,
    start_two_sided,
    check,
    LAWS - {"residual_orthogonal"},
    constant_size=True,
)
