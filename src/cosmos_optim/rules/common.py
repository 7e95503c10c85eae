"""Small pieces that several rules share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.coefficients import COEFFICIENTS
from cosmos_optim.linalg.moments import correction, quotient
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.rules.rule import Hyper, require

__all__ = [
    "check_momentum", "check_newton_schulz", "correction", "due", "look_ahead", "newton_schulz_of", "quotient"
]  # fmt: skip


def due(t: Tensor, every: int) -> Tensor:
    """Whether step t is one of 1, 1 + every, 1 + 2 every, ..."""
    return (t - 1).remainder(every) == 0


def look_ahead(M: Any, G: Any, beta: float, nesterov: bool, alg: Algebra) -> Any:
    """Return Nesterov's momentum beta M + (1 - beta) G, or M."""
    return alg.blend(beta, M, 1 - beta, G) if nesterov else M


def newton_schulz_of(h: Hyper, *, deflated: bool = False) -> NewtonSchulz:
    """The Newton-Schulz settings of a group, for matrices whose leading directions have been taken out, or not."""
    return NewtonSchulz(h["ns_steps"], h["ns_coefficients"], h["ns_dtype"], deflated)


def check_momentum(h: Hyper) -> None:
    """Check the settings of M that every rule with a momentum of whole matrices shares."""
    require(isinstance(h["nesterov"], bool), "nesterov", h["nesterov"],
            "give True or False (a number of steps to look ahead was measured to be worse than one)")  # fmt: skip
    require(h["momentum_dtype"] in (None, torch.float32, torch.bfloat16), "momentum_dtype", h["momentum_dtype"],
            "torch.float32 or torch.bfloat16")  # fmt: skip


def check_newton_schulz(h: Hyper) -> None:
    """The settings every rule with a Newton-Schulz iteration shares."""
    require(isinstance(h["ns_steps"], int) and h["ns_steps"] >= 1, "ns_steps", h["ns_steps"], "a positive integer")
    known = sorted(COEFFICIENTS)
    require(h["ns_coefficients"] in known, "ns_coefficients", h["ns_coefficients"], f"one of {known}")
    ok = h["ns_dtype"] is None or (isinstance(h["ns_dtype"], torch.dtype) and h["ns_dtype"].is_floating_point)
    require(ok, "ns_dtype", h["ns_dtype"], "a floating-point torch.dtype, or None to choose by device")
