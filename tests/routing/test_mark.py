"""`mark` leaves a route on every parameter, and it stays through all that is done to a model before it is trained."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from cosmos_optim import Adam, Cosmos, Muon, mark, param_groups
from tests.optim.helpers import decoder, matrix, train
from tests.sharding.ranks import run_ranks

Rules = dict[str, tuple[str, str]]


def rules(opt: torch.optim.Optimizer) -> Rules:
    """Return the rule and layout of each parameter, by name."""
    return {name: (g["rule"], g["layout"]) for g in opt.param_groups for name in g["param_names"]}


def model_to_mark() -> nn.Module:
    """Return a decoder with a convolution, which needs a layout, and a tied head."""
    model = decoder()
    model.conv = nn.Conv1d(4, 6, 3)
    model.lm_head.weight = model.embed.weight
    return model


def expected() -> Rules:
    return rules(Cosmos(model_to_mark(), rank=4))


def test_marked_parameters_give_the_groups_of_the_model() -> None:
    model = mark(model_to_mark())
    assert rules(Cosmos(model.parameters(), rank=4)) == expected()
    assert expected()["conv.weight"] == ("cosmos", "conv")
    assert expected()["embed.weight"] == ("adam", "matrix")


def test_overrides_and_head_are_those_of_param_groups() -> None:
    overrides = {"up.weight": {"rule": "adam", "lr": 0.3}, "lm_head.weight": {"rule": "cosmos", "rank": 2}}
    model = decoder()
    mark(model, overrides=overrides, head="down")
    found = Cosmos(model.parameters(), rank=4)
    wanted = Cosmos(param_groups(model, overrides=overrides, head="down"), rank=4)
    assert rules(found) == rules(wanted)
    assert {g["lr"] for g in found.param_groups} == {g["lr"] for g in wanted.param_groups}


def reloaded(model: nn.Module) -> nn.Module:
    """Return the model after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def swapped(model: nn.Module) -> nn.Module:
    """Return the model after a conversion that exchanges the contents of its parameters."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def overwritten(model: nn.Module) -> nn.Module:
    """Return the model after a conversion that makes new parameters."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle and deepcopy": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
    "torch.save": reloaded,
    "to": lambda model: model.to(torch.float64),
    "to, swapped": swapped,
    "to, overwritten": overwritten,
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "compile": lambda model: torch.compile(model, backend="eager"),
    "load_state_dict": lambda model: model.load_state_dict(decoder().state_dict(), strict=False) and model,
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model).requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_marks_survive(change: str) -> None:
    model = CHANGES[change](mark(model_to_mark()))
    assert rules(Cosmos(model.parameters(), rank=4)) == expected()


def test_a_marked_model_compiles_whole_and_trains_as_before() -> None:
    plain, model = decoder(), mark(decoder())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    a, b = Cosmos(plain, rank=4), Cosmos(compiled.parameters(), rank=4)
    assert train(plain, a, range(3)) == pytest.approx(train(compiled, b, range(3)), rel=1e-5)


def test_a_checkpoint_of_a_marked_model_loads_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(mark(decoder()).state_dict(), file)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == set(decoder().state_dict())


def test_functional_call_leaves_no_mark_on_what_it_is_given() -> None:
    model = mark(decoder())
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (torch.zeros(1, 2, dtype=torch.long),))
    assert not any(hasattr(p, "_cosmos_mark") for p in given.values())
    assert rules(Cosmos(model.parameters(), rank=4)) == rules(Cosmos(decoder(), rank=4))


def sharded(rank: int, kind: str) -> tuple[Rules, list[float]]:
    """Return the rules of a marked model after it was distributed, and losses of its training."""
    model = mark(decoder())
    mesh = init_device_mesh("cpu", (2,))
    if kind == "ddp":
        trained: nn.Module = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model.up)
        trained = fully_shard(model)
    elif kind == "tp":
        trained = parallelize_module(model, mesh, {"up": ColwiseParallel(), "lm_head": ColwiseParallel()})
    else:
        trained = fully_shard(copy.deepcopy(model))
    opt = Cosmos(trained.parameters(), rank=4)
    losses = train(trained, opt, range(2)) if kind != "tp" else []
    return rules(opt), losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", "copied, then fsdp"])
def test_marks_survive_distribution(kind: str) -> None:
    plain = decoder()
    losses = train(plain, Cosmos(plain, rank=4), range(2))
    for found, got in run_ranks(2, sharded, kind):
        assert found == rules(Cosmos(decoder(), rank=4))
        assert not got or got == pytest.approx(losses, rel=1e-4)


def test_a_marked_model_itself_does_not_follow_its_marks_and_says_so() -> None:
    model = mark(decoder(), overrides={"up.weight": "adam"})
    with pytest.warns(UserWarning, match=r"1 parameters, such as 'up.weight', were marked.*model.parameters\(\)"):
        Cosmos(model, rank=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cosmos(model.parameters(), rank=4)
        Adam(model)
        Cosmos(nn.Sequential(mark(decoder())), rank=4)


def test_groups_without_a_rule_are_split_and_keep_their_settings() -> None:
    model = mark(decoder())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    opt = Cosmos([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.5}], rank=4)
    assert rules(opt) == rules(Cosmos(decoder(), rank=4))
    assert [(g["rule"], g["weight_decay"], g["lr"]) for g in opt.param_groups] == [
        ("cosmos", 0.1, 5e-4), ("adam", 0.1, 2e-3), ("adam", 0.0, 0.5),
    ]  # fmt: skip


def test_a_rule_in_a_group_wins_over_the_marks() -> None:
    model = mark(decoder())
    rest = [p for p in model.parameters() if p is not model.up.weight]
    opt = Cosmos([{"params": [model.up.weight], "rule": "adam"}, {"params": rest}], rank=4)
    assert rules(opt)["up.weight"][0] == "adam"
    assert rules(opt)["down.weight"][0] == "cosmos"
    assert {g["rule"] for g in Adam(model.parameters()).param_groups} == {"adam"}


def test_a_list_with_marked_and_unmarked_parameters_is_refused() -> None:
    model = mark(decoder())
    model.extra = nn.Linear(12, 12)
    with pytest.raises(ValueError, match=r"2 of 10 parameters have no mark, the first of shape \(12, 12\): call mark"):
        Cosmos(model.parameters(), rank=4)
    assert rules(Cosmos(mark(model).parameters(), rank=4))["extra.weight"][0] == "cosmos"
    extra = matrix((6, 6))
    opt = Cosmos([{"params": list(model.parameters())}, {"params": [extra], "rule": "cosmos"}], rank=4)
    assert rules(opt)["group 1, parameter 0"][0] == "cosmos"


def test_frozen_parameters_are_left_out_until_they_are_trained() -> None:
    model = decoder()
    model.up.requires_grad_(False)
    model.odd = nn.Parameter(torch.zeros(3, 4), requires_grad=False)  # nothing is known about it
    mark(model)
    assert set(rules(Cosmos(model.parameters(), rank=4))) == {n for n, p in model.named_parameters() if p.requires_grad}
    model.up.requires_grad_(True)
    assert rules(Cosmos(model.parameters(), rank=4))["up.weight"][0] == "cosmos"


def test_marks_for_another_optimizer_are_refused() -> None:
    with pytest.raises(ValueError, match="Muon was given groups of rule cosmos"):
        Muon(mark(decoder()).parameters())
    assert rules(Muon(mark(decoder(), "muon").parameters()))["up.weight"][0] == "muon"


def test_bare_matrices_warn_once_with_their_number_and_largest_shape() -> None:
    given = [matrix((6, 4)), matrix((50, 4))]
    message = r"unnamed matrices \(2, the largest of shape \(50, 4\)\).*mark\(model"
    with pytest.warns(UserWarning, match=message) as caught:
        Cosmos(given, rank=2)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_named_embeddings_and_heads_without_a_rule_warn() -> None:
    given = [("tok.embed.weight", matrix((50, 4))), ("up.weight", matrix((6, 4))), ("lm_head.weight", matrix((50, 4)))]
    with pytest.warns(UserWarning, match="of AdamW: 'tok.embed.weight', 'lm_head.weight'. Call mark") as caught:
        Cosmos(given, rank=2)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_stacked_biases_and_norms_without_a_rule_warn() -> None:
    """`torch.func.stack_module_state` makes matrices of them."""
    models = [nn.ModuleDict({"up": nn.Linear(8, 6), "norm": nn.LayerNorm(6)}) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(models)
    with pytest.warns(UserWarning, match="of AdamW: 'up.bias', 'norm.weight', 'norm.bias'. Call mark"):
        Cosmos(stacked.items(), rank=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cosmos([("norm_proj.weight", stacked["up.weight"]), ("biased.weight", matrix((4, 6)))], rank=4)


def test_a_group_added_later_follows_its_marks_or_warns() -> None:
    model = mark(decoder())
    opt = Cosmos([model.up.weight], rank=2)
    opt.add_param_group({"params": [model.lm_head.weight]})
    assert opt.param_groups[-1]["rule"] == "adam"
    opt = Cosmos([("w", matrix((6, 4)))], rank=2)
    with pytest.warns(UserWarning, match="'lm_head.weight'") as caught:
        opt.add_param_group({"params": [("lm_head.weight", matrix((50, 4)))]})
    assert len(caught) == 1 and caught[0].filename == __file__ and opt.param_groups[-1]["rule"] == "cosmos"


def test_a_group_that_marks_split_is_added_whole_or_not_at_all() -> None:
    model = mark(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    opt = Cosmos(model[0].parameters(), rank=2)
    before = [group["param_names"] for group in opt.param_groups]
    model[1].bias = model[0].bias  # which the optimizer has already
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": list(model[1].parameters())})
    assert [group["param_names"] for group in opt.param_groups] == before and model[1].weight not in opt.state


def test_named_marked_and_ruled_parameters_and_models_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cosmos([("w", matrix((6, 4)))], rank=2)
        Cosmos([{"params": [matrix((6, 4))], "rule": "cosmos"}], rank=2)
        Cosmos(mark(decoder()).parameters(), rank=2)
        Cosmos(decoder(), rank=2)
        Adam(decoder().parameters())
