"""Keys of other code in a group are kept, as torch keeps them; a slip in one of our names is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cosmos_optim import OPTIMIZERS, Adam, Cosmos, Muon
from cosmos_optim.engine.batching import settings_key
from cosmos_optim.hyperparameters import SETTING_NAMES, near_miss
from tests.optim.helpers import decoder, matrix, small_rank, train

# Keys that schedulers, wrappers, trainers and other optimizers write into groups.
OF_OTHERS = (
    "lr_scale", "lr_mult", "lr_mul", "lr_multiplier", "lr_factor", "lr_decay", "lr_max", "layer_id", "layer_decay",
    "layer_scale", "weight_decay_mult", "weight_decay_multiplier", "wd_mult", "wd_mul", "wd_multiplier", "wd_scale",
    "apply_wd", "no_decay", "start_wd", "end_wd", "base_wd", "initial_weight_decay", "decoupled_weight_decay",
    "corrected_weight_decay", "pre_wd_mult", "pre_lr_mult", "is_decoupled_lr", "is_expert_parallel", "is_expert",
    "is_moe", "moe", "default_config", "min_lr", "max_lr", "base_lr", "init_lr", "initial_lr", "swa_lr", "target_lr",
    "scheduled_lr", "weight_sum", "weight_lr_power", "warmup_steps", "train_mode", "k", "r", "rho", "adaptive",
    "momentum_decay", "base_momentum", "max_momentum", "slow_momentum", "dampening", "centered", "lookahead_alpha",
    "lookahead_k", "lookahead_step", "is_last_layer", "apply_lars_exclude", "trust_coefficient", "trust_ratio_clip",
    "caution", "relative_step", "scale_parameter", "warmup_init", "clip_threshold", "decay_rate", "max_grad_norm", "d",
    "d0", "d_coef", "growth_rate", "d_numerator", "beta1", "beta3", "alpha", "alphas", "lambd", "t0", "adamw_betas",
    "adamw_eps", "adamw_lr", "use_muon", "ns_impl", "algorithm", "flatten", "mu", "update_proj_gap", "proj_type",
    "width_mult", "mup_scale", "fused", "foreach", "capturable", "differentiable", "amsgrad", "name", "names",
    "group_name", "label", "tag", "type", "role", "stage", "size", "index", "id", "step", "num_steps", "max_steps",
    "dtype", "shape", "no_weight_decay", "eps1", "eps2", "ep", "tp", "pp", "bucket_size", "param_group_id",
)  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keys_of_other_code_are_kept_trained_with_and_saved(name: str) -> None:
    model = decoder()
    made = OPTIMIZERS[name]
    values: list[Any] = [0.5, None, True, "text", [1, 2], {"a": 1}]
    foreign = {key: values[i % len(values)] for i, key in enumerate(OF_OTHERS)}
    rule = {"rule": "adam"} if name == "adam" else {}
    hidden, rest = [model.up.weight, model.down.weight], [model.up.bias]
    groups = [{"params": hidden, **rule, **foreign}, {"params": rest, "rule": "adam"}]
    opt = made(groups, **small_rank(name))
    train(model, opt, range(2))
    assert {key: opt.param_groups[0][key] for key in OF_OTHERS} == foreign
    opt.param_groups[0]["layer_id"] = 7
    again = made(groups, **small_rank(name))
    again.load_state_dict(opt.state_dict())
    assert {key: again.param_groups[0][key] for key in OF_OTHERS} == foreign | {"layer_id": 7}
    assert len(OF_OTHERS) > 100


def test_no_key_of_other_code_looks_like_one_of_ours() -> None:
    assert {key: near_miss(key) for key in OF_OTHERS if near_miss(key) or key in SETTING_NAMES} == {}


@pytest.mark.parametrize(
    ("slip", "meant"),
    [("weight_decy", "weight_decay"), ("weightdecay", "weight_decay"), ("wieght_decay", "weight_decay"),
     ("gama", "gamma"), ("gemma", "gamma"), ("rnak", "rank"), ("ranks", "rank"), ("beta", "betas"), ("bteas", "betas"),
     ("nestrov", "nesterov"), ("ns_step", "ns_steps"), ("split_size", "split_sizes"), ("maximise", "maximize"),
     ("row_beta", "row_beta2"), ("layot", "layout"), ("learning_rate", "lr"), ("lerning_rate", "lr"),
     ("wd", "weight_decay"), ("momentm", "momentum")],
)  # fmt: skip
def test_a_slip_in_one_of_our_names_is_an_error_with_the_right_name(slip: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"no hyper-parameter '{slip}' .did you mean '{meant}'"):
        Cosmos([{"params": [matrix((6, 4))], slip: 0.1}])
    opt = Cosmos([matrix((6, 4))])
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        opt.add_param_group({"params": [matrix((6, 4), 1)], slip: 0.1})


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [(Cosmos, "momentum", 0.9), (Cosmos, "scaling", "paper"), (Cosmos, "frequency", 10), (Muon, "rank", 4),
     (Muon, "gamma", 0.5), (Muon, "two_sided", True), (Adam, "nesterov", True), (Cosmos, "adam_lr", 1e-3),
     (Muon, "cuda_graphs", False), (Muon, "offload", "cpu"), (Cosmos, "head_dim", 64), (Muon, "beta2", 0.9)],
)  # fmt: skip
def test_a_setting_of_another_rule_stays_an_error(make: Any, key: str, value: object) -> None:
    """It would have no effect, and its author expects one."""
    with pytest.raises(ValueError, match=f"has no hyper-parameter '{key}'; it has"):
        make([{"params": [matrix((6, 4))], key: value}])


def test_betas_and_eps_may_be_in_every_group_and_are_checked_there() -> None:
    """torch's optimizers have them in every group, so frameworks write them into every group."""
    group = Muon([{"params": [matrix((6, 4))], "betas": (0.8, 0.9), "eps": 1e-6}]).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
    with pytest.raises(ValueError, match=r"betas\[0\]=1.0"):
        Muon([{"params": [matrix((6, 4))], "betas": (1.0, 0.9)}])


def test_keys_of_other_code_that_change_need_no_new_kernels() -> None:
    opt = Cosmos([{"params": [matrix((6, 4))], "weight_sum": 0.0}])
    group = opt.param_groups[0]
    before = settings_key(group)
    group |= {"weight_sum": 1.0, "lr": 0.1, "scheduled_lr": torch.ones(()), "weight_decay": 0.1}
    assert settings_key(group) == before
    assert settings_key(group | {"gamma": 0.7}) != before
