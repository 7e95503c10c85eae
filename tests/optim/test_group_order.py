"""Hidden matrices come first in the groups, and checkpoints of the older order still continue."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler

from cosmos_optim import OPTIMIZERS, Cosmos, param_groups
from tests.optim.helpers import decoder, train


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adam"])
def test_the_first_group_is_one_of_hidden_matrices(name: str) -> None:
    opt = OPTIMIZERS[name](decoder(), lr=1e-3, adam_lr=3e-3)
    schedule = lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    assert schedule.get_last_lr()[0] == 1e-3
    assert [group["rule"] == "adam" for group in opt.param_groups] == sorted(
        group["rule"] == "adam" for group in opt.param_groups
    )


def in_the_order_of_the_parameters(model: torch.nn.Module) -> list[dict[str, object]]:
    """Return groups as the first checkouts made them: AdamW's first, and all of it decayed."""
    hidden, other = param_groups(model)
    order = [name for name, _ in model.named_parameters()]
    adam = sorted(other["params"], key=lambda item: order.index(item[0]))
    return [{"params": adam, "rule": "adam"}, hidden]


def with_a_decayed_head(model: torch.nn.Module) -> list[dict[str, object]]:
    """Return groups as later checkouts made them: the head in a third one, which has the optimizer's decay."""
    hidden, other = param_groups(model)
    head = [item for item in other["params"] if item[0] == "lm_head.weight"]
    rest = [item for item in other["params"] if item[0] != "lm_head.weight"]
    return [hidden, {**other, "params": rest}, {"params": head, "rule": "adam"}]


def test_a_checkpoint_with_layers_added_late_loads_with_a_warning_that_names_the_cause() -> None:
    model = decoder()
    model.up.requires_grad_(False)
    old = Cosmos(model, rank=4)
    model.up.requires_grad_(True)
    for group in param_groups(model, beside=old):
        old.add_param_group(group)
    train(model, old, range(2))
    other = copy.deepcopy(model)
    new = Cosmos(other, rank=4)
    with pytest.warns(UserWarning, match="as after add_param_group or in an older version"):
        new.load_state_dict(old.state_dict())
    assert train(model, old, range(2, 4)) == train(other, new, range(2, 4))


def test_the_error_for_a_checkpoint_from_before_layers_were_added_says_in_which_order_to_load() -> None:
    """A loop returns to it after a spike, and the optimizer has the added groups already."""
    model = decoder()
    model.up.requires_grad_(False)
    opt = Cosmos(model, rank=4)
    saved = opt.state_dict()
    model.up.requires_grad_(True)
    for group in param_groups(model, beside=opt):
        opt.add_param_group(group)
    with pytest.raises(ValueError, match="has 2 parameter groups, this optimizer has 4.* load first, and then add"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("is_flat", [False, True])
def test_groups_that_torchs_distributed_checkpoints_merge_get_a_warning(is_flat: bool) -> None:
    """A layer added late with its own rate is in a group of hidden matrices when the optimizer is built again."""
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model = decoder()
    model.up.requires_grad_(False)
    old = Cosmos(model, rank=4)
    again = get_optimizer_state_dict(model, old, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_optimizer_state_dict(model, old, again, options=options)
    model.up.requires_grad_(True)
    for group in param_groups(model, beside=old):
        old.add_param_group({**group, "lr": 1e-4})
    saved = get_optimizer_state_dict(model, old, options=options)
    new = Cosmos(model, rank=4)
    with pytest.warns(UserWarning, match="group 0 has settings that were saved for 1 of its 2 parameters"):
        set_optimizer_state_dict(model, new, saved, options=options)


def test_a_group_without_settings_in_torchs_distributed_checkpoints_gets_a_warning() -> None:
    """A new override makes another group, and only one of both gets what was saved, such as the rate of a schedule."""
    model = decoder()
    saved = get_optimizer_state_dict(model, Cosmos(model, rank=4, lr=1e-5, adam_lr=4e-5))
    new = Cosmos(param_groups(model, overrides={"norm*": {"lr": 1e-4}}), rank=4)
    with pytest.warns(UserWarning, match=r"group 1 has no settings .* another group got those of \['embed.weight'\]"):
        set_optimizer_state_dict(model, new, saved)


@pytest.mark.parametrize("groups_of", [in_the_order_of_the_parameters, with_a_decayed_head])
def test_a_checkpoint_of_other_groups_continues_bit_for_bit_with_its_scheduler(
    groups_of: Callable[[torch.nn.Module], list[dict[str, object]]],
) -> None:
    def schedule_of(opt: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))

    model, other = decoder(), decoder(seed=1)
    old = Cosmos(groups_of(model), lr=1e-2, adam_lr=3e-2, rank=4, weight_decay=0.1)
    old_schedule = schedule_of(old)
    for step in range(3):
        train(model, old, range(step, step + 1))
        old_schedule.step()
    new = Cosmos(other, lr=1e-2, adam_lr=3e-2, rank=4, weight_decay=0.1)
    assert [len(g["params"]) for g in old.param_groups] != [len(g["params"]) for g in new.param_groups]
    other.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="other groups of the same parameters"):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    schedule = schedule_of(new)  # it sets the first rates again
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    schedule.load_state_dict(old_schedule.state_dict())
    for step in range(3, 6):
        assert train(model, old, range(step, step + 1)) == train(other, new, range(step, step + 1))
        old_schedule.step()
        schedule.step()
        assert [(g["rule"], g["lr"]) for g in old.param_groups] == [(g["rule"], g["lr"]) for g in new.param_groups]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_groups_that_need_other_state_are_not_merged() -> None:
    model = decoder()
    hidden, *others = param_groups(model)
    apart = [{**hidden, "params": hidden["params"][:1], "rank": 2}, {**hidden, "params": hidden["params"][1:]}, *others]
    new = Cosmos(apart, rank=4)
    before = [list(group["params"]) for group in new.param_groups]
    with pytest.raises(ValueError, match="the checkpoint has 2 parameter groups, this optimizer has 3"):
        new.load_state_dict(Cosmos(param_groups(model), rank=4).state_dict())
    assert [list(group["params"]) for group in new.param_groups] == before


def test_an_error_in_a_checkpoint_of_other_groups_changes_nothing() -> None:
    model = decoder()
    old, new = Cosmos(in_the_order_of_the_parameters(model), rank=4), Cosmos(model, rank=4)
    before = [list(group["params"]) for group in new.param_groups]
    saved = copy.deepcopy(old.state_dict())
    saved["state"][saved["param_groups"][1]["params"][0]]["M"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="state 'M' has shape"):
        new.load_state_dict(saved)
    assert [list(group["params"]) for group in new.param_groups] == before


def layers() -> torch.nn.Sequential:
    """Return three layers of one shape, so that the state of any of them fits the others."""
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(3)))


def test_state_is_not_loaded_into_another_parameter_if_other_layers_are_frozen() -> None:
    model = layers()
    model[2].weight.requires_grad_(False)
    saved = Cosmos(model).state_dict()
    model[2].weight.requires_grad_(True)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="has '1.weight' in the checkpoint where it has '2.weight' here"):
        Cosmos(model).load_state_dict(saved)


def test_state_is_not_loaded_into_another_parameter_if_the_overrides_are_others() -> None:
    model = layers()
    saved = Cosmos(param_groups(model, overrides={"2.weight": "adam"})).state_dict()
    other = Cosmos(param_groups(model, overrides={"1.weight": "adam"}))
    with pytest.raises(ValueError, match="'1.weight' has another place here.*same overrides"):
        other.load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["param_names"]
    other.load_state_dict(saved)  # by position, as the error offers


def test_names_that_a_wrapper_changed_are_loaded_by_position() -> None:
    model, wrapped = layers(), layers()
    saved = Cosmos(model).state_dict()
    wrapped[1] = torch.nn.ModuleDict({"_checkpoint_wrapped_module": wrapped[1]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cosmos(wrapped).load_state_dict(saved)
        Cosmos(torch.nn.ModuleDict({"module": model})).load_state_dict(saved)


def test_a_parameter_with_a_name_that_is_unknown_here_is_loaded_by_position_with_a_warning() -> None:
    model, other = layers(), layers()
    saved = Cosmos(model).state_dict()
    named = torch.nn.ModuleDict({"0": other[0], "1": other[1], "added": other[2]})
    with pytest.warns(UserWarning, match=r"has '2.weight' where this optimizer has 'added.weight'.*only if.*renamed"):
        Cosmos(named).load_state_dict(saved)
