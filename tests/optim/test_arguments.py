"""Arguments and groups that make no sense: refused by name, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import OPTIMIZERS, SOAP, AdamMini, Cosmos, Muon, param_groups
from tests.optim.helpers import decoder, gradient, matrix


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"adam_lr": 0.0}, "adam_lr"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
        ({"betas": 0.9}, "two numbers"),
        ({"eps": -1e-8}, "eps"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"gamma": -0.1}, "gamma"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"eps_placement": "within"}, "eps_placement"),
        ({"side": "left"}, "side"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"ns_coefficients": "ns6"}, "ns_coefficients"),
        ({"ns_dtype": torch.int32}, "ns_dtype"),
        ({"momentum_dtype": torch.float16}, "momentum_dtype"),
        ({"nesterov": "false"}, "nesterov"),
        ({"nesterov": -1}, "nesterov=-1"),
        ({"nesterov": 5}, "nesterov=5 is not valid: give True or False .a number of steps .* worse"),
        ({"residual_guard": 1.5}, "residual_guard"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"split_sizes": (3, 4)}, "split_sizes"),
        ({"gama": 0.1}, "did you mean 'gamma'"),
        ({"learning_rate": 0.1}, "did you mean 'lr'"),
        ({"overrides": {}}, r"param_groups\(model, overrides"),
        ({"head": "lm_head"}, r"param_groups\(model, head"),
        ({"lr": True}, "lr=True is not valid: give a number"),
        ({"rank": True}, "rank=True is not valid: give a number"),
        ({"two_sided": "yes"}, "two_sided='yes' is not valid: give True or False"),
        ({"cuda_graphs": "no"}, "cuda_graphs='no' is not valid: give True or False"),
    ],
)
def test_wrong_hyper_parameters(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cosmos([matrix((6, 4))], **kwargs)


def test_wrong_groups() -> None:
    p = matrix((6, 4))
    with pytest.raises(ValueError, match="did you mean 'cosmos'"):
        Cosmos([{"params": [p], "rule": "cosmo"}])
    with pytest.raises(ValueError, match="no hyper-parameter 'rank'"):
        Cosmos([{"params": [p], "rule": "adam", "rank": 3}])
    with pytest.raises(ValueError, match=r"param_groups\(model\)"):
        Cosmos(decoder().parameters())
    with pytest.raises(ValueError, match="bias.*is not a matrix"):
        Cosmos([("w", p), ("bias", matrix((4,)))])
    with pytest.raises(ValueError, match="duplicate|more than one"):
        Cosmos([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="empty"):
        Cosmos([])
    with pytest.raises(ValueError, match="is sparse"):
        Cosmos([nn.Parameter(torch.eye(4).to_sparse())])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_for_another_optimizer_are_refused(name: str) -> None:
    """They would train with that one's rule, whatever the class is called."""
    made, model = OPTIMIZERS[name], decoder()
    if made.rule == "cosmos":
        made(param_groups(model))
        with pytest.raises(ValueError, match=r"groups of rule muon .* param_groups\(model, 'cosmos'\)"):
            made(param_groups(model, "muon"))
        return
    with pytest.raises(ValueError, match="groups of rule cosmos") as error:
        made(param_groups(model))
    assert f"param_groups(model, {made.rule!r})" in str(error.value)
    opt = made(param_groups(model, made.rule))
    assert {group["rule"] for group in opt.param_groups} <= {made.rule, "adam"}


def test_rules_may_be_mixed() -> None:
    """As long as the optimizer's own is among them."""
    opt = Cosmos(param_groups(decoder(), overrides={"up.weight": "muon"}))
    assert {group["rule"] for group in opt.param_groups} == {"cosmos", "muon", "adam"}


@pytest.mark.parametrize("given", ["model", "groups", "group"])
@pytest.mark.parametrize(("make", "rule"), [(Cosmos, "cosmos"), (SOAP, "soap")])
def test_two_sided_however_it_is_asked_for(make: Any, rule: str, given: str) -> None:
    model = decoder()
    if given == "group":
        opt = make([{"params": [model.up.weight], "two_sided": True}])
    else:
        opt = make(model if given == "model" else param_groups(model, rule), two_sided=True)
    assert {group["rule"] for group in opt.param_groups} - {"adam"} == {f"{rule}-two-sided"}


def test_an_argument_that_nothing_would_use_is_refused() -> None:
    with pytest.raises(ValueError, match="Muon has no argument 'two_sided'"):
        Muon(decoder(), two_sided=True)


@pytest.mark.parametrize("given", ["model", "groups"])
def test_heads_however_the_parameters_are_given(given: str) -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "up": nn.Linear(8, 8, bias=False)})
    opt = AdamMini(model if given == "model" else param_groups(model, "adam-mini"), head_dim=4)
    assert {tuple(group["param_names"]): group["block_rows"] for group in opt.param_groups} == {
        ("q_proj.weight",): 4, ("up.weight",): 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "kwargs",
    [{"lr": "5e-4"}, {"adam_lr": "2e-3"}, {"weight_decay": "0.1"}, {"gamma": "0.5"}, {"eps": "1e-8"}, {"lr": None},
     {"residual_guard": "0"}, {"maximize": "no"}, {"betas": ("0.9", 0.98)}, {"row_beta2": "0.95"}],
)  # fmt: skip
def test_text_for_a_number_is_named(kwargs: dict[str, Any]) -> None:
    """YAML reads 5e-4 as text."""
    ((name, value),) = kwargs.items()
    with pytest.raises(ValueError, match=name):
        Cosmos(decoder(), **kwargs)
    if isinstance(value, str) and name.endswith("lr"):
        with pytest.raises(ValueError, match=r"5\.0e-4"):
            Cosmos(decoder(), **kwargs)


def test_a_refused_group_leaves_nothing_behind() -> None:
    p, q = matrix((4, 4)), matrix((8, 4), 1)
    opt = Cosmos([p], rank=2)
    for name, wrong in (("split_sizes", 5), ("split_sizes", [5, 5]), ("rank", "many")):
        with pytest.raises(ValueError, match=name):
            opt.add_param_group({"params": [q], name: wrong})
        assert len(opt.param_groups) == 1 and set(opt.state) == {p}
    p.grad = gradient((4, 4), 0)
    opt.step()
    opt.add_param_group({"params": [q]})


def test_parameters_in_a_set_are_refused() -> None:
    """Their order changes from run to run, and with it whose state is whose."""
    held = {matrix((4, 4), seed) for seed in range(3)}
    for given in (held, [{"params": held}]):
        with pytest.raises(TypeError, match="list"):
            Cosmos(given, rank=2)
