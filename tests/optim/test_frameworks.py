"""What schedulers, trainers, checkpoint tools and model surgery do to an optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import OPTIMIZERS, Adam, Cosmos, Muon, NorMuon
from tests.optim.helpers import decoder, matrix, same, small_rank, snapshot, train


def build(name: str, params: object, **kwargs: object) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](params, **kwargs, **small_rank(name, 3))


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "muon" not in n])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_schedulers_can_cycle_beta1(name: str, scheduler: str) -> None:
    model = decoder()
    opt = build(name, model, lr=1e-3, adam_lr=1e-3)
    arguments = {"OneCycleLR": {"max_lr": 1e-2, "total_steps": 6}, "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-3}}
    schedule = getattr(torch.optim.lr_scheduler, scheduler)(opt, **arguments[scheduler])
    gamma = opt.param_groups[0].get("gamma")
    first = opt.param_groups[0]["betas"][0]
    for step in range(4):
        train(model, opt, range(step, step + 1))
        schedule.step()
    assert opt.param_groups[0]["betas"][0] != first
    assert opt.param_groups[0].get("gamma") == gamma
    again = build(name, decoder())
    again.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("reset", ["clear", "replace", "entry"])
def test_state_reset_by_hand_starts_over(reset: str) -> None:
    model, other = decoder(), decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(3))
    model.load_state_dict(other.state_dict())
    if reset == "clear":
        opt.state.clear()
    elif reset == "replace":
        opt.state = defaultdict(dict)
    else:
        for p in model.parameters():
            opt.state[p] = {}
    fresh = Cosmos(other, rank=4)
    opt.load_state_dict(opt.state_dict())  # has no state, or {}
    train(model, opt, range(3))
    train(other, fresh, range(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_parameters_replaced_in_the_groups_are_trained() -> None:
    """accelerate does this when FSDP2 replaces a model's parameters after the optimizer is built."""
    model, new = decoder(), decoder()
    opt, clean = Cosmos(model, rank=4), Cosmos(decoder(), rank=4)
    swap = dict(zip(model.parameters(), new.parameters(), strict=True))
    for group in opt.param_groups:
        group["params"] = [swap[p] for p in group["params"]]
    assert len(opt.state_dict()["state"]) == len(swap)
    assert set(opt.state) == set(new.parameters())
    opt.load_state_dict(clean.state_dict())
    train(new, opt, range(2))
    assert {float(s["step"]) for s in opt.state.values()} == {2.0}


def test_state_that_other_code_writes_continues_bit_for_bit() -> None:
    """Without `load_state_dict`: its bases must not be taken again from the next gradient."""
    models = [decoder(), decoder()]
    old, new = (Cosmos(model, rank=4) for model in models)
    train(models[0], old, range(3))
    models[1].load_state_dict(models[0].state_dict())
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        new.state[q] = {name: value.clone() for name, value in old.state[p].items()}
    for model, opt in zip(models, (old, new), strict=True):
        train(model, opt, range(3, 5))
    assert same(snapshot(models[0], old), snapshot(models[1], new))


def test_a_checkpoint_without_state_resets_the_state() -> None:
    """torch's optimizers write no state before their first step."""
    model = decoder()
    adam = torch.optim.AdamW(decoder().parameters(), lr=1e-3)
    opt = Adam(model.parameters())
    train(model, opt, range(2))
    opt.load_state_dict(adam.state_dict())
    assert {float(s["step"]) for s in opt.state.values()} == {0.0}


def test_a_checkpoint_of_step_0_lets_a_trained_optimizer_start_over() -> None:
    """Its bases are zero, so the next gradient must give them, as in a new optimizer."""
    models = [decoder(), decoder()]
    old, new = (Cosmos(model, rank=4) for model in models)
    train(models[0], old, range(3))
    models[0].load_state_dict(models[1].state_dict())
    old.load_state_dict(new.state_dict())
    for model, opt in zip(models, (old, new), strict=True):
        train(model, opt, range(3))
    assert same(snapshot(models[0], old), snapshot(models[1], new))


def test_a_hook_that_changes_the_checkpoint_does_not_change_the_callers() -> None:
    p = matrix((6, 4))
    opt = Cosmos([p], rank=2)
    opt.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict.pop("of_a_wrapper"))
    saved = opt.state_dict() | {"of_a_wrapper": None}
    opt.load_state_dict(saved)
    assert "of_a_wrapper" in saved


def test_an_adamw_checkpoint_continues() -> None:
    model, other = decoder(), decoder()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    train(model, theirs, range(3))
    ours = Adam(other.parameters())
    other.load_state_dict(model.state_dict())
    ours.load_state_dict(theirs.state_dict())
    train(model, theirs, range(3, 6))
    train(other, ours, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_shares_no_lr_tensor_with_its_source() -> None:
    a, b = Cosmos([matrix((6, 4))], lr=torch.tensor(1e-3)), Cosmos([matrix((6, 4))])
    b.load_state_dict(a.state_dict())
    a.param_groups[0]["lr"].mul_(10)
    assert float(b.param_groups[0]["lr"]) == pytest.approx(1e-3)


def test_the_error_for_a_checkpoint_of_another_structure_names_the_option() -> None:
    p = matrix((6, 8))
    with pytest.raises(ValueError, match=r"split_sizes=\(3, 3\).*build the optimizer with"):
        Muon([p]).load_state_dict(Muon([p], split_sizes=(3, 3)).state_dict())
    with pytest.raises(ValueError, match="side='input'.*build the optimizer with"):
        Cosmos([p]).load_state_dict(Cosmos([p], side="input").state_dict())


def test_a_checkpoint_of_another_side_loads_if_it_means_the_same() -> None:
    """Older versions saved "input", and their default is now "auto", which differs only for few rows."""
    cases = (Cosmos, (40, 48), "input"), (Cosmos, (6, 8), "smaller"), (Muon, (6, 8), "input")
    for make, shape, saved in cases:
        p = matrix(shape)
        old, new = make([{"params": [p], "side": saved}]), make([p])
        p.grad = torch.randn(shape)
        old.step()
        new.load_state_dict(old.state_dict())
        assert all(torch.equal(old.state[p][name], new.state[p][name]) for name in old.state[p])


@pytest.mark.parametrize("make", [Muon, NorMuon])
def test_the_side_of_a_checkpoint_does_not_change_a_rule_without_a_tracked_side(make: Any) -> None:
    """Older versions accepted "smaller" for every rule, and transposed the matrix."""
    p = matrix((6, 8))
    opt, plain = make([p]), make([q := nn.Parameter(p.detach().clone())])
    saved = opt.state_dict()
    saved["param_groups"][0]["side"] = "smaller"
    opt.load_state_dict(saved)
    p.grad = q.grad = torch.randn(6, 8)
    opt.step()
    plain.step()
    assert torch.equal(p, q)


def test_a_model_on_the_meta_device_is_refused_when_it_would_not_train() -> None:
    """to_empty gives the model other tensors: without the error, training would silently change nothing."""
    with torch.device("meta"):
        model = decoder()
    opt = Cosmos(model, rank=4)
    saved = Cosmos(decoder(), rank=4).state_dict()
    with pytest.raises(ValueError, match=r"is on the meta device.*to_empty"):
        opt.load_state_dict(saved)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="is on the meta device.*build the optimizer after"):
        train(model, opt, range(1))


def test_a_parameter_that_changed_its_shape_is_an_error() -> None:
    p = matrix((16, 8))
    opt = Cosmos([("w", p)])
    p.data = torch.zeros(12, 8)
    p.grad = torch.ones(12, 8)
    with pytest.raises(ValueError, match=r"'w' had shape \(16, 8\) when it was added and has \(12, 8\)"):
        opt.step()


def test_a_first_rate_of_zero_is_refused_unless_gamma_is_given() -> None:
    with pytest.raises(ValueError, match="lr=0.0.*give gamma, or the peak lr"):
        Cosmos([matrix((6, 4))], lr=0.0)
    assert Cosmos([matrix((6, 4))], lr=0.0, gamma=0.25).param_groups[0]["gamma"] == 0.25


def test_labels_of_groups_are_kept_and_a_group_without_params_is_refused() -> None:
    opt = Cosmos([{"params": [matrix((6, 4))], "name": "trunk", "lr_scale": 0.5}])
    assert opt.param_groups[0]["name"] == "trunk"
    with pytest.raises(ValueError, match="has no 'params'"):
        Cosmos([{"lr": 1e-3}])


@pytest.mark.parametrize("lr", [torch.tensor([1e-2]), torch.tensor(1e-2, dtype=torch.float64), 1, 1e-30])
def test_a_rate_trains_alike_as_a_tensor_an_int_or_a_float(lr: float | torch.Tensor) -> None:
    model, other = decoder(), decoder()
    a = Cosmos(model, lr=lr, adam_lr=lr, rank=4, weight_decay=0.1)
    b = Cosmos(other, lr=float(lr), adam_lr=float(lr), rank=4, weight_decay=0.1)
    train(model, a, range(2))
    train(other, b, range(2))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.dtype is torch.float32
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_hooks_run_and_copies_of_copies_continue_bit_for_bit() -> None:
    model = decoder()
    opt = Cosmos(model, lr=2e-3, adam_lr=2e-3, rank=4)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(opt, swa_lr=1e-3, anneal_epochs=2)
    train(model, opt, range(2))
    average.update_parameters(model)
    schedule.step()
    assert calls == ["before", "after"] * 2
    other, again = copy.deepcopy(copy.deepcopy((model, opt)))
    again.add_param_group({"params": [("extra", matrix((5, 4)))], "rank": 2})
    again.load_state_dict(again.state_dict())
    train(model, opt, range(2, 4))
    train(other, again, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
