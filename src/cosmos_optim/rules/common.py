"""Small pieces that several rules share."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.linalg.newton_schulz import COEFFICIENTS, NewtonSchulz
from cosmos_optim.rules.base import Hyper, require


def symmetric(S: Tensor) -> Tensor:
    """(S + S')/2: rounding must not let the halves of a second moment drift apart."""
    return (S + S.mT) / 2


def correction(beta: float, t: Tensor) -> Tensor:
    """1 - beta^t, from double precision: beta = 0.9999 would lose half its digits at t = 1 otherwise."""
    wide = torch.float32 if t.device.type == "mps" else torch.float64
    return (1 - torch.pow(beta, t.to(wide))).to(t.dtype)


def due(t: Tensor, every: int) -> Tensor:
    """Whether step t is one of 1, 1 + every, 1 + 2 every, ..."""
    return (t - 1).remainder(every) == 0


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0/0 = 0, so that eps = 0 is legal."""
    return torch.where(b > 0, a / b, torch.zeros_like(a))


def newton_schulz_of(h: Hyper) -> NewtonSchulz:
    """The Newton-Schulz settings of a group."""
    return NewtonSchulz(steps=h["ns_steps"], coefficients=h["ns_coefficients"], dtype=h["ns_dtype"])


def check_newton_schulz(h: Hyper) -> None:
    """The settings every rule with a Newton-Schulz iteration shares."""
    require(isinstance(h["ns_steps"], int) and h["ns_steps"] >= 1, "ns_steps", h["ns_steps"], "a positive integer")
    known = sorted(COEFFICIENTS)
    require(h["ns_coefficients"] in known, "ns_coefficients", h["ns_coefficients"], f"one of {known}")
    ok = h["ns_dtype"] is None or (isinstance(h["ns_dtype"], torch.dtype) and h["ns_dtype"].is_floating_point)
    require(ok, "ns_dtype", h["ns_dtype"], "a floating-point torch.dtype, or None to choose by device")
