"""One rounding of the gradient changes no step: nothing in the path of a rule is decided by rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_optim import Cosmos, GaLore
from tests.small_gradients import F64, FAMILIES, SHAPES, STEPS, Family

LR = 0.01
# The largest change of an element of a step, in units of lr. Double precision; a power step amplifies rounding by the
# condition of its columns, and 30 of them follow each other. Measured: 2e-10 (GaLore 1e-7).
UNCHANGED = 1e-6
# Each family takes every sixth shape, beginning with another one.
CASES = {name: SHAPES[i % 6 :: 6] for i, name in enumerate(FAMILIES)}


def path(family: Family, m: int, n: int, rounded: bool, make: type[Any] = Cosmos, **given: Any) -> Tensor:
    """Return all updates in units of lr; each element of the gradient is one rounding off, up or down, if `rounded`."""
    p = torch.nn.Parameter(torch.zeros(m, n, dtype=F64))
    opt, updates = make([p], lr=LR, **given), []
    g = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        grad, old = family(m, n, step, 1), p.detach().clone()
        off = torch.randint(-1, 2, grad.shape, generator=g).to(F64) * torch.finfo(F64).eps
        p.grad = grad * (1 + off) if rounded else grad
        opt.step()
        updates.append((p.detach() - old) / LR)
    return torch.stack(updates)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rounding_of_the_gradient_changes_no_step_of_cosmos(name: str) -> None:
    """In double precision, for every sixth shape."""
    for m, n in CASES[name]:
        far = float((path(FAMILIES[name], m, n, True) - path(FAMILIES[name], m, n, False)).abs().max())
        assert far < UNCHANGED, f"{m} x {n}: {far:.1e} lr"


@pytest.mark.parametrize("name", ["few rows", "low rank that changes", "rank one", "blocks"])
def test_one_rounding_of_the_gradient_changes_no_step_of_galore(name: str) -> None:
    """The sign of a renewed column that does not overlap with the old one is not decided by rounding."""
    given = {"update_gap": 5}
    a, b = (path(FAMILIES[name], 15, 100, rounded, GaLore, **given) for rounded in (False, True))
    assert float((a - b).abs().max()) < UNCHANGED
