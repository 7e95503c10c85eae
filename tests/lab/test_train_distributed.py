"""DDP and FSDP2 over two gloo processes on the CPU give the numbers of one process, and resume."""

import multiprocessing
import os
import shutil
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.results.reading import read_metrics
from cosmos_lab.run import checkpoint, run_folder
from cosmos_lab.run.evaluate import evaluate
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import Trainer, train
from tests.lab.outcomes import send

# Sums over processes round differently from sums over micro-batches, and eight steps of training amplify it.
DISTRIBUTED_TOLERANCE = 1e-4


def on_ranks(count: int, work: Callable[[], Any], timeout: float = 120.0) -> None:
    """Run ``work`` in ``count`` forked processes set up as torchrun would; any error fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()

    def body(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        try:
            work()
        except BaseException:
            errors.put(f"rank {rank}: {traceback.format_exc()}")
            os._exit(1)
        os._exit(0)

    processes = [context.Process(target=body, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    messages = [] if errors.empty() else [errors.get()]
    assert not stuck and all(process.exitcode == 0 for process in processes), messages or "a process hangs"


def losses(config: RunConfig) -> list[float]:
    lines = read_metrics(config.folder)
    return [record.get("loss", record.get("val_loss")) for record in lines if "diagnostics" not in record]


@pytest.mark.parametrize("optimizer", ["adam", "cosmos"])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tiny_run: RunConfig, sharding: str, optimizer: str) -> None:
    rank = 8 if optimizer == "cosmos" else None
    base = tiny_run.replace(optimizer=optimizer, rank=rank, micro_batch=2, clip=1.0)
    train(base.replace(name="one"))
    two = base.replace(name="two", sharding=sharding)
    on_ranks(2, lambda: train(two))
    assert losses(two) == pytest.approx(losses(base.replace(name="one")), rel=DISTRIBUTED_TOLERANCE)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize("windows", [2, 27])
def test_the_validation_text_does_not_depend_on_the_processes(tiny_run: RunConfig, sharding: str, windows: int) -> None:
    """27 sequences are 14 batches of two, the last one smaller, so that one of three processes repeats it."""
    base = tiny_run.replace(batch=12, micro_batch=2, steps=1, val_tokens=16 * windows, checkpoint_every=1)
    train(base.replace(name="one"))
    three = base.replace(name="three", sharding=sharding)
    on_ranks(3, lambda: train(three))
    assert losses(three) == pytest.approx(losses(base.replace(name="one")), rel=DISTRIBUTED_TOLERANCE)


def test_the_first_of_two_processes_decides_whether_a_run_is_finished(tiny_run: RunConfig) -> None:
    """A network disk may show a file to one process later than to another."""
    config = tiny_run.replace(steps=2, sharding="ddp")
    summary = train(config)
    before = {path: path.stat().st_mtime_ns for path in config.folder.rglob("*")}

    def look() -> None:
        if os.environ["RANK"] == "1":
            run_folder.read_summary = lambda folder: None  # type: ignore[assignment]
        assert train(config) == summary

    on_ranks(2, look, timeout=30.0)
    assert {path: path.stat().st_mtime_ns for path in config.folder.rglob("*")} == before


def told(config: RunConfig, stop: int) -> None:
    """Of two processes the second gets a signal in step 6; both stop after the step ``stop``."""
    step = Trainer._step

    def signalled(trainer: Trainer) -> None:
        step(trainer)
        if trainer.world.rank == 1 and trainer.state.step == 6:
            send(signal.SIGTERM)

    Trainer._step = signalled  # type: ignore[method-assign]
    with pytest.raises(Stopped, match=f"stopped by SIGTERM at step {stop} of 12, with a checkpoint"):
        train(config)


@pytest.mark.parametrize(("sharding", "logs", "stop"), [("ddp", 0, 10), ("fsdp", 4, 8)])
def test_two_processes_stop_together(tiny_run: RunConfig, sharding: str, logs: int, stop: int) -> None:
    config = tiny_run.replace(sharding=sharding, steps=12, log_every=logs, val_every=0, checkpoint_every=0)
    on_ranks(2, lambda: told(config, stop))
    newest = checkpoint.latest(config.folder / "checkpoints")
    assert newest is not None and newest.name == f"step_{stop:06d}"
    on_ranks(2, lambda: train(config))
    on_ranks(2, lambda: train(config.replace(name="whole")))
    assert losses(config) == losses(config.replace(name="whole"))
    assert not newest.parent.exists()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_resume_with_the_same_losses(tiny_run: RunConfig, sharding: str) -> None:
    config = tiny_run.replace(sharding=sharding, optimizer="cosmos", log_every=3)  # saves between log lines

    def cut() -> None:
        def fall(record: Any) -> None:
            if record["step"] > 5:
                os._exit(0)  # as good as a kill: no clean-up runs

        try:
            train(config, progress=fall)
        except RuntimeError:  # the other process is gone
            os._exit(0)

    on_ranks(2, cut)
    newest = checkpoint.latest(config.folder / "checkpoints")
    assert newest is not None and newest.name == "step_000004"
    on_ranks(2, lambda: train(config))
    on_ranks(2, lambda: train(config.replace(name="whole")))
    assert losses(config) == losses(config.replace(name="whole"))


def test_three_ddp_processes_resume_bit_for_bit(tiny_run: RunConfig) -> None:
    """DDP changes the order of its sums after its first step, which three summands show."""
    config = tiny_run.replace(sharding="ddp", batch=12, micro_batch=1, checkpoint_every=1, keep=12, steps=12)
    on_ranks(3, lambda: train(config))
    again = config.replace(name="again")
    shutil.copytree(config.folder / "checkpoints" / "step_000001", again.folder / "checkpoints" / "step_000001")
    on_ranks(3, lambda: train(again))
    assert losses(again) == losses(config)[1:]


def test_the_error_for_fsdp_in_a_single_process_says_how_to_start_it(tiny_run: RunConfig) -> None:
    with pytest.raises(ValueError, match="--sharding fsdp needs torchrun"):
        train(tiny_run.replace(sharding="fsdp"))


def test_a_sharded_checkpoint_is_not_taken_for_a_whole_one(tiny_run: RunConfig) -> None:
    train(tiny_run)
    Path(tiny_run.folder / "summary.json").unlink()
    with pytest.raises(AssertionError, match="written without --sharding fsdp"):
        on_ranks(1, lambda: train(tiny_run.replace(sharding="fsdp")))


@pytest.mark.parametrize("change", [{}, {"weights": "bf16"}, {"model": "gpt2-small"}])
def test_a_sharded_checkpoint_can_be_evaluated_in_one_process(tiny_run: RunConfig, change: dict) -> None:
    config = tiny_run.replace(sharding="fsdp", micro_batch=2, steps=4, **change)
    on_ranks(2, lambda: train(config))
    logged = [record["val_loss"] for record in read_metrics(config.folder) if "val_loss" in record]
    assert evaluate(config.folder, device="cpu")["val_loss"] == pytest.approx(logged[-1], rel=DISTRIBUTED_TOLERANCE)
