"""Progress is shown with rich and without."""

import pytest

from cosmos_lab import display
from cosmos_lab.config import RunConfig
from cosmos_lab.display import TableDisplay, TrainDisplay
from cosmos_lab.results.reading import Status

LINE = {"step": 5, "time": 1.0, "loss": 3.21, "tokens_per_s": 45_600.0, "mfu": 0.451, "memory_gb": 12.34}


@pytest.mark.parametrize("rich", [True, False])
def test_a_run_shows_loss_speed_mfu_memory_and_time_left(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(display, "has_rich", lambda: rich)
    monkeypatch.setattr(display, "_EVERY_S", -1.0)  # every line is due
    with TrainDisplay(RunConfig().replace(steps=10, name="mine[/b]")) as show:
        show({"step": 0, "about": "data/[a-z]: 1,234 tokens"})
        show({**LINE, "loss": 4.0})
        show({**LINE, "step": 10, "time": 2.0})
        show({"step": 10, "val_loss": 3.0, "val_ppl": 20.09})
    out = capsys.readouterr().out
    numbers = ("loss 3.210", "45.6k tok/s", "MFU 45%", "12.3 GiB", "ETA 0:00", "ppl 20.09")
    for text in ("mine[/b]", "[a-z]: 1,234 tokens", *numbers):
        assert text in out


def test_a_run_that_was_finished_earlier_leaves_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(display, "has_rich", lambda: True)
    with TrainDisplay(RunConfig().replace(name="mine")) as show:
        pass
    assert not show.began and "mine" not in capsys.readouterr().out


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_shows_status_and_numbers_of_every_run(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(display, "has_rich", lambda: rich)
    with TableDisplay([RunConfig().replace(name=name, steps=10) for name in ("first", "second[/b]")]) as table:
        table.update(0, Status.RUNNING, LINE)
        table.update(0, Status.DONE, {"step": 10, "loss": None, "val_ppl": 20.09})
        table.update(1, Status.FAILED)
    out = capsys.readouterr().out
    for text in ("first", "second[/b]", "done", "failed", "10/10", "3.210", "20.09", "45,600"):
        assert text in out
    if not rich:  # lines have no heads
        assert "run 1 of 2  first  done  step 10/10  loss 3.210  val ppl 20.09  tokens/s 45,600\n" in out


def test_the_table_tells_how_many_runs_ended_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of runs that were finished before this call, or of the part before a resume, took no time now."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    table = TableDisplay([RunConfig().replace(name=name, steps=100) for name in "abc"], show=False)
    table.update(0, Status.DONE, {"step": 100})
    table.update(1, Status.RUNNING)
    assert table._progress() == "1 of 3 runs ended"
    table.update(1, Status.RUNNING, {"step": 50, "about": "resumed"})
    now[0] = 40.0
    table.update(1, Status.RUNNING, {"step": 70})
    assert table._progress() == "1 of 3 runs ended, about 4:20 left"  # 130 steps of 2 s
    table.update(1, Status.UNFINISHED, {"step": 80})
    table.update(2, Status.FAILED)
    assert table._progress() == "2 of 3 runs ended"


def test_the_time_left_comes_from_the_speed_so_far() -> None:
    show = TrainDisplay(RunConfig().replace(steps=100))
    assert show._eta({"step": 1, "time": 10.0}) is None
    assert show._eta({"step": 11, "time": 30.0}) == pytest.approx(89 * 2.0)
