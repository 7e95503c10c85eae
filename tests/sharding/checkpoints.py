"""Save and load by torch.distributed.checkpoint, with and without a process group."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.sharding.cases import take_steps


def save(model: Any, opt: Any, folder: Path) -> None:
    """Write a checkpoint."""
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(model: Any, opt: Any, folder: Path) -> None:
    """Read a checkpoint."""
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)


def run_part(
    model: Any, opt: Any, dtype: torch.dtype, source: Path | None, which: range, target: Path | None
) -> None:  # fmt: skip
    """Load, take some steps, save. Weights are zero before they are loaded."""
    if source is not None:
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        load(model, opt, source)
    take_steps(model, opt, dtype, which)
    if target is not None:
        save(model, opt, target)
