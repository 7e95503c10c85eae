"""The arithmetic on thin factors that the paper's lines 6 to 8 consist of, in plain torch.

Letters: S, E (..., r, r) second moments in a basis, V (..., m, r) second moment of G U, t (..., 1, 1) counts from 1.
`Algebra` puts these together; where kernels stand in they do the same in one launch each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adam:
    """The constants of line 8.

    eps inside the root is the paper's sqrt((V + eps) / (1 - b2^t)); outside it is sqrt(V / ..) + eps. With eps = 1e-8
    the printed form has a floor of 1e-4, above the typical gradient of a language model (docs/algorithm.md has the one
    trial there is). `ahead`: the momentum looks so many steps ahead.
    """

    beta1: float
    beta2: float
    eps: float
    inside: bool = False
    ahead: float = 0.0


def symmetric(S: Tensor) -> Tensor:
    """(S + S')/2: rounding must not let the halves of a second moment drift apart."""
    return (S + S.mT) / 2


def correction(beta: float, t: Tensor) -> Tensor:
    """1 - beta^t, from double precision: beta = 0.9999 would lose half its digits at t = 1 otherwise."""
    wide = torch.float32 if t.device.type == "mps" else torch.float64
    return (1 - torch.pow(beta, t.to(wide))).to(t.dtype)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0/0 = 0, so that eps = 0 is legal."""
    return torch.where(b > 0, a / b, torch.zeros_like(a))


def root(V: Tensor, t: Tensor, how: Adam) -> Tensor:
    """The denominator of line 8."""
    c2 = correction(how.beta2, t)
    if how.inside:
        return ((V + how.eps) / c2).sqrt()
    return (V / c2).sqrt() + how.eps


def noise_floor(dtype: torch.dtype, guard: bool) -> float:
    """The share of a trace below which a direction holds rounding alone; -1, which all exceed, without the guard."""
    return (64 * torch.finfo(dtype).eps) ** 2 if guard else -1.0


def real_columns(S: Tensor, E: Tensor, guard: bool) -> Tensor:
    """(..., 1, r): 1 for tracked directions that hold gradient, 0 for those that hold rounding, 1 with the guard off.

    Where the gradient has fewer than r directions, the others get quotients of rounding noise by rounding noise, as
    large as any real one. In exact arithmetic they are 0/0. A direction is real that holds a share of the past, S, or
    of this gradient, E: after one huge gradient the past alone would hide everything else for hundreds of steps.
    """
    floor = noise_floor(S.dtype, guard)
    past, now = (X.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) for X in (S, E))
    return ((past > floor * past.sum(-1, keepdim=True)) | (now > floor * now.sum(-1, keepdim=True))).to(S.dtype)
