"""Schedules against their definitions written another way, and at their ends."""

import math

import pytest

from cosmos_lab.config import ScheduleOptions
from cosmos_lab.run.schedule import lr_factor

STEPS = 200


def test_the_papers_schedule_is_ten_percent_warm_up_then_linear_to_zero() -> None:
    share = [lr_factor(t, STEPS, ScheduleOptions()) for t in range(1, STEPS + 1)]
    assert share[:20] == pytest.approx([t / 20 for t in range(1, 21)])
    assert share[20:] == pytest.approx([(STEPS - t) / 180 for t in range(20, STEPS)])


def test_wsd_holds_the_peak_and_decays_at_the_end() -> None:
    options = ScheduleOptions("wsd", warmup=0.05, decay=0.25)
    share = [lr_factor(t, STEPS, options) for t in range(1, STEPS + 1)]
    assert share[9:150] == [1.0] * 141
    assert share[150:] == pytest.approx([(50 - i) / 50 for i in range(50)])


def test_the_cosine_schedule_is_half_a_cosine_wave() -> None:
    options = ScheduleOptions("cosine", warmup=0.0)
    for t in (1, 51, 101, 151):
        assert lr_factor(t, STEPS, options) == pytest.approx(0.5 * (1 + math.cos(math.pi * (t - 1) / STEPS)))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_rate_falls_towards_final_lr_and_never_below(schedule: str) -> None:
    options = ScheduleOptions(schedule, final_lr=0.1)  # type: ignore[arg-type]
    share = [lr_factor(t, 1000, options) for t in range(101, 1001)]
    assert all(later <= earlier for earlier, later in zip(share, share[1:]))
    assert 0.1 < share[-1] < 0.106


def test_a_constant_rate_and_a_single_step_use_the_peak() -> None:
    assert lr_factor(7, 10, ScheduleOptions("constant", warmup=0.1)) == 1.0
    assert lr_factor(1, 1, ScheduleOptions()) == 1.0
