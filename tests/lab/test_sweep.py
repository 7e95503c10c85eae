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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import benchmarks.protocol as protocol_module
from benchmarks import rate_runs, sweep_queue
from benchmarks.comparison import Regime, Run
from benchmarks.kept_runs import losses, read_results, run_of
from benchmarks.protocol import Protocol
from benchmarks.sweep import main
from benchmarks.sweep_gpu import compile_cache, shared_gpu
from benchmarks.sweep_options import Options
from benchmarks.sweep_queue import CLOSING, Queue
from benchmarks.sweep_table import table
from benchmarks.sweep_worker import Worker, share_cpu
from benchmarks.variants import VARIANTS, Variant
from tests.lab.tiny_sweep import BUNDLE, TINY, tiny_options


@pytest.fixture(autouse=True)
def _restored(only_the_packages_rules: None) -> None:
    """Forget the trial optimizers after each test."""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Write a text and return options for it."""
    return tiny_options(tmp_path)


def test_processes_on_a_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for parallel, beside in ((1, 0), (2, 0), (2, 1), (16, 0)):
        share_cpu(Options("", Path(), parallel=parallel, beside=beside, device="cpu"))
    assert chosen == [8, 4, 2, 1]


def test_a_run_has_the_commit_at_which_the_queue_began(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sweep_queue.commit", lambda: "before")
    queue = Queue(TINY, dataclasses.replace(options, commit=None))
    monkeypatch.setattr("benchmarks.sweep_queue.commit", lambda: "after")
    assert queue.options.commit == "before"


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
    assert one["at_a_time"] == 1
    assert len(one["curve"]) == 4 and one["test_tokens"] == 448 and len(one["test_blocks"]) == 7
    assert one["settings"]["adam.lr"] == [2e-3, 1e-3]  # AdamW has both rates

    later = dataclasses.replace(options, out=options.out / "more", known=(options.out / "bundle.json",))
    again = Queue(first_runs, later)
    again.results["other"] = {"id": "other", "model": "llama-60m", "val_loss": 1.0}
    assert again.work() and again.finished == []
    assert read_results([later.out / "bundle.json"]) == queue.results  # of its model, as the files in results/
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
    changes = dataclasses.replace(TINY, phases=[("B", ("cosmos",), ("quality",))])
    queue, workers = Queue(changes, dataclasses.replace(options, parallel=2)), list[Any]()
    queue._begin_runs(workers)
    (first,) = (worker.run for worker in workers)
    assert not first.variant
    queue.results[first.id] = {"model": "tiny", "regime": "B", "entry": "cosmos", "at_a_time": 1, "variant": "",
                               "val_loss": 1.0, "wall_s": 2.0, "train_s": 1.0, "tokens": 256}  # fmt: skip
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
        assert worker.pipe.poll(600)
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


def runs_that_begin(monkeypatch: pytest.MonkeyPatch, dies: Callable[[list[str]], bool]) -> list[str]:
    """Return the list of runs that begin from now on; the process of the last one dies before it if `dies` says so."""
    begin, begun = Worker.begin, list[str]()

    def begin_or_die(worker: Worker, run: Run) -> None:
        begun.append(run.id)
        if dies(begun):
            worker.process.kill()
            worker.process.join()
        begin(worker, run)

    monkeypatch.setattr(Worker, "begin", begin_or_die)
    return begun


def test_the_queue_continues_if_an_idle_process_dies(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = runs_that_begin(monkeypatch, dies=lambda begun: len(begun) == 1)
    first_runs = dataclasses.replace(TINY, phases=[("B", ("adamw", "cosmos"), ("lr",))])
    queue = Queue(first_runs, dataclasses.replace(options, parallel=2))
    assert not queue.work()
    assert queue.failed == {begun[0]: "its process ended with -9"} and len(queue.finished) >= 3


@pytest.mark.slow
def test_all_runs_begin_again_on_a_new_gpu_daemon_if_one_may_have_broken_it_but_each_run_causes_that_once(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, restarted = runs_that_begin(monkeypatch, dies=lambda begun: begun[-1] == begun[0]), list[list[str]]()
    first_runs = dataclasses.replace(TINY, phases=[("B", ("adamw", "cosmos"), ("lr",))])
    queue = Queue(first_runs, dataclasses.replace(options, parallel=2))
    assert not queue.work(lambda: restarted.append(list(begun)))
    first, beside = begun[:2]
    assert restarted == [[first, beside]] and begun[2:4] == [first, beside]
    assert queue.failed == {first: "its process ended with -9"}
    assert beside in queue.finished and begun.count(beside) == 2 and len(queue.finished) >= 3
    assert f"all runs begin again, because {first} may have lost the GPU" in capsys.readouterr().out


@pytest.mark.parametrize("text", [
    "RuntimeError: CUDA driver error: an illegal memory access was encountered", "its process ended with -6",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "ValueError: this machine has a GPU, but CUDA does not start (Error 805); use --device cpu",
])  # fmt: skip
def test_an_error_that_another_process_can_cause_counts_as_a_lost_gpu(text: str) -> None:
    assert sweep_queue.LOST_GPU.search(f"Traceback (most recent call last):\n  File\n{text}\n")
    assert not sweep_queue.LOST_GPU.search("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")


def test_each_gpu_daemon_has_a_new_folder_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, "elsewhere")
    program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY ${{1:-$(cat)}}" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with shared_gpu(wanted=True) as restart:
        assert restart is not None
        restart()
    (one, *first), (two, *second), (three, *third), (four, *fourth) = map(str.split, log.read_text().splitlines())
    assert [first, second, third, fourth] == [["-d"], ["quit", "-t", "1"], ["-d"], ["quit", "-t", "1"]]
    assert one == two != three == four and not Path(one).exists()
    with shared_gpu(wanted=False) as nothing:
        assert nothing is None


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [False, True])
def test_runs_that_do_not_fit_begin_and_are_continued_if_there_is_a_folder_for_checkpoints(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signalled: bool
) -> None:
    endless = dataclasses.replace(TINY, regimes={"B": Regime(steps=10**7, batch=4, seq_len=16, epochs=10**6)})
    monkeypatch.setattr(sweep_queue, "SAVING", 600.0)  # a busy machine takes long
    kept = dataclasses.replace(options, seconds=3600.0, parallel=2, checkpoints=options.out / "kept")
    queue = Queue(endless, kept)
    monkeypatch.setattr(queue, "estimate", lambda *_: 1e9)
    begun = [run.id for run in endless.candidates({})]
    logs = [options.out / "kept" / name / "metrics.jsonl" for name in begun]

    def wait_and_end(*_: Any) -> list[Any]:
        found = wait_for(lambda: all(map(has_lines, logs)))
        if signalled:
            raise SystemExit(143)  # as the handler of SIGTERM does
        return found

    monkeypatch.setattr(sweep_queue, "wait", wait_and_end)
    with pytest.raises(SystemExit) if signalled else nullcontext():
        assert queue.work()
    assert queue.finished == [] and len(begun) == 2
    assert all(queue._has_checkpoint(run) for run in endless.candidates({}))
    printed = capsys.readouterr().out
    assert all(f"cut off: {name}; the next command continues it" in printed for name in begun)


def test_a_run_that_ends_in_time_begins_before_one_that_must_be_continued(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = TINY.candidates({})
    queue = Queue(TINY, dataclasses.replace(options, seconds=3600.0, checkpoints=options.out / "kept"))
    expected = {first: 1e9, second: 1.0}
    monkeypatch.setattr(queue, "estimate", lambda run, cold: expected[run])
    assert queue._first_fitting([], cold=True) == second
    expected[second] = 1e9
    assert queue._first_fitting([], cold=True) == first
    monkeypatch.setattr(queue, "_left", lambda: sweep_queue.SAVING)
    assert queue._first_fitting([], cold=True) is None


def has_lines(log: Path) -> bool:
    """Return whether a run has taken its first step."""
    return log.exists() and log.stat().st_size > 0


def wait_for(true: Callable[[], bool]) -> list[Any]:
    """Wait until something is true, and return that no worker has an answer."""
    while not true():
        time.sleep(0.1)
    return []


@pytest.mark.slow
def test_a_worker_ends_in_the_middle_of_a_run_if_the_queue_is_killed(options: Options) -> None:
    endless = dataclasses.replace(TINY, regimes={"B": Regime(steps=10**7, batch=4, seq_len=16, epochs=10**6)})
    script = """
import pickle, sys, time
from benchmarks.sweep_worker import Worker, share_cpu
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


@pytest.mark.parametrize(("run_seconds", "beside", "expected"), [(100, 0, 1), (112, 0, 1), (190, 0, 2), (0, 3, 4)])
def test_a_result_says_how_many_runs_there_were_at_a_time_not_how_many_were_allowed(
    options: Options, monkeypatch: pytest.MonkeyPatch, run_seconds: float, beside: int, expected: int
) -> None:
    """The last run of a queue is alone, and takes half of the time that it would take beside another one."""
    queue = Queue(TINY, dataclasses.replace(options, parallel=2, beside=beside))
    queue.started["one"] = 1000.0, 50.0
    queue.run_seconds = 50.0 + run_seconds
    monkeypatch.setattr(time, "monotonic", lambda: 1100.0)
    assert queue._runs_at_a_time("one") == expected


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


def test_a_slow_row_counts_its_own_runs_even_if_others_had_as_many_runs_at_a_time_as_now(options: Options) -> None:
    queue = Queue(Protocol(), dataclasses.replace(options, known=(BUNDLE,), parallel=4))
    full = {r["entry"] for r in queue.results.values() if r["at_a_time"] > 2}
    slow, usual = (Run("llama-60m", "B", entry, 1e-3, 1.6e-2) for entry in ("soap-f10", "cosmos"))
    assert "cosmos" in full and "soap-f10" not in full
    assert queue.estimate(slow, cold=False) > 1.3 * queue.estimate(usual, cold=False)


@pytest.mark.parametrize(
    ("steps", "flags", "message"),
    [(4, ["--data", "nowhere"], "nowhere"), (10**4, [], "-s0: 640,000 tokens asked for, 4,000 found, epochs 1: add")],
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
