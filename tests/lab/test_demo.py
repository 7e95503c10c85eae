"""The demo, shortened and on toy text: four runs, a table, a report, one sentence."""

from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_lab.demo import RATES, SWEEP, DemoConfig, demo, demo_run, sentence
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import train
from tests.lab.outcomes import at_step, log_of


def test_the_demo_ends_with_table_report_and_sentence(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    config = DemoConfig(out=str(tmp_path / "demo"), steps=3, data=lab_data)
    adam = demo_run("adam", RATES["adam"], config)
    with pytest.raises(Stopped):
        train(adam, progress=at_step(1))
    result = demo(config)
    assert log_of(adam.folder)[0]["step"] == 1  # a fresh demo does not continue one that was stopped
    out = capsys.readouterr().out
    assert set(result["summaries"]) == {"adam", "muon", "soap", "cosmos"}
    shown = ("Adam", "MUON", "SOAP", "COSMOS", "val ppl", result["report"], result["sentence"])
    assert all(text in out for text in shown)
    assert Path(result["report"]).read_text().startswith("<!")
    kept = demo(replace(config, fresh=False))["summaries"]
    assert kept == result["summaries"]
    again = demo(config)["summaries"]  # trains again rather than show the old runs: other clocks, same numbers
    assert again["cosmos"]["time"] != kept["cosmos"]["time"]
    assert again["cosmos"]["final_val_loss"] == kept["cosmos"]["final_val_loss"]


def test_a_demo_of_one_step_has_nothing_to_time(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    demo(DemoConfig(out=str(tmp_path / "demo"), steps=1, data=lab_data))
    out = capsys.readouterr().out
    (adam,) = (line.split() for line in out.splitlines() if line.startswith("Adam "))
    assert adam[4:6] == ["-", "-"] and "lowest validation perplexity" in out


def test_rates_come_from_a_sweep_of_the_same_size_for_each() -> None:
    assert set(RATES) == set(SWEEP) and len({len(rates) for rates in SWEEP.values()}) == 1
    for name, rate in RATES.items():
        assert rate in SWEEP[name][1:-1], "a best rate at the edge of its grid says that the grid is too small"


def test_every_optimizer_gets_the_same_budget() -> None:
    runs = [demo_run(name, lr, DemoConfig()).flat() for name, lr in RATES.items()]
    own = {"optimizer", "lr", "adam_lr", "rank", "name"}
    common = [{name: value for name, value in run.items() if name not in own} for run in runs]
    assert all(run == common[0] for run in common)


def test_the_sentence_follows_the_numbers() -> None:
    def summary(loss: float, ppl: float) -> dict[str, float]:
        return {"final_val_loss": loss, "final_val_ppl": ppl, "tokens": 1000}

    said = sentence({"adam": summary(1.0, 10.0), "cosmos": summary(2.0, 20.0)})
    assert "Adam has the lowest validation perplexity, 50.0 % below COSMOS's (Adam 10.00, COSMOS 20.00)" in said
    lost = {"final_val_loss": None, "final_val_ppl": None, "tokens": 1000}
    assert said == sentence({"soap": lost, "adam": summary(1.0, 10.0), "cosmos": summary(2.0, 20.0)})
    assert sentence({"soap": lost}) == "No run ended with a finite validation loss."
