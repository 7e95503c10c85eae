"""Skipped steps are reported: the first one, and many in a row, by one process and without waiting for a GPU."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_optim import OPTIMIZERS, Cosmos, SkippedStepWarning
from cosmos_optim.engine import skipped_steps
from cosmos_optim.engine.gradients import GradientCheck, check_gradients
from cosmos_optim.engine.run import run
from cosmos_optim.engine.skipped_steps import SkippedSteps
from tests.optim.helpers import Decoder, backward, decoder, gradient, matrix, same, small_rank, snapshot, train

BAD, GOOD = float("nan"), 0.0


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield the texts of all warnings of skipped steps, filled in as the block ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in seen if w.category is SkippedStepWarning]


def step_all(opt: Cosmos, p: Tensor, added: list[float]) -> list[str]:
    """Take a step for each number, which is added to the gradient; return the warnings."""
    with recorded() as texts:
        for step, value in enumerate(added):
            p.grad = gradient((4, 3), step) + value
            opt.step()
    return texts


def tiny() -> tuple[Cosmos, Tensor]:
    p = matrix((4, 3))
    return Cosmos([("w", p)], rank=2), p


@pytest.mark.parametrize("before", [0, 2])
def test_the_first_skipped_step_warns_once_and_names_the_parameter(before: int) -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    with recorded() as texts:
        for step in range(before + 3):
            backward(model, step)
            if step >= before:
                model.down.weight.grad[1, 2] = BAD
            opt.step()
    assert len(texts) == 1
    for word in ("a step was skipped", "'down.weight' (12, 20)", "NaN or inf", "nonfinite='raise'", "detect_anomaly"):
        assert word in texts[0], texts[0]
    assert opt.skipped_steps == 3


def test_skipped_steps_in_a_row_warn_after_20_and_200() -> None:
    opt, p = tiny()
    texts = step_all(opt, p, [GOOD, *[BAD] * 210])
    assert [text.split(":")[0] for text in texts] == [
        "a step was skipped, and it changed nothing",
        "20 steps in a row were skipped, so nothing is trained",
        "200 steps in a row were skipped, so nothing is trained",
    ]
    assert all("'w'" in text for text in texts)


def test_a_step_that_works_ends_the_row() -> None:
    opt, p = tiny()
    assert len(step_all(opt, p, ([BAD] * 19 + [GOOD]) * 3)) == 1
    texts = step_all(opt, p, [*[BAD] * 25, GOOD, *[BAD] * 25])
    assert ["20 steps in a row" in text for text in texts] == [True, True]


@pytest.mark.parametrize("options", [{}, {"momentum_dtype": torch.int8}, {"adam_dtype": torch.int8}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_flag_on_the_device_keeps_every_bit_of_a_skipped_step(name: str, options: dict[str, Any]) -> None:
    """Every writer of plain torch honours it, as on a GPU, where the host does not look; False steps as without it."""
    if not options.keys() <= inspect.signature(OPTIMIZERS[name]).parameters.keys():
        pytest.skip("has no such option")
    ends = []
    for flags in ([None, None], [torch.tensor(False), torch.tensor(True), torch.tensor(False)]):
        torch.manual_seed(0)
        model = Decoder(vocab=400, width=16)  # an embedding that `adam_dtype` is for
        opt = OPTIMIZERS[name](model, **small_rank(name), **options)
        train(model, opt, range(2))
        for flag in flags:
            backward(model, 2)
            entries = opt._collect()
            check = check_gradients(entries, opt._started, None)
            before = snapshot(model, opt)
            with torch.no_grad():
                run(entries, replace(check, skip=flag), None)
            assert same(before, snapshot(model, opt)) == (flag is not None and bool(flag))
        ends.append(snapshot(model, opt))
    assert same(*ends)


# -- a count that only the GPU knows ----------------------------------------------------------------------------------


class LateCopy:
    """A copy that arrives when the test says so; it has the value from when it was started, as a GPU's has."""

    arrived = True
    started = 0

    def __init__(self, device: torch.device) -> None:
        self._value = 0

    def start(self, number: Tensor) -> None:
        type(self).started += 1
        self._value = int(number)

    def value(self) -> int | None:
        return self._value if type(self).arrived else None


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateCopy]:
    monkeypatch.setattr(skipped_steps, "HostCopy", LateCopy)
    monkeypatch.setattr(LateCopy, "arrived", True)
    monkeypatch.setattr(LateCopy, "started", 0)
    return LateCopy


def on_device(skipped: SkippedSteps, flags: list[bool]) -> list[str]:
    """Count steps with a flag that only the device knows, and return the warnings."""
    with recorded() as texts:
        for flag in flags:
            check = GradientCheck([], torch.zeros(0), [], [], skip=torch.tensor(flag))
            skipped.count(check, torch.device("cpu"))
            skipped.report(check)
    return texts


def test_a_step_that_the_gpu_skips_is_reported_by_the_next_step(late: type[LateCopy]) -> None:
    skipped = SkippedSteps()
    assert not on_device(skipped, [False, False, True])
    texts = on_device(skipped, [False])
    assert len(texts) == 1
    assert "a step was skipped" in texts[0] and "a gradient is NaN" in texts[0] and "nonfinite='raise'" in texts[0]
    assert not on_device(skipped, [True, False, True, False])
    assert skipped.total() == 3


def test_the_host_does_not_wait_for_a_late_count_and_misses_no_row(late: type[LateCopy]) -> None:
    skipped = SkippedSteps()
    assert not on_device(skipped, [False, False])
    late.arrived = False
    assert not on_device(skipped, [True] * 30)
    assert late.started == 2  # one copy at a time
    late.arrived = True
    texts = on_device(skipped, [True] * 2)
    assert len(texts) == 1 and "31 steps in a row" in texts[0]
    assert not on_device(skipped, [True] * 5)
    assert skipped.total() == 37


def test_skipped_steps_in_a_row_on_a_gpu_warn_as_on_the_host(late: type[LateCopy]) -> None:
    skipped = SkippedSteps()
    assert len(on_device(skipped, [True] * 20)) == 1
    assert "20 steps in a row" in on_device(skipped, [False])[0]
    assert not on_device(skipped, ([True] * 19 + [False]) * 3)


def test_a_count_that_comes_very_late_warns_once(late: type[LateCopy]) -> None:
    skipped = SkippedSteps()
    late.arrived = False
    on_device(skipped, [True] * 300)
    late.arrived = True
    assert len(on_device(skipped, [True] * 3)) == 2  # the copy of the first step, then that of all others
    assert not on_device(skipped, [True] * 1600)
    assert "in a row" in on_device(skipped, [True] * 200)[0]
