"""Code that wraps the optimizer or copies the model: schedule-free, Lookahead of timm, EMA of ema-pytorch."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from cosmos_optim import Cosmos
from tests.integrations.helpers import STEPS, assert_continues_exactly, changed, tiny_llama, train, weights
from tests.integrations.torchvision_stub import import_timm


def built(model: Any) -> Cosmos:
    return Cosmos(model, lr=2e-3, adam_lr=8e-3, rank=8)


def test_schedule_free_continues_exactly() -> None:
    schedulefree = pytest.importorskip("schedulefree")

    def wrap(model: Any) -> Any:
        opt = schedulefree.ScheduleFreeWrapper(built(model), momentum=0.9)
        opt.train()
        return opt

    assert_continues_exactly(tiny_llama, wrap)


def test_lookahead_of_timm_continues_exactly() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("could not import 'timm'")
    import_timm()
    from timm.optim import Lookahead

    assert_continues_exactly(tiny_llama, lambda model: Lookahead(built(model), k=2))


def test_an_ema_of_the_model_follows_and_does_not_disturb() -> None:
    ema_pytorch = pytest.importorskip("ema_pytorch")
    model, alone = tiny_llama(), tiny_llama()
    opt = built(model)
    ema = ema_pytorch.EMA(model, beta=0.9, update_after_step=0, update_every=1)
    losses = []
    for step in range(STEPS):
        losses += train(model, opt, range(step, step + 1))
        ema.update()
    assert losses == train(alone, built(alone), range(STEPS))
    assert changed(ema.ema_model, weights(model)) == {name for name, _ in model.named_parameters()}
