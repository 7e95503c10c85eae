"""Optimizers in other people's hands: schedulers, trainers and model surgery; modules that are not quite nn.Linear."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from cosmos_optim import OPTIMIZERS, Adam, AdamMini, Cosmos, Muon, param_groups, plan
from cosmos_optim.routing.param_groups import routes
from tests.optim.helpers import decoder, gradient, matrix, small_rank, train


def build(name: str, params: object, **kwargs: object) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](params, **kwargs, **small_rank(name, 3))


def rules(model: nn.Module, **kwargs: object) -> dict[str, tuple[str, dict[str, object]]]:
    return {parameter.name: (route.rule, dict(route.settings)) for parameter, route in routes(model, **kwargs)}


# -- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "muon" not in n])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_beta1(name: str, scheduler: str) -> None:
    model = decoder()
    opt = build(name, model)
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
    train(model, opt, range(3))
    train(other, fresh, range(3))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_parameters_replaced_in_the_groups() -> None:
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


def test_a_checkpoint_without_state_resets() -> None:
    """torch's optimizers write no state before their first step."""
    model = decoder()
    adam = torch.optim.AdamW(decoder().parameters(), lr=1e-3)
    opt = Adam(model.parameters())
    train(model, opt, range(2))
    opt.load_state_dict(adam.state_dict())
    assert {float(s["step"]) for s in opt.state.values()} == {0.0}


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


def test_a_checkpoint_of_another_structure_says_which_option() -> None:
    p = matrix((6, 8))
    with pytest.raises(ValueError, match=r"split_sizes=\(3, 3\).*build the optimizer with"):
        Muon([p]).load_state_dict(Muon([p], split_sizes=(3, 3)).state_dict())
    with pytest.raises(ValueError, match="side='smaller'.*build the optimizer with"):
        Cosmos([p]).load_state_dict(Cosmos([p], side="smaller").state_dict())


def test_a_model_on_the_meta_device() -> None:
    """to_empty gives the model other tensors: without the error nothing would be trained, in silence."""
    with torch.device("meta"):
        model = decoder()
    opt = Cosmos(model, rank=4)
    saved = Cosmos(decoder(), rank=4).state_dict()
    with pytest.raises(ValueError, match=r"is on the meta device.*to_empty"):
        opt.load_state_dict(saved)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="is on the meta device.*build the optimizer after"):
        train(model, opt, range(1))


def test_a_parameter_of_another_shape_says_so() -> None:
    p = matrix((16, 8))
    opt = Cosmos([("w", p)])
    p.data = torch.zeros(12, 8)
    p.grad = torch.ones(12, 8)
    with pytest.raises(ValueError, match=r"'w' had shape \(16, 8\) when it was added and has \(12, 8\)"):
        opt.step()


def test_a_first_rate_of_zero_would_silence_the_muon_half() -> None:
    with pytest.raises(ValueError, match="lr=0.0.*give gamma, or the peak lr"):
        Cosmos([matrix((6, 4))], lr=0.0)
    assert Cosmos([matrix((6, 4))], lr=0.0, gamma=0.25).param_groups[0]["gamma"] == 0.25


def test_labels_of_groups_are_kept_and_a_group_without_params_says_so() -> None:
    opt = Cosmos([{"params": [matrix((6, 4))], "name": "trunk", "lr_scale": 0.5}])
    assert opt.param_groups[0]["name"] == "trunk"
    with pytest.raises(ValueError, match="has no 'params'"):
        Cosmos([{"lr": 1e-3}])


@pytest.mark.parametrize("lr", [torch.tensor([1e-2]), torch.tensor(1e-2, dtype=torch.float64), 1, 1e-30])
def test_rates_of_any_kind(lr: float | torch.Tensor) -> None:
    model, other = decoder(), decoder()
    a = Cosmos(model, lr=lr, adam_lr=lr, rank=4, weight_decay=0.1)
    b = Cosmos(other, lr=float(lr), adam_lr=float(lr), rank=4, weight_decay=0.1)
    train(model, a, range(2))
    train(other, b, range(2))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.dtype is torch.float32
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_hooks_averages_and_copies_of_copies() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
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


# -- the model -------------------------------------------------------------------------------------------------------


def test_parametrized_weights_go_where_their_module_says() -> None:
    model = nn.ModuleDict(
        {
            "normed": parametrizations.weight_norm(nn.Linear(4, 8)),
            "conv": parametrizations.weight_norm(nn.Conv1d(4, 8, 1)),
            "spectral": parametrizations.spectral_norm(nn.Linear(4, 8)),
            "table": parametrizations.weight_norm(nn.Embedding(10, 4)),
        }
    )
    found = rules(model)
    assert found["normed.parametrizations.weight.original0"] == ("adam", {})
    assert found["normed.parametrizations.weight.original1"] == ("cosmos", {})
    assert found["conv.parametrizations.weight.original0"] == ("adam", {})
    assert found["conv.parametrizations.weight.original1"] == ("cosmos", {"layout": "conv"})
    assert found["spectral.parametrizations.weight.original"] == ("cosmos", {})
    assert found["table.parametrizations.weight.original1"] == ("adam", {})
    Cosmos(model, rank=2)


def test_recurrent_projections_are_one_block() -> None:
    found = rules(nn.ModuleDict({"lstm": nn.LSTM(4, 5, proj_size=3)}))
    assert found["lstm.weight_hr_l0"] == ("cosmos", {})
    assert found["lstm.weight_hh_l0"] == ("cosmos", {"split_sizes": (5, 5, 5, 5)})


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))


class Experts(nn.Module):
    """As transformers keeps GPT-OSS's: (expert, in, out), with biases."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0)))
        self.up_bias = nn.Parameter(torch.zeros(3, 12))


def test_mixtures_of_experts() -> None:
    """The update of (expert, in, out) stacks is the transpose of the update of (expert, out, in) ones."""
    model = nn.ModuleDict({"router": TopKRouter(), "experts": Experts()})
    assert rules(model) == {
        "router.weight": ("cosmos", {}),
        "experts.up": ("cosmos", {"layout": "in_out"}),
        "experts.up_bias": ("adam", {}),
    }
    stored, plain = model["experts"].up, nn.Parameter(model["experts"].up.detach().mT.contiguous())
    a, b = Cosmos(model, lr=0.1, rank=3), Cosmos([plain], lr=0.1, rank=3)
    assert a.state[stored]["U"].shape == (3, 8, 3)
    for step in range(3):
        plain.grad = gradient((3, 12, 8), step)
        stored.grad = plain.grad.mT.clone()
        a.step()
        b.step()
    torch.testing.assert_close(stored.mT, plain, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="a stack of matrices: leave split_sizes out"):
        Cosmos([{"params": [plain], "split_sizes": (6, 6)}])


def test_a_head_of_several_layers_and_a_tied_name() -> None:
    model = decoder()
    model.classify = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    assert rules(model, head="classify")["classify.0.weight"][0] == "adam"
    assert rules(model)["classify.0.weight"][0] == "cosmos"
    model.lm_head.weight = model.embed.weight
    groups = param_groups(model, overrides={"lm_head.weight": {"rule": "adam", "lr": 0.3}})
    assert [name for name, _ in groups[0]["params"]] == ["embed.weight"]
    assert groups[0]["lr"] == 0.3


def test_adam_mini_has_a_number_for_each_output() -> None:
    """Output rows of every convolution and of (in, out) weights, whatever their storage."""
    model = nn.ModuleDict(
        {"conv": nn.Conv2d(3, 8, 3), "depthwise": nn.Conv2d(4, 4, 3, groups=4), "query": nn.Linear(6, 8)}
    )
    opt = AdamMini(model, head_dim=4)
    shapes = {name: tuple(opt.state[p]["v"].shape) for name, p in model.named_parameters() if p.dim() > 1}
    assert shapes == {"conv.weight": (8, 1), "depthwise.weight": (4, 1), "query.weight": (2, 1)}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_of_a_model_is_the_plan_of_its_optimizer(name: str) -> None:
    model = decoder()
    model.query, model.conv = nn.Linear(8, 128), nn.Conv2d(2, 2, 3, groups=2)
    a, b = plan(model, name).rows, plan(OPTIMIZERS[name](model)).rows
    assert {(row.name, row.rule, row.state_bytes) for row in a} == {(row.name, row.rule, row.state_bytes) for row in b}


def test_the_plan_of_two_sided_rules() -> None:
    assert {row.rule for row in plan(decoder(), "soap", two_sided=True).rows} == {"soap-two-sided", "adam"}
    assert {row.rule for row in plan(decoder(), two_sided=True).rows} == {"cosmos-two-sided", "adam"}
