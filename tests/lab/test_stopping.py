"""Runs that are told to stop: a checkpoint, one line, the signal's exit code, and the same command continues."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.grid import compare as comparison
from cosmos_lab.grid import workers
from cosmos_lab.grid.compare import compare
from cosmos_lab.io import locked
from cosmos_lab.results.reading import METRICS, read_metrics, read_summary
from cosmos_lab.run import checkpoint, stopping
from cosmos_lab.run.stopping import Stopped, watch
from cosmos_lab.run.train import train
from tests.lab.outcomes import assert_same, at_step, log_of, outcome, send, start, wait_until


def unnoticed(signum: int, frame: object) -> None:
    """In place of SIGTERM's own action, which would end the tests."""
    raise AssertionError("nobody was watching for signals")


@pytest.fixture(autouse=True)
def _known_handlers() -> Iterator[None]:
    """Make signals raise, and check that every test leaves them so."""
    fresh = {signal.SIGTERM: unnoticed, signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, handler) for signum, handler in fresh.items()}
    yield
    left = {signum: signal.signal(signum, handler) for signum, handler in before.items()}
    assert left == fresh


def flags_of(config: RunConfig, *left_out: str) -> list[str]:
    """Return the flags that make any recipe's run this one."""
    words: list[str] = []
    for name, value in config.flat().items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value != () and name not in left_out:
            words += [f"--{flag}", str(value)]
    return words


# -- one run ----------------------------------------------------------------------------------------------------------


def test_sigterm_ends_with_a_checkpoint_and_the_same_command_continues(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(steps=60, checkpoint_every=1000, val_every=40, log_every=7)
    command = ["train", "tiny", *flags_of(config)]
    folder = config.folder
    process = start("-m", "cosmos_lab", *command)
    wait_until(lambda: any(read_metrics(folder)), process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as `timeout` does, to the process and to its group
    error = process.communicate()[1]
    assert process.returncode == 143
    (kept,) = (folder / "checkpoints").iterdir()
    step = int(kept.name.removeprefix("step_"))
    message = f"stopped by SIGTERM at step {step} of 60, with a checkpoint; the same command continues"
    assert error.endswith(f"cosmos-lab: {message}\n") and 0 < step < 60
    assert main(command) == 0
    train(config.replace(name="whole"))
    assert_same(outcome(config), outcome(config.replace(name="whole")))


@pytest.mark.parametrize("stop", [1, 4, 8])
def test_a_stop_leaves_no_checkpoint_in_the_end_if_none_was_asked_for(tiny_run: RunConfig, stop: int) -> None:
    config = tiny_run.replace(checkpoint_every=0)
    train(config.replace(name="whole"))
    folder = config.folder
    with pytest.raises(Stopped, match=f"at step {stop} of 8, with a checkpoint"):
        train(config, progress=at_step(stop))
    assert (folder / "checkpoints" / f"step_{stop:06d}").is_dir()
    assert train(config)["status"] == "done"
    assert not (folder / "checkpoints").exists()
    assert_same(log_of(folder), log_of(folder.with_name("whole")))


def test_checkpoints_that_were_asked_for_survive_a_resume_that_asks_for_none(tiny_run: RunConfig) -> None:
    with pytest.raises(Stopped):
        train(tiny_run.replace(checkpoint_every=2, keep=5), progress=at_step(5))
    train(tiny_run.replace(checkpoint_every=0))
    found = sorted(path.name for path in (tiny_run.folder / "checkpoints").iterdir())
    assert found == ["step_000002", "step_000004", "step_000005"]


def test_a_resumed_run_diverges_at_the_same_step(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(optimizer="adam", rank=None, lr=1e30, adam_lr=1e30, warmup=0.0, checkpoint_every=0)
    whole = train(config.replace(name="whole"))
    bad = next(r["step"] for r in log_of(config.replace(name="whole").folder) if r["loss"] is None)
    with pytest.raises(Stopped):
        train(config, progress=at_step(bad))
    summary = train(config)
    assert summary["status"] == whole["status"] == "diverged" and summary["steps"] == whole["steps"] == bad + 1


def test_a_signal_in_the_last_validation_does_not_get_lost(tiny_run: RunConfig) -> None:
    def late(record: Any) -> None:
        if record["step"] == 8 and "val_loss" in record:
            send(signal.SIGTERM)

    with pytest.raises(Stopped, match="stopped by SIGTERM after all work was done"):
        train(tiny_run, progress=late)
    assert train(tiny_run)["status"] == "done"


def test_ctrl_c_has_its_own_exit_code(
    tiny_run: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    press = at_step(3, signal.SIGINT)
    monkeypatch.setattr("cosmos_lab.display.TrainDisplay.__call__", lambda _, record: press(record))
    assert main(["train", "tiny", *flags_of(tiny_run)]) == 130
    message = "stopped by SIGINT at step 3 of 8, with a checkpoint; the same command continues"
    assert capsys.readouterr().err == f"cosmos-lab: {message}\n"


def test_another_thread_can_train(tiny_run: RunConfig) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train(tiny_run)["status"]))
    thread.start()
    thread.join()
    assert found == ["done"]


# -- several runs -----------------------------------------------------------------------------------------------------


def test_a_stop_ends_the_whole_comparison(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tiny_run.replace(name=f"run{seed}", seed=seed, checkpoint_every=0) for seed in range(3)]

    def signalled(config: RunConfig, progress: Any) -> Any:
        return train(config, progress=at_step(5) if config.run_name == "run1" else progress)

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "train", signalled)
        with pytest.raises(Stopped, match="at step 5 of 8, with a checkpoint"):
            compare(runs)
    (row,) = json.loads((Path(tiny_run.logging.out) / "compare.json").read_text())["rows"]
    assert row["status"] == ["done", "unfinished", "not started"] and row["values"][0] is not None
    out = capsys.readouterr().out
    assert "not started, unfinished" in out and "--minutes" not in out
    (row,) = compare(runs, show=False)["rows"]
    assert row["status"] == ["done"] * 3


def test_no_run_starts_after_a_stop_between_runs(tiny_run: RunConfig) -> None:
    with pytest.raises(Stopped, match="stopped by SIGTERM before run"), watch():
        send(signal.SIGTERM)
        compare([tiny_run], show=False)
    with pytest.raises(Stopped, match="stopped by SIGTERM at step 0 of 8$"), watch():
        send(signal.SIGTERM)
        train(tiny_run)


@pytest.mark.slow
def test_a_stop_ends_every_process_with_a_checkpoint(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Long enough that the first process is still training when the second one begins, also on a busy machine.
    config = tiny_run.replace(steps=1210, log_every=10, val_every=0, diagnostics_every=0, checkpoint_every=0, rank=None)
    common = flags_of(config, "optimizer", "lr", "seed", "name", "recipe")
    command = ["compare", "tiny", *common, "--optimizers", "adam", "--lrs", "1e-3,2e-3"]
    names = ["tiny-adam-lr0.001-s0", "tiny-adam-lr0.002-s0"]
    out = Path(config.logging.out)
    show, processes, told = workers._show_progress, set(), []

    def signalled(job: Any, *rest: Any) -> None:
        processes.add(job.process)
        if not told and all(any(read_metrics(out / name)) for name in names):
            told.append(send(signal.SIGTERM))
        show(job, *rest)

    monkeypatch.setattr(workers, "_show_progress", signalled)
    assert main([*command, "--parallel", "2"]) == 143
    said = capsys.readouterr()
    message = "stopped by SIGTERM in 2 of 2 runs, with checkpoints; the same command continues"
    assert said.err.endswith(f"cosmos-lab: {message}\n") and "unfinished" in said.out
    assert [process.returncode for process in processes] == [143, 143]  # and waited for: no process is left
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
    for name in names:
        assert "stopped by SIGTERM at step" in (out / name / "output.txt").read_text()
        assert (out / name / "checkpoints").is_dir()
    assert main(command) == 0
    for name in names:
        lines = [record["step"] for record in log_of(out / name) if "loss" in record]
        assert lines == sorted({1, 1149, *range(10, 1211, 10)})  # from 1149 on the final training loss is counted
        assert not (out / name / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_the_processes_of_a_killed_comparison_end_with_a_checkpoint(tiny_run: RunConfig) -> None:
    """Otherwise they would train on, unseen, on GPUs that the next comparison uses."""
    run = tiny_run.replace(steps=5000, val_every=0, diagnostics_every=0, checkpoint_every=0)
    code = "from cosmos_lab.grid.compare import compare; from cosmos_lab.config import RunConfig; import json, sys; "
    code += "compare([RunConfig.from_flat(json.loads(sys.argv[1]))], parallel=2)"
    process = start("-c", code, json.dumps(run.flat()))
    wait_until(lambda: any(read_metrics(run.folder)), process)
    process.kill()
    process.wait()
    with locked(run.folder / ".lock"):  # waits for the end of the run
        assert checkpoint.latest(run.folder / "checkpoints") is not None


@pytest.mark.slow
def test_a_process_does_not_train_if_its_comparison_was_killed_while_it_started(tiny_run: RunConfig) -> None:
    code = """
import json, os, signal, subprocess, sys
from cosmos_lab.config import RunConfig
from cosmos_lab.grid import workers
from cosmos_lab.grid.compare import compare
real = subprocess.Popen
def killed(*arguments, **more):
    real(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)
workers.subprocess.Popen = killed
compare([RunConfig.from_flat(json.loads(sys.argv[1]))], parallel=2)
"""
    process = start("-c", code, json.dumps(tiny_run.flat()))
    assert process.wait() == -signal.SIGKILL
    said = tiny_run.folder / "output.txt"
    deadline = time.monotonic() + 120
    while not (said.read_text() or read_summary(tiny_run.folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "the comparison has ended" in said.read_text() and not (tiny_run.folder / METRICS).exists()


# -- the watch itself -------------------------------------------------------------------------------------------------


def test_a_watch_within_another_shares_its_request() -> None:
    with pytest.raises(Stopped, match="stopped by SIGINT after all work was done") as stop, watch() as outer:
        with watch() as inner:
            send(signal.SIGINT)
        assert outer is inner and outer.signum == signal.SIGINT
    assert stop.value.code == 130


def test_an_error_is_not_hidden_by_a_stop() -> None:
    with pytest.raises(ZeroDivisionError), watch():
        send(signal.SIGTERM)
        raise ZeroDivisionError


def test_a_second_signal_acts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt) as now, watch():
        send(signal.SIGTERM)
        send(signal.SIGINT)  # within the time of an echo
        monkeypatch.setattr(stopping, "_ECHO_S", -1.0)
        send(signal.SIGINT)
        raise AssertionError("not reached")
    assert now.type is KeyboardInterrupt


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup, or in the background of a script
    with watch() as request:
        send(signal.SIGINT)
    assert request.signum == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_run_outlives_the_reader_of_its_output(
    lab_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cosmos-lab train ... | head -1`, or a `tee` that dies."""
    flags = {"steps": 6, "batch": 4, "seq-len": 16, "log-every": 1, "device": "cpu", "data": lab_data,
             "out": tmp_path, "name": "run"}  # fmt: skip
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main(["train", "tiny", *given]) == 0
    assert (tmp_path / "run" / "summary.json").exists()
