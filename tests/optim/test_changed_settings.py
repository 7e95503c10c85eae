"""Settings that the state depends on cannot be changed after the optimizer was built."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import AdamMini, Cosmos, Muon, mark
from tests.optim.helpers import decoder, gradient, matrix, same, snapshot, train


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [(Cosmos, "rank", 3), (Cosmos, "rule", "muon"), (Cosmos, "side", "smaller"), (Cosmos, "split_sizes", (4, 4)),
     (Cosmos, "split_sizes", 4), (Cosmos, "split_side", "input"),
     (Cosmos, "layout", "in_out"), (Cosmos, "row_beta2", None), (Cosmos, "momentum_dtype", torch.bfloat16),
     (AdamMini, "block_rows", 2), (Muon, "normalize", True), (Cosmos, "rule", "no such rule")],
)  # fmt: skip
def test_a_changed_setting_is_an_error_at_the_next_step_and_when_saved(make: Any, key: str, value: object) -> None:
    p, q = matrix((8, 6)), matrix((4,), 1)
    opt = make([{"params": [q], "rule": "adam"}, {"params": [p]}], **({"rank": 2} if make is Cosmos else {}))
    p.grad, q.grad = gradient((8, 6), 0), gradient((4,), 0)
    opt.step()
    before = p.detach().clone()
    was = opt.param_groups[1][key]
    opt.param_groups[1][key] = value
    for act in (opt.step, opt.state_dict, lambda: copy.deepcopy(opt)):
        with pytest.raises(ValueError, match=f"group 1: {key} is .* now, but its state was allocated for {key}="):
            act()
    assert torch.equal(p, before)
    opt.param_groups[1][key] = was
    opt.step()
    assert not torch.equal(p, before)


def test_settings_that_need_no_other_state_may_change() -> None:
    p = matrix((8, 6))
    opt = Cosmos([p], rank=2, split_sizes=[4, 4])
    opt.param_groups[0] |= {"row_beta2": 0.5, "split_sizes": (4, 4), "lr": 0.1, "gamma": 0.3, "nesterov": False}
    p.grad = gradient((8, 6), 0)
    opt.step()
    opt.state_dict()


def test_a_loaded_checkpoint_trains_though_it_changes_settings() -> None:
    """Its row_beta2 and momentum_dtype replace those of the optimizer, with its state."""
    p, q = matrix((8, 6)), matrix((8, 6))
    wrote = Cosmos([p], rank=2, row_beta2=0.5, momentum_dtype=torch.bfloat16, split_sizes=[4, 4])
    opt = Cosmos([q], rank=2, split_sizes=[4, 4])
    for held, optimizer in ((p, wrote), (q, opt)):
        held.grad = gradient((8, 6), 0)
        optimizer.step()
    opt.load_state_dict(wrote.state_dict())
    opt.step()
    copy.deepcopy(opt).step()
    assert opt.state[q]["M"].dtype is torch.bfloat16
    opt.param_groups[0]["momentum_dtype"] = None
    with pytest.raises(ValueError, match="momentum_dtype is None now"):
        opt.step()


@pytest.mark.parametrize(
    ("key", "value"),
    [("betas", (1.0, 0.98)), ("betas", (0.9, float("nan"))), ("betas", (0.9,)), ("gamma", float("nan")),
     ("gamma", None), ("gamma", float("inf")), ("row_beta2", 1.0), ("eps", float("nan")), ("missing", "zeros")],
)  # fmt: skip
def test_a_wrong_value_that_a_loop_writes_is_refused_before_anything_changes(key: str, value: object) -> None:
    """A decay of 1 divides by zero, and the weights would be NaN. A wrong word would have no effect."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(2))
    before, good = snapshot(model, opt), opt.param_groups[0][key]
    opt.param_groups[0][key] = value
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"group 0: {key}.* is not valid.* Nothing was changed by this step"):
            train(model, opt, range(2, 3))
    assert same(before, snapshot(model, opt))
    opt.param_groups[0][key] = good
    train(model, opt, range(2, 3))


def test_a_key_that_the_rule_of_a_group_does_not_read_may_have_any_value() -> None:
    """A scheduler of momentum may write None for groups without one."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    for group in opt.param_groups:
        group["momentum"], group["beta2"] = None, 7
    train(model, opt, range(2))


def test_a_group_added_later_is_watched_too() -> None:
    p, q = matrix((8, 6)), matrix((8, 6), 1)
    opt = Cosmos([p], rank=2)
    opt.add_param_group({"params": [q], "rank": 3})
    q.grad = gradient((8, 6), 0)
    opt.step()
    opt.param_groups[1]["rank"] = 2
    with pytest.raises(ValueError, match="group 1: rank is 2 now, but its state was allocated for rank=3"):
        opt.step()


@pytest.mark.parametrize("changed", [{}, {"rank": 3}, {"rule": "adam"}, {"momentum_dtype": torch.bfloat16}])
def test_a_parameter_moved_to_a_new_group_keeps_its_state_if_that_fits(changed: dict[str, Any]) -> None:
    """Otherwise it starts over; nothing is left of the removed group's settings."""
    p, q = matrix((8, 6)), matrix((8, 6))
    opt = Cosmos([{"params": [matrix((6, 6), 1), p]}], rank=2)
    p.grad = q.grad = gradient((8, 6), 0)
    opt.step()
    assert opt.param_groups[0]["params"].pop() is p
    opt.add_param_group({"params": [p], "rule": "cosmos"} | changed)
    assert float(opt.state[p]["step"]) == (0.0 if changed else 1.0)
    q.data.copy_(p)
    if changed:
        fresh = Cosmos([{"params": [q], "rule": "cosmos"} | changed], rank=2)
        for optimizer in (opt, fresh):
            optimizer.step()
        assert torch.equal(p, q) and opt.state[p].keys() == fresh.state[q].keys()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def test_parameters_removed_without_their_names_are_an_error_at_the_next_step() -> None:
    """Not first at the next checkpoint, which would be lost."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(1))
    group = opt.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not model.up.weight]
    before = snapshot(model, opt)
    for use in (lambda: train(model, opt, range(1, 2)), opt.state_dict):
        with pytest.raises(ValueError, match="group 0 has 1 parameters and 2 names.*remove these from .* param_names"):
            use()
    assert same(before, snapshot(model, opt))
    group["param_names"].remove("up.weight")
    train(model, opt, range(1, 2))
    opt.load_state_dict(opt.state_dict())


def test_a_parameter_that_other_code_replaced_is_not_kept_in_memory() -> None:
    """As accelerate does for FSDP2: the whole parameters would stay beside their shards."""
    opt = Cosmos([nn.Parameter(torch.ones(8, 8))], lr=0.1)
    old = weakref.ref(opt.param_groups[0]["params"][0])
    opt.param_groups[0]["params"] = [nn.Parameter(torch.ones(8, 8))]
    opt.param_groups[0]["params"][0].grad = torch.ones(8, 8)
    opt.step()
    gc.collect()
    assert old() is None


def test_groups_that_were_refused_leave_no_setting_behind() -> None:
    """The rank suits the first group of the two, and the second group is refused because of it."""
    layers = nn.ModuleDict({"hidden": nn.Linear(6, 8, bias=False), "embed": nn.Embedding(9, 4)})
    mark(layers)
    opt = Cosmos(nn.Linear(4, 4, bias=False), rank=2)
    named = list(layers.named_parameters())
    with pytest.raises(ValueError, match="rule 'adam' has no hyper-parameter 'rank'"):
        opt.add_param_group({"params": named, "rank": 3})
    opt.add_param_group({"params": named[:1], "rank": 4})
    layers["hidden"].weight.grad = gradient((8, 6), 0)
    opt.step()
    assert opt.state[layers["hidden"].weight]["U"].shape == (6, 4)
