"""Routing: every kind of parameter, the order, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from cosmos_optim import OPTIMIZERS, Cosmos, param_groups, plan
from cosmos_optim.routing.param_groups import routes
from tests.optim.helpers import decoder, gradient, small_rank


def rules(model: nn.Module, **kwargs) -> dict[str, str]:
    return {parameter.name: route.rule for parameter, route in routes(model, **kwargs)}


class Conv1D(nn.Module):
    """The layer of transformers' GPT-2: weight (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def test_a_decoder_has_its_hidden_matrices_on_cosmos_and_the_rest_on_adam() -> None:
    assert rules(decoder()) == {
        "embed.weight": "adam",
        "up.weight": "cosmos",
        "up.bias": "adam",
        "down.weight": "cosmos",
        "down.bias": "adam",
        "norm.weight": "adam",
        "norm.bias": "adam",
        "lm_head.weight": "adam",
    }


def test_a_tied_head_is_routed_once_as_an_embedding() -> None:
    model = decoder()
    model.lm_head.weight = model.embed.weight
    found = rules(model)
    assert found["embed.weight"] == "adam"
    assert "lm_head.weight" not in found
    Cosmos(model, rank=4)


def test_an_override_changes_what_it_names_and_nothing_else() -> None:
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(50, 16),
            "conv": nn.Conv2d(4, 6, 3),
            "attention": nn.MultiheadAttention(16, 2),
            "lstm": nn.LSTM(4, 5),
            "gpt": Conv1D(10, 6),
            "lm_head": nn.Linear(16, 50),
        }
    )
    usual = {parameter.name: route for parameter, route in routes(model)}
    for name, route in usual.items():
        (found,) = (
            r for parameter, r in routes(model, overrides={name: {"weight_decay": 0.1}}) if parameter.name == name
        )
        assert (found.rule, found.settings) == (route.rule, {**route.settings, "weight_decay": 0.1})
    for name in ("conv.weight", "attention.in_proj_weight", "lstm.weight_hh_l0", "gpt.weight"):
        (found,) = (r for parameter, r in routes(model, overrides={name: "muon"}) if parameter.name == name)
        assert (found.rule, found.settings) == ("muon", usual[name].settings)
        (found,) = (r for parameter, r in routes(model, overrides={name: "adam"}) if parameter.name == name)
        assert (found.rule, found.settings) == ("adam", {})
    whole = {"attention.in_proj_weight": {"split_sizes": None}}
    (found,) = (r for parameter, r in routes(model, overrides=whole) if parameter.name in whole)
    assert found.settings == {"split_sizes": None}
    opt = Cosmos(param_groups(model, overrides={"*bias": {"weight_decay": 0.2}}), rank=3, weight_decay=0.1)
    decays = {(g["rule"], g["weight_decay"]) for g in opt.param_groups}
    assert decays == {("cosmos", 0.1), ("adam", 0.2), ("adam", 0.0)}


def test_an_override_without_a_rule_is_refused_for_an_unknown_parameter() -> None:
    model = decoder()
    model.mixing = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match="'mixing'.*is not known to be"):
        param_groups(model, overrides={"mixing": {"weight_decay": 0.1}})
    assert rules(model, overrides={"mixing": {"rule": "cosmos", "rank": 2}})["mixing"] == "cosmos"


def test_an_unknown_parameter_that_an_override_gives_to_adam_is_not_decayed() -> None:
    """It is most likely a table, a scale or a gate. A known matrix is decayed, and so is what asks for it."""
    model = decoder()
    model.mixing = nn.Parameter(torch.randn(4, 4))
    decays = {}
    for asked in ("adam", "cosmos", {"rule": "adam", "weight_decay": 0.1}):
        (route,) = (r for p, r in routes(model, overrides={"mixing": asked}) if p.name == "mixing")
        decays[str(asked)] = route.settings.get("weight_decay")
    assert list(decays.values()) == [0.0, None, 0.1]


class Experts(nn.Module):
    def __init__(self, **sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))


class Attention(Experts):
    """Heads in a separate dimension."""


def test_a_3d_parameter_is_a_stack_only_if_a_count_or_a_name_says_so() -> None:
    counted = Experts(w1=(4, 8, 6))
    counted.num_experts = 4
    assert rules(nn.ModuleDict({"embedder": counted})) == {"embedder.w1": "cosmos"}
    for name in ("experts", "shared_experts", "moe"):
        assert set(rules(nn.ModuleDict({name: Experts(w1=(4, 8, 6))})).values()) == {"cosmos"}
    counted.num_experts = 3
    for model in (nn.ModuleDict({"embedder": counted}), nn.ModuleDict({"decomposition": Experts(w=(3, 8, 6))})):
        with pytest.raises(ValueError, match="is not known to be"):
            param_groups(model)
    tokens = nn.ModuleDict({"a": Attention(query_tokens=(1, 32, 16), register_token=(1, 4, 16))})
    assert set(rules(tokens).values()) == {"adam"}
    model = nn.ModuleDict({"layers": nn.ModuleList(Attention(q=(64, 4, 16), k=(64, 4, 16)) for _ in range(3))})
    both = r"\{'layers\.\*\.q': 'adam', 'layers\.\*\.k': 'adam'\}"
    with pytest.raises(ValueError, match=rf"'layers.0.q'.*neither are 5 others.*{both}"):
        param_groups(model)
    assert set(rules(model, overrides={"layers.*.[qk]": "adam"}).values()) == {"adam"}


def test_subclasses_and_parametrized_tensors_are_routed_as_their_base() -> None:
    class MyLSTM(nn.LSTM):
        pass

    class NormedLinear(nn.Linear):
        pass

    attention = nn.MultiheadAttention(8, 2)
    nn.utils.parametrize.register_parametrization(attention, "in_proj_weight", nn.Identity())
    model = nn.ModuleDict({"lstm": MyLSTM(4, 5), "linear": NormedLinear(4, 5), "attention": attention})
    found = {parameter.name: (route.rule, dict(route.settings)) for parameter, route in routes(model)}
    assert found["lstm.weight_ih_l0"] == ("cosmos", {"split_sizes": (5, 5, 5, 5)})
    assert found["linear.weight"] == ("cosmos", {})
    assert found["attention.parametrizations.in_proj_weight.original"] == ("cosmos", {"split_sizes": (8, 8, 8)})


def test_a_bare_kernel_is_not_taken_for_a_stack_of_matrices() -> None:
    kernel, stacks = nn.Conv2d(8, 6, 3).weight, nn.Parameter(torch.randn(2, 3, 8, 6))
    unnamed = "group 0, parameter 0"
    for name, give in ((unnamed, [kernel]), ("kernel", [("kernel", kernel)]), (unnamed, [{"params": kernel}])):
        message = f"parameter '{name}' of shape .*a convolution's kernel or a stack of matrices.*layout='conv'"
        with pytest.raises(ValueError, match=message):
            Cosmos(give, rank=4)
    opt = Cosmos([{"params": [kernel], "layout": "conv"}, {"params": [stacks], "layout": "matrix"}], rank=4)
    assert opt.state[kernel]["U"].shape == (72, 4)
    assert opt.state[stacks]["U"].shape == (2, 3, 6, 4)


def test_convolutions_recurrent_and_attention_weights_are_cut_into_matrices() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 6, 3),
            "depthwise": nn.Conv2d(4, 4, 3, groups=4),
            "one_output": nn.Conv2d(8, 4, 3, groups=4),  # each group is a single row
            "grouped": nn.Conv2d(8, 6, 3, groups=2),
            "conv1d": nn.Conv1d(4, 6, 3),
            "lstm": nn.LSTM(4, 5),
            "gru": nn.GRU(4, 8),
            "rnn": nn.RNN(4, 6),
            "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
        }
    )
    found = {parameter.name: (route.rule, dict(route.settings)) for parameter, route in routes(model)}
    assert found["conv.weight"] == ("cosmos", {"layout": "conv"})
    assert found["depthwise.weight"][0] == found["one_output.weight"][0] == "adam"
    assert found["grouped.weight"] == ("cosmos", {"layout": "conv", "split_sizes": (3, 3)})
    assert found["conv1d.weight"] == ("cosmos", {"layout": "conv"})
    assert found["lstm.weight_ih_l0"] == ("cosmos", {"split_sizes": (5, 5, 5, 5)})
    assert found["gru.weight_hh_l0"] == ("cosmos", {"split_sizes": (8, 8, 8)})
    assert found["rnn.weight_hh_l0"] == ("cosmos", {})
    assert found["attention.in_proj_weight"] == ("cosmos", {"split_sizes": (8, 8, 8)})
    assert found["attention.bias_k"][0] == "adam"
    opt = Cosmos(model, rank=3)
    state = {n: opt.state[p] for g in opt.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    assert state["conv.weight"]["U"].shape == (36, 3)
    assert state["grouped.weight"]["U"].shape == (2, 36, 3)
    assert state["lstm.weight_ih_l0"]["V"].shape == (20, 3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    opt.step()


def test_hf_conv1d_tracks_its_input_side() -> None:
    """The update of an (in, out) weight is the transpose of the update of the (out, in) one."""
    layer, linear = Conv1D(10, 6), nn.Linear(6, 10)
    linear.weight.data.copy_(layer.weight.data.T)
    a, b = Cosmos(nn.ModuleDict({"c": layer}), lr=0.1, rank=3), Cosmos(nn.ModuleDict({"c": linear}), lr=0.1, rank=3)
    for step in range(4):
        linear.weight.grad = gradient((10, 6), step)
        layer.weight.grad = linear.weight.grad.T.clone()
        a.step()
        b.step()
    assert a.state[layer.weight]["U"].shape == (6, 3)
    torch.testing.assert_close(layer.weight.T, linear.weight, rtol=1e-5, atol=1e-6)


def test_a_channels_last_convolution_is_updated_as_a_contiguous_one() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, bias=False, dtype=torch.float64)
    last = nn.Conv2d(4, 6, 3, bias=False, dtype=torch.float64)
    last.load_state_dict(plain.state_dict())
    last = last.to(memory_format=torch.channels_last)
    a, b = Cosmos(plain, lr=0.1, rank=3), Cosmos(last, lr=0.1, rank=3)
    for step in range(3):
        plain.weight.grad = gradient((6, 4, 3, 3), step, torch.float64)
        last.weight.grad = plain.weight.grad.clone()
        a.step()
        b.step()
    assert not last.weight.is_contiguous()
    torch.testing.assert_close(plain.weight, last.weight, rtol=1e-9, atol=1e-10)


def test_experts_and_split_blocks_are_updated_as_single_matrices() -> None:
    """A stack, a fused weight and single matrices with the same gradients get the same updates."""
    singles = [nn.Parameter(torch.randn(5, 8, generator=torch.Generator().manual_seed(i))) for i in range(3)]
    stack = nn.Parameter(torch.stack([p.detach() for p in singles]))
    fused = nn.Parameter(torch.cat([p.detach() for p in singles]))
    a = Cosmos(singles, lr=0.1, rank=3)
    b = Cosmos([("experts", stack)], lr=0.1, rank=3)
    c = Cosmos([{"params": [("qkv", fused)], "split_sizes": (5, 5, 5)}], lr=0.1, rank=3)
    for step in range(4):
        for i, p in enumerate(singles):
            p.grad = gradient((5, 8), 10 * i + step)
        stack.grad = torch.stack([p.grad for p in singles])
        fused.grad = torch.cat([p.grad for p in singles])
        for opt in (a, b, c):
            opt.step()
    expected = torch.stack([p.detach() for p in singles])
    torch.testing.assert_close(stack.detach(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused.detach().view(3, 5, 8), expected, rtol=1e-5, atol=1e-6)


def test_every_block_of_uneven_split_sizes_moves_by_lr() -> None:
    """Grouped-query attention: 8 query rows, 3 key rows, 3 value rows."""
    p = nn.Parameter(torch.randn(14, 6))
    opt = Cosmos([{"params": [("qkv", p)], "split_sizes": (8, 3, 3)}], lr=0.1, rank=4)
    before = p.detach().clone()
    p.grad = gradient((14, 6), 0)
    opt.step()
    for block in (p.detach() - before).split((8, 3, 3)):
        torch.testing.assert_close(block.square().mean().sqrt(), torch.tensor(0.1), rtol=1e-4, atol=0)


def test_an_unknown_parameter_is_an_error_until_an_override_names_its_rule() -> None:
    model = decoder()
    model.mixing = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"'mixing'.*is not known to be.*overrides=\{'mixing': 'adam'\}"):
        param_groups(model)
    assert rules(model, overrides={"mixing": "cosmos"})["mixing"] == "cosmos"
    assert rules(model, overrides={"mix*": "adam"})["mixing"] == "adam"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_call_in_the_error_for_an_unknown_parameter_makes_groups_for_that_optimizer(name: str) -> None:
    model = decoder()
    model.mixing = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match="is not known to be") as error:
        OPTIMIZERS[name](model)
    text = str(error.value)
    (call,) = re.findall(r"param_groups\(.*?\)", text)
    opt = OPTIMIZERS[name](eval(call, {"param_groups": param_groups, "model": model}), weight_decay=0.1)
    (group,) = (group for group in opt.param_groups if "mixing" in group["param_names"])
    assert (group["rule"], group["weight_decay"]) == ("adam", 0.0)
    assert ("or {'rule': 'adam', 'weight_decay': 0.1}" in text) == (name == "adam")


@pytest.mark.parametrize("count", [2, 6, 7])
def test_the_error_for_unknown_parameters_lists_up_to_six_patterns_which_can_be_given(count: int) -> None:
    model = decoder()
    for i in range(count):
        model.register_parameter(f"mix_{'abcdefg'[i]}", nn.Parameter(torch.randn(4, 4)))
    model.block = nn.Sequential(Experts(mix_a=(4, 4)))
    with pytest.raises(ValueError, match=f"and neither are {count} others") as error:
        param_groups(model)
    (call,) = re.findall(r"param_groups\(.*?\)", str(error.value))
    if call.endswith(", ...})"):
        assert count > 5 and call.count("'adam'") == 6
    else:
        eval(call, {"param_groups": param_groups, "model": model})


def test_the_error_for_an_unknown_matrix_says_how_to_give_one_stored_as_in_out() -> None:
    model = decoder()
    model.mixing = nn.Parameter(torch.randn(4, 6))
    for rule in ("cosmos", "muon"):
        with pytest.raises(ValueError, match=r"a row for each output; \{.*\} is for one stored \(in, out\)") as error:
            param_groups(model, rule)
        (asked,) = re.findall(r"\{'rule'.*?\}", str(error.value))
        (route,) = (route for p, route in routes(model, rule, overrides={"mixing": eval(asked)}) if p.name == "mixing")
        assert (route.rule, route.settings) == (rule, {"layout": "in_out"})
    with pytest.raises(ValueError, match="is not known to be") as error:
        param_groups(model, "adam")
    assert "in_out" not in str(error.value)


def test_an_override_matches_names_with_brackets_as_they_are_and_as_the_error_writes_them() -> None:
    model = nn.Sequential(nn.Module())
    model[0].register_parameter("mix[1]", nn.Parameter(torch.randn(4, 4)))
    with pytest.raises(ValueError, match="is not known to be") as error:
        param_groups(model)
    (written,) = re.findall(r"overrides=\{'(.*?)'", str(error.value))
    for pattern in (written, "0.mix[1]"):
        assert rules(model, overrides={pattern: "adam"})["0.mix[1]"] == "adam"


def test_the_first_matching_override_wins_and_each_must_match() -> None:
    found = rules(decoder(), overrides={"up.weight": "adam", "*.weight": {"rule": "muon"}})
    assert (found["up.weight"], found["down.weight"], found["embed.weight"]) == ("adam", "muon", "muon")
    with pytest.raises(ValueError, match=r"match no parameter: \['ups.weight'\]"):
        param_groups(decoder(), overrides={"ups.weight": "adam"})
    with pytest.raises(ValueError, match="neither a rule's name nor a mapping"):
        param_groups(decoder(), overrides={"up.weight": 3})


def test_a_pattern_that_earlier_ones_cover_is_refused() -> None:
    covered = {"*": "adam", "up.*": {"lr": 0.1}}
    with pytest.raises(ValueError, match=r"'up\.\*' has no effect: .* parameters: '\*'\. .*narrower pattern first"):
        param_groups(decoder(), overrides=covered)
    with pytest.raises(ValueError, match=r"'up\.\*' has no effect: .*: 'up.weight' and '\*.bias'"):
        param_groups(decoder(), overrides={"down.weight": "adam", "up.weight": "adam", "*.bias": "adam", "up.*": {}})
    param_groups(decoder(), overrides=dict(reversed(covered.items())))
    param_groups(decoder(), overrides={"up.*": "adam", "up.weight": {"rule": "adam"}})  # the same, written twice
    frozen = decoder()
    frozen.down.requires_grad_(False)
    param_groups(frozen, overrides={"up.*": "adam", "*.weight": "adam", "down.*": "muon"})  # it has down.bias


def test_frozen_parameters_are_left_out() -> None:
    model = decoder()
    model.up.weight.requires_grad_(False)
    assert "up.weight" not in rules(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_without_a_parameter_to_train_is_refused_with_the_reason(name: str) -> None:
    """torch says that it got an empty parameter list."""
    for model in (decoder().requires_grad_(False), torch.nn.Identity()):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no parameter to train: all are frozen, or"):
            OPTIMIZERS[name](model)


def test_an_override_for_a_frozen_parameter_is_accepted() -> None:
    """Stages of training freeze different layers with the same overrides."""
    model = decoder()
    model.up.requires_grad_(False)
    param_groups(model, overrides={"up.*": {"lr": 0.1}})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_unfrozen_later_join_with_their_full_names_and_routes(name: str) -> None:
    """From a layer alone, routing could not see that it is the output head, and two layers would have equal names."""
    model, kind = decoder(), OPTIMIZERS[name]
    for layer in (model.lm_head, model.down):
        layer.requires_grad_(False)
    opt = kind(model, **small_rank(name))
    for layer in (model.lm_head, model.down):
        layer.requires_grad_(True)
    for group in param_groups(model, beside=opt):
        opt.add_param_group(group)
    added = {name: group["rule"] for group in opt.param_groups for name in group["param_names"]}
    expected = {name: group["rule"] for group in param_groups(model, kind.rule) for name, _ in group["params"]}
    assert added == expected and added["down.weight"] == kind.rule
    assert param_groups(model, beside=opt) == []


def test_a_group_without_names_is_refused_with_the_groups_to_add() -> None:
    model = decoder()
    model.down.weight.requires_grad_(False)
    opt = Cosmos(model, rank=4)
    with pytest.raises(ValueError, match=r"have no names, unlike .*param_groups\(model, beside=optimizer\)"):
        opt.add_param_group({"params": [model.down.weight], "rule": "cosmos"})


def test_parameters_instead_of_a_model_are_refused() -> None:
    with pytest.raises(TypeError, match="give the model"):
        plan(decoder().parameters())
    with pytest.raises(TypeError, match="give the model"):
        param_groups(decoder().parameters())


def test_flat_shards_are_refused_and_not_trained_as_vectors() -> None:
    model = decoder()
    model.up.weight = nn.Parameter(model.up.weight.detach().flatten())
    with pytest.raises(ValueError, match=r"'up.weight'.*flat piece of the matrix of a Linear.*FSDP2"):
        param_groups(model)
    model = decoder()
    model.norm.weight.ds_shape = (3, 4)
    with pytest.raises(ValueError, match="flat piece"):
        param_groups(model)


def test_a_2d_layernorm_and_position_tables_get_adam() -> None:
    model = nn.Module()
    model.norm = nn.LayerNorm((3, 4))
    model.pos_embed = nn.Parameter(torch.zeros(1, 7, 4))
    assert set(rules(model).values()) == {"adam"}


def test_biases_and_position_tables_are_recognized_by_name() -> None:
    model = Attention(bias_u=(4, 16), attention_biases=(4, 49), rel_pos_h=(27, 16))
    model.position_embeddings = nn.ParameterList([torch.randn(1, 64, 16), torch.randn(64, 1, 16)])
    assert set(rules(nn.ModuleDict({"a": model})).values()) == {"adam"}
