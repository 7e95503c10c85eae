"""DeepSpeed: stage 0 trains and continues exactly; stages 1 to 3 cut matrices into flat pieces and are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")

from cosmos_optim import Cosmos
from tests.integrations.helpers import CUT, STEPS, llama_loss, tiny_llama
from tests.integrations.ranks import run_launched

# gloo carries the messages: without this DeepSpeed would compile its own C++ code for it.
for name in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[name] = False


def engine_of(stage: int, seed: int = 0) -> Any:
    model = tiny_llama(seed)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    opt = Cosmos(model, lr=2e-3, adam_lr=8e-3, rank=8)
    return deepspeed.initialize(model=model, optimizer=opt, config=config, dist_init_required=False)[0]


def run(engine: Any, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        loss = llama_loss(engine, 2 * step + rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stage_0_rank(rank: int, folder: Path) -> Any:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    engine = engine_of(0)
    run(engine, range(CUT), rank)
    engine.save_checkpoint(str(folder), tag="cut")
    after = run(engine, range(CUT, STEPS), rank)
    again = engine_of(0, seed=1)
    again.load_checkpoint(str(folder), tag="cut")
    return after, run(again, range(CUT, STEPS), rank)


def test_stage_0_continues_exactly(tmp_path: Path) -> None:
    for after, resumed in run_launched(stage_0_rank, tmp_path):
        assert after == resumed


def refused_rank(rank: int, stage: int) -> str:
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    try:
        run(engine_of(stage), range(2), rank)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_with_flat_pieces_are_refused_by_name(stage: int) -> None:
    for message in run_launched(refused_rank, stage):
        assert "DeepSpeed" in message and "stage 0" in message and "FSDP2" in message, message
