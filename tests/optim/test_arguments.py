"""Arguments and groups: every option is visible, and wrong ones are refused by name and change nothing."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import OPTIMIZERS, SOAP, AdamMini, Cosmos, Muon, param_groups, plan
from cosmos_optim.hyperparameters import COMMON
from cosmos_optim.rules import RULES
from cosmos_optim.rules.cosmos import PAPER
from tests.optim.helpers import decoder, gradient, matrix


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"adam_lr": 0.0}, "adam_lr"),
        ({"lr": float("nan")}, "lr=nan is not valid: it must be finite, and 0 or positive"),
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
        ({"ns_dtype": torch.float8_e4m3fn}, "ns_dtype=torch.float8_e4m3fn is not valid: give one of"),
        ({"momentum_dtype": torch.float16}, "momentum_dtype"),
        ({"adam_dtype": torch.uint8}, "adam_dtype=torch.uint8 is not valid: give one of .*torch.int8"),
        ({"nesterov": "false"}, "nesterov"),
        ({"nesterov": -1}, "nesterov=-1"),
        ({"nesterov": 5}, "nesterov=5 is not valid: give True or False .looking ahead .* worse"),
        ({"residual_guard": 1.5}, "residual_guard"),
        ({"residual_guard": -1e-9}, "residual_guard=-1e-09 is not valid: it must be in"),
        ({"row_beta2": 1.0}, "row_beta2=1.0 is not valid: it must be in"),
        ({"nonfinite": "ignore"}, "nonfinite"),
        ({"split_sizes": (3, 4)}, "split_sizes"),
        ({"lr": True}, "lr=True is not valid: give a number"),
        ({"rank": True}, "rank=True is not valid: give a number"),
        ({"two_sided": "yes"}, "two_sided='yes' is not valid: give True or False"),
        ({"cuda_graphs": "no"}, "cuda_graphs='no' is not valid: give True or False"),
        ({"offload": "cuda"}, r"offload='cuda' is not valid: give one of \(None, 'cpu'\)"),
        ({"offload": True}, "offload=True is not valid"),
    ],
)
def test_a_wrong_hyper_parameter_is_refused_by_name(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cosmos([matrix((6, 4))], **kwargs)


def test_a_scale_of_galore_that_would_train_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale=0.0 is not valid: it must be positive"):
        OPTIMIZERS["galore"]([matrix((6, 4))], scale=0.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"gama": 0.1}, r"^Cosmos has no argument 'gama' \(did you mean 'gamma'\?\)$"),
        ({"learning_rate": 0.1}, "did you mean 'lr'"),
        ({"overrides": {}}, r"is an argument of param_groups: give param_groups\(model, overrides=...\)"),
        ({"head": "lm_head"}, r"param_groups\(model, head"),
        ({"layout": "conv"}, "Cosmos has no argument 'layout': give it in a parameter group"),
        ({"frequency": 10}, "Cosmos has no argument 'frequency'; it has params, lr, adam_lr, weight_decay, rank"),
        ({"fused": True}, "Cosmos has no argument 'fused': leave it out, it is for torch's optimizers$"),
        ({"momentum": 0.9}, r"Cosmos has no argument 'momentum' \(did you mean 'betas'\?\)$"),
    ],
)
def test_an_unknown_argument_is_a_type_error_that_says_what_to_give(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Cosmos([matrix((6, 4))], **kwargs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_argument_of_param_groups_is_a_type_error_with_the_call_for_that_optimizer(name: str) -> None:
    model = decoder()
    with pytest.raises(TypeError, match="is an argument of param_groups") as error:
        OPTIMIZERS[name](model, decay="all")
    (call,) = re.findall(r"param_groups\(.*\)", str(error.value))
    names = {"param_groups": param_groups, "model": model}
    OPTIMIZERS[name](eval(call.replace("...", "'all'"), names))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_is_visible_keyword_only_and_documented(name: str) -> None:
    made = OPTIMIZERS[name]
    parameters = dict(inspect.signature(made).parameters)
    assert list(parameters)[:4] == ["params", "lr", "adam_lr", "weight_decay"]
    some = {"layout", "side", "split_sizes", "split_side"}  # group keys that are not arguments of every optimizer
    assert {*COMMON, *RULES[made.rule].defaults, *RULES["adam"].defaults, "cuda_graphs", "offload"} - some <= set(
        parameters
    )
    assert {p.kind for p in list(parameters.values())[2:]} == {inspect.Parameter.KEYWORD_ONLY}
    text, shared = made.__doc__ or "", re.findall(r"([\w\s,]+): as in `Cosmos`", made.__doc__ or "")
    if "Arguments and options are those of `Cosmos`" in text:
        text = Cosmos.__doc__ or ""
    for argument in parameters:
        own = re.search(rf"^        {argument}: ", text, re.MULTILINE)
        assert own or re.search(rf"\b{argument}\b", "".join(shared)), f"{argument} is not documented"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_defaults_of_a_signature_are_those_of_the_rule(name: str) -> None:
    made = OPTIMIZERS[name]
    parameters = inspect.signature(made).parameters
    changed = PAPER if name == "cosmos-paper" else {}
    for option, default in {**COMMON, **RULES[made.rule].defaults, **changed}.items():
        assert option not in parameters or parameters[option].default == default


class Labelled(Cosmos):
    """A subclass with an additional argument."""

    def __init__(self, params: Any, *, label: str, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups[0]["name"] = label


class Fast(Cosmos):
    """A subclass without a constructor."""


def test_subclasses_may_add_arguments_and_pass_others_on() -> None:
    p = matrix((6, 4))
    opt = Labelled([p], label="trunk", rank=2)
    for again in (opt, copy.deepcopy(opt)):
        assert (again.param_groups[0]["name"], again.param_groups[0]["rank"]) == ("trunk", 2)
    with pytest.raises(TypeError, match="gama"):
        Labelled([p], label="trunk", gama=0.1)
    with pytest.raises(TypeError, match="Fast has no argument 'gama' .did you mean 'gamma'"):
        Fast([p], gama=0.1)
    assert Fast([p], rank=2).param_groups[0]["rank"] == 2


def test_a_wrong_group_is_refused_with_the_reason() -> None:
    p = matrix((6, 4))
    with pytest.raises(ValueError, match="did you mean 'cosmos'"):
        Cosmos([{"params": [p], "rule": "cosmo"}])
    with pytest.raises(ValueError, match="rule=<class .*Muon'> is not valid: give the name of a rule, one of"):
        Cosmos([{"params": [p], "rule": Muon}])
    with pytest.raises(ValueError, match="rule=<class .*Muon'> is not valid: give the name of a rule, one of"):
        plan(decoder(), Muon)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rule=None is not valid"):
        Cosmos([{"params": [p], "rule": None}])
    with pytest.raises(ValueError, match="'muon-norm' is rule 'muon' with normalize=True"):
        Muon([{"params": [p], "rule": "muon-norm"}])
    with pytest.raises(ValueError, match="no hyper-parameter 'rank'"):
        Cosmos([{"params": [p], "rule": "adam", "rank": 3}])
    with pytest.raises(ValueError, match="'adam_lr' is an argument of the optimizer; in a group, lr is AdamW's rate"):
        Cosmos([{"params": [p], "adam_lr": 2e-3}])
    with pytest.raises(ValueError, match="'offload' is an argument of the optimizer.$"):
        Cosmos([{"params": [p], "offload": "cpu"}])
    with pytest.raises(ValueError, match=r"param_groups\(model\)"):
        Cosmos(decoder().parameters())
    with pytest.raises(ValueError, match=r"parameter 'bias' has shape \(4,\) and is not a matrix"):
        Cosmos([("w", p), ("bias", matrix((4,)))])
    with pytest.raises(ValueError, match="parameter 0 of group 1 has shape"):
        Cosmos([{"params": [p]}, {"params": [matrix((4,))]}])
    with pytest.raises(ValueError, match="parameter 1 has shape"):
        Cosmos([p, matrix((4,))])
    with pytest.raises(ValueError, match="there is no rule 'adamw' .did you mean 'adam'"):
        Cosmos([{"params": [p]}, {"params": [matrix((4,))], "rule": "adamw"}])
    with pytest.raises(ValueError, match="there is no rule 'adamw' .did you mean 'adam'"):
        Cosmos(param_groups(decoder(), overrides={"*.bias": "adamw", "up.weight": "adamw"}))
    with pytest.raises(ValueError, match="duplicate|more than one"):
        Cosmos([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="empty"):
        Cosmos([])
    with pytest.raises(ValueError, match="is sparse"):
        Cosmos([nn.Parameter(torch.eye(4).to_sparse())])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: [{"params": [p]}, p], "params has groups and a Parameter beside them: put all parameters in groups"),
        (lambda p: [p, {"params": [p]}], "params has groups and a Parameter beside them"),
        (lambda p: [(p, "w")], r"a named parameter must be a pair \(name, tensor\), got \(Parameter, str\)"),
        (lambda p: [("w",)], r"must be a pair \(name, tensor\), got \(str\)"),
        (lambda p: {"params": [p]}, "got a dict: put a group in a list"),
        (lambda p: {"w": p}, r"got a dict: .* the items\(\) of named parameters"),
        (lambda p: [{"params": None}], "'params' of a group must be a tensor or a list of them, got a NoneType$"),
        (lambda p: [{"params": nn.Linear(2, 2)}], r"got a Linear: give its parameters\(\), or param_groups\(model\)"),
        (lambda p: [{"params": nn.Sequential()}], "got a Sequential: give its parameters"),
    ],
)
def test_parameters_in_a_wrong_form_are_refused_with_the_right_one(make: Any, message: str) -> None:
    for name in ("cosmos", "adam"):
        with pytest.raises(TypeError, match=message):
            OPTIMIZERS[name](make(matrix((6, 4))))
    Cosmos([{"params": nn.ParameterList([matrix((6, 4))])}])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_for_another_optimizer_are_refused(name: str) -> None:
    """They would train with the other optimizer's rule under this one's name."""
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


def test_groups_may_mix_rules_if_one_has_the_optimizers_own() -> None:
    opt = Cosmos(param_groups(decoder(), overrides={"up.weight": "muon"}))
    assert {group["rule"] for group in opt.param_groups} == {"cosmos", "muon", "adam"}


@pytest.mark.parametrize("given", ["model", "groups", "group"])
@pytest.mark.parametrize(("make", "rule"), [(Cosmos, "cosmos"), (SOAP, "soap")])
def test_two_sided_reaches_the_rule_from_the_constructor_and_from_a_group(make: Any, rule: str, given: str) -> None:
    model = decoder()
    if given == "group":
        opt = make([{"params": [model.up.weight], "two_sided": True}])
    else:
        opt = make(model if given == "model" else param_groups(model, rule), two_sided=True)
    assert {group["rule"] for group in opt.param_groups} - {"adam"} == {f"{rule}-two-sided"}


def test_an_argument_of_another_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="Muon has no argument 'two_sided'"):
        Muon(decoder(), two_sided=True)


@pytest.mark.parametrize("given", ["model", "groups"])
def test_head_dim_reaches_queries_and_keys_of_models_and_of_groups(given: str) -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "up": nn.Linear(8, 8, bias=False)})
    opt = AdamMini(model if given == "model" else param_groups(model, "adam-mini"), head_dim=4)
    assert {tuple(group["param_names"]): group["block_rows"] for group in opt.param_groups} == {
        ("q_proj.weight",): 4, ("up.weight",): 1,
    }  # fmt: skip


def test_head_dim_reaches_groups_added_late_and_leaves_groups_that_set_their_own() -> None:
    names = ("q_proj", "k_proj", "up")
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})
    groups = param_groups(model, "adam-mini", overrides={"k_proj*": {"block_rows": 2}})
    opt = AdamMini(groups, head_dim=4)
    model["layers"] = nn.ModuleDict({"query_proj": nn.Linear(8, 8, bias=False)})
    for group in param_groups(model, beside=opt):
        opt.add_param_group(group)
    opt.add_param_group({"params": [("odd.weight", nn.Parameter(torch.ones(8, 8)))], "block_rows": None})
    sizes = {name: group["block_rows"] for group in opt.param_groups for name in group["param_names"]}
    assert sizes == {
        "q_proj.weight": 4, "k_proj.weight": 2, "up.weight": 1, "layers.query_proj.weight": 4, "odd.weight": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    "kwargs",
    [{"lr": "5e-4"}, {"adam_lr": "2e-3"}, {"weight_decay": "0.1"}, {"gamma": "0.5"}, {"eps": "1e-8"}, {"lr": None},
     {"residual_guard": "0"}, {"maximize": "no"}, {"betas": ("0.9", 0.98)}, {"row_beta2": "0.95"}],
)  # fmt: skip
def test_text_instead_of_a_number_is_refused_by_name(kwargs: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("name", [*RULES])
def test_side_smaller_is_refused_by_rules_that_track_no_basis_on_one_side(name: str) -> None:
    made = OPTIMIZERS[name.removesuffix("-two-sided")]
    for side in ("auto", "input"):  # the defaults of this version and of older ones
        made([{"params": [("w", matrix((8, 32)))], "rule": name, "side": side}])
    group = {"params": [("w", matrix((8, 32)))], "rule": name, "side": "smaller"}
    if name in ("cosmos", "soap"):
        made([group])
        return
    with pytest.raises(ValueError, match=f"rule '{name}' does not track a basis on one side.*'cosmos', 'soap'"):
        made([group])


def test_the_error_for_an_argument_side_does_not_suggest_a_group_of_a_rule_without_one() -> None:
    with pytest.raises(TypeError, match="Muon has no argument 'side'; it has params, lr"):
        Muon(decoder(), side="smaller")
    with pytest.raises(TypeError, match="Muon has no argument 'layout': give it in a parameter group"):
        Muon(decoder(), layout="conv")


def test_the_side_of_an_optimizer_is_for_its_one_sided_groups() -> None:
    groups = param_groups(decoder(), overrides={"up.weight": "muon"})
    opt = Cosmos(groups, rank=2, side="smaller")
    assert {group["rule"]: group["side"] for group in opt.param_groups} == {
        "cosmos": "smaller", "muon": "auto", "adam": "auto",
    }  # fmt: skip
    with pytest.raises(ValueError, match="rule 'cosmos-two-sided' does not track a basis on one side"):
        Cosmos(decoder(), two_sided=True, side="smaller")


@pytest.mark.parametrize(
    ("rule", "given", "shape", "sizes", "advice"),
    [
        ("galore", {"rank": 1}, (12, 8), (8, 2, 2), "needs blocks of equal size here: give equal sizes, or leave"),
        ("galore", {"rank": 5}, (12, 8), (8, 2, 2), "rule 'galore' needs blocks of equal size"),
        ("galore", {"rank": 5}, (12, 16), (8, 2, 2), "lower rank to at most 2, the smallest block"),
        ("soap-two-sided", {}, (12, 8), (8, 2, 2), "give equal sizes, give its group two_sided=False, or leave"),
        ("cosmos-two-sided", {"rank": 5}, (12, 8), (8, 2, 2), "lower rank to at most 2, the smallest block"),
    ],
)
def test_blocks_that_a_rule_cannot_keep_are_refused_with_advice_that_helps(
    rule: str, given: dict[str, Any], shape: tuple[int, int], sizes: tuple[int, ...], advice: str
) -> None:
    made, group = OPTIMIZERS[rule.removesuffix("-two-sided")], {"rule": rule, "split_sizes": sizes, **given}
    with pytest.raises(ValueError, match=rf"'qkv' of shape {re.escape(str(shape))}: .*{advice}"):
        made([{"params": [("qkv", matrix(shape))], **group}])
    if "lower rank" in advice:
        made([{"params": [("qkv", matrix(shape))], **group, "rank": 2}])


def test_parameters_in_a_set_are_refused() -> None:
    """Their order changes from run to run, so saved state would reach the wrong parameters."""
    held = {matrix((4, 4), seed) for seed in range(3)}
    for given in (held, [{"params": held}]):
        with pytest.raises(TypeError, match="params must be ordered, got a set.*Pass a list"):
            Cosmos(given, rank=2)
