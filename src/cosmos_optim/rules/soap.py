"""SOAP: Adam in the slowly rotating eigenbasis of the averaged G'G (the paper's Algorithm 2), optionally also of GG'.

Letters: G M (m, n), L (n, n) the average of G'G, U (n, n) its eigenbasis, V (m, n) the second moment in that basis;
two-sided: K (m, m) the average of GG' and O (m, m) its basis.

Two points differ from the printed algorithm. Its line 5 averages G'G with itself, a misprint of b2 L + (1 - b2) G'G.
Its lines 7 and 8 average the squares of the projected momentum; published SOAP (Vyas et al. 2024) averages those of the
projected gradient, which is the default (`squares`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.cholesky_qr import next_basis
from cosmos_optim.linalg.normalization import bias_correction, quotient
from cosmos_optim.linalg.subspace import take_first_bases
from cosmos_optim.rules.rule import Rule, Settings, Slot

DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "frequency": 1, "squares": "gradient"}


class SoapState(NamedTuple):
    """State of one matrix, one-sided: M and V (m, n), L and U (n, n)."""

    M: Tensor
    V: Tensor
    L: Tensor
    U: Tensor


class TwoSidedSoapState(NamedTuple):
    """State of one matrix, two-sided: the one-sided state, and K and O (m, m)."""

    M: Tensor
    V: Tensor
    L: Tensor
    U: Tensor
    K: Tensor
    O: Tensor


# fmt: off
def direction(
    G: Tensor, state: SoapState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    frequency: int = 1, squares: str = "gradient", alg: Algebra | None = None,
) -> tuple[Tensor, SoapState]:
    """Return the direction and the new state: Algorithm 2 (one-sided)."""
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), (M, V, L, U) = betas, state
    c1, c2 = bias_correction(b1, t), bias_correction(b2, t)

    M = torch.lerp(M, G, 1 - b1)                                        # L4   b1 M + (1 - b1) G
    L = b2 * L + alg.tn((1 - b2) * G, G)                                # L5   b2 L + (1 - b2) G'G
    U = updated_basis(U, L, t, frequency)                               # L6   QR(L U)
    MU = alg.mm(M, U)                                                   # L7
    GU = MU if squares == "momentum" else alg.mm(G, U)
    V = b2 * V + (1 - b2) * GU * GU                                     # L8
    P = quotient(MU / c1, (V / c2).sqrt() + eps)                        # L9
    return P @ U.mT, SoapState(M, V, L, U)


def direction_two_sided(
    G: Tensor, state: TwoSidedSoapState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    frequency: int = 1, squares: str = "gradient", alg: Algebra | None = None,
) -> tuple[Tensor, TwoSidedSoapState]:
    """Return the direction and the new state, with a basis on each side."""
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), (M, V, L, U, K, O) = betas, state
    c1, c2 = bias_correction(b1, t), bias_correction(b2, t)

    M = torch.lerp(M, G, 1 - b1)
    L = b2 * L + alg.tn((1 - b2) * G, G)
    K = b2 * K + alg.T.tn((1 - b2) * G.mT, G.mT)
    U, O = updated_basis(U, L, t, frequency), updated_basis(O, K, t, frequency)
    OMU = O.mT @ M @ U
    OGU = OMU if squares == "momentum" else O.mT @ G @ U
    V = b2 * V + (1 - b2) * OGU * OGU
    P = quotient(OMU / c1, (V / c2).sqrt() + eps)
    return O @ P @ U.mT, TwoSidedSoapState(M, V, L, U, K, O)


# fmt: on


def updated_basis(U: Tensor, L: Tensor, t: Tensor, frequency: int) -> Tensor:
    """Return QR(L U) every `frequency` steps, but not at the first, which already has the basis of L; else U.

    If `frequency` is above 1, the host waits for a GPU at every step, to know whether an update is due.
    """
    due = ((t - 1).remainder(frequency) == 0) & (t > 1)
    if frequency > 1 and not bool(due.any()):
        return U
    return torch.where(due, next_basis(L @ U, U), U)


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return M and V (m, n), L and U (n, n)."""
    return {"M": Slot("mn", (m, n)), "V": Slot("mn", (m, n)), "L": Slot("nk", (n, n)), "U": Slot("nk", (n, n))}


def slots_two_sided(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return the one-sided state, and K and O (m, m)."""
    return slots(m, n, settings) | {"K": Slot("mq", (m, m)), "O": Slot("mq", (m, m))}


RULE = Rule("soap", DEFAULTS, SoapState, slots, direction, take_first_bases, one_sided=True, shardable_sides="m")
TWO_SIDED = Rule(
    "soap-two-sided", DEFAULTS, TwoSidedSoapState, slots_two_sided, direction_two_sided, take_first_bases,
    shardable_sides="",
)  # fmt: skip
