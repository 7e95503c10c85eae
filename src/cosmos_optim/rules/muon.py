"""Muon (the paper's Algorithm 3), optionally with normalized updates (the paper's ablation), and NorMuon.

Letters: G (m, n) gradient, M (m, n) momentum, N (m, n) its Nesterov form, B (m, n) the orthogonalized momentum,
v (m, 1) mean squares of B's rows (NorMuon).

The paper sums: M = mu M + G and N = mu M + G. This code averages, M + (1 - mu)(G - M): the same matrix times
1 - mu, and Newton-Schulz is invariant to scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.linalg.normalization import normalize_rows, unit_rms
from cosmos_optim.rules.rule import Rule, Settings, Slot, as_stored, momentum_slots

# The paper's sqrt(m) assumes that m is the longer side. The other two are torch.optim.Muon's.
SCALINGS: dict[str, Callable[[int, int], float]] = {
    "paper": lambda m, n: max(m, n) ** 0.5,
    "original": lambda m, n: max(1.0, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
}

_ITERATION: dict[str, Any] = {
    "momentum": 0.95, "nesterov": True, "equal_rows": False, "ns_steps": 5, "ns_coefficients": "ns5", "ns_dtype": None,
    "momentum_dtype": None,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {**_ITERATION, "scaling": "paper", "normalize": False}
DEFAULTS_NORMUON: dict[str, Any] = {**_ITERATION, "beta2": 0.95, "eps": 1e-8}
NS5 = NewtonSchulz()


class MuonState(NamedTuple):
    """The momentum (m, n)."""

    M: Tensor


class NorMuonState(NamedTuple):
    """The momentum (m, n), and mean squares of the rows of B, (m, 1)."""

    M: Tensor
    v: Tensor


# fmt: off
def direction(
    G: Tensor, state: MuonState, t: Tensor | None = None, *, momentum: float = 0.95, nesterov: bool = True,
    equal_rows: bool = False, momentum_dtype: torch.dtype | None = None, scaling: str = "paper",
    normalize: bool = False, ns: NewtonSchulz = NS5, alg: Algebra | None = None,
) -> tuple[Tensor, MuonState]:
    """Return the direction and the new state: Algorithm 3.

    With `normalize`, line 7 is replaced by sqrt(m) NORM(B), so that every update has root mean square lr.

    >>> D, state = direction(torch.randn(6, 4), MuonState(torch.zeros(6, 4)), normalize=True)
    >>> print(f"root mean square {D.square().mean().sqrt():.4f}")
    root mean square 1.0000
    """
    alg = alg or Algebra(*G.shape[-2:])
    M = as_stored(torch.lerp(state.M, G, 1 - momentum), momentum_dtype)         # L4   mu M + (1 - mu) G
    N = torch.add(momentum * M, G, alpha=1 - momentum) if nesterov else M       # L5
    B = alg.polar_with_rows(N, alg.norm_sq(N), ns, equal_rows)                  # L6   NS5(N / |N|)
    D = unit_rms(B, alg) if normalize else SCALINGS[scaling](alg.m, alg.n) * B  # L7   sqrt(m) B
    return D, MuonState(M)


def direction_normuon(
    G: Tensor, state: NorMuonState, t: Tensor | None = None, *, momentum: float = 0.95, nesterov: bool = True,
    equal_rows: bool = False, momentum_dtype: torch.dtype | None = None, beta2: float = 0.95, eps: float = 1e-8,
    ns: NewtonSchulz = NS5, alg: Algebra | None = None,
) -> tuple[Tensor, NorMuonState]:
    """Return the direction and the new state of NorMuon (Li et al. 2025): rows of equal size, then RMS 1."""
    alg = alg or Algebra(*G.shape[-2:])
    M = as_stored(torch.lerp(state.M, G, 1 - momentum), momentum_dtype)
    N = torch.add(momentum * M, G, alpha=1 - momentum) if nesterov else M
    B = alg.polar_with_rows(N, alg.norm_sq(N), ns, equal_rows)
    D, v = normalize_rows(B, state.v, beta2, eps, alg)
    assert v is not None
    return unit_rms(D, alg), NorMuonState(M, v)


# fmt: on


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return the momentum."""
    return momentum_slots(m, n, settings["momentum_dtype"])


def slots_normuon(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return the momentum, and one number for each row."""
    return slots(m, n, settings) | {"v": Slot("mo", (m, 1))}


MUON = Rule("muon", DEFAULTS, MuonState, slots, direction, constant_size=True)
NORMUON = Rule("normuon", DEFAULTS_NORMUON, NorMuonState, slots_normuon, direction_normuon, constant_size=True)
