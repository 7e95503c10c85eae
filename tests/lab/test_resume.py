"""Resume: bit for bit after a real kill -9, for every optimizer, and refused if it would be wrong."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cosmos_optim
from cosmos_lab.config import RunConfig
from cosmos_lab.results.reading import read_metrics
from cosmos_lab.run import checkpoint, distributed, run_folder, run_log
from cosmos_lab.run.evaluate import evaluate
from cosmos_lab.run.run_folder import summary_if_finished
from cosmos_lab.run.train import Trainer, train
from tests.lab.outcomes import assert_same, outcome, start, wait_until


class Stop(Exception):
    """Ends a run in the middle."""


def interrupt(config: RunConfig, step: int) -> None:
    """Train until after ``step``, then raise an error."""

    def fall(record: Any) -> None:
        if record["step"] > step:
            raise Stop

    with pytest.raises(Stop):
        train(config, progress=fall)


@pytest.mark.parametrize("optimizer", list(cosmos_optim.OPTIMIZERS))
def test_every_optimizer_resumes_bit_for_bit(tiny_run: RunConfig, optimizer: str) -> None:
    rank = 8 if optimizer in ("cosmos", "cosmos-paper", "galore") else None
    config = tiny_run.replace(optimizer=optimizer, rank=rank, checkpoint_every=3, val_every=2)
    train(config.replace(name="whole"))
    interrupt(config, 5)  # the newest checkpoint is of step 3: two steps are done again
    seen: list[Any] = []
    train(config, progress=seen.append)
    assert "continues after step 3 of 8" in seen[0]["about"]
    assert_same(outcome(config), outcome(config.replace(name="whole")))


def test_a_run_in_a_folder_with_any_bytes_in_its_name_resumes_and_is_evaluated(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(name="caf\udce9", diagnostics_every=0)  # as Python reads a name in Latin-1
    interrupt(config, 5)
    seen: list[Any] = []
    summary = train(config, progress=seen.append)
    assert "continues after step 4 of 8" in seen[0]["about"]
    assert evaluate(config.folder, device="cpu")["val_loss"] == pytest.approx(summary["final_val_loss"])


def test_resume_after_kill_9_equals_the_unbroken_run(tiny_run: RunConfig, tmp_path: Path) -> None:
    config = tiny_run.replace(steps=80, checkpoint_every=3, val_every=20, log_every=5, diagnostics_every=0)
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps(config.flat()))
    process = start("-m", "cosmos_lab.grid.workers", str(asked), str(os.getpid()))
    checkpoints = config.folder / "checkpoints"
    try:
        wait_until(lambda: any(checkpoints.glob("step_*")), process)
        time.sleep(0.1)  # into the middle of some step or save
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    stopped = checkpoint.latest(checkpoints)
    assert stopped is not None and not (config.folder / "summary.json").exists()
    step = int(stopped.name.removeprefix("step_"))
    assert 0 < step < 80
    train(config)
    train(config.replace(name="whole"))
    assert_same(outcome(config), outcome(config.replace(name="whole")))


def test_a_half_written_checkpoint_is_ignored_and_removed(tiny_run: RunConfig) -> None:
    interrupt(tiny_run, 5)
    checkpoints = tiny_run.folder / "checkpoints"
    half = checkpoints / ".writing_step_000006"
    half.mkdir()
    (half / "state.pt").write_bytes(b"half")
    train(tiny_run)
    assert not half.exists()
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step_000004", "step_000008"]


def test_only_the_newest_checkpoints_are_kept(tiny_run: RunConfig) -> None:
    train(tiny_run.replace(checkpoint_every=1, keep=3))
    found = sorted(path.name for path in (tiny_run.folder / "checkpoints").iterdir())
    assert found == ["step_000006", "step_000007", "step_000008"]


@contextlib.contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Inside, a write beyond ``size`` bytes into any file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tiny_run: RunConfig) -> None:
    checkpoints = tiny_run.folder / "checkpoints"
    with distributed.session("cpu", "auto") as world:
        trainer = Trainer(tiny_run, world)
        with contextlib.closing(trainer):
            trainer._step()
            trainer.save()
            before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
            trainer._step()
            with disk_of(20_000), pytest.raises((OSError, RuntimeError), match="cannot write .*step_000002.*untouched"):
                trainer.save()
            after = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
            assert after == before  # and nothing half-written beside it
            trainer.save()
    assert checkpoint.latest(checkpoints) == checkpoints / "step_000002"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "adam", "rank": None}, "trained with optimizer 'cosmos', this run asks for optimizer 'adam'"),
        ({"depth": 2}, "trained with model depth 1, this run asks for model depth 2"),
        ({"rank": 4}, "trained with rank 8, this run asks for rank 4"),
        ({"seed": 3}, "trained with seed 0, this run asks for seed 3"),
        ({"batch": 4}, "trained with batch 8, this run asks for batch 4"),
        ({"seq_len": 8}, "trained with seq_len 16, this run asks for seq_len 8"),
        ({"weights": "bf16"}, "trained with weights 'fp32', this run asks for weights 'bf16'"),
        ({"options": ("ns_steps=2",)}, "trained with cosmos.ns_steps 5, this run asks for cosmos.ns_steps 2"),
        ({"gamma": 0.7}, "trained with cosmos.gamma .*, this run asks for cosmos.gamma 0.7"),
    ],
)
def test_resume_with_another_config_is_refused_and_names_both(tiny_run: RunConfig, change: dict, message: str) -> None:
    interrupt(tiny_run, 5)
    folder = tiny_run.folder
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        train(tiny_run.replace(**change))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_resume_may_change_the_rates_with_a_warning(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(gamma=0.5)
    interrupt(config, 5)
    with pytest.warns(UserWarning, match="continues with lr 1e-05 instead of 0.002, adam_lr 1e-05 instead of 0.01"):
        train(config.replace(lr=1e-5, adam_lr=1e-5))
    last = [record for record in read_metrics(config.folder) if "lr" in record][-1]
    assert last["lr"] < 1e-5


def test_a_resume_with_a_separate_rate_that_the_run_did_not_have_is_refused(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(optimizer="adam", rank=None, adam_lr=None)
    interrupt(config, 5)
    with pytest.raises(ValueError, match=r"\(number of groups: 1, now 2\): give the rates that the run began with"):
        train(config.replace(adam_lr=1e-2))
    train(config)


def test_two_processes_do_not_train_in_one_folder(tiny_run: RunConfig) -> None:
    def intrude(record: Any) -> None:
        if record["step"] == 3:
            with pytest.raises(ValueError, match="another process is training in"):
                train(tiny_run)
            raise Stop

    with pytest.raises(Stop):
        train(tiny_run, progress=intrude)
    assert train(tiny_run)["status"] == "done"  # the lock is gone with its holder


def test_a_run_killed_before_its_summary_repeats_no_step(tiny_run: RunConfig) -> None:
    train(tiny_run)
    lines = list(read_metrics(tiny_run.folder))
    (tiny_run.folder / "summary.json").unlink()
    train(tiny_run)
    assert list(read_metrics(tiny_run.folder)) == lines


def test_a_log_line_cut_short_is_dropped(tiny_run: RunConfig) -> None:
    interrupt(tiny_run, 5)
    with (tiny_run.folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')
    train(tiny_run)
    steps = [record["step"] for record in read_metrics(tiny_run.folder) if "loss" in record]
    assert steps == list(range(1, 9))


def test_a_refused_process_leaves_the_others_checkpoint_alone(tiny_run: RunConfig) -> None:
    """The other process may be writing it just now."""
    writing = tiny_run.folder / "checkpoints" / ".writing_step_000004"

    def intrude(record: Any) -> None:
        if record["step"] == 3:
            writing.mkdir(parents=True)
            with pytest.raises(ValueError, match="another process is training in"):
                train(tiny_run)
            assert writing.is_dir()
            raise Stop

    with pytest.raises(Stop):
        train(tiny_run, progress=intrude)


def test_a_run_that_another_process_has_finished_meanwhile_is_not_trained_again(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tiny_run)
    before = {path: path.read_bytes() for path in tiny_run.folder.rglob("*") if path.is_file()}
    answers: list[Any] = [None]  # it was not there yet when this process looked first

    def late(config: RunConfig) -> Any:
        return answers.pop() if answers else summary_if_finished(config)

    monkeypatch.setattr(run_folder, "summary_if_finished", late)
    assert train(tiny_run) == {**whole} and not answers
    assert {path: path.read_bytes() for path in tiny_run.folder.rglob("*") if path.is_file()} == before


def test_a_checkpoint_beyond_the_last_step_is_refused(tiny_run: RunConfig) -> None:
    interrupt(tiny_run.replace(steps=12), 9)
    with pytest.raises(ValueError, match=r"step_000008 is beyond --steps 6"):
        train(tiny_run.replace(steps=6))


def test_a_resume_with_changed_fields_warns_and_names_them(tiny_run: RunConfig) -> None:
    interrupt(tiny_run, 5)
    with pytest.warns(UserWarning, match=r"continues with steps 10 instead of 8, clip 0.5 instead of None"):
        assert train(tiny_run.replace(steps=10, clip=0.5))["steps"] == 10


def test_a_resume_with_another_validation_text_is_refused(tiny_run: RunConfig, lab_data: str, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copy(f"{lab_data}_{split}.bin", tmp_path / f"mine_{split}.bin")
    config = tiny_run.replace(data=str(tmp_path / "mine"))
    interrupt(config, 5)
    shutil.copy(f"{lab_data}_train.bin", tmp_path / "mine_val.bin")
    with pytest.raises(ValueError, match="trained with validation data"):
        train(config)


@pytest.mark.parametrize("name", ["state.pt", "process_0.pt"])
def test_the_error_for_a_truncated_checkpoint_file_names_it(tiny_run: RunConfig, name: str) -> None:
    interrupt(tiny_run, 5)
    path = tiny_run.folder / "checkpoints" / "step_000004" / name
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{name} is damaged: it has 1,000 bytes instead of .*remove .*checkpoints to"):
        train(tiny_run)


def test_a_full_disk_is_reported_once(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the log tries to write again, and its error would hide the one that says what to do."""

    class Full:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        flush = close = lambda self: self.write("")

    real = run_log.RunLog.__init__

    def fill(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(run_log.RunLog, "__init__", fill)
    with pytest.raises(OSError, match=r"cannot write .*metrics.jsonl: no space left on the disk; free some space"):
        train(tiny_run)
