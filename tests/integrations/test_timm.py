"""timm: the optimizers in its registry, weight decay where timm has it, its schedulers, exact continuation."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.integrations.helpers import STEPS, assert_continues_exactly, train
from tests.integrations.torchvision_stub import import_timm

if importlib.util.find_spec("timm") is None:
    pytest.skip("could not import 'timm'", allow_module_level=True)
timm = import_timm()
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import CosineLRScheduler

from cosmos_optim.integrations.timm import register, timm_groups


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def vit(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=7
    )


def image_loss(model: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return torch.nn.functional.cross_entropy(model(images), torch.arange(4))


def optimizer(model: Any, **changes: Any) -> Any:
    given = {"lr": 1e-3, "weight_decay": 0.05, "param_group_fn": timm_groups, "rank": 8}
    return create_optimizer_v2(model, "cosmos", **(given | changes))


def test_a_run_with_a_scheduler_of_timm_continues_exactly() -> None:
    def run(model: Any, opt: Any, steps: range) -> list[float]:
        schedule = CosineLRScheduler(opt, t_initial=STEPS, warmup_t=2, warmup_lr_init=1e-5)
        losses = []
        for step in steps:
            schedule.step(step)
            losses += train(model, opt, range(step, step + 1), image_loss)
        return losses

    assert_continues_exactly(vit, optimizer, run)


def test_hidden_matrices_are_decayed_except_those_that_the_model_exempts() -> None:
    model = vit()
    exempt = model.no_weight_decay() | {"blocks.1.mlp.fc1.weight", "not in the model"}
    model.no_weight_decay = lambda: exempt
    opt = optimizer(model)
    groups = {name: (g["rule"], g["weight_decay"], g["lr"]) for g in opt.param_groups for name in g["param_names"]}
    assert groups["blocks.0.attn.qkv.weight"] == ("cosmos", 0.05, 1e-3)
    assert groups["blocks.1.mlp.fc1.weight"] == ("cosmos", 0.0, 1e-3)
    for name in ("cls_token", "pos_embed", "norm.weight", "blocks.1.mlp.fc1.bias", "head.weight"):
        assert groups[name] == ("adam", 0.0, 4e-3)
    assert opt.param_groups[0]["rule"] == "cosmos"


def test_names_of_timm_keep_their_own_optimizers() -> None:
    assert {"cosmos", "cosmos-paper", "normuon"} <= set(list_optimizers())
    assert get_optimizer_class("adamw") is torch.optim.AdamW
    assert get_optimizer_class("muon").__module__.startswith("timm")


def test_timm_groups_without_names_are_refused_with_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"timm.*param_group_fn=.*timm_groups"):
        optimizer(vit(), param_group_fn=None)
