"""accelerate: one process, DDP and FSDP2 on two, and transformers' Trainer under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_optim import Cosmos
from cosmos_optim.integrations.transformers import CosmosFactory
from tests.integrations.helpers import CUT, STEPS, examples, llama_loss, tiny_llama
from tests.integrations.ranks import WORLD, run_launched

accelerate = pytest.importorskip("accelerate")
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch.optim.lr_scheduler import LinearLR

OTHER_ORDER = 2e-4  # FSDP2 and DDP sum gradients in another order, and six steps amplify the rounding


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    """Let accelerate forget the processes of the test before."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def prepared(accelerator: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return model, optimizer and schedule in accelerate's wrappers."""
    model = tiny_llama(seed)
    opt = Cosmos(model, lr=2e-3, adam_lr=8e-3, rank=8)
    return accelerator.prepare(model, opt, LinearLR(opt, total_iters=STEPS * accelerator.num_processes))


def run(accelerator: Any, parts: tuple[Any, Any, Any], steps: range, rank: int = 0) -> list[float]:
    """Train on different batches on every rank."""
    model, opt, schedule = parts
    losses = []
    for step in steps:
        loss = llama_loss(model, WORLD * step + rank)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def whole_and_resumed(accelerator: Any, folder: Path, rank: int = 0) -> tuple[list[float], list[float]]:
    """Return the losses after the cut, of the unbroken run and of one that loads the saved state."""
    parts = prepared(accelerator)
    run(accelerator, parts, range(CUT), rank)
    accelerator.save_state(str(folder))
    after = run(accelerator, parts, range(CUT, STEPS), rank)
    accelerator.free_memory()
    again = prepared(accelerator, seed=1)
    accelerator.load_state(str(folder))
    return after, run(accelerator, again, range(CUT, STEPS), rank)


def test_a_run_in_one_process_continues_exactly(tmp_path: Path) -> None:
    after, resumed = whole_and_resumed(accelerate.Accelerator(cpu=True), tmp_path)
    assert after == resumed


def ddp_rank(rank: int, folder: Path) -> Any:
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == WORLD
    return whole_and_resumed(accelerator, folder, rank)


def test_a_ddp_run_on_two_processes_continues_exactly(tmp_path: Path) -> None:
    for after, resumed in run_launched(ddp_rank, tmp_path):
        assert after == resumed


def fsdp2_plugin() -> Any:
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
    )  # fmt: skip


def let_cpus_shard() -> None:
    """Let accelerate shard on CPUs, in this process. It asks for a GPU, but nothing that it then does needs one."""

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = set_device


def fsdp2_rank(rank: int, folder: Path) -> Any:
    from torch.distributed.tensor import DTensor

    let_cpus_shard()
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=fsdp2_plugin())
    result = whole_and_resumed(accelerator, folder, rank)
    opt = accelerator._optimizers[0].optimizer
    assert all(isinstance(p, DTensor) for group in opt.param_groups for p in group["params"])
    assert opt.param_groups[0]["rule"] == "cosmos"
    return result


def test_an_fsdp2_run_on_two_processes_continues_exactly_and_equals_ddp(tmp_path: Path) -> None:
    sharded = run_launched(fsdp2_rank, tmp_path / "fsdp2")
    for after, resumed in sharded:
        assert after == resumed
    for (after, _), (same, _) in zip(sharded, run_launched(ddp_rank, tmp_path / "ddp"), strict=True):
        torch.testing.assert_close(torch.tensor(after), torch.tensor(same), rtol=OTHER_ORDER, atol=0.0)


def fsdp1_rank(rank: int) -> str:
    let_cpus_shard()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, use_orig_params=True,
    )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    try:
        run(accelerator, prepared(accelerator), range(1), rank)
    except ValueError as error:
        return str(error)
    return "no error"


def test_flat_pieces_of_fsdp1_are_refused_by_name() -> None:
    for message in run_launched(fsdp1_rank):
        assert "FSDP1" in message and "fully_shard" in message


def trainer_rank(rank: int, folder: Path) -> Any:
    from torch.distributed.tensor import DTensor
    from transformers import Trainer, TrainingArguments

    let_cpus_shard()

    def make(seed: int) -> Any:
        args = TrainingArguments(
            str(folder), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=STEPS, save_steps=CUT,
            logging_steps=1, learning_rate=2e-3, per_device_train_batch_size=4, fsdp=True,
            fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                         "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )  # fmt: skip
        made = (CosmosFactory, {"args": args, "rank": 8})
        return Trainer(tiny_llama(seed), args, train_dataset=examples(), optimizer_cls_and_kwargs=made)

    whole = make(0)
    whole.train()
    again = make(0)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{CUT}"))
    assert isinstance(whole.optimizer.param_groups[0]["params"][0], DTensor)
    return [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (whole, again)]


def test_trainer_under_fsdp2_continues_exactly(tmp_path: Path) -> None:
    for whole, resumed in run_launched(trainer_rank, tmp_path):
        assert whole == resumed
        assert whole[-1] < whole[0]
