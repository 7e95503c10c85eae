"""The demo, shortened and on toy text: four runs, a table, a report, a sentence, commands that work."""

import json
import math
import shlex
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from benchmarks.demo_tuning import OPTIMIZERS, START, best_of, noise, tune, untried
from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.demo import NOISE, RATES, VALIDATIONS, DemoConfig, demo, demo_run
from cosmos_lab.results.reading import read_run, read_summary
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import train
from tests.lab.outcomes import at_step, log_of

ROOT = Path(__file__).parents[2]
TUNING = json.loads((ROOT / "results" / "demo-tuning.json").read_text())


def test_the_demo_ends_with_table_link_sentence_and_commands_that_work(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    config = DemoConfig(out=str(tmp_path / "demo"), steps=VALIDATIONS, data=lab_data)
    adam = demo_run("adam", *RATES["adam"], config)

    def summary() -> dict[str, Any]:
        found = read_summary(adam.folder)
        assert found is not None
        return found

    with pytest.raises(Stopped):
        train(adam, progress=at_step(1))
    result = demo(config)
    assert log_of(adam.folder)[0]["step"] == 1  # a fresh demo does not continue one that was stopped
    out = capsys.readouterr().out
    assert out.startswith(f"Trains a tiny LLaMA on {lab_data}, 4 times")
    assert out.splitlines()[1] == f"{VALIDATIONS} steps each, about 1 minute in all on two cores."
    assert list(result["best"]) == ["adam", "muon", "soap", "cosmos"]
    assert "run 2 of 4" in out and "left" in out
    (link,) = [line.removeprefix("Report: ") for line in out.splitlines() if line.startswith("Report: ")]
    page = Path(urlparse(link).path).read_text()
    assert link.startswith("file://") and page.startswith("<!")
    (said,) = [line for line in out.splitlines() if line.startswith("Of 4 optimizers, ")]
    assert escape(said).replace(" %", "&nbsp;%") in page and "one seed each" not in said  # it knows the noise
    for name, rates in RATES.items():
        assert len(read_run(demo_run(name, *rates, config).folder).validation) >= 10
    evaluate, export, more = out[out.index("Next:") :].splitlines()[1:4]
    for command in (evaluate, export):
        assert main(shlex.split(command, comments=True)[1:]) == 0
    assert (tmp_path / "demo" / "model" / "config.json").exists()
    assert main([*shlex.split(more, comments=True)[1:], "--steps", "0"]) == 2  # its words are right, its steps are not
    assert "--steps must be positive" in capsys.readouterr().err
    kept = summary()
    assert demo(replace(config, fresh=False)) == result and summary() == kept
    demo(config)  # trains again instead of showing the old runs: other clocks, same numbers
    assert summary()["time"] != kept["time"] and summary()["final_val_loss"] == kept["final_val_loss"]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"data": "/nowhere"}])
def test_a_demo_that_cannot_run_leaves_the_earlier_one(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    config = DemoConfig(out=str(tmp_path / "demo"), steps=1, data=lab_data)
    train(demo_run("adam", *RATES["adam"], config))
    before = sorted((tmp_path / "demo").rglob("*"))
    with pytest.raises(ValueError, match="--steps must be positive|/nowhere"):
        demo(replace(config, **wrong))
    assert sorted((tmp_path / "demo").rglob("*")) == before


def test_a_demo_of_one_step_shows_dashes_instead_of_times(
    tmp_path: Path, lab_data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    demo(DemoConfig(out=str(tmp_path / "demo"), steps=1, data=lab_data))
    (adam,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("adam lr "))
    assert adam[6:8] == ["-", "-"]


def test_every_optimizer_runs_at_the_best_of_the_same_pairs() -> None:
    pairs = {(row["hidden_lr"], row["embedding_lr"]) for row in TUNING["grid"]}
    assert pairs >= set(START)
    for name in OPTIMIZERS:
        tried = [row for row in TUNING["grid"] if row["optimizer"] == name]
        assert {(row["hidden_lr"], row["embedding_lr"]) for row in tried} == pairs and len(tried) == len(pairs)
        best = best_of(tried)[name]
        assert best == TUNING["best"][name] and RATES[name] == (best["hidden_lr"], best["embedding_lr"])
    assert pytest.approx(noise([*TUNING["grid"], *TUNING["seeds"]]), abs=5e-4) == NOISE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_best_rate_is_at_the_edge_of_the_rates_tried(name: str) -> None:
    pairs = {(row["hidden_lr"], row["embedding_lr"]) for row in TUNING["grid"]}
    assert untried(TUNING["best"][name], pairs) == [], "a best rate at the edge says that the grid is too small"


def test_the_documented_table_is_that_of_the_file() -> None:
    section = (ROOT / "docs" / "lab.md").read_text().partition("## The demo's rates")[2]
    cells = {}
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith("| `lr`"):
            hidden, embedding, *losses = line.strip("| ").split(" | ")
            cells |= {(o, float(hidden), float(embedding)): x for o, x in zip(OPTIMIZERS, losses, strict=True)}
    expected = {}
    for row in TUNING["grid"]:
        pair, loss = (row["hidden_lr"], row["embedding_lr"]), f"{row['final_val_loss']:.3f}"
        expected[(row["optimizer"], *pair)] = f"**{loss}**" if pair == RATES[row["optimizer"]] else loss
    assert cells == expected


def test_the_tuning_widens_the_grid_for_all_until_each_best_is_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest = {"adam": (1e-3, 3.2e-2), "muon": (5e-4, 8e-3), "soap": (2e-3, 4e-3), "cosmos": (8e-3, 2e-3)}
    trained, text = [], {"fingerprint": "a"}

    def row(run: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        name, pair = run.optimizer.optimizer, (run.optimizer.lr, run.optimizer.adam_lr or 0.0)
        trained.append((name, *pair, run.training.seed))
        loss = sum(abs(math.log2(rate / best)) for rate, best in zip(pair, lowest[name], strict=True))
        loss += 0.01 * run.training.seed
        found = {"optimizer": name, "hidden_lr": pair[0], "embedding_lr": pair[1], "seed": run.training.seed}
        about = {"date": "today", "versions": {}, "data": text, "parameters": 1}
        return {**found, "final_val_loss": loss if loss < 6 else None}, about

    monkeypatch.setattr("benchmarks.demo_tuning._row", row)
    tune(str(tmp_path), tmp_path / "tuning.json")
    kept = json.loads((tmp_path / "tuning.json").read_text())
    pairs = {(one["hidden_lr"], one["embedding_lr"]) for one in kept["grid"]}
    for name, best in kept["best"].items():
        assert (best["hidden_lr"], best["embedding_lr"]) == lowest[name] and untried(best, pairs) == []
        assert {(h, e) for o, h, e, seed in trained if o == name and not seed} == pairs
    assert kept["noise"] == pytest.approx(0.01) and len(trained) == len(set(trained)) == 4 * len(pairs) + 8
    before = len(trained)
    tune(str(tmp_path), tmp_path / "tuning.json")
    assert len(trained) == before and json.loads((tmp_path / "tuning.json").read_text()) == kept
    text["fingerprint"] = "b"
    kept["grid"].pop()
    (tmp_path / "tuning.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="another text"):
        tune(str(tmp_path), tmp_path / "tuning.json")


def test_the_tuning_ran_at_the_size_and_length_of_the_demo() -> None:
    apart = {"optimizer", "lr", "adam_lr", "embedding_lr", "head_lr", "vector_lr", "name", "out", "seed"}
    apart |= {"val_every", "diagnostics_every", "checkpoint_every", "keep"}  # change nothing that is learnt
    for row in [*TUNING["grid"], *TUNING["seeds"]]:
        run = demo_run(row["optimizer"], row["hidden_lr"], row["embedding_lr"], DemoConfig()).flat()
        kept = RunConfig.from_flat(row["config"]).flat()  # with the defaults of fields that are newer
        assert {k: v for k, v in kept.items() if k not in apart} == {k: v for k, v in run.items() if k not in apart}


def test_every_optimizer_gets_the_same_budget() -> None:
    runs = [demo_run(name, *rates, DemoConfig()).flat() for name, rates in RATES.items()]
    own = {"optimizer", "lr", "adam_lr", "embedding_lr", "head_lr", "vector_lr", "name"}
    common = [{name: value for name, value in run.items() if name not in own} for run in runs]
    assert all(run == common[0] for run in common)
