"""A plan lists every parameter, counts the state right, and is as strict as the optimizer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import OPTIMIZERS, AdamMini, Cosmos, Muon, param_groups, plan
from cosmos_optim.optimizer import MatrixOptimizer
from tests.optim.helpers import Decoder, decoder


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"up.weight": "adamw"}, ValueError, "there is no rule 'adamw' .did you mean 'adam'"),
        ({"up.weight": {"wd": 1}}, ValueError, "no hyper-parameter 'wd'"),
        ({"up.weight": {"learnrate": 3}}, ValueError, "no hyper-parameter 'learnrate' .did you mean 'lr'"),
        ({"up.weight": {"layout": "transposed"}}, ValueError, "layout='transposed'"),
        ({"up.weight": {"rule": "soap", "two_sided": True}}, ValueError, "'soap' has no hyper-parameter 'two_sided'"),
        (["up.weight"], TypeError, "must map patterns"),
    ],
)
def test_a_plan_refuses_the_overrides_that_the_optimizer_refuses(
    overrides: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(decoder(), overrides=overrides)
    with pytest.raises(error, match=message):
        Cosmos(param_groups(decoder(), overrides=overrides))


@pytest.mark.parametrize(
    ("kind", "hyper", "error", "message"),
    [
        (Cosmos, {"rank": 0}, ValueError, "rank=0 is not valid"),
        (Cosmos, {"two_sided": "x"}, ValueError, "two_sided='x' is not valid"),
        (Cosmos, {"weight_decay": -1.0}, ValueError, "weight_decay=-1.0 is not valid"),
        (Cosmos, {"lr": "5e-4"}, ValueError, "lr='5e-4' is not valid"),
        (Cosmos, {"lr": 0.0}, ValueError, "give gamma, or the peak lr"),
        (Cosmos, {"offload": "disk"}, ValueError, "offload='disk' is not valid"),
        (Cosmos, {"cuda_graphs": "x"}, ValueError, "cuda_graphs='x' is not valid"),
        (Muon, {"two_sided": False}, TypeError, "Muon has no argument 'two_sided'"),
        (Muon, {"gama": 1.0}, TypeError, "Muon has no argument 'gama'"),
    ],
)
def test_a_plan_refuses_the_arguments_that_the_optimizer_refuses(
    kind: type[MatrixOptimizer], hyper: dict[str, Any], error: type[Exception], message: str
) -> None:
    for make in (lambda: plan(decoder(), kind.rule, **hyper), lambda: kind(decoder(), **hyper)):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("hyper", [{"adam_dtype": torch.uint8}, {"adam_lr": "2e-3"}, {"adam_lr": -1.0}])
def test_a_plan_refuses_wrong_options_that_no_group_reads(hyper: dict[str, Any]) -> None:
    matrices = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    for make in (lambda: plan(matrices, "muon", **hyper), lambda: Muon(matrices, **hyper)):
        with pytest.raises(ValueError, match=f"{next(iter(hyper))}=.* is not valid"):
            make()


def test_a_plan_of_an_optimizer_shows_parameters_that_other_code_put_into_its_groups() -> None:
    opt = Muon([("w", nn.Parameter(torch.ones(8, 4)))])
    opt.param_groups[0]["params"][0] = nn.Parameter(torch.ones(8, 6))
    (row,) = plan(opt).rows
    assert (row.name, row.shape) == ("w", (8, 6))


def test_a_plan_of_an_optimizer_lists_a_replaced_layer_beside_the_new_one_of_the_same_name() -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
    opt = Cosmos(model)
    model["up"], model["layers"][1] = nn.Linear(8, 8), nn.Linear(8, 8)
    for group in param_groups(model, beside=opt):
        opt.add_param_group(group)
    lines = [line.split("  ")[0] for line in str(plan(opt)).splitlines()]
    assert lines.count("up.weight") == lines.count("up.bias") == 2
    assert lines.count("layers.0-1,1.weight x3") == lines.count("layers.0-1,1.bias x3") == 1


def test_a_plan_of_adam_mini_counts_its_heads() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False)})
    (row,) = plan(model, "adam-mini", head_dim=4).rows
    assert row.state_bytes == AdamMini(model, head_dim=4).state_bytes()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("asked", [{"up.weight": True}, {"up.weight": False, "down.weight": True}, {}])
def test_a_plan_chooses_the_two_sided_form_as_the_optimizer_does(both: bool, asked: dict[str, bool]) -> None:
    overrides = {name: {"two_sided": answer} for name, answer in asked.items()}
    groups = Cosmos(param_groups(decoder(), overrides=overrides), two_sided=both).param_groups
    rules = {name: group["rule"] for group in groups for name in group["param_names"]}
    assert {row.name: row.rule for row in plan(decoder(), two_sided=both, overrides=overrides).rows} == rules
    for name in ("up.weight", "down.weight"):
        assert rules[name] == ("cosmos-two-sided" if asked.get(name, both) else "cosmos")


def test_the_plan_names_every_parameter_and_adds_up() -> None:
    model = Decoder()
    text = str(plan(model, rank=4))
    for name, _ in model.named_parameters():
        assert name in text
    assert "cosmos: 2 tensors, 480 parameters" in text
    opt = Cosmos(model, rank=4)
    assert plan(model, rank=4).state_bytes == plan(opt).state_bytes == opt.state_bytes()
    totals = plan(model, rank=4).totals()
    assert sum(size for _, _, size in totals.values()) == opt.state_bytes()
    assert sum(count for _, count, _ in totals.values()) == sum(p.numel() for p in model.parameters())
    assert "because" in text and "because" not in str(plan(opt))  # an optimizer does not know it
    with pytest.raises(TypeError, match="did you mean 'rank'"):
        plan(model, rnak=4)
    with pytest.raises(ValueError, match="no rule 'sopa'"):
        plan(model, "sopa")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_of_a_model_is_the_plan_of_its_optimizer(name: str) -> None:
    model = decoder()
    model.query, model.conv = nn.Linear(8, 128), nn.Conv2d(2, 2, 3, groups=2)
    a, b = plan(model, name).rows, plan(OPTIMIZERS[name](model)).rows
    assert {(row.name, row.rule, row.state_bytes) for row in a} == {(row.name, row.rule, row.state_bytes) for row in b}


def test_a_plan_with_two_sided_has_the_two_sided_rule() -> None:
    assert {row.rule for row in plan(decoder(), "soap", two_sided=True).rows} == {"soap-two-sided", "adam"}
    assert {row.rule for row in plan(decoder(), two_sided=True).rows} == {"cosmos-two-sided", "adam"}


# The paper's Table 1, in units of d^2, for four d x d and two d x 4d matrices and r = 0.05 d.
PAPER_TABLE = {"adam": 24, "adam-mini": 12, "soap": 66, "muon": 12, "cosmos-paper": 13}


@pytest.mark.parametrize("rule", PAPER_TABLE)
def test_state_sizes_are_those_of_the_papers_table(rule: str) -> None:
    d = 1000
    with torch.device("meta"):
        shapes = [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]
        model = nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in shapes))
    hyper = {"rank": 50} if rule == "cosmos-paper" else {}
    # The paper rounds to whole d^2: COSMOS needs 12.915, Adam-mini 12 and 9 vectors.
    assert plan(model, rule, **hyper).state_elements / d**2 == pytest.approx(PAPER_TABLE[rule], abs=0.1)


# -- rates, decay and the printed form ---------------------------------------------------------------------------------


class Block(nn.Module):
    """A block with a fused attention weight, experts, a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(32)


class Tied(nn.Module):
    """Blocks between an embedding and a head that share one weight."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.lm_head = nn.Linear(32, 100, bias=False)
        self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_for_hidden_matrices_unless_it_is_for_all(name: str) -> None:
    model, kind = decoder(), OPTIMIZERS[name]
    for decay, expected in (("matrices", {"up.weight", "down.weight"}), ("all", None)):
        groups = param_groups(model, kind.rule, decay=decay)
        opt = kind(groups, weight_decay=0.1)
        decayed = {name for group in opt.param_groups for name in group["param_names"] if group["weight_decay"]}
        assert decayed == (expected or {name for name, _ in model.named_parameters()})
        rows = plan(model, name, weight_decay=0.1, decay=decay).rows
        assert {row.name for row in rows if row.weight_decay} == decayed
    with pytest.raises(ValueError, match="decay='none' is not valid: give one of"):
        param_groups(model, decay="none")


def test_another_rule_does_not_change_what_is_decayed() -> None:
    others = {"up.weight": "adam", "embed.weight": "cosmos", "lm_head.weight": "cosmos"}
    opt = Cosmos(param_groups(decoder(), overrides=others), weight_decay=0.1)
    assert {name for group in opt.param_groups for name in group["param_names"] if group["weight_decay"]} == {
        "up.weight", "down.weight",
    }  # fmt: skip


def test_an_override_may_decay_what_is_usually_left_out() -> None:
    groups = param_groups(decoder(), overrides={"*bias": {"weight_decay": 0.3}})
    opt = Cosmos(groups, weight_decay=0.1)
    found = {name: group["weight_decay"] for group in opt.param_groups for name in group["param_names"]}
    assert {found[name] for name in found if name.endswith("bias")} == {0.3}


def test_equal_layers_share_a_line_with_their_numbers_and_count() -> None:
    lines = str(plan(Tied(), weight_decay=0.1)).splitlines()
    assert any(line.startswith("blocks.0-2.experts.0-3.weight x12 ") for line in lines)
    assert any(line.startswith("blocks.0-2.qkv.weight x3 ") for line in lines)
    assert len([line for line in lines if line.startswith("blocks")]) == 5
    qkv = next(line for line in lines if "qkv.weight" in line)
    assert "0.0005    0.1" in qkv


def test_layers_of_different_shape_keep_their_own_lines() -> None:
    model = nn.ModuleList(nn.Linear(8, 8 if i != 2 else 16, bias=False) for i in range(5))
    lines = str(plan(model)).splitlines()
    assert [line.split("  ")[0] for line in lines if ".weight" in line] == ["0-1,3-4.weight x4", "2.weight"]


def test_layers_of_different_rate_keep_their_own_lines() -> None:
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
    opt = Cosmos(param_groups(model, overrides={"1.weight": {"lr": 0.125}}))
    lines = str(plan(opt)).splitlines()
    found = {line.split("  ")[0]: "0.125" in line for line in lines if ".weight" in line}
    assert found == {"0,2.weight x2": False, "1.weight": True}


def test_a_tied_head_is_named() -> None:
    line = next(line for line in str(plan(Tied())).splitlines() if line.startswith("embed.weight"))
    assert "embedding, tied to lm_head.weight" in line


def test_a_fused_weight_gets_a_hint_that_works() -> None:
    text = str(plan(Tied()))
    hint = 'you can cut them (not measured): overrides={"blocks.*.qkv.weight": {"split_sizes": [32, 32, 32]}}'
    assert text.count(hint) == 1
    cut = plan(Tied(), adam_lr=8e-3, overrides={"blocks.*.qkv.weight": {"split_sizes": [32, 32, 32]}})
    assert "hint" not in str(cut)


@pytest.mark.parametrize("declares", ["attention", "config"])
def test_a_fused_weight_with_more_queries_than_features_is_cut_where_the_declared_heads_end(declares: str) -> None:
    """As in Qwen3-4B and Gemma: queries need not have as many rows as the weight has columns."""
    attention = nn.ModuleDict({"qkv": nn.Linear(20, 48, bias=False), "proj": nn.Linear(32, 20, bias=False)})
    sizes = SimpleNamespace(n_head=8, head_size=4)
    if declares == "config":
        attention.config = sizes
    else:
        vars(attention).update(vars(sizes))
    model = nn.ModuleDict({"attn": attention})
    model.config = SimpleNamespace(num_attention_heads=2, head_dim=4)  # of another tower
    assert '{"split_sizes": [32, 8, 8]}' in str(plan(model))


def test_a_weight_that_interleaves_the_heads_gets_no_hint_to_cut_it() -> None:
    """torchtitan's wqkv has queries, key and value of each group of heads together."""
    assert "split_sizes" not in str(plan(nn.ModuleDict({"wqkv": nn.Linear(8, 24), "wo": nn.Linear(8, 8)})))


@pytest.mark.parametrize(
    ("name", "options", "is_hinted"),
    [("cosmos", {"rank": 1}, True), ("muon", {}, True), ("soap", {}, True), ("soap", {"two_sided": True}, False),
     ("galore", {"rank": 1}, False)],
)  # fmt: skip
def test_a_fused_weight_of_grouped_heads_gets_a_hint_only_if_the_rule_takes_it(
    name: str, options: dict[str, Any], is_hinted: bool
) -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 12, bias=False), "out": nn.Linear(8, 8, bias=False)})
    cut = {"qkv.weight": {"split_sizes": [8, 2, 2]}}
    assert ("[8, 2, 2]" in str(plan(model, name, **options))) == is_hinted
    if is_hinted:
        plan(model, name, overrides=cut, **options)
    else:
        with pytest.raises(ValueError, match="needs blocks of equal size"):
            plan(model, name, overrides=cut, **options)


def test_a_plan_on_the_meta_device_and_of_an_optimizer_show_the_same_rates() -> None:
    with torch.device("meta"):
        a = plan(Tied(), lr=3e-4, weight_decay=0.1)
    b = plan(Cosmos(Tied(), lr=3e-4, weight_decay=0.1))
    assert {(r.name, r.lr, r.weight_decay) for r in a.rows} == {(r.name, r.lr, r.weight_decay) for r in b.rows}


def test_a_plan_of_a_frozen_model_says_that_nothing_trains() -> None:
    assert str(plan(decoder().requires_grad_(False))) == "nothing to train: every parameter is frozen"


def test_a_plan_counts_frozen_parameters_before_its_hints() -> None:
    model = Tied()
    assert "frozen" not in str(plan(model)) and plan(model).frozen == (0, 0)
    model.blocks[0].norm.requires_grad_(False)
    model.embed.requires_grad_(False)  # tied: counted once
    line = "frozen: 3 tensors, 3,264 parameters, left out; after unfreezing, add them with "
    line += "param_groups(model, beside=opt)"
    lines = str(plan(model)).splitlines()
    assert lines[lines.index(line) - 1].startswith("total: ") and lines[lines.index(line) + 1].startswith("hint: ")
    assert plan(model).frozen == (3, 3264)
    assert "frozen" not in str(plan(Cosmos(model)))


def test_a_plan_says_that_the_default_adam_lr_is_low_for_training_from_scratch() -> None:
    scratch = "To train from scratch, use rates(model, steps, tokens_per_step)"
    assert f"hint: adam_lr was not given, so it is 4 times lr. {scratch}" in str(plan(Tied()))
    assert "it is 2 times lr. To train from scratch, try 1.6e-2" in str(plan(Tied(), "muon"))
    frozen = Tied()
    frozen.embed.requires_grad_(False)
    for quiet in (plan(Tied(), adam_lr=4e-3), plan(frozen), plan(Tied(), "cosmos-paper"), plan(Tied(), "soap")):
        assert "adam_lr" not in str(quiet)


def test_a_plan_says_that_bfloat16_weights_lose_updates_unless_something_keeps_them() -> None:
    model = decoder().bfloat16()
    count = sum(1 for _ in model.parameters())
    assert f"hint: {count} tensors in bfloat16 lose updates below their last place" in str(plan(model))
    for keeps in ("weight_correction", "stochastic_rounding"):
        assert "bfloat16" not in str(plan(model, **{keeps: True}))
    assert "bfloat16" not in str(plan(decoder()))


def test_a_plan_is_its_table_in_a_notebook_and_reads_wrapped_optimizers() -> None:
    opt = Cosmos(decoder(), rank=4)
    wrapper = torch.optim.SGD([torch.zeros(1)])
    wrapper.optimizer = opt  # as accelerate's
    assert repr(plan(opt)) == str(plan(opt)) == str(plan(wrapper))


def test_a_plan_of_galore_shows_its_rank() -> None:
    (row,) = plan(nn.ModuleDict({"up": nn.Linear(8, 16, bias=False)}), "galore", rank=4).rows
    assert row.rank == 4


def test_a_plan_without_an_output_head_says_how_to_name_it() -> None:
    layers = nn.ModuleDict({"up": nn.Linear(8, 16), "last": nn.Linear(16, 4)})
    hint = "hint: no output head was found. If the model has one, name it: param_groups(model, head='last')"
    assert hint in str(plan(layers))
    assert "hint" not in str(plan(layers, head="last"))
    for rule in ("muon", "galore", "soap"):  # rows of Adam-mini and Adam are the same in an output head
        assert hint.replace("model, ", f"model, '{rule}', ") in str(plan(layers, rule))
    assert "output head" not in str(plan(layers, "adam-mini")) + str(plan(layers, "adam"))
    assert "output head was" not in str(plan(decoder())) + str(plan(Tied()))


def test_a_plan_does_not_suggest_an_adapter_as_the_head() -> None:
    factors = {"lora_a": nn.Linear(8, 2, bias=False), "lora_b": nn.Linear(2, 8, bias=False)}
    model = nn.ModuleDict({name: nn.ModuleDict(copy.deepcopy(factors)) for name in ("up", "output")})
    assert "no output head" not in str(plan(model))


def test_a_plan_does_not_suggest_a_numbered_layer_as_the_head() -> None:
    blocks = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16)}) for _ in range(2))})
    for model in (blocks, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))):
        assert "name it: param_groups(model, head='NAME')" in str(plan(model))


@pytest.mark.parametrize(("adam_lr", "gamma"), [(2e-4, "5"), (1e-3, ""), (2e-3, ""), (0.1, "")])
def test_a_plan_says_that_a_gamma_from_the_two_rates_was_not_measured(adam_lr: float, gamma: str) -> None:
    text = str(plan(decoder(), lr=1e-3, adam_lr=adam_lr))
    assert ("follows from the two rates and is " in text) == bool(gamma)
    assert f"and is {gamma}" in text or not gamma
    assert "two rates" not in str(plan(decoder(), lr=1e-3, adam_lr=adam_lr, gamma=0.5))


def test_a_plan_does_not_call_the_gamma_of_an_override_one_that_follows_from_the_rates() -> None:
    assert "two rates" not in str(plan(decoder(), overrides={"up.weight": {"gamma": 5.0}}))
    text = str(plan(decoder(), gamma=0.5, adam_lr=1e-4, overrides={"up.weight": {"gamma": None}}))
    assert "follows from the two rates and is 5." in text


def test_a_plan_of_the_papers_cosmos_says_that_its_gamma_is_small_if_the_outer_rate_is_high() -> None:
    assert "and is 0.05. Measured were 0.1 to 1" in str(plan(decoder(), "cosmos-paper", lr=1e-3, adam_lr=2e-2))
