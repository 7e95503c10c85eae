"""torch.distributed.checkpoint: save on some ranks, continue on another number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.sharding.cases import STEPS, Case, distance, fsdp, full_weights, take_steps
from tests.sharding.checkpoints import load, run_part
from tests.sharding.ranks import run_ranks

CLOSE_64 = 1e-9
CASE = Case()


def continue_run(rank: int, source: Path | None, which: range, target: Path | None) -> dict[str, torch.Tensor]:
    """Continue a run from one folder to another."""
    model, opt = CASE.build(fsdp if dist.is_initialized() else None)
    run_part(model, opt, CASE.dtype, source, which, target)
    return full_weights(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_changes_its_number_of_ranks_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """2 ranks -> 4 -> 1 -> no process group -> 2."""
    expected = CASE.on_one_process()
    run_ranks(2, continue_run, None, range(2), tmp_path / "a")
    run_ranks(4, continue_run, tmp_path / "a", range(2, 4), tmp_path / "b")
    run_ranks(1, continue_run, tmp_path / "b", range(4, 6), tmp_path / "c")
    continue_run(0, tmp_path / "c", range(6, 8), tmp_path / "d")
    weights = run_ranks(2, continue_run, tmp_path / "d", range(8, STEPS), None)[0]
    assert distance(weights, expected)[0] < CLOSE_64, distance(weights, expected)


def save_while_training(rank: int, folder: Path) -> float:
    """Save in another thread while steps are taken, take these steps again from the checkpoint; return the distance."""
    model, opt = CASE.build(fsdp)
    take_steps(model, opt, CASE.dtype, range(2))
    weights, state = get_state_dict(model, opt)
    group = dist.new_group(backend="gloo")
    save = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=group)
    take_steps(model, opt, CASE.dtype, range(2, 5))
    save.result()
    other, again = CASE.build(fsdp)
    load(other, again, folder)
    take_steps(other, again, CASE.dtype, range(2, 5))
    return distance(full_weights(other), full_weights(model))[0]


def test_a_checkpoint_saved_while_training_continues_is_that_of_its_step(tmp_path: Path) -> None:
    assert run_ranks(2, save_while_training, tmp_path) == [0.0, 0.0]
