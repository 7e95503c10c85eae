"""Run folders are read and ranked: good, unfinished and broken runs, means over seeds, the best of each optimizer."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.cli.main import main
from cosmos_lab.config import TASK, marked
from cosmos_lab.report import write_report
from cosmos_lab.report.curves import training, validation
from cosmos_lab.report.words import cautions, summary
from cosmos_lab.results import ranking
from cosmos_lab.results.ranking import arrange
from cosmos_lab.results.reading import Run, find_runs, read_run
from tests.lab.report_runs import Tags, data_of, falling, make_run, task_of, write

# -- reading ---------------------------------------------------------------------------------------------------------


def test_runs_below_a_folder_are_found_once_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sweep" / "a", "adam", [3.0])
    (run / "checkpoints" / "step_000010").mkdir(parents=True)
    write(run / "checkpoints" / "step_000010", "config.json", {})
    (tmp_path / "sweep" / "started").mkdir()
    assert find_runs([tmp_path, run, tmp_path / "sweep"]) == [run, tmp_path / "sweep" / "started"]


@pytest.mark.parametrize("paths", [[], ["missing"], ["file"]])
def test_bad_paths_are_named_and_nothing_is_written(tmp_path: Path, paths: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=paths[0] if paths else "at least one run folder"):
        write_report([tmp_path / path for path in paths], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "status", "note"),
    [
        ({"config.json": "{"}, "broken", "config.json cannot be read"),
        ({"config.json": "[1]", "metrics.jsonl": ""}, "broken", "holds a list"),
        ({"config.json": '{"optimizer": "adam"}'}, "empty", "metrics.jsonl is missing"),
        ({"config.json": '{"optimizer": "adam"}', "metrics.jsonl": ""}, "empty", ""),
        ({"config.json": '{"optimizer": "adam", "lr": "fast"}', "metrics.jsonl": '{"step": 1, "loss": 2.5}\n'},
         "unfinished", ""),
        ({"config.json": '{"optimizer": "adam"}', "metrics.jsonl": '{"step": 1, "loss": 2.5}\n{"step": 2, "lo'},
         "unfinished", "unreadable lines left out: 1"),
        ({"config.json": '{"optimizer": "adam"}', "metrics.jsonl": '3\n{"step": 1, "loss": 2.5, "tokens": "x"}\n'},
         "unfinished", "unreadable lines left out: 1"),
        ({"config.json": '{"optimizer": "adam"}', "metrics.jsonl": '{"step": 1, "loss": NaN}\n'}, "diverged", ""),
        ({"config.json": '{"optimizer": "adam"}', "metrics.jsonl": '{"step": 1, "loss": null}\n'}, "diverged", ""),
        ({"config.json": '{"optimizer": "adam"}', "metrics.jsonl": f'{{"step": 1, "loss": 1{"0" * 400}}}\n'},
         "diverged", ""),
        ({"metrics.jsonl": '{"step": 1, "loss": 2.5}\n', "summary.json": "\x00"},
         "unfinished", "config.json is missing"),
    ],
    ids=["cut", "list", "no-log", "empty-log", "odd-types",
         "cut-line", "odd-lines", "nan", "null", "huge", "no-config"],
)  # fmt: skip
def test_broken_folders_are_shown_as_such(
    tmp_path: Path, no_figures: None, files: dict[str, str], status: str, note: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    run = read_run(folder)
    assert run.status == status
    assert note in " ".join(run.notes)
    text = write_report([folder], tmp_path / "out").page.read_text()
    assert not Tags(text).open
    assert status in text
    assert note in text


def test_a_folder_without_runs_is_refused_and_an_older_report_stays(
    tmp_path: Path, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write_report([make_run(tmp_path / "run", "adam", [3.0])], tmp_path / "out").page
    older = page.read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no run")
    assert read_run(tmp_path / "other").status == "empty"
    assert main(["report", str(tmp_path / "other"), "-o", str(tmp_path / "out")]) == 2
    assert "no run to report on: " in (told := capsys.readouterr().err) and "other: the folder holds no config" in told
    assert page.read_bytes() == older


def test_folders_without_a_run_are_named_on_the_terminal(
    tmp_path: Path, no_figures: None, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path / "runs" / "good", "adam", [3.0])
    write_report([tmp_path / "runs"], tmp_path / "out")
    assert not caplog.messages
    (tmp_path / "runs" / "other").mkdir()
    write_report([tmp_path / "runs"], tmp_path / "out")
    (told,) = caplog.messages
    assert "One folder could not be shown." in told and "other: the folder holds no config.json" in told


def test_folders_in_place_of_files_and_undecodable_bytes_do_not_stop_the_report(
    tmp_path: Path, no_figures: None
) -> None:
    folder = make_run(tmp_path / "run", "adam", [3.0])
    (folder / "summary.json").unlink()
    (folder / "summary.json").mkdir()
    (folder / "metrics.jsonl").write_bytes(b'\xff\xfe\n{"step": 1, "val_loss": 2.0}\n')
    run = read_run(folder)
    assert run.status == "unfinished" and run.score == 2.0
    assert "IsADirectoryError" in " ".join(run.notes)
    write_report([folder], tmp_path / "out")


def test_a_resumed_run_counts_each_step_once_and_its_time_continues(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "adam", [3.0])
    rows = [(1, 4.0, 10.0), (2, 3.5, 20.0), (3, 9.9, 30.0), (3, 3.0, 5.0), (4, 2.5, 15.0)]
    lines = [json.dumps({"step": step, "tokens": step, "time": time, "loss": loss}) for step, loss, time in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    train = read_run(folder).train
    assert [(point.step, point.value) for point in train] == [(1, 4.0), (2, 3.5), (3, 3.0), (4, 2.5)]
    assert [point.time for point in train] == [10.0, 20.0, 25.0, 35.0]


def test_an_unfinished_run_takes_its_numbers_from_the_log(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", "adam", [3.0, 2.0], finished=False))
    assert run.status == "unfinished"
    expected = {"final_val_loss": 2.0, "final_val_ppl": math.exp(2.0), "tokens": 20000, "tokens_per_s": 2e4}
    assert {key: run.stats[key] for key in expected} == pytest.approx(expected)


# -- comparing -------------------------------------------------------------------------------------------------------


def test_best_rate_of_each_optimizer_is_marked(tmp_path: Path, no_figures: None) -> None:
    folders = [
        make_run(tmp_path / f"{optimizer}-{lr}", optimizer, falling(end), lr=lr)
        for optimizer, lr, end in [
            ("adam", 1e-3, 3.0), ("adam", 2e-3, 2.9), ("adam", 4e-3, 3.1), ("cosmos", 1e-3, 2.8), ("cosmos", 2e-3, 2.7)
        ]
    ]  # fmt: skip
    folders.append(make_run(tmp_path / "diverged", "cosmos", [3.0, None], lr=4e-3))
    folders.append(make_run(tmp_path / "leads", "adam", [2.0], lr=8e-3, finished=False))
    task = task_of(*folders)
    assert [group.label for group in task.ranking] == ["cosmos 2e-3", "adam 2e-3"]
    below = 100 * (1 - math.exp(2.7) / math.exp(2.9))
    assert summary(task) == (
        f"Of 2 optimizers, each at the best rate tried, cosmos ended lowest, at a validation perplexity of "
        f"{math.exp(2.7):.2f}: {below:.0f} % below adam ({math.exp(2.9):.2f}); one seed each, so small differences may "
        "be chance."
    )
    assert "Of 7 runs, 1 diverged, 1 unfinished." in cautions(task)
    assert write_report(folders, tmp_path / "out").summary == summary(task)


def test_a_best_rate_at_the_edge_and_unequal_budgets_are_pointed_out(tmp_path: Path) -> None:
    task = task_of(
        make_run(tmp_path / "a", "adam", falling(3.0), lr=1e-3),
        make_run(tmp_path / "b", "adam", falling(2.9), lr=2e-3),
        make_run(tmp_path / "c", "cosmos", falling(2.5, points=3), lr=1e-3),
    )
    text = " ".join(cautions(task))
    assert "edge of the rates tried for adam (highest)" in text
    assert summary(task) == (
        "These runs are not ranked, because they trained on between 30 k and 60 k tokens: "
        "compare runs of the same length."
    )
    assert "One seed each" in text


def test_seeds_give_mean_and_spread(tmp_path: Path) -> None:
    ends = (2.5, 2.6, 2.9)
    folders = [make_run(tmp_path / f"s{seed}", "cosmos", falling(end), seed=seed) for seed, end in enumerate(ends)]
    (group,) = task_of(*folders).groups
    spread = group.stat("final_val_loss")
    assert spread is not None
    assert (spread.mean, spread.deviation, spread.n) == pytest.approx((2.6667, statistics.stdev(ends), 3), abs=1e-4)
    curve = validation(group)
    assert curve is not None
    assert curve.value[-1] == pytest.approx(statistics.fmean(ends))
    assert curve.high[-1] - curve.low[-1] == pytest.approx(2 * statistics.stdev(ends))
    assert len(training(group)) == 3


def test_the_sentence_says_if_a_gap_is_within_the_spread_of_seeds(tmp_path: Path) -> None:
    ends = {"adam": (2.5, 2.7), "cosmos": (2.48, 2.68)}
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, falling(end), seed=seed)
        for name, pair in ends.items()
        for seed, end in enumerate(pair)
    ]
    assert "no larger than the spread over seeds" in summary(task_of(*folders))
    assert summary(task_of(*folders[:3])).endswith("; one seed of cosmos, so small differences may be chance.")


@pytest.mark.parametrize(
    ("muon", "adam", "end"),
    [
        ((2.02, 2.12), (2.5, 2.6), " below adam (12.82); the gap to muon is no larger than the spread over seeds."),
        ((2.02, 2.12), (2.03, 2.13), " below adam (8.014), gaps no larger than the spread over seeds."),
        ((2.5, 2.6), (2.2, 3.2), " below adam (16.78); the gap to adam is no larger than the spread over seeds."),
        ((2.5, 2.6), (2.7, 2.8), " below adam (15.66)."),
        ((2.02, 2.12), (2.5,), "; one seed of adam, so small differences may be chance."),
        ((2.02,), (2.5,), "; one seed of muon and adam, so small differences may be chance."),
    ],
)
def test_the_sentence_names_the_gap_that_may_be_chance(
    tmp_path: Path, muon: tuple[float, ...], adam: tuple[float, ...], end: str
) -> None:
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, falling(value), seed=seed)
        for name, values in (("cosmos", (2.0, 2.1)), ("muon", muon), ("adam", adam))
        for seed, value in enumerate(values)
    ]
    assert summary(task_of(*folders)).endswith(end)


def test_a_mean_perplexity_above_that_of_the_second_is_not_said_to_be_below(tmp_path: Path) -> None:
    """Seeds far apart have a mean perplexity above that of their mean loss, which runs are ranked by."""
    ends = {"adam": (2.51, 2.51), "cosmos": (2.0, 3.0)}
    folders = [
        make_run(tmp_path / f"{name}{seed}", name, falling(end), seed=seed)
        for name, pair in ends.items()
        for seed, end in enumerate(pair)
    ]
    assert summary(task_of(*folders)).endswith(": ahead of adam, a gap no larger than the spread over seeds.")


def test_the_headline_claims_no_win_within_the_noise_of_one_seed_each(tmp_path: Path, no_figures: None) -> None:
    ends = {"adam": 2.5, "muon": 2.05, "soap": 2.02, "cosmos": 2.0}
    folders = [make_run(tmp_path / name, name, falling(end)) for name, end in ends.items()]
    task = task_of(*folders)
    assert "cosmos ended lowest" in summary(task)
    assert summary(task).endswith("; one seed each, so small differences may be chance.")
    low, high = f"{math.exp(2.0):.3f}", f"{math.exp(2.02):.3f}"
    assert summary(task, noise=0.01) == (
        f"Of 4 optimizers, cosmos and soap cannot be told apart: validation perplexity {low} to {high}, "
        "a gap that seeds alone can make; muon and adam ended higher."
    )
    assert summary(task, noise=1.0).startswith("Of 4 optimizers, cosmos, soap, muon and adam cannot be told apart: ")
    clear = summary(task, noise=0.001)
    assert "cosmos ended lowest" in clear and "seed" not in clear
    page = write_report(folders, tmp_path / "out", noise=0.01).page
    assert "cosmos and soap cannot be told apart" in page.read_text()


def test_a_group_with_a_diverged_seed_is_not_ranked(tmp_path: Path) -> None:
    task = task_of(
        make_run(tmp_path / "a", "adam", falling(2.0), lr=2e-3, seed=0),
        make_run(tmp_path / "b", "adam", [3.0, None], lr=2e-3, seed=1),
        make_run(tmp_path / "c", "adam", falling(2.5), lr=1e-3, seed=0),
    )
    assert [group.label for group in task.ranking] == ["adam 1e-3"]


def test_settings_tell_methods_apart_and_models_are_never_ranked_together(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "cosmos", falling(2.5), rank=16)
    make_run(tmp_path / "b", "cosmos", falling(2.6), rank=64)
    make_run(tmp_path / "c", "cosmos", falling(2.6), rank=64)
    make_run(tmp_path / "d", "cosmos", falling(1.0), model="other")
    make_run(tmp_path / "e", "cosmos", falling(1.0), model="other", width=9)
    tasks, _ = arrange(map(read_run, find_runs([tmp_path])))
    assert [task.title for task in tasks] == ["tiny · test", "other · test · width null", "other · test · width 9"]
    assert [group.label for group in tasks[0].groups] == [
        "cosmos (rank 16) 1e-3", "cosmos (rank 64) 1e-3", "cosmos (rank 64) 1e-3 #2"
    ]  # fmt: skip


def test_settings_of_one_optimizer_are_not_called_optimizers(tmp_path: Path, no_figures: None) -> None:
    make_run(tmp_path / "runs" / "a", "cosmos", falling(2.5), rank=16)
    make_run(tmp_path / "runs" / "b", "cosmos", falling(2.6), rank=64)
    make_run(tmp_path / "runs" / "c", "cosmos", falling(2.7), rank=64, lr=2e-3)
    make_run(tmp_path / "runs" / "d", "adam", falling(2.8))
    folders = find_runs([tmp_path / "runs"])
    assert summary(task_of(*folders)).startswith("Of 3 settings, each at the best rate tried, cosmos (rank 16) ended")
    page = write_report(folders, tmp_path / "out").page.read_text()
    assert "Best of each setting" in page and "Each setting at the best" in page and "best rate of each setting" in page
    page = write_report([folders[1], folders[2], folders[3]], tmp_path / "other").page.read_text()
    assert "Best of each optimizer" in page and "Of 2 optimizers" in page and "setting at" not in page


def test_runs_are_ranked_together_by_the_content_of_their_data(tmp_path: Path) -> None:
    """The same shards have other spellings in other folders; one spelling may have other shards later."""
    texts = {"a": ("data/c4", "1", "2"), "b": ("/me/c4", "1", "2"), "c": ("data/c4", "1", "3"), "d": ("x", "4", "2")}
    for seed, (name, (spelling, fingerprint, val)) in enumerate(texts.items()):
        folder = make_run(tmp_path / name, "adam", falling(2.5), seed=seed, data=spelling)
        about = json.loads((folder / "config.json").read_text())
        write(folder, "config.json", about | {"data": {"fingerprint": fingerprint, "val_fingerprint": val}})
    tasks, _ = arrange(map(read_run, find_runs([tmp_path])))
    groups = [group for task in tasks for group in task.groups]
    assert [[run.name for run in group.runs] for group in groups] == [["a", "b"], ["c"], ["d"]]
    assert [task.title for task in tasks] == [
        "tiny · test · data data/c4 (hashes 1, 2)", "tiny · test · data data/c4 (hashes 1, 3)", "tiny · test · data x",
    ]  # fmt: skip


def test_the_fields_of_a_task_are_looked_up_once_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A title compares its task with all others: looking them up for each comparison took a minute for 120 tasks."""
    looked_up: list[str] = []
    real = ranking.resolved

    def counted(run: Run, key: str) -> Any:
        looked_up.append(key)
        return real(run, key)

    monkeypatch.setattr(ranking, "resolved", counted)
    runs = [read_run(make_run(tmp_path / str(length), "adam", falling(2.5), seq_len=length)) for length in range(20)]
    tasks, _ = arrange(runs)
    assert [task.title for task in tasks] == [f"tiny · test · seq_len {length}" for length in range(20)]
    assert len(looked_up) == 20 * len(marked(TASK))


def test_without_hashes_runs_are_told_apart_by_the_spelling_of_their_data(tmp_path: Path) -> None:
    for name, spelling in (("a", "data/c4"), ("b", "data/wiki")):
        make_run(tmp_path / name, "adam", falling(2.5), data=spelling)
    tasks, _ = arrange(map(read_run, find_runs([tmp_path])))
    assert [task.title for task in tasks] == ["tiny · test · data data/c4", "tiny · test · data data/wiki"]


def test_intervals_and_sharding_do_not_make_another_method(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "adam", falling(2.5), seed=0, val_every=2, sharding="ddp")
    make_run(tmp_path / "b", "adam", falling(2.6), seed=1, val_every=4, sharding="fsdp")
    assert [group.label for group in task_of(tmp_path / "a", tmp_path / "b").groups] == ["adam 1e-3"]


def test_a_method_is_named_by_as_many_options_as_tell_it_apart(tmp_path: Path) -> None:
    both = ["nesterov=True", "row_beta2=0.95"]
    make_run(tmp_path / "a", "cosmos", falling(2.5), rank=64)
    make_run(tmp_path / "b", "cosmos", falling(2.6), rank=64, options=both)
    make_run(tmp_path / "c", "cosmos", falling(2.7), rank=64, options=both[:1])
    tasks, _ = arrange(map(read_run, find_runs([tmp_path])))
    assert [group.method for group in tasks[0].groups] == [
        "cosmos", "cosmos (nesterov True, row_beta2 0.95)", "cosmos (nesterov True)"
    ]  # fmt: skip
    make_run(tmp_path / "d", "cosmos", falling(2.8), rank=32, options=both)
    tasks, _ = arrange(map(read_run, find_runs([tmp_path])))
    assert [group.method for group in tasks[0].groups] == [
        "cosmos (rank 64)", "cosmos (rank 64, nesterov True, row_beta2 0.95)", "cosmos (rank 64, nesterov True)",
        "cosmos (rank 32, nesterov True, row_beta2 0.95)",
    ]  # fmt: skip


def test_without_validation_training_losses_are_compared(tmp_path: Path, no_figures: None) -> None:
    folders = [
        make_run(tmp_path / name, name, falling(end), validated=False) for name, end in (("adam", 2.0), ("muon", 1.9))
    ]
    task = task_of(*folders)
    assert "muon ended lowest, at a training loss of 2.000: 4.8 % below adam (2.100)" in summary(task)
    assert data_of(write_report(folders, tmp_path / "out").page)[0][0]["charts"][0]["title"] == "training loss"


def test_the_sentence_says_if_no_run_has_finished_or_logged_a_loss(tmp_path: Path) -> None:
    running = make_run(tmp_path / "a", "adam", [2.0], finished=False)
    assert summary(task_of(running)).startswith("No run has finished; the lowest validation perplexity so far is 7.389")
    diverged = make_run(tmp_path / "b", "adam", [None])
    assert summary(task_of(diverged)) == "No run has logged a finite loss yet."


def test_the_sentence_does_not_deny_runs_that_finished_or_diverged_later(tmp_path: Path) -> None:
    done = make_run(tmp_path / "done", "adam", falling(2.0))
    running = make_run(tmp_path / "running", "adam", [2.5], seed=1, finished=False)
    assert summary(task_of(done, running)) == (
        "No setting can be ranked yet; the lowest validation perplexity so far is 7.389, by adam at learning rate 1e-3."
    )
    diverged = make_run(tmp_path / "diverged", "adam", [3.0, None], seed=2)
    other = make_run(tmp_path / "other", "muon", [2.5], finished=False)
    assert summary(task_of(diverged, other)).startswith("No setting can be ranked yet; ")
    for runs in ([diverged], [done, diverged]):
        assert summary(task_of(*runs)) == "No setting can be ranked: in each of them, a run diverged."


def test_the_sentence_does_not_call_a_run_that_logged_nothing_diverged(tmp_path: Path) -> None:
    diverged = make_run(tmp_path / "diverged", "adam", [3.0, None])
    begun = make_run(tmp_path / "begun", "muon", [], finished=False)
    reason = "No setting can be ranked: in each of them, a run diverged or logged no training loss."
    assert summary(task_of(diverged, begun)) == reason
