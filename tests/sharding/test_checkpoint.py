"""torch.distributed.checkpoint: save on some ranks, continue on another number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.sharding.cases import STEPS, Case, distance, fsdp, full_weights, take_steps
from tests.sharding.ranks import run_ranks

CLOSE_64 = 1e-9
CASE = Case()


def save(model: Any, opt: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(model: Any, opt: Any, folder: Path) -> None:
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)


def continue_run(rank: int, source: Path | None, which: range, target: Path | None) -> dict[str, torch.Tensor]:
    """Load, take some steps, save."""
    model, opt = CASE.build(fsdp if dist.is_initialized() else None)
    if source is not None:
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        load(model, opt, source)
    take_steps(model, opt, CASE.dtype, which)
    if target is not None:
        save(model, opt, target)
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
