"""Memory that a step must release."""

import gc
import weakref

import pytest
import torch

from cosmos_optim import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_freed_as_soon_as_the_user_drops_them(name: str) -> None:
    """Without waiting for Python's cycle collector, after the first step (which does more work) and after the next."""
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 6))
    opt = OPTIMIZERS[name](model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model(torch.randn(4, 12)).square().mean().backward()
            gradients = [weakref.ref(p.grad) for p in model.parameters()]
            opt.step()
            opt.zero_grad(set_to_none=True)
            assert [g() for g in gradients] == [None] * len(gradients)
    finally:
        gc.enable()
