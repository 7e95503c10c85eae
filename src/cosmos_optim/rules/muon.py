"""Muon (the paper's Algorithm 3, with its normalization ablation as an option), and NorMuon.

Letters: G (m, n) gradient, M (m, n) momentum, N its Nesterov look-ahead, B the orthogonalized momentum.

The paper sums, M = mu M + G and N = mu M + G. Here M is the average, M + (1 - mu)(G - M): the same matrix times
1 - mu, and Newton-Schulz does not see a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.common import check_momentum, check_newton_schulz, look_ahead, newton_schulz_of
from cosmos_optim.rules.rule import Hyper, Probe, Rule, Slot, State, check_eps, require

# The paper's sqrt(m) assumes that m is the longer side. The other two are torch.optim.Muon's.
SCALINGS: dict[str, Callable[[int, int], float]] = {
    "paper": lambda m, n: max(m, n) ** 0.5,
    "original": lambda m, n: max(1.0, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
}

_ITERATION: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "ns_coefficients": "ns5",
    "ns_dtype": None,
    "momentum_dtype": None,
}
HYPER: dict[str, Any] = {**_ITERATION, "scaling": "paper", "normalize": False}
HYPER_NORMUON: dict[str, Any] = {**_ITERATION, "beta2": 0.95, "eps": 1e-8}


def orthogonal_momentum(G: Any, state: State, *, h: Hyper, alg: Algebra) -> tuple[Any, Any]:
    """M and B = NS5(N / |N|)."""
    mu = h["momentum"]
    M = alg.lerp(state["M"], G, 1 - mu)  # L4
    N = look_ahead(M, G, mu, h["nesterov"], alg)  # L5
    return M, alg.polar(N, newton_schulz_of(h))  # L6


def direction(
    G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Any, State]:
    """Take Algorithm 3's direction; with `normalize`, line 7 becomes sqrt(m) NORM(B): every update has RMS lr."""
    M, B = orthogonal_momentum(G, state, h=h, alg=alg)
    if h["normalize"]:
        return alg.unit_rms(B), {"M": M}
    return alg.scale(B, t.new_full((1, 1, 1), SCALINGS[h["scaling"]](alg.m, alg.n))), {"M": M}  # L7


def direction_normuon(
    G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Any, State]:
    """NorMuon (Li et al. 2025): B's rows divided by the root of their running mean square, then RMS 1."""
    M, B = orthogonal_momentum(G, state, h=h, alg=alg)
    D, v = alg.even_rows(B, state["v"], h["beta2"], h["eps"])
    return alg.unit_rms(D), {"M": M, "v": v}


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """The momentum."""
    return {"M": Slot("mn", (m, n), h["momentum_dtype"])}


def slots_normuon(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """The momentum and a number a row."""
    return slots(m, n, h) | {"v": Slot("mo", (m, 1))}


def check(h: Hyper) -> None:
    """Hyper-parameters within their ranges."""
    require(0 <= h["momentum"] < 1, "momentum", h["momentum"], "it must lie in [0, 1)")
    check_momentum(h)
    check_newton_schulz(h)
    if "scaling" in h:
        require(h["scaling"] in SCALINGS, "scaling", h["scaling"], f"one of {sorted(SCALINGS)}")


def check_normuon(h: Hyper) -> None:
    """MUON's, and its second moment's."""
    check(h)
    check_eps(h)
    require(0 <= h["beta2"] < 1, "beta2", h["beta2"], "it must lie in [0, 1)")


LAWS = frozenset({"row_permutation", "scale_invariance", "batched_equals_single", "deterministic", "grad_untouched",
                  "odd"})  # fmt: skip
_HOW: dict[str, Any] = {"lazy": True, "constant_size": True}
MUON = Rule("muon", HYPER, slots, direction, check=check, laws=LAWS, **_HOW)
NORMUON = Rule(
    "normuon", HYPER_NORMUON, slots_normuon, direction_normuon, check=check_normuon, laws=LAWS | {"unit_rms"}, **_HOW
)
