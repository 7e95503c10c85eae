"""torch's schedulers drive every optimizer: the rates are those that torch.optim.AdamW would get."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.swa_utils import SWALR

from cosmos_optim import OPTIMIZERS, param_groups
from tests.optim.helpers import backward, decoder, small_rank, train

LR = 1e-2


def chained(opt: Optimizer) -> Any:
    parts = [torch_schedulers.ConstantLR(opt, 0.5, 2), torch_schedulers.ExponentialLR(opt, 0.9)]
    return torch_schedulers.ChainedScheduler(parts, optimizer=opt)


def sequential(opt: Optimizer) -> Any:
    parts = [torch_schedulers.LinearLR(opt, 0.1, total_iters=3), torch_schedulers.CosineAnnealingLR(opt, 5)]
    return torch_schedulers.SequentialLR(opt, parts, milestones=[3])


def one_cycle(opt: Optimizer) -> Any:
    return torch_schedulers.OneCycleLR(opt, max_lr=LR, total_steps=8, cycle_momentum=False)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "chained": chained,
    "sequential": sequential,
    "one cycle": one_cycle,
    "restarts": lambda opt: torch_schedulers.CosineAnnealingWarmRestarts(opt, 2, T_mult=2),
    "lambdas": lambda opt: torch_schedulers.LambdaLR(
        opt, [lambda t, i=i: 1 / (1 + t * (i + 1)) for i in range(len(opt.param_groups))]
    ),
    "multiplicative": lambda opt: torch_schedulers.MultiplicativeLR(opt, lambda t: 0.9),
    "steps": lambda opt: torch_schedulers.StepLR(opt, 2, 0.5),
    "milestones": lambda opt: torch_schedulers.MultiStepLR(opt, [2, 4], 0.5),
    "polynomial": lambda opt: torch_schedulers.PolynomialLR(opt, 5, 2.0),
    "cyclic": lambda opt: torch_schedulers.CyclicLR(opt, 1e-3, LR, step_size_up=2, cycle_momentum=False),
    "averaging": lambda opt: SWALR(opt, swa_lr=1e-3, anneal_epochs=3),
    "plateau": lambda opt: torch_schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=0),
}


# The schedulers that docs/options.md says to leave as they are after rates were changed or groups added.
MULTIPLY: dict[str, Callable[[Optimizer], Any]] = {
    "exponential": lambda opt: torch_schedulers.ExponentialLR(opt, 0.9),
    "steps": SCHEDULES["steps"],
    "warm-up": lambda opt: torch_schedulers.LinearLR(opt, total_iters=20),
    "cosine": lambda opt: torch_schedulers.CosineAnnealingLR(opt, 20),
    "plateau": SCHEDULES["plateau"],
}


def rates(opt: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in opt.param_groups]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_gives_the_rates_that_it_gives_adamw_and_training_resumes(name: str, kind: str) -> None:
    model, other = decoder(), decoder()
    ours = OPTIMIZERS[name](model, lr=LR, adam_lr=LR, **small_rank(name))
    sizes = [len(group["params"]) for group in ours.param_groups]
    held = iter(decoder().parameters())
    theirs = torch.optim.AdamW([{"params": [next(held) for _ in range(n)]} for n in sizes], lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler that does not know the optimizer warns
        mine, reference = SCHEDULES[kind](ours), SCHEDULES[kind](theirs)
        argument = (1.0,) if kind == "plateau" else ()
        for step in range(3):
            train(model, ours, range(step, step + 1))
            theirs.step()
            mine.step(*argument)
            reference.step(*argument)
            assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12)
    again = OPTIMIZERS[name](other, lr=LR, adam_lr=LR, **small_rank(name))
    resumed = SCHEDULES[kind](again)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(mine.state_dict())
    again.load_state_dict(ours.state_dict())
    for net, opt, schedule in ((model, ours, mine), (other, again, resumed)):
        train(net, opt, range(3, 5))
        schedule.step(*argument)
    assert rates(ours) == rates(again)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    """So a compiled step or a CUDA graph reads the new value."""
    model = decoder()
    opt = OPTIMIZERS["cosmos"](model, lr=torch.tensor(LR), adam_lr=torch.tensor(LR), rank=4)
    held = opt.param_groups[0]["lr"]
    schedule = torch_schedulers.ExponentialLR(opt, 0.5)
    train(model, opt, range(1))
    schedule.step()
    assert opt.param_groups[0]["lr"] is held and float(held) == pytest.approx(LR / 2)


@pytest.mark.parametrize("kind", MULTIPLY)
def test_a_schedule_that_multiplies_continues_from_changed_rates_and_with_groups_added_at_its_rates(kind: str) -> None:
    model = decoder()
    model.up.requires_grad_(False)
    changed, unchanged = (OPTIMIZERS["cosmos"](model, lr=LR, adam_lr=4 * LR, rank=4) for _ in range(2))
    schedules = [MULTIPLY[kind](opt) for opt in (changed, unchanged)]
    for step in range(6):
        if step == 3:
            known = {group["rule"]: group for group in changed.param_groups}
            for group in known.values():
                group["lr"] *= 0.5
            model.up.requires_grad_(True)
            for group in param_groups(model, beside=changed):
                changed.add_param_group(group)
                changed.param_groups[-1]["lr"] = known[group["rule"]]["lr"]
        backward(model, step)
        for opt, schedule in zip((changed, unchanged), schedules, strict=True):
            opt.step()
            schedule.step(*((1.0,) if kind == "plateau" else ()))
    assert len(rates(changed)) == 4
    assert rates(changed) == pytest.approx([0.5 * rate for rate in rates(unchanged)] * 2, rel=1e-12)
