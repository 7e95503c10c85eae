"""torchtitan's containers of optimizers and schedulers, with FSDP2 and its flat, named checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.helpers import CUT, STEPS, llama_loss, tiny_llama
from tests.integrations.ranks import WORLD, run_launched

pytest.importorskip("torchtitan")
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from cosmos_optim.integrations.torchtitan import CosmosContainer, cosmos


def built(model: Any) -> tuple[Any, Any]:
    """Return the two containers as torchtitan's trainer builds them from its configuration."""
    optimizers = cosmos(lr=2e-3, adam_lr=8e-3, rank=8).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=STEPS)
    return optimizers, schedule


def run(model: Any, optimizers: Any, schedule: Any, steps: range, rank: int = 0) -> list[float]:
    losses = []
    for step in steps:
        optimizers.zero_grad()
        loss = llama_loss(model, WORLD * step + rank)
        loss.backward()
        optimizers.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def sharded_rank(rank: int, folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    def sharded(seed: int) -> Any:
        model = tiny_llama(seed)
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    model = sharded(0)
    optimizers, schedule = built(model)
    run(model, optimizers, schedule, range(CUT), rank)
    state = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "schedule": schedule.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    after = run(model, optimizers, schedule, range(CUT, STEPS), rank)

    other = sharded(1)
    again, resumed = built(other)
    state = {"model": other.state_dict(), "optimizer": again.state_dict(), "schedule": resumed.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["schedule"])
    return after, run(other, again, resumed, range(CUT, STEPS), rank)


def test_a_sharded_run_continues_exactly_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    for after, resumed in run_launched(sharded_rank, tmp_path):
        assert after == resumed


def test_checkpoint_names_do_not_depend_on_activation_checkpointing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = tiny_llama(), tiny_llama()
    for i, layer in enumerate(wrapped.model.layers):
        wrapped.model.layers[i] = checkpoint_wrapper(layer)
    states = [cosmos(lr=1e-3).build(model_parts=[model]).state_dict() for model in (plain, wrapped)]
    assert set(states[0]) == set(states[1])


def test_every_part_of_a_pipeline_gets_its_own_optimizer_and_only_its_overrides() -> None:
    parts = [tiny_llama(), torch.nn.Linear(8, 8)]
    container = cosmos(lr=1e-3, overrides={"*.q_proj.weight": "adam"}).build(model_parts=parts)
    assert len(container) == 2
    adam = {name for g in container.optimizers[0].param_groups if g["rule"] == "adam" for name in g["param_names"]}
    assert "model.layers.0.self_attn.q_proj.weight" in adam


def test_a_pattern_that_earlier_ones_cover_in_one_part_of_a_pipeline_is_used_in_the_others() -> None:
    parts = [torch.nn.ModuleDict({name: torch.nn.Linear(8, 8)}) for name in ("a", "b")]
    container = cosmos(lr=1e-3, overrides={"a.weight": {"lr": 0.1}, "*.weight": {"lr": 0.2}}).build(model_parts=parts)
    rates = {name: g["lr"] for opt in container.optimizers for g in opt.param_groups for name in g["param_names"]}
    assert (rates["a.weight"], rates["b.weight"]) == (0.1, 0.2)


def test_a_container_takes_the_arguments_of_param_groups() -> None:
    container = cosmos(lr=1e-3, weight_decay=0.1, decay="all").build(model_parts=[tiny_llama()])
    assert {group["weight_decay"] for group in container.optimizers[0].param_groups} == {0.1}


def test_the_debug_model_of_torchtitan_is_routed() -> None:
    from torchtitan.models.llama3 import llama3_configs

    with torch.device("meta"):
        model = llama3_configs["debugmodel"]("flex").build()
    container = cosmos(lr=1e-3).build(model_parts=[model])
    rules = {name: g["rule"] for g in container.optimizers[0].param_groups for name in g["param_names"]}
    assert rules["tok_embeddings.weight"] == rules["lm_head.weight"] == rules["norm.weight"] == "adam"
    assert rules["layers.0.feed_forward.w1.weight"] == rules["layers.5.attention.wo.weight"] == "cosmos"


def test_patterns_of_torchtitan_are_refused_with_what_to_give() -> None:
    everything = ParamGroupConfig(pattern=".*", optimizer_name="AdamW")
    with pytest.raises(ValueError, match="give overrides"):
        CosmosContainer.Config(param_groups=[everything]).build(model_parts=[tiny_llama()])
    assert issubclass(CosmosContainer, OptimizersContainer)
