"""The queue of benchmarks/sweep.py on a CPU: what it runs, what it skips, what it prints."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.protocol as protocol_module
from benchmarks import rate_runs, sweep_queue, trials
from benchmarks.best_rows import best_rows
from benchmarks.comparison import Entry, Regime, Run
from benchmarks.kept_runs import losses, read_results, run_of, write_bundle
from benchmarks.protocol import MOST, Protocol
from benchmarks.sweep import main
from benchmarks.sweep_flags import Filters, Options
from benchmarks.sweep_gpu import compile_cache
from benchmarks.sweep_queue import CLOSING, Queue
from benchmarks.sweep_table import table
from benchmarks.sweep_training import TwoTextTrainer, split, train
from benchmarks.sweep_worker import Worker
from benchmarks.variants import VARIANTS, Variant
from cosmos_lab.data import open_data, write_shard
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import Trainer

BUNDLE = Path(__file__).resolve().parents[2] / "results" / "protocol-60m.json"
START = {"B": (1e-3, 2e-3)}
TINY = Protocol(
    model="tiny",
    sizes={"width": 64, "depth": 1, "mlp": 96, "vocab_size": 64},
    regimes={"B": Regime(steps=4, batch=4, seq_len=16)},
    entries={"adamw": Entry("adam", START), "cosmos": Entry("cosmos", START)},
    phases=[("B", ("adamw", "cosmos"), ("lr", "adam_lr", "beta2", "seeds"))],
    cut=500,
    block=64,
    curve_tokens=64,
)


@pytest.fixture(autouse=True)
def _restored(only_the_packages_rules: None) -> None:
    """Forget the trial optimizers after each test."""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Write a text with T5's end-of-document token and return options for it."""
    rng = np.random.default_rng(0)
    for name, length in (("train", 4_000), ("val", 1_000)):
        tokens = rng.integers(2, 64, length)
        tokens[29::30] = 1
        write_shard(tmp_path / f"toy_t5_{name}.bin", tokens)
    data, cache = str(tmp_path / "toy_t5"), str(tmp_path / "cache")
    return Options(data, tmp_path / "out", device="cpu", compile="off", cache=cache, commit="abc")


def fake(protocol: Protocol, best: int) -> dict[str, float]:
    """Run a whole search on losses that are lowest at ``best`` powers of 2 above the starting rates."""
    loss: dict[str, float] = {}
    while runs := protocol.candidates(loss):
        loss[runs[0].id] = float(sum(abs(power - best) for power in powers(runs[0])) + runs[0].beta2)
    return loss


def powers(run: Run) -> list[float]:
    """Return the powers of 2 by which both rates differ from the starting ones."""
    return [np.log2(rate / start) for rate, start in zip((run.lr, run.adam_lr), START["B"], strict=True)]


@pytest.mark.slow
def test_runs_of_both_optimizers_are_kept_and_skipped_afterwards(options: Options) -> None:
    first_runs = dataclasses.replace(TINY, phases=[("B", ("adamw", "cosmos"), ("lr",))])
    queue = Queue(first_runs, dataclasses.replace(options, seconds=600.0))
    queue.work()
    assert not queue.failed
    names = {r["entry"] for r in queue.results.values()}
    assert names == {"adamw", "cosmos"} and len(queue.finished) >= 6
    one = json.loads((options.out / "runs" / f"{queue.finished[0]}.json").read_text())
    assert one["clip"] == 1.0 and one["config"]["warmup"] == 0.1 and one["commit"] == "abc" and one["settings"]
    assert len(one["curve"]) == 4 and one["test_tokens"] == 448 and len(one["test_blocks"]) == 7
    assert one["settings"]["adam.lr"] == [2e-3, 1e-3]  # AdamW has both rates

    later = dataclasses.replace(options, out=options.out / "more", known=(options.out / "bundle.json",))
    again = Queue(first_runs, later)
    assert again.work() and again.finished == [] and again.results == queue.results
    text = table(first_runs, again.results)
    assert "adamw - cosmos" in text and "one seed; to tune: adam_lr, beta2" in text
    assert text.count("tiny-B-") == len(queue.finished)


def test_no_run_begins_that_would_pass_the_deadline(options: Options) -> None:
    run = TINY.candidates({})[0]
    queue = Queue(TINY, dataclasses.replace(options, seconds=100.0))
    queue.results[run.id] = {
        "model": "tiny", "regime": "B", "entry": "adamw", "share": 1.0, "at_a_time": 1, "variant": "",
        "wall_s": 1000.0, "train_s": 900.0, "tokens": 256, "val_loss": 1.0,
    }  # fmt: skip
    assert queue._first_fitting([], cold=False) is None
    assert len(TINY.candidates(losses(queue.results))) == 2


def test_workers_start_when_a_second_run_can_begin(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first only the run without a change can begin; two changes follow, at the same time."""

    class FakeWorker:
        def __init__(self, *_: Any) -> None:
            self.run: Run | None = None

        def begin(self, run: Run) -> None:
            self.run = run

    monkeypatch.setattr(sweep_queue, "Worker", FakeWorker)
    levers = dataclasses.replace(TINY, phases=[("B", ("cosmos",), ("levers",))])
    queue, workers = Queue(levers, dataclasses.replace(options, parallel=2)), list[Any]()
    queue._begin_runs(workers)
    (first,) = (worker.run for worker in workers)
    assert not first.variant
    queue.results[first.id] = {"model": "tiny", "regime": "B", "entry": "cosmos", "at_a_time": 1, "variant": "",
                               "val_loss": 1.0}  # fmt: skip
    workers[0].run = None
    queue._begin_runs(workers)
    assert len({worker.run.variant for worker in workers}) == 2 and all(worker.run.variant for worker in workers)


def test_the_time_counts_from_the_start_of_the_command_and_leaves_some_for_the_end(options: Options) -> None:
    now = time.monotonic()
    for began, fits in ((now, True), (now - 100 + CLOSING + 60, True), (now - 100 + CLOSING, False)):
        queue = Queue(TINY, dataclasses.replace(options, seconds=100.0), began)
        assert (queue._first_fitting([], cold=True) is not None) == fits


def test_a_result_that_arrives_at_the_deadline_is_kept(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, left = Worker.begin, [100.0]

    def begin_and_wait(worker: Worker, run: Run) -> None:
        begin(worker, run)
        assert worker.pipe.poll(60)
        left[0] = -1.0

    monkeypatch.setattr(Worker, "begin", begin_and_wait)
    queue = Queue(TINY, dataclasses.replace(options, seconds=100.0))
    monkeypatch.setattr(queue, "_left", lambda: left[0])
    assert queue.work() and len(queue.finished) == 1


def test_a_run_cut_off_by_the_deadline_leaves_no_result(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    queue = Queue(TINY, dataclasses.replace(options, seconds=CLOSING + 0.3))  # less than a process takes to start
    queue.work()
    assert queue.finished == [] and list((options.out / "runs").iterdir()) == []
    assert "0 runs finished, 0 failed, 2 can begin now; the first, tiny-B-adamw-" in capsys.readouterr().out


def test_the_queue_continues_if_an_idle_process_dies(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = Worker.begin, list[str]()

    def kill_and_begin(worker: Worker, run: Run) -> None:
        begun.append(run.id)
        if len(begun) == 1:
            worker.process.kill()
            worker.process.join()
        begin(worker, run)

    monkeypatch.setattr(Worker, "begin", kill_and_begin)
    first_runs = dataclasses.replace(TINY, phases=[("B", ("adamw", "cosmos"), ("lr",))])
    queue = Queue(first_runs, dataclasses.replace(options, parallel=2))
    assert not queue.work()
    assert queue.failed == {begun[0]: "its process ended with -9"} and len(queue.finished) >= 3


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM in a step of every training run, as the queue does at the deadline."""
    take_step = Trainer._step

    def take_step_and_stop(trainer: Trainer) -> None:
        take_step(trainer)
        if trainer.state.step == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", take_step_and_stop)


def test_a_run_that_was_cut_off_and_continued_equals_the_unbroken_one(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TINY.at("B", "cosmos", {"lr": 0, "adam_lr": 0, "beta2": 0.98})
    unbroken = train(TINY, options, run)
    kept = dataclasses.replace(options, checkpoints=options.out / "kept")
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        with pytest.raises(Stopped):
            train(TINY, kept, run)
    queue = Queue(TINY, kept)
    assert queue._begun(run) and queue.next()[0] != run and queue._first_fitting([], cold=True) == run
    continued = train(TINY, kept, run)
    assert (unbroken["continued_at"], continued["continued_at"]) == (0, 2)
    assert continued["wall_s"] >= continued["train_s"] > 0
    measured = {"continued_at", "wall_s", "train_s", "step_ms", "optimizer_ms", "tokens_per_s", "peak_memory_gb"}
    assert {k: v for k, v in continued.items() if k not in measured} == {
        k: v for k, v in unbroken.items() if k not in measured
    }


def test_a_run_that_was_stopped_begins_again_without_a_folder_for_checkpoints(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TINY.candidates({})[0]
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        with pytest.raises(Stopped):
            train(TINY, options, run)
    assert train(TINY, options, run)["continued_at"] == 0


def test_a_run_that_was_stopped_after_its_last_step_keeps_its_result(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kept = TINY.candidates({})[0], dataclasses.replace(options, checkpoints=options.out / "kept")
    final = TwoTextTrainer.final

    def final_and_stop(trainer: TwoTextTrainer) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return final(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(TwoTextTrainer, "final", final_and_stop)
        with pytest.raises(Stopped):
            train(TINY, kept, run)
        patched.setattr(TwoTextTrainer, "_step", None)  # it does not train again
        result = train(TINY, kept, run)
    assert result["status"] == "done" and len(result["curve"]) == 4 and result["wall_s"] >= result["train_s"]


@pytest.mark.slow
def test_runs_that_do_not_fit_begin_and_are_continued_if_there_is_a_folder_for_checkpoints(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = dataclasses.replace(TINY, regimes={"B": Regime(steps=10**7, batch=4, seq_len=16, epochs=10**6)})
    kept = dataclasses.replace(options, seconds=600.0, parallel=2, checkpoints=options.out / "kept")
    queue = Queue(endless, kept)
    monkeypatch.setattr(queue, "estimate", lambda *_: 1e9)
    begun = [run.id for run in endless.candidates({})]
    logs = [options.out / "kept" / name / "metrics.jsonl" for name in begun]
    monkeypatch.setattr(sweep_queue, "wait", lambda *_: wait_for(lambda: all(log.exists() for log in logs)))
    assert queue.work() and queue.finished == [] and len(begun) == 2
    assert all(queue._begun(run) for run in endless.candidates({}))
    printed = capsys.readouterr().out
    assert all(f"cut off by the deadline: {name}; the next command continues it" in printed for name in begun)


def wait_for(true: Callable[[], bool]) -> list[Any]:
    """Wait until something is true, and return that no worker has an answer."""
    while not true():
        time.sleep(0.1)
    return []


def test_a_loss_without_a_perplexity_counts_as_diverged(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoTextTrainer, "read", lambda *_: [800.0])
    result = train(TINY, options, TINY.candidates({})[0])
    assert result["val_loss"] is None and result["test_ppl"] is None
    assert "diverged" in table(TINY, {result["id"]: result})


@pytest.mark.slow
def test_a_worker_ends_in_the_middle_of_a_run_if_the_queue_is_killed(options: Options) -> None:
    endless = dataclasses.replace(TINY, regimes={"B": Regime(steps=10**7, batch=4, seq_len=16, epochs=10**6)})
    script = """
import pickle, sys, time
from benchmarks.sweep_worker import Worker
protocol, options, run = pickle.load(sys.stdin.buffer)
worker = Worker(protocol, options)
worker.begin(run)
while not (options.out / "unfinished").exists():
    time.sleep(0.1)
print(worker.process.pid, flush=True)
time.sleep(600)
"""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    queue = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path
    )  # fmt: skip
    assert queue.stdin and queue.stdout
    pickle.dump((endless, options, endless.candidates({})[0]), queue.stdin)
    queue.stdin.flush()
    worker = int(queue.stdout.readline())
    queue.kill()
    try:
        queue.communicate(timeout=60)  # the worker has the same output, so this waits for its end, too
    except subprocess.TimeoutExpired:
        os.kill(worker, signal.SIGKILL)
        raise


def test_a_search_brackets_the_best_rates_with_the_same_rule_for_all() -> None:
    for best in (-1, 0, 1):
        loss = fake(TINY, best)
        for entry in TINY.entries:
            point, unfinished, at_the_end = TINY.best("B", entry, loss)
            assert point == {"lr": best, "adam_lr": best, "beta2": 0.95} and not unfinished and not at_the_end
        counts = [sum(f"-{entry}-" in name for name in loss) for entry in TINY.entries]
        assert counts[0] == counts[1] <= sum(MOST.values()) - 1 + 2 + 2


def test_the_hidden_rate_is_tuned_again_if_the_outer_rate_has_moved_far() -> None:
    """The best hidden rate rises by a factor of 2 with every factor of 4 in the outer rate, whose best is 8 times."""
    loss: dict[str, float] = {}
    search = dataclasses.replace(TINY, phases=[("B", ("adamw",), ("lr", "adam_lr"))])
    while runs := search.candidates(loss):
        lr, outer = powers(runs[0])
        loss[runs[0].id] = float((lr - outer / 2) ** 2 + (outer - 3) ** 2)
    point, unfinished, at_the_end = search.best("B", "adamw", loss)
    assert (point["lr"], point["adam_lr"]) == (1, 2) and unfinished == ["beta2"] and not at_the_end
    assert {lr for lr in (5e-4, 1e-3, 2e-3, 4e-3) if f"tiny-B-adamw-lr{lr:g}-emb0.008-b0.98-s0" in loss} >= {1e-3, 2e-3}


def test_a_best_value_at_the_end_of_its_range_is_marked() -> None:
    _, unfinished, at_the_end = TINY.best("B", "adamw", fake(TINY, 8))
    assert not unfinished and at_the_end == ["lr", "adam_lr"]


def test_a_larger_model_runs_at_the_best_settings_of_a_smaller_one() -> None:
    found = fake(TINY, 1)
    larger = dataclasses.replace(TINY, model="larger", tuned_on="tiny")
    runs = larger.candidates(found)
    assert [(run.model, run.entry, run.seed) for run in runs] == [
        ("larger", entry, seed) for seed in (0, 1, 2) for entry in ("adamw", "cosmos")
    ]
    assert {(run.lr, run.adam_lr, run.beta2) for run in runs} == {(2e-3, 4e-3, 0.95)}
    assert larger.candidates(found | {run.id: 1.0 for run in runs}) == []


def test_a_row_that_never_ran_on_the_smaller_model_does_not_run_on_the_larger_one(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = dataclasses.replace(TINY, model="larger", tuned_on="tiny")
    found = {name: loss for name, loss in fake(TINY, 1).items() if "-cosmos-" in name}
    assert {run.entry for run in larger.candidates(found)} == {"cosmos"}
    assert Queue(larger, options).next() == []
    assert "skipped, because --known has no search of tiny: adamw in B, cosmos in B\n" in capsys.readouterr().out


def test_a_long_regime_takes_its_settings_from_another_and_may_see_tokens_twice(options: Options) -> None:
    regimes = {**TINY.regimes, "long": Regime(steps=80, batch=4, seq_len=16, epochs=2, like="B")}
    long = dataclasses.replace(TINY, regimes=regimes, phases=[("long", ("cosmos",), ("seeds",))])
    runs = long.candidates(fake(TINY, 1))
    assert {(run.lr, run.adam_lr, run.beta2) for run in runs} == {(2e-3, 4e-3, 0.95)}
    assert train(long, options, runs[0])["tokens"] == 80 * 64  # of a text of 4,000
    regimes["long"] = dataclasses.replace(regimes["long"], epochs=1)
    with pytest.raises(ValueError, match="5,120 tokens asked for, 4,000 found, epochs 1: add a shard"):
        train(dataclasses.replace(long, regimes=regimes), options, runs[0])


def test_the_text_is_cut_after_the_document_that_holds_the_cut(options: Options) -> None:
    whole = open_data(options.data, "val", cache_dir=options.cache)
    val, test = split(whole, TINY.cut, options.cache)
    assert (len(val), len(test)) == (510, 490)
    assert np.array_equal(np.concatenate([val.read(0, 510), test.read(0, 490)]), whole.read(0, 1000))
    assert val.read(509, 510) == 1 and len({val.fingerprint, test.fingerprint, whole.fingerprint}) == 3


def test_the_index_of_a_cut_text_is_in_the_given_cache(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = options.out / "elsewhere"
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(elsewhere))
    train(TINY, options, TINY.candidates({})[0])
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--regimes", "C"], "--regimes: unknown: C; there are A, B"),
        (["--seeds", "0", "7"], "--seeds: unknown: 7; there are 0, 1, 2"),
        (["--only", "soap-f1", "--regimes", "long"], "no phase of the comparison has these"),
        (["--only", "cosmo"], "--only: unknown: cosmo; there are adamw"),
    ],
)
def test_an_unknown_regime_seed_or_row_or_one_in_no_phase_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["--plan", "--out", str(tmp_path), *flags])
    assert message in capsys.readouterr().err


def test_single_runs_at_a_given_setting_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--plan", "--out", str(tmp_path), "--only", "cosmos", "muon", "--regimes", "A", "--model", "llama-130m"]
    setting = ["--at", "lr=1e-3", "adam_lr=1.6e-2", "beta2=0.95"]
    assert main([*flags, *setting]) == 0
    ids = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ids == [f"llama-130m-A-{entry}-lr0.001-emb0.016-b0.95-s0" for entry in ("cosmos", "muon")]
    assert main([*flags, *setting[:3], "--seeds", "1", "2", "--variants", "none", "heads"]) == 0
    ids = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(ids) == 8 and "llama-130m-A-muon-lr0.001-emb0.016-b0.98-s2-heads" in ids
    for wrong in (["--at", "lr=1e-3"], [*setting, "rank=8"], ["--at", "lr=high", "adam_lr=1"]):
        with pytest.raises(SystemExit):
            main([*flags, *wrong])


def test_a_single_run_is_kept_like_any_other_and_not_repeated(options: Options) -> None:
    run = Run("tiny", "B", "cosmos", 3e-3, 5e-3, 0.9)
    queue = Queue(TINY, dataclasses.replace(options, runs=(run,)))
    assert queue.work() and queue.finished == [run.id]
    again = Queue(TINY, queue.options)
    assert run_of(again.results[run.id]) == run and again.next() == []
    assert run.id in table(TINY, again.results)


def with_weights_field(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config that a kept run has today: before `weights`, trial-cosmos turned them into bfloat16."""
    if "bf16_weights=True" not in config["options"]:
        return config
    assert config["optimizer"] == "trial-cosmos"
    options = [option for option in config["options"] if option != "bf16_weights=True"]
    return {**config, "optimizer": "cosmos", "options": options, "weights": "bf16"}


def test_a_kept_run_would_be_repeated_with_the_settings_it_records() -> None:
    trials.register()
    results = read_results(sorted(BUNDLE.parent.glob("protocol-*.json")))
    assert {r["model"] for r in results.values()} == set(rate_runs.SIZES)
    for result in results.values():
        run = run_of(result)
        compared = run.regime in Protocol().regimes
        config = (Protocol(model=run.model) if compared else rate_runs.protocol(run.model)).config(run)
        asked = {name: list(v) if isinstance(v, tuple) else v for name, v in config.flat().items()}
        kept = with_weights_field(result["config"])
        other = {name for name, value in kept.items() if asked[name] != value}
        assert run.id == result["id"]
        assert other <= {"recipe", "embedding_lr", "head_lr"}  # earlier runs gave AdamW its second rate by these fields
        # "auto" was called "input" for the same side: every matrix has at least `rank` rows.
        now, then = (
            {name: "input" if x == "auto" else x for name, x in found.items()}
            for found in (hyperparameters(config), result["settings"])
        )
        assert {name: now[name] for name in then} == then


def test_the_kept_results_belong_to_the_search_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", str(BUNDLE)]) == 0
    assert "cosmos" in capsys.readouterr().out
    results = read_results([BUNDLE])
    runs = {Protocol().at("B", name, {"lr": 0, "adam_lr": 0, "beta2": 0.98}).id for name in Protocol().entries}
    assert runs & set(results) and not {run.id for run in Protocol().candidates(losses(results))} & set(results)


@pytest.mark.parametrize("content", ['{"id": "x", "val_lo', '["id"]', '{"name": "x"}'])
def test_a_damaged_result_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    damaged = tmp_path / "runs" / "x.json"
    damaged.parent.mkdir()
    damaged.write_text(content)
    for flags in (["--out", str(tmp_path)], ["--out", str(tmp_path / "new"), "--known", str(damaged)]):
        with pytest.raises(SystemExit):
            main(["--plan", *flags])
        assert f"{damaged} is not " in capsys.readouterr().err


def test_two_results_of_one_run_are_an_error_unless_they_are_equal(tmp_path: Path) -> None:
    name, result = next(iter(read_results([BUNDLE]).items()))
    for file, loss in (("a", 3.0), ("b", 3.0), ("c", 3.1)):
        write_bundle(tmp_path / f"{file}.json", {name: {**result, "val_loss": loss}})
    assert read_results([tmp_path / "a.json", tmp_path / "b.json"])[name]["val_loss"] == 3.0
    with pytest.raises(ValueError, match=rf"b.json and .*c.json have different results of {name}"):
        read_results([tmp_path / "b.json", tmp_path / "c.json"])


def test_filters_leave_only_the_named_variants_and_seeds() -> None:
    plain = {name: r for name, r in read_results([BUNDLE]).items() if not r.get("variant")}
    runs = [r for r in Protocol().candidates(losses(plain)) if r.entry == "cosmos"]
    named = [r for r in runs if Filters(("embed-x4", "momentum-int8"), (0,)).allow(r)]
    assert {r.variant for r in named} == {"embed-x4", "momentum-int8"} and {r.seed for r in named} == {0}
    assert all(not r.variant for r in runs if Filters(("none",)).allow(r)) and all(map(Filters().allow, runs))


def test_stages_leave_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = ["--plan", "--out", str(tmp_path), "--known", str(BUNDLE), "--parallel", "2"]
    assert main([*known, "--regimes", "A", "--only", "cosmos", "--stages", "memory"]) == 0
    ids = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ids and all(VARIANTS[name.rpartition("-s2-")[2]] in protocol_module.MEMORY for name in ids if "-s2-" in name)
    assert main([*known, "--regimes", "A", "--only", "cosmos", "--stages", "seeds"]) == 0
    assert "llama" not in capsys.readouterr().out  # rates come before seeds, and are not tuned yet


def test_a_plan_lists_what_comes_next_with_seconds_and_names_what_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = Variant("not-here", "an option of another version", options=("not_an_option=1",))
    monkeypatch.setattr(protocol_module, "MEMORY", (unknown,))
    monkeypatch.setitem(VARIANTS, unknown.name, unknown)
    assert main(["--plan", "--out", str(tmp_path), "--known", str(BUNDLE), "--parallel", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    skipped = [line for line in printed if "skipped" in line]
    assert len(skipped) == 1 and "cosmos with not-here: this version cannot run it" in skipped[0]
    first = next(line for line in printed if "llama-60m" in line and line not in skipped)
    seconds, total, name = first.split()
    assert 60 < int(seconds) < 200 and int(total) < int(seconds) and name not in read_results([BUNDLE])


def test_further_seeds_run_after_the_search_and_count_in_the_table() -> None:
    results = {name: r for name, r in read_results([BUNDLE]).items() if r["seed"] < 3}
    asked = Protocol().wanted("B", "cosmos", ("more-seeds",), losses(results))
    assert [run.seed for run in asked] == [3, 4]
    unfinished = {name: r for name, r in results.items() if r["beta2"] != 0.999}
    assert Protocol().wanted("B", "cosmos", ("more-seeds",), losses(unfinished)) == []
    first = results[dataclasses.replace(asked[0], seed=0).id]
    results |= {run.id: {**first, "id": run.id, "seed": run.seed} for run in asked}
    assert len(best_rows(Protocol(), "B", results)["cosmos"].seeds) == 5


def test_a_row_without_runs_is_expected_to_take_the_usual_time_times_its_cost(options: Options) -> None:
    queue = Queue(Protocol(), dataclasses.replace(options, known=(BUNDLE,), parallel=2))
    queue.results = {name: r for name, r in queue.results.items() if r["entry"] not in ("soap-polar", "muon-eq")}
    polar, eq, cosmos = (Run("llama-60m", "B", entry, 5e-4, 1.6e-2) for entry in ("soap-polar", "muon-eq", "cosmos"))
    slow, plain = queue.estimate(polar, cold=False), queue.estimate(eq, cold=False)
    assert slow > 1.8 * plain
    assert queue.estimate(cosmos) > queue.estimate(cosmos, cold=False)


def test_slow_variants_and_the_runs_of_a_fuller_gpu_do_not_count_in_the_expected_time(options: Options) -> None:
    queue = Queue(Protocol(), dataclasses.replace(options, known=(BUNDLE,), parallel=2))
    run = Run("llama-60m", "A", "cosmos", 1e-3, 1.6e-2)
    before = queue.estimate(run)
    one = next(r for r in queue.results.values() if (r["entry"], r["regime"], r["variant"]) == ("cosmos", "A", ""))
    for i, change in enumerate(({"variant": "all-8"}, {"at_a_time": 5})):
        queue.results[f"slow {i}"] = {**one, "id": f"slow {i}", "train_s": 9999.0, **change}
    assert queue.estimate(run) == before
    assert Queue(Protocol(), dataclasses.replace(options, parallel=2, beside=3)).options.at_a_time == 5


def test_a_diverged_run_does_not_count_in_the_expected_time(options: Options) -> None:
    queue = Queue(Protocol(), dataclasses.replace(options, known=(BUNDLE,), parallel=2))
    run = Run("llama-60m", "B", "cosmos", 5e-4, 1.6e-2)
    before = queue.estimate(run)
    slow = next(r for r in queue.results.values() if (r["entry"], r["regime"]) == ("cosmos", "B"))
    queue.results["diverged"] = {**slow, "id": "diverged", "val_loss": None, "tokens": 1000, "train_s": 50.0}
    assert queue.estimate(run) == before


def test_runs_of_a_less_full_gpu_count_if_there_are_no_others(options: Options) -> None:
    run = Run("llama-60m", "B", "cosmos", 5e-4, 1.6e-2)
    one, two, four = (
        Queue(Protocol(), dataclasses.replace(options, known=(BUNDLE,), parallel=number)).estimate(run, cold=False)
        for number in (1, 2, 4)
    )
    assert 0 < one <= 1.1 * two and four > 1.5 * two


@pytest.mark.parametrize(
    ("steps", "flags", "message"),
    [(4, ["--data", "nowhere"], "nowhere"), (10**4, [], "tokens asked for, 4,000 found, epochs 1: add a shard")],
)
def test_texts_are_checked_before_a_process_starts(
    options: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, steps: int,
    flags: list[str], message: str,
) -> None:  # fmt: skip
    protocol = dataclasses.replace(TINY, regimes={"B": Regime(steps=steps, batch=4, seq_len=16)})
    monkeypatch.setattr(rate_runs, "protocol", lambda _: protocol)
    monkeypatch.setattr(sweep_queue, "Worker", None)
    given = ["--rates", "llama-10m", "--out", str(options.out), "--data", options.data, "--cache", str(options.cache)]
    with pytest.raises(SystemExit):
        main([*given, *flags])
    assert message in capsys.readouterr().err


def test_compiled_code_comes_back_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, folder = tmp_path / "kept" / "compiled.tar.gz", tmp_path / "out" / "compiled"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    with compile_cache(archive, folder):
        place = Path(os.environ["TRITON_CACHE_DIR"])
        place.mkdir()
        (place / "kernel").write_text("code")
    assert archive.exists() and not folder.exists()
    with compile_cache(archive, folder):
        assert (place / "kernel").read_text() == "code"
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[40:]])
def test_a_damaged_archive_of_compiled_code_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    archive, folder = tmp_path / "compiled.tar.gz", tmp_path / "compiled"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    with compile_cache(archive, folder):
        (folder / "kernel").write_bytes(np.random.default_rng(0).bytes(1000))
    archive.write_bytes(damage(archive.read_bytes()))
    with compile_cache(archive, folder):
        assert list(folder.iterdir()) == []
        (folder / "kernel").write_text("code")
    with compile_cache(archive, folder):
        assert (folder / "kernel").read_text() == "code"


@pytest.mark.parametrize(
    ("entry", "variant"),
    [("cosmos", "balance"), ("adamw", "outer-rows"), ("cosmos", "embed-x4"), ("cosmos", "all-8")],
)
def test_a_variant_trains_as_the_sweep_trains_it(options: Options, entry: str, variant: str) -> None:
    trials.register()
    run = dataclasses.replace(TINY.at("B", entry, {"lr": 0, "adam_lr": 0, "beta2": 0.98}), variant=variant)
    result = train(TINY, options, run)
    assert result["id"].endswith(f"-s0-{variant}") and run_of(result) == run and result["status"] == "done"
    plain = train(TINY, options, run.plain)
    text = table(TINY, {r["id"]: r for r in (result, plain)})
    assert f"{entry} with {variant}: " in text and "1 seed(s)" in text
    assert result["test_loss"] != plain["test_loss"]


def test_a_variant_that_ran_at_two_settings_has_a_line_for_each() -> None:
    results = read_results([BUNDLE])
    for result in list(results.values()):
        run = run_of(result)
        if (run.regime, run.entry, run.variant) == ("A", "cosmos", "all-8"):
            for variant, loss in (("", 4.0), ("all-8", 4.0 + run.seed)):
                other = dataclasses.replace(run, adam_lr=2e-3, variant=variant)
                results[other.id] = {**result, **dataclasses.asdict(other), "test_loss": loss}
    lines = [line for line in table(Protocol(), results).splitlines() if "cosmos with all-8" in line]
    assert any("+1.0000 nats" in line and "3 seed(s) at 0.001, 0.002, beta2 0.98" in line for line in lines)
    assert any("+0.0010 nats" in line and "3 seed(s) at 0.001, 0.004, beta2 0.98" in line for line in lines)


def test_result_files_with_a_recipe_say_how_long_and_how_large_their_runs_were() -> None:
    for path in BUNDLE.parent.glob("*.json"):
        kept = json.loads(path.read_text())
        if "recipe" in kept:
            assert {"steps", "batch", "seq_len", "note"} <= set(kept["set_up"]), path.name
            assert all("embedding_lr" in row for row in kept["rows"]), path.name
