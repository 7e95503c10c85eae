"""The demo, shortened and on toy text: four runs, a table, a report, one sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.demo import RATES, SWEEP, DemoConfig, demo, demo_run
from cosmos_lab.results.reading import read_summary
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import train
from tests.lab.outcomes import at_step, log_of


def test_the_demo_ends_with_table_report_and_sentence(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    config = DemoConfig(out=str(tmp_path / "demo"), steps=3, data=lab_data)
    adam = demo_run("adam", RATES["adam"], config)

    def summary() -> dict[str, Any]:
        found = read_summary(adam.folder)
        assert found is not None
        return found

    with pytest.raises(Stopped):
        train(adam, progress=at_step(1))
    result = demo(config)
    assert log_of(adam.folder)[0]["step"] == 1  # a fresh demo does not continue one that was stopped
    out = capsys.readouterr().out
    assert list(result["best"]) == ["adam", "muon", "soap", "cosmos"]
    page = tmp_path / "demo" / "report" / "index.html"
    shown = ("AdamW", "Muon", "SOAP", "COSMOS", "val ppl", str(page), "Of 4 optimizers, ", "validation perplexity of")
    assert all(text in out for text in shown)
    assert page.read_text().startswith("<!")
    kept = summary()
    assert demo(replace(config, fresh=False)) == result and summary() == kept
    demo(config)  # trains again instead of showing the old runs: other clocks, same numbers
    assert summary()["time"] != kept["time"] and summary()["final_val_loss"] == kept["final_val_loss"]


def test_a_demo_of_one_step_shows_dashes_instead_of_times(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    demo(DemoConfig(out=str(tmp_path / "demo"), steps=1, data=lab_data))
    (adam,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("adam lr "))
    assert adam[6:8] == ["-", "-"]


def test_the_sweep_tried_equally_many_rates_for_each_optimizer() -> None:
    assert set(RATES) == set(SWEEP) and len({len(rates) for rates in SWEEP.values()}) == 1
    for name, rate in RATES.items():
        assert rate in SWEEP[name][1:-1], "a best rate at the edge of its grid says that the grid is too small"


def test_every_optimizer_gets_the_same_budget() -> None:
    runs = [demo_run(name, lr, DemoConfig()).flat() for name, lr in RATES.items()]
    own = {"optimizer", "lr", "adam_lr", "rank", "name"}
    common = [{name: value for name, value in run.items() if name not in own} for run in runs]
    assert all(run == common[0] for run in common)
