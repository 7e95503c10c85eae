"""Megatron-LM: its groups, its scheduler of rates, its registry, and tensor parallelism, which is refused."""

from __future__ import annotations

import copy
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from cosmos_optim import Cosmos
from cosmos_optim.integrations.megatron import REGISTRY_READ, MegatronCosmos, register
from tests.integrations.helpers import CUT, STEPS, tiny_llama, train
from tests.integrations.ranks import run_launched

pytest.importorskip("megatron.core")


def hidden_groups(model: Any) -> list[dict[str, Any]]:
    """Return the hidden matrices in one group with the keys that Megatron's `_get_param_groups` writes."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
            "max_lr": 2e-3, "min_lr": 1e-4, "default_config": True}  # fmt: skip
    return [{"params": matrices, **keys}]


def schedule_of(opt: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        opt, init_lr=0.0, max_lr=2e-3, min_lr=1e-4, lr_warmup_steps=2, lr_decay_steps=STEPS, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=STEPS, wd_incr_style="constant",
    )  # fmt: skip


def test_groups_and_schedule_of_megatron_train_and_continue_exactly() -> None:
    def run(model: Any, opt: Any, schedule: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses += train(model, opt, range(step, step + 1))
            schedule.step(increment=1)
        return losses

    model = tiny_llama()
    opt = MegatronCosmos(hidden_groups(model), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95), rank=8)
    schedule = schedule_of(opt)
    run(model, opt, schedule, range(CUT))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict(), schedule.state_dict()))
    after = run(model, opt, schedule, range(CUT, STEPS))
    other = tiny_llama(seed=1)
    again = MegatronCosmos(hidden_groups(other), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95), rank=8)
    resumed = schedule_of(again)
    for group in again.param_groups:  # Megatron calls this before it loads a checkpoint
        again._init_group(group, skip_non_grad_params=False)
    assert all(again.state[p] for group in again.param_groups for p in group["params"])
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    assert run(other, again, resumed, range(CUT, STEPS)) == after


def tensor_parallel_rank(rank: int) -> str:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    piece = torch.nn.Parameter(torch.zeros(8, 16))
    tensor_parallel.set_tensor_model_parallel_attributes(piece, True, 0, 1)
    try:
        MegatronCosmos([{"params": [piece]}])
    except ValueError as error:
        return str(error)
    return "no error"


def test_pieces_of_tensor_parallelism_are_refused() -> None:
    for message in run_launched(tensor_parallel_rank):
        assert "Megatron-LM's tensor parallelism" in message and "tensor_model_parallel_size=1" in message


def test_the_registry_gets_a_class_with_the_arguments_of_cosmos(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real registry needs Python 3.12, so a module with its interface replaces it."""
    entered: dict[str, type] = {}
    package, registry = ModuleType("emerging_optimizers"), ModuleType("emerging_optimizers.registry")
    registry.register_optimizer = lambda name: lambda cls: entered.setdefault(name, cls)  # type: ignore[attr-defined]
    package.registry = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "emerging_optimizers", package)
    register()
    assert entered == {"cosmos": MegatronCosmos}
    assert list(inspect.signature(MegatronCosmos.__init__).parameters) == list(
        inspect.signature(Cosmos.__init__).parameters
    )
    monkeypatch.setitem(sys.modules, REGISTRY_READ, ModuleType(REGISTRY_READ))
    with pytest.raises(RuntimeError, match="before megatron.core.optimizer is imported"):
        register()
