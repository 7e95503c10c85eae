"""What a reader meets first in a report is true and legible: names, units, lengths, missing logs, shapes of curves."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.config import RunConfig
from cosmos_lab.report import write_report
from cosmos_lab.report.curves import smoothed, training
from cosmos_lab.report.heat import heat_section
from cosmos_lab.report.words import cautions, missing_curves, summary
from cosmos_lab.results.ranking import arrange
from cosmos_lab.results.reading import read_run
from cosmos_lab.run.train import train
from tests.lab.report_runs import data_of, falling, make_run, task_of


def test_training_noise_is_smoothed_without_a_bias() -> None:
    noisy = [3.0 + (0.5 if index % 2 else -0.5) for index in range(200)]
    found = smoothed(noisy)
    assert len(found) == len(noisy) and statistics.fmean(found) == pytest.approx(3.0, abs=0.01)
    assert max(abs(value - 3.0) for value in found[20:]) < 0.1
    assert smoothed([5.0, 4.0, 3.0]) == [5.0, 4.0, 3.0]  # a short log stays as it is


def test_the_page_draws_the_smoothed_training_loss_alone(tmp_path: Path, no_figures: None) -> None:
    losses = [3.0 + (0.5 if index % 2 else -0.5) for index in range(200)]
    run = make_run(tmp_path / "a", "cosmos", losses)
    (train_line,) = [
        line for line in data_of(write_report([run], tmp_path / "out").page)[0][0]["lines"] if line["faint"]
    ]
    assert train_line["y"] == pytest.approx(training(task_of(run).groups[0])[0].value, rel=1e-5)


@pytest.mark.parametrize(("points", "marked"), [(12, True), (100, False)])
def test_a_short_validation_line_has_a_mark_at_every_point(
    tmp_path: Path, no_figures: None, points: int, marked: bool
) -> None:
    run = make_run(tmp_path / "a", "cosmos", falling(2.0, points=points))
    (line,) = [line for line in data_of(write_report([run], tmp_path / "out").page)[0][0]["lines"] if not line["faint"]]
    assert len(line["marks"]) == (points if marked else 0)


def test_two_validations_are_said_to_be_too_few(tmp_path: Path) -> None:
    (note,) = missing_curves(task_of(make_run(tmp_path / "a", "adam", [3.0, 2.0])))
    assert note == "Only 2 validations a run, too few to show a curve: set --val-every to validate more often."
    assert missing_curves(task_of(make_run(tmp_path / "b", "adam", falling(2.0)))) == []


def test_diagnostics_open_on_cosmos_and_on_a_metric_that_varies(tmp_path: Path) -> None:
    soap = make_run(tmp_path / "soap", "soap", falling(1.0), layers=2)
    log = soap / "metrics.jsonl"
    log.write_text(re.sub(r'"energy": [0-9.]+', '"energy": 1.0', log.read_text()))
    cosmos = make_run(tmp_path / "cosmos", "cosmos", falling(2.0), layers=2)
    found = heat_section(task_of(soap, cosmos), 10_000)
    assert found is not None
    assert [run.label for run in found.runs] == ["cosmos 1e-3 (best)", "soap 1e-3 (best)"]
    assert found.runs[0].metrics[0].name == "energy"
    first, *_, last = found.runs[1].metrics
    assert not first.constant and last.name == "energy" and last.constant


def test_a_column_has_one_unit_that_suits_its_numbers(tmp_path: Path, no_figures: None) -> None:
    for name, seconds in (("adam", 14.4), ("muon", 17.8)):  # 86.4 s and 106.8 s, which would be 1.78 min
        make_run(tmp_path / "runs" / name, name, falling(2.0), seconds=seconds)
    text = write_report([tmp_path / "runs"], tmp_path / "out").page.read_text()
    rows = [re.sub(r"<[^>]+>", " ", row) for row in re.findall(r"<tr class=.*?</tr>", text)]
    assert {unit for row in rows for unit in re.findall(r"\d (s|min|h) ", row)} == {"s"}
    assert [re.findall(r"(\S+ \w?i?B) ", row) for row in rows[:2]] == [["1.50 GiB", "2.00 MiB"]] * 2  # not 1,536 MiB


def test_settings_left_to_the_default_are_shown_with_the_value_that_was_used(
    tmp_path: Path, tiny_run: RunConfig, no_figures: None
) -> None:
    for name, rank, width in (("demo-a", None, 64), ("demo-b", 4, 64), ("demo-c", None, None)):
        train(tiny_run.replace(rank=rank, width=width, name=name, steps=2, lr=1e-3))
    folders = sorted(Path(tiny_run.logging.out).iterdir())
    tasks, _ = arrange(map(read_run, folders))
    assert [task.title for task in tasks] == ["tiny · custom · width 64", "tiny · custom · width 128"]
    first, second = (group.method for group in tasks[0].groups)
    assert re.fullmatch(r"cosmos \(rank \d+\)", first) and re.fullmatch(r"cosmos \(rank \d+\)", second)
    assert "null" not in re.sub(
        r"<script.*?</script>", "", write_report(folders, tmp_path / "out").page.read_text(), flags=re.S
    )


def test_a_default_that_follows_from_the_rate_does_not_make_another_method(tmp_path: Path, tiny_run: RunConfig) -> None:
    for lr in (1e-3, 2e-3):
        train(tiny_run.replace(rank=None, lr=lr, name=None, steps=2))
    task = task_of(*sorted(Path(tiny_run.logging.out).iterdir()))
    assert task.methods == ["cosmos"] and list(task.sweeps) == ["cosmos"]


def test_the_names_that_users_gave_are_kept(tmp_path: Path, no_figures: None) -> None:
    make_run(tmp_path / "runs" / "a", "cosmos", falling(2.0), name="my baseline")
    make_run(tmp_path / "runs" / "b", "cosmos", falling(1.9), name="bigger", lr=2e-3)
    make_run(tmp_path / "runs" / "c", "adam", falling(2.1), name="test-adam-lr0.001-s0")  # made up by a recipe
    page = write_report([tmp_path / "runs"], tmp_path / "out").page
    series = data_of(page)[0][0]["series"]
    assert {entry["label"] for entry in series if entry["named"]} == {"my baseline", "bigger"}
    text = page.read_text()
    assert '<button type="button">Name</button>' in text and "cosmos (bigger) ended lowest" in text
    assert "test-adam" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_a_table_without_a_named_run_has_no_column_of_names(tmp_path: Path, no_figures: None) -> None:
    make_run(tmp_path / "runs" / "a", "cosmos", falling(2.0))
    make_run(tmp_path / "runs" / "b", "cosmos", falling(2.1), name="mine", lr=2e-3)
    best, every = re.findall(r"<table.*?</table>", write_report([tmp_path / "runs"], tmp_path / "out").page.read_text())
    assert ">Name<" not in best and ">Name<" in every


def test_runs_of_different_lengths_get_no_headline_and_no_winner(tmp_path: Path, no_figures: None) -> None:
    folders = [make_run(tmp_path / n, n, falling(2.0, points=p)) for n, p in (("adam", 6), ("cosmos", 12))]
    task = task_of(*folders)
    assert summary(task).startswith("These runs are not ranked, because they trained on between 60 k and 120 k tokens")
    assert "first" not in re.findall(r'<tr class="([^"]*)"', write_report(folders, tmp_path / "out").page.read_text())


def test_several_recipes_are_said_not_to_be_compared(tmp_path: Path, no_figures: None) -> None:
    folders = [make_run(tmp_path / model, "adam", falling(2.0), model=model) for model in ("tiny", "llama-60m")]
    text = write_report(folders, tmp_path / "out").page.read_text()
    assert "Runs of different models, data or recipes are not compared with each other." in text


def test_a_missing_log_is_said_above_the_curves_it_lacks(tmp_path: Path, no_figures: None) -> None:
    make_run(tmp_path / "runs" / "a", "adam", falling(2.0))
    (make_run(tmp_path / "runs" / "b", "muon", falling(2.1)) / "metrics.jsonl").unlink()
    text = write_report([tmp_path / "runs"], tmp_path / "out").page.read_text()
    curves = text[text.index("<h2>Loss curves") :]
    said = curves[: curves.index("data-chart")]
    assert "No curve for muon 1e-3 (folder b): metrics.jsonl is missing." in said
    assert not any("metrics.jsonl" in note for note in cautions(task_of(*sorted((tmp_path / "runs").iterdir()))))


def test_missing_diagnostics_are_said_in_their_section(tmp_path: Path, no_figures: None) -> None:
    def page(optimizer: str) -> Any:
        run = make_run(tmp_path / optimizer, optimizer, falling(2.0))
        return write_report([run], tmp_path / "out").page.read_text()

    assert "No run of COSMOS has logged diagnostics: --diagnostics-every 100" in page("cosmos")
    assert "iagnostics</h2>" not in page("adam")
