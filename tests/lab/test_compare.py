"""Grids are trained once, continued after an interruption, and ranked, in one process or several."""

import datetime
import functools
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.config import RunConfig
from cosmos_lab.grid import compare as module
from cosmos_lab.grid import workers
from cosmos_lab.grid.budget import Budget
from cosmos_lab.grid.table import format_result, table_of
from tests.lab.conftest import VOCAB, write_text

compare = functools.partial(module.compare, report=False)  # drawing its figures takes a second
quietly = functools.partial(compare, show=False)


def grid(base: RunConfig, *variants: dict[str, Any]) -> list[RunConfig]:
    """Return runs of a few steps without checkpoints, named by their number."""
    quick = base.replace(steps=4, val_every=0, diagnostics_every=0, checkpoint_every=0)
    return [quick.replace(name=f"run{i}", **variant) for i, variant in enumerate(variants)]


ADAM = {"optimizer": "adam", "rank": None}
COSMOS = {"optimizer": "cosmos"}
# A process of a comparison whose training fails with a message of several lines.
FAILING = """
import pathlib, sys
from cosmos_lab.grid import workers
def train(config): raise RuntimeError("no compiler\\n\\nset VERBOSE=1 for more")
workers.train = train
sys.exit(workers._work(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
"""
# One that fails because somebody removed the folder of its run.
REMOVED = "import pathlib, shutil, sys; shutil.rmtree(pathlib.Path(sys.argv[1]).parent); sys.exit('the folder is gone')"


def replace_worker(monkeypatch: pytest.MonkeyPatch, code: str) -> list[subprocess.Popen[bytes]]:
    """Let processes of a comparison run ``code`` instead of training; return the list of those started."""
    started, real = [], subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        started.append(real([command[0], "-c", code, *command[3:]], **more))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", start)
    return started


def test_a_grid_is_ranked_by_the_mean_over_seeds(tiny_run: RunConfig) -> None:
    runs = grid(
        tiny_run,
        *({**ADAM, "lr": lr, "adam_lr": lr, "seed": seed} for lr in (1e-6, 1e-2) for seed in (0, 1)),
        {**COSMOS, "lr": 2e-3},
    )
    result = quietly(runs)
    assert json.loads((Path(tiny_run.logging.out) / "compare.json").read_text()) == result
    assert [row["label"] for row in result["rows"]] == ["adam lr 1e-06", "adam lr 0.01", "cosmos lr 0.002"]
    assert result["best"] == {"adam": "adam lr 0.01", "cosmos": "cosmos lr 0.002"}
    assert [row["best"] for row in result["rows"]] == [False, True, True]
    slow = result["rows"][0]
    summaries = (Path(tiny_run.logging.out) / name / "summary.json" for name in slow["runs"])
    values = [json.loads(path.read_text())["final_val_loss"] for path in summaries]
    assert slow["seeds"] == [0, 1] and slow["mean"] == pytest.approx(sum(values) / 2)
    assert slow["spread"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    text = format_result(result).splitlines()
    assert text[0].split()[:3] == ["run", "best", "final_val_loss"] and "*" in text[2] and "*" not in text[1]
    assert text[4:] == [
        "5 of 5 runs done",
        "The best rate is at the edge of the rates tried for adam (highest, 1e-2): one beyond it may be better (--lrs)",
    ]


def test_a_comparison_ends_with_a_report_and_says_where(
    tiny_run: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-2}, {**COSMOS, "lr": 2e-3})
    page = Path(tiny_run.logging.out) / "report" / "index.html"
    compare(runs)
    out = capsys.readouterr().out
    assert not page.exists() and str(page) not in out and out.startswith("checking settings and data of 2 runs\n")
    compare(runs, report=True)
    assert "Of 2 optimizers, " in page.read_text()
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"Report: {page}" and said[-2].startswith("Of 2 optimizers, ")

    def full(*anything: Any, **more: Any) -> Any:
        raise OSError(28, "no space left on the disk")

    monkeypatch.setattr(module, "write_report", full)
    assert compare(runs, report=True)["best"]
    assert "no space left" in capsys.readouterr().err


def test_a_comparison_says_what_its_runs_were_made_with(tiny_run: RunConfig) -> None:
    """Data, date, commit and versions are read from the run folders, not from the call that compares them."""
    runs = grid(tiny_run, {**ADAM, "lr": 1e-2}, {**COSMOS, "lr": 2e-3})
    now = quietly(runs)
    assert now["date"] == datetime.date.today().isoformat() and "torch" in now["versions"]
    about = Path(tiny_run.logging.out) / runs[0].run_name / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"commit": "older"}))
    mixed = quietly(runs)
    assert mixed["commit"] == (["older", now["commit"]] if now["commit"] else "older")
    assert mixed["versions"] == now["versions"]
    assert now["data"]["tokens"] > 0 and mixed["data"] == now["data"] and "be compared" not in format_result(mixed)


def test_a_comparison_has_the_set_up_that_its_runs_have_in_common(tiny_run: RunConfig) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-2}, {**COSMOS, "lr": 2e-3})
    found = table_of(runs, "final_val_loss")["set_up"]
    expected = {"steps": 4, "batch": 8, "seq_len": 16, "schedule": "linear", "warmup": 0.1, "model": "tiny", "seed": 0}
    assert {name: found.get(name) for name in expected} == expected
    assert not {"optimizer", "lr", "rank", "name", "out"} & set(found)


def test_the_table_says_that_runs_on_different_data_cannot_be_compared(tiny_run: RunConfig) -> None:
    """For example, a shard was added during the comparison: the table names both texts."""
    runs = grid(tiny_run, {**ADAM, "lr": 1e-2}, {**COSMOS, "lr": 2e-3})
    now = quietly(runs)
    about = Path(tiny_run.logging.out) / runs[0].run_name / "config.json"
    other = {**now["data"], "tokens": 1234, "fingerprint": "0123456789abcdef"}
    about.write_text(json.dumps(json.loads(about.read_text()) | {"data": other}))
    mixed = table_of(runs, "final_val_loss")
    assert mixed["data"] == [other, now["data"]]
    last = format_result(mixed).splitlines()[-1]
    assert "cannot be compared" in last and "1,234" in last and now["data"]["fingerprint"] in last


def test_the_table_says_that_runs_validated_on_different_text_cannot_be_compared(tiny_run: RunConfig) -> None:
    """Older runs do not record which text they were validated on."""
    runs = grid(tiny_run, {**ADAM, "lr": 1e-2}, {**COSMOS, "lr": 2e-3})
    now = quietly(runs)
    about = Path(tiny_run.logging.out) / runs[0].run_name / "config.json"
    for other in ({**now["data"], "val_fingerprint": "0123456789abcdef"}, {**now["data"]}):
        if other == now["data"]:
            del other["val_fingerprint"]
        about.write_text(json.dumps(json.loads(about.read_text()) | {"data": other}))
        said = "validated on 0123456789abcdef" in format_result(table_of(runs, "final_val_loss"))
        assert said == ("val_fingerprint" in other)


def test_a_failed_run_stops_neither_the_others_nor_the_table(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-3}, {**ADAM, "lr": 2e-3}, {**ADAM, "lr": 4e-3})
    real = module.train

    def broken(config: RunConfig, progress: Any = None) -> Any:
        if config.run_name == runs[1].run_name:
            raise ValueError("its data is gone")
        return real(config, progress=progress)

    monkeypatch.setattr(module, "train", broken)
    rows = quietly(runs)["rows"]
    assert [row["status"] for row in rows] == [["done"], ["failed"], ["done"]]
    assert rows[1]["failures"] == ["its data is gone"]


def test_a_run_that_another_comparison_finished_meanwhile_is_done(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = grid(tiny_run, ADAM)
    real = module.train

    def refused(config: RunConfig, progress: Any = None) -> Any:
        real(config)  # by the other one
        raise ValueError("another process is training here")

    monkeypatch.setattr(module, "train", refused)
    (row,) = quietly([run])["rows"]
    assert row["status"] == ["done"] and row["best"] and row["failures"] == []


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_run_without_a_folder_stops_neither_the_others_nor_the_table(tiny_run: RunConfig, parallel: int) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-3}, {**ADAM, "lr": 2e-3})
    runs[0].folder.parent.mkdir()
    runs[0].folder.touch()  # a file where the folder should be
    rows = compare(runs, parallel=parallel, show=False, report=False)["rows"]
    assert [row["status"] for row in rows] == [["failed"], ["done"]]
    assert rows[0]["failures"][0].startswith(f"cannot write {runs[0].folder}: ")
    assert (Path(tiny_run.logging.out) / "compare.json").exists()


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_bad_gradient_ends_only_its_run_and_is_named_in_the_table(tiny_run: RunConfig, parallel: int) -> None:
    bad = {"lr": 1e30, "adam_lr": 1e30, "warmup": 0.0, "options": ("nonfinite=raise",)}
    rows = quietly(grid(tiny_run, {**ADAM, **bad}, {**ADAM, "lr": 1e-3}), parallel=parallel)["rows"]
    assert [row["status"] for row in rows] == [["failed"], ["done"]]
    assert rows[0]["failures"][0].startswith("the gradient of parameter 'embed.weight'")


def test_an_unfinished_run_of_another_length_is_refused_before_anything_is_trained(tiny_run: RunConfig) -> None:
    """Otherwise it would be ranked among runs with fewer steps."""
    runs = grid(tiny_run, {**ADAM, "lr": 1e-3}, {**ADAM, "lr": 2e-3})

    def fall(record: Any) -> None:
        if record["step"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.train(runs[1].replace(steps=20, checkpoint_every=4), progress=fall)
    with pytest.raises(ValueError, match="was trained with steps 20, this run asks for steps 4"):
        quietly(runs)
    assert not (Path(tiny_run.logging.out) / runs[0].run_name).exists()


def test_finished_runs_are_skipped_and_unfinished_ones_resumed(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-3}, {**ADAM, "lr": 2e-3})
    runs = [run.replace(checkpoint_every=1, steps=6) for run in runs]
    steps: list[tuple[str, int]] = []
    real = module.train

    def counted(config: RunConfig, progress: Any = None) -> Any:
        def note(record: Any) -> None:
            if "loss" in record:
                steps.append((config.run_name, record["step"]))
                if len(steps) == 9:
                    raise KeyboardInterrupt
            progress(record)

        return real(config, progress=note)

    monkeypatch.setattr(module, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        quietly(runs)
    assert steps[-1] == ("run1", 3)
    quietly(runs)
    assert steps[9:] == [("run1", 3), ("run1", 4), ("run1", 5), ("run1", 6)]  # step 3 was logged, not yet saved


def test_runs_in_processes_give_the_same_values(tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-2, "adam_lr": 1e-2}, COSMOS)
    (runs[1].folder / "checkpoints" / "step_000002").mkdir(parents=True)  # damaged: it is empty
    result = compare(runs, parallel=2)
    assert "failed" in capsys.readouterr().out
    assert [row["status"] for row in result["rows"]] == [["done"], ["failed"]]
    assert "step_000002" in result["rows"][1]["failures"][0]
    here = quietly([runs[0].replace(name="here")])
    assert here["rows"][0]["values"] == result["rows"][0]["values"]


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL; memory may have run out"),
        ("import os; os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV"),
        ("raise SystemExit(3)", "its process ended with exit code 3"),
        ("import os, sys; os.write(2, b'no \\xff here\\n'); sys.exit(2)", "no \N{REPLACEMENT CHARACTER} here"),
        ("import sys; print('cosmos-lab: a bad value'); sys.exit(2)", "a bad value"),
        (FAILING, "no compiler"),
        (REMOVED, "the folder is gone"),
    ],
    ids=["killed", "crashed", "silent", "not utf-8", "told", "several lines", "removed"],
)
def test_a_failed_process_is_explained_by_how_it_ended_and_not_by_older_output(
    tiny_run: RunConfig, worker: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run.folder.mkdir(parents=True)
    (tiny_run.folder / "output.txt").write_text("cosmos-lab: stopped by SIGTERM at step 3 of 8\n")
    replace_worker(monkeypatch, worker)
    (row,) = quietly([tiny_run], parallel=2)["rows"]
    assert row["status"] == ["failed"] and row["failures"] == [reason]


def test_a_process_that_ignores_sigterm_is_killed_when_the_comparison_ends(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs, for example in a collective, must not keep Ctrl-C from ending the comparison."""
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('hangs', flush=True)"
    started = replace_worker(monkeypatch, f"{hangs}; time.sleep(600)")

    def interrupted(job: Any, grid: Any) -> None:
        if (job.run.folder / "output.txt").read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_show_progress", interrupted)
    monkeypatch.setattr(workers, "_CHECKPOINT_S", 0.1)
    with pytest.raises(KeyboardInterrupt):
        quietly([tiny_run], parallel=2)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    ("devices", "gpus", "processes"),
    [(["cpu"] * 3, 2, 3), (["auto"] * 3, 0, 3), (["auto"] * 3, 2, 2), (["cpu", "cuda"], 1, 1), (["auto"] * 3, 8, 3)],
)
def test_runs_on_gpus_are_at_most_as_many_as_gpus_and_the_output_says_so(
    tiny_run: RunConfig, devices: list[str], gpus: int, processes: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    started = []
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(module, "train_in_processes", lambda *more: started.append(more[-1].number))
    monkeypatch.setattr(module, "_one_by_one", lambda *more: started.append(1))
    compare(grid(tiny_run, *({**ADAM, "lr": 1e-3 * i, "device": d} for i, d in enumerate(devices, 1))), parallel=3)
    assert started == [processes]
    said = f"--parallel 3 is reduced to {gpus}, the number of GPUs: each run has its own"
    assert (said in capsys.readouterr().out) == (processes < 3)


@pytest.mark.parametrize("parallel", [0, -1])
def test_fewer_than_one_run_at_a_time_is_refused(tiny_run: RunConfig, parallel: int) -> None:
    with pytest.raises(ValueError, match=rf"--parallel must be 1 or more; got {parallel}"):
        quietly(grid(tiny_run, ADAM), parallel=parallel)


def test_a_comparison_with_other_runs_in_its_folder_advises_only_flags_that_it_takes(tiny_run: RunConfig) -> None:
    quietly(grid(tiny_run, ADAM))
    with pytest.raises(ValueError, match="choose another --out") as told:
        quietly(grid(tiny_run, {**ADAM, "lr": 1e-2}))
    assert "--name" not in str(told.value)


def test_a_diverged_run_is_never_the_best(tiny_run: RunConfig) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e30, "adam_lr": 1e30, "warmup": 0.0}, {**ADAM, "lr": 1e-3, "warmup": 0.0})
    result = quietly(runs)
    assert result["rows"][0]["status"] == ["diverged"] and result["best"] == {"adam": "adam lr 0.001"}
    assert "diverged" in format_result(result)


def test_a_variant_with_a_diverged_seed_has_no_mean(tiny_run: RunConfig) -> None:
    runs = grid(tiny_run, {**ADAM, "seed": 0}, {**ADAM, "seed": 1})
    quietly(runs)
    path = runs[1].folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"final_val_loss": float("inf")}))
    row = table_of(runs, "final_val_loss")["rows"][0]
    assert row["status"] == ["done", "diverged"]
    assert row["mean"] is None and row["spread"] is None


def test_variants_of_one_optimizer_have_different_labels(tiny_run: RunConfig) -> None:
    runs = grid(tiny_run, {**COSMOS, "rank": 4}, {**COSMOS, "rank": 8, "gamma": 0.1 + 0.2}, {**ADAM, "rank": None})
    result = table_of(runs, "final_val_loss")
    labels = [row["label"] for row in result["rows"]]
    assert labels == ["cosmos lr 0.002 rank 4", "cosmos lr 0.002 rank 8 gamma 0.3", "adam lr 0.002"]
    assert all(row["mean"] is None for row in result["rows"]) and result["best"] == {}


def test_labels_show_adam_lr_and_options_if_they_differ(tiny_run: RunConfig) -> None:
    follows = [{**ADAM, "lr": lr, "adam_lr": lr} for lr in (1e-3, 2e-3)]
    runs = grid(tiny_run, *follows, COSMOS, {**COSMOS, "adam_lr": 2e-2}, {**COSMOS, "options": ("nesterov=True",)})
    rows = table_of(runs[:2], "final_val_loss")["rows"]
    assert [row["label"] for row in rows] == ["adam lr 0.001", "adam lr 0.002"]
    rows = table_of(runs[2:], "final_val_loss")["rows"]
    assert [row["label"] for row in rows] == [
        "cosmos lr 0.002 adam_lr 0.01", "cosmos lr 0.002 adam_lr 0.02", "cosmos lr 0.002 adam_lr 0.01 nesterov=True",
    ]  # fmt: skip
    assert rows[2]["options"] == ["nesterov=True"]


def test_a_run_that_repeats_a_seed_has_a_row_with_its_number(tiny_run: RunConfig) -> None:
    rows = table_of(grid(tiny_run, ADAM, ADAM), "final_val_loss")["rows"]
    assert [row["label"] for row in rows] == ["adam lr 0.002", "adam lr 0.002 #2"]


def test_a_wrong_option_is_found_before_anything_is_trained(tiny_run: RunConfig) -> None:
    wrong = ({**COSMOS, "options": ("ns_stepz=1",)}, {"optimizer": "adamm"}, {**ADAM, "model": "llama-13m"})
    with pytest.raises(ValueError, match="because 3 of 4 runs are invalid") as error:
        quietly(grid(tiny_run, ADAM, *wrong))
    assert all(word in str(error.value) for word in ("run1: ", "ns_stepz", "run2: unknown optimizer", "no preset"))
    assert not Path(tiny_run.logging.out).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 96}, "width 96 is not a multiple of head_dim 64"),
        ({"data": "nowhere/at/all"}, "missing shard: no .bin or .bin.xz file matches 'nowhere/at/all'"),
        ({"seq_len": 2000}, r"\(val\) has 2000 tokens; a window of seq_len 2000 needs 2001"),
        ({"vocab_size": VOCAB - 1}, f"is beyond the vocabulary of {VOCAB - 1} ids"),
    ],
)
def test_a_wrong_model_or_text_of_the_last_run_is_found_before_anything_is_trained(
    tiny_run: RunConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"no run was started because a run is invalid(.|\n)*run1: .*{message}"):
        quietly(grid(tiny_run, ADAM, {**COSMOS, **change}))
    assert not Path(tiny_run.logging.out).exists()


def test_a_problem_of_many_runs_is_told_once(tiny_run: RunConfig) -> None:
    with pytest.raises(ValueError, match="because 3 of 3 runs are invalid") as error:
        quietly(grid(tiny_run.replace(data="nowhere"), ADAM, COSMOS, {**COSMOS, "lr": 1e-2}))
    (problem,) = str(error.value).splitlines()[1:]
    assert problem.startswith("  run0 and 2 more: missing shard")


def test_a_finished_comparison_is_shown_even_if_its_text_is_gone(tiny_run: RunConfig, tmp_path: Path) -> None:
    write_text(tmp_path)
    runs = grid(tiny_run.replace(data=str(tmp_path / "toy")), ADAM)
    before = quietly(runs)
    for path in tmp_path.glob("toy_*"):
        path.unlink()
    with pytest.warns(UserWarning, match="cannot check that the text is still the one trained on"):
        assert quietly(runs) == before


@pytest.mark.parametrize(
    ("message", "reason"), [("CUDA out of memory\nmore", "CUDA out of memory"), ("", "RuntimeError")]
)
def test_a_run_out_of_memory_does_not_end_the_comparison(
    tiny_run: RunConfig, message: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.train

    def scarce(config: RunConfig, progress: Any = None) -> Any:
        if config.optimizer.optimizer == "cosmos":
            raise RuntimeError(message)
        return real(config, progress=progress)

    monkeypatch.setattr(module, "train", scarce)
    result = quietly(grid(tiny_run, COSMOS, ADAM))
    assert result["rows"][0]["failures"] == [reason] and list(result["best"]) == ["adam"]
    assert not (tiny_run.replace(name="run0").folder / "summary.json").exists()  # so it is tried again


def test_a_budget_expects_the_time_of_the_longest_run_of_the_same_size(tiny_run: RunConfig) -> None:
    now = 0.0
    budget = Budget(10.0, clock=lambda: now)
    wide, long = tiny_run.replace(width=128), tiny_run.replace(steps=16)
    for seconds in (200.0, 100.0):  # the first may have compiled
        assert budget.start(tiny_run)
        now += seconds
        budget.finish(tiny_run)
    assert budget.start(wide) and budget.start(long)  # of kinds not seen yet
    now += 99.0
    assert budget.start(tiny_run)  # at 399 of 600 s, and 200 s long
    now += 1.0
    assert not budget.start(tiny_run)
    now += 100.0
    budget.finish(wide)  # 200 s
    budget.finish(long)
    assert not budget.start(wide) and budget.start(tiny_run.replace(depth=3))
    now += 100.0
    assert not budget.start(tiny_run.replace(depth=4))  # the time is up


def test_without_a_budget_or_before_the_first_run_everything_starts(tiny_run: RunConfig) -> None:
    now = 0.0
    free, spent = Budget(0.0, clock=lambda: now), Budget(1e-9, clock=lambda: now)
    now = 1e9
    assert free.start(tiny_run) and free.start(tiny_run)
    assert spent.start(tiny_run) and not spent.start(tiny_run)
    with pytest.raises(ValueError, match="--minutes must be 0 .no limit. or more; got -1"):
        Budget(-1.0)


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_same_call_continues_after_its_minutes(
    tiny_run: RunConfig, parallel: int, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-3}, {**ADAM, "lr": 2e-3}, {**ADAM, "lr": 4e-3})
    for done in (1, 2)[: 3 - parallel]:  # starting processes takes long
        result = compare(runs, minutes=1e-9, parallel=parallel)
        assert [row["status"] for row in result["rows"]] == [["done"]] * done + [["not started"]] * (3 - done)
        assert json.loads((Path(tiny_run.logging.out) / "compare.json").read_text()) == result
        out = capsys.readouterr().out
        assert f"{3 - done} of 3 runs would not end within --minutes 1e-09: the same command continues" in out
        assert out.splitlines()[-3].endswith("not started")
        assert out.splitlines()[-2] == f"{done} of 3 runs done"  # no word about the edge of a sweep that goes on
    result = compare(runs, minutes=60.0)
    assert [row["status"] for row in result["rows"]] == [["done"]] * 3
    assert "--minutes" not in capsys.readouterr().out


def test_a_run_that_lost_its_folder_after_it_had_ended_is_not_said_to_be_out_of_time(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = module.train

    def train_and_remove(config: RunConfig, progress: Any = None) -> Any:
        summary = real(config)
        shutil.rmtree(config.folder)
        return summary

    monkeypatch.setattr(module, "train", train_and_remove)
    compare(grid(tiny_run, ADAM), report=False)
    out = capsys.readouterr().out
    assert "1 of 1 runs lost their results after they had ended: the same command continues" in out
    assert "--minutes" not in out


def test_conflicts_with_finished_runs_are_all_found_before_anything_is_trained(tiny_run: RunConfig) -> None:
    runs = grid(tiny_run, {**ADAM, "lr": 1e-3}, {**ADAM, "lr": 2e-3}, {**ADAM, "lr": 3e-3}, {**COSMOS})
    quietly(runs[1:3])
    others = [run.replace(beta2=0.9) if run.run_name == "run1" else run.replace(clip=1.0) for run in runs]
    with pytest.raises(ValueError, match="no run was started because 2 of 4 runs are invalid") as error:
        quietly(others)
    assert "run1 was trained with beta2 0.98, this run asks for beta2 0.9" in str(error.value)
    assert "run2 was trained with clip None, this run asks for clip 1.0" in str(error.value)
    out = Path(tiny_run.logging.out)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["run1", "run2"]
    with pytest.raises(ValueError, match="or its folder holds another run:\n.*run1 holds a run already"):
        quietly([runs[0], runs[1].replace(resume="never")])


def test_a_finished_run_with_other_defaults_is_not_taken_for_this_one(tiny_run: RunConfig) -> None:
    """An earlier version of the optimizer may have had other defaults, which no field of the run shows."""
    run = tiny_run.replace(**COSMOS, options=("ns_steps=3",))
    rows = quietly([run])["rows"]
    assert rows[0]["options"] == ["ns_steps=3"] and len(rows[0]["val_losses"][0]) > 0
    about = Path(tiny_run.logging.out) / run.run_name / "config.json"
    saved = json.loads(about.read_text())
    assert saved["settings"]["cosmos.row_beta2"] == 0.95 and saved["settings"]["cosmos.ns_steps"] == 3
    quietly([run])
    saved["settings"]["cosmos.row_beta2"] = None
    about.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="was trained with cosmos.row_beta2 None, this run asks for .* 0.95"):
        quietly([run])


def test_equal_names_and_an_empty_grid_are_refused(tiny_run: RunConfig) -> None:
    with pytest.raises(ValueError, match="two runs are called 'run'"):
        quietly([tiny_run, tiny_run])
    with pytest.raises(ValueError, match="nothing to compare"):
        quietly([])
