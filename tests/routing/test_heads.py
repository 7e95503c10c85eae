"""`split_heads` finds the weights of attention and cuts them into heads, by names and declared sizes."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import SOAP, Cosmos, Muon, mark, param_groups, plan
from tests.optim.helpers import gradient

STEPS = 3
ROWS = {"split_sizes": 4}
COLUMNS = {"split_sizes": 4, "split_side": "input"}


def named(sizes: dict[str, tuple[int, int]]) -> nn.Module:
    """Return a module with linear layers at these paths, (in, out) each."""
    model = nn.Module()
    for path, size in sizes.items():
        place = model
        *above, last = path.split(".")
        for part in above:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, nn.Linear(*size, bias=False))
    return model


def cuts(model: nn.Module, split_heads: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the settings that cut each parameter, by the path of its layer."""
    groups = param_groups(model, split_heads=split_heads, **options)
    keys = ("split_sizes", "split_side")
    return {name.removesuffix(".weight"): {key: g[key] for key in keys if key in g} for g in groups
            for name, _ in g["params"]}  # fmt: skip


@pytest.mark.parametrize(
    "names", ["a.q a.k a.v a.o", "attn.q_proj attn.k_proj attn.v_proj attn.o_proj", "attn.wq attn.wk attn.wv attn.wo",
              "x.to_q x.to_k x.to_v x.to_out.0", "a.q_lin a.k_lin a.v_lin a.out_lin",
              "a.q_proj a.k_proj a.v_proj a.out_proj", "a.qkv_linear.wq a.qkv_linear.wk a.qkv_linear.wv a.wo",
              "attention.self.query attention.self.key attention.self.value attention.output.dense",
              "attention.attention.query attention.attention.key attention.attention.value attention.output.dense"],
)  # fmt: skip
def test_common_names_are_cut_by_rows_and_the_output_by_columns(names: str) -> None:
    """Keys and values may have fewer heads; layers of an MLP with an output's name stay whole."""
    q, k, v, o = names.split()
    sizes = {q: (12, 16), k: (12, 8), v: (12, 8), o: (16, 12)}
    model = named({**sizes, "mlp.up": (12, 8), "mlp.c_proj": (8, 12), "mlp.output.dense": (12, 12)})
    whole: dict[str, dict[str, Any]] = dict.fromkeys(("mlp.up", "mlp.c_proj", "mlp.output.dense"), {})
    assert cuts(model, 4) == {q: ROWS, k: ROWS, v: ROWS, o: COLUMNS, **whole}
    assert len(param_groups(model, split_heads=4)) == 3


@pytest.mark.parametrize(
    "names", ["a.qkv a.proj", "a.c_attn a.c_proj", "a.query_key_value a.dense", "a.Wqkv a.out_proj"]
)
def test_fused_weights_are_cut_into_the_heads_of_all_three(names: str) -> None:
    qkv, o = names.split()
    assert cuts(named({qkv: (8, 24), o: (8, 8)}), 4) == {qkv: ROWS, o: COLUMNS}


def test_torchs_own_attention_declares_the_size_of_a_head() -> None:
    model = nn.ModuleDict({"fused": nn.MultiheadAttention(8, 2), "apart": nn.MultiheadAttention(8, 2, kdim=6, vdim=5)})
    found = cuts(model, True)
    assert found["fused.in_proj_weight"] == ROWS
    assert [found[f"apart.{part}_proj_weight"] for part in "qkv"] == [ROWS] * 3
    assert found["fused.out_proj"] == found["apart.out_proj"] == COLUMNS


@pytest.mark.parametrize(
    "declared",
    [{"head_dim": 4}, {"hidden_size": 16, "num_attention_heads": 4}, {"n_embd": 16, "n_head": 4}, {"d_kv": 4}],
)
def test_true_reads_the_size_from_a_config_above(declared: dict[str, int]) -> None:
    model = named({"layers.a.q": (16, 16), "layers.a.k": (16, 16), "layers.a.v": (16, 16), "layers.a.o": (16, 16)})
    with pytest.raises(ValueError, match=r"neither 'layers.a' nor a config above it declares.*split_heads=64"):
        param_groups(model, split_heads=True)
    model.config = SimpleNamespace(**declared)
    assert cuts(model, True) == cuts(model, 4)
    with pytest.raises(ValueError, match=r"split_heads=8 is the size of one head, but 'layers.a'.*declares 4"):
        param_groups(model, split_heads=8)


def test_the_error_for_heads_of_the_model_itself_says_so() -> None:
    model = named({"q": (16, 16), "k": (16, 16), "v": (16, 16)})
    with pytest.raises(ValueError, match="neither the model nor a config above it declares"):
        param_groups(model, split_heads=True)


def test_what_does_not_fit_is_an_error_with_a_name() -> None:
    model = named({"a.q": (12, 16), "a.k": (12, 16), "a.v": (12, 16), "a.o": (18, 12)})
    with pytest.raises(ValueError, match=r"'a.o.weight' of shape \(12, 18\): its 18 columns are not a multiple of 4"):
        param_groups(model, split_heads=4)
    found = cuts(model, 4, overrides={"a.o.weight": {"split_sizes": None}})
    assert found["a.o"] == {"split_sizes": None} and found["a.q"] == ROWS
    for names in ("up down", "a.q_a a.q_b a.o", "mixer.in_proj mixer.out_proj", "a.q_proj a.kv_b_proj a.o_proj"):
        with pytest.raises(ValueError, match="split_heads=4 matches no parameter.*q_proj"):
            param_groups(named(dict.fromkeys(names.split(), (8, 8))), split_heads=4)
    for wrong in ("auto", -1, 2.0, None):
        with pytest.raises(ValueError, match="split_heads=.* is not valid"):
            param_groups(model, split_heads=wrong)
    with pytest.raises(TypeError, match=re.escape("give param_groups(model, split_heads=...)")):
        Cosmos(model, split_heads=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="split_heads=4: AdamW updates each element by itself"):
        param_groups(model, "adam", split_heads=4)


def test_a_declared_number_of_heads_counts_in_the_rows_of_the_queries() -> None:
    """Narrow attention has smaller heads than the model's width suggests. Other sizes of values are left whole."""
    model = named({"a.q": (16, 8), "a.k": (16, 8), "a.v": (16, 8), "a.o": (8, 16)})
    model.config = SimpleNamespace(hidden_size=16, num_attention_heads=2)
    assert cuts(model, True) == cuts(model, 4)
    model.add_module("b", named({"q": (16, 8), "k": (16, 8), "v": (16, 16), "o": (16, 16)}))
    assert {name: cut for name, cut in cuts(model, True).items() if name.startswith("b.")} == {
        "b.q": {}, "b.k": {}, "b.v": {}, "b.o": {}
    }  # fmt: skip


def test_an_override_of_the_rule_or_rate_keeps_the_heads() -> None:
    model = named({"a.q": (8, 8), "a.k": (8, 8), "a.v": (8, 8), "a.o": (8, 8)})
    overrides = {"a.q.weight": {"lr": 0.1}, "a.k.weight": "muon", "a.v.weight": "adam"}
    assert cuts(model, 4, overrides=overrides) == {"a.q": ROWS, "a.k": ROWS, "a.v": {}, "a.o": COLUMNS}


def test_the_plan_counts_heads_and_mark_keeps_them() -> None:
    model = named({"a.q": (12, 16), "a.k": (12, 8), "a.v": (12, 8), "a.o": (16, 12)})
    why = {row.name: row.why for row in plan(model, rank=2, split_heads=4).rows}
    assert why["a.q.weight"] == "linear, 4 heads of 4 rows" and why["a.k.weight"] == "linear, 2 heads of 4 rows"
    assert why["a.o.weight"] == "linear, 4 heads of 4 columns"
    held = Cosmos(mark(model, split_heads=4).parameters(), rank=2)
    wanted = Cosmos(param_groups(model, split_heads=4), rank=2)
    assert [g["param_names"] for g in held.param_groups] == [g["param_names"] for g in wanted.param_groups]
    assert held.state_bytes() == wanted.state_bytes() == plan(model, rank=2, split_heads=4).state_bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [("LlamaForCausalLM", {"q_proj": 128, "k_proj": 128, "v_proj": 128, "o_proj": -128}),
     ("GPT2LMHeadModel", {"c_attn": 64, "c_proj": -64}), ("ModernBertForMaskedLM", {"Wqkv": 64, "Wo": -64}),
     ("BertForMaskedLM", {"query": 64, "key": 64, "value": 64, "dense": -64}),
     ("T5EncoderModel", {"q": 64, "k": 64, "v": 64, "o": -64}),
     ("RecurrentGemmaForCausalLM", {"q_proj": 256, "k_proj": 256, "v_proj": 256, "o_proj": -256})],
)  # fmt: skip
def test_models_of_transformers_declare_their_heads(name: str, expected: dict[str, int]) -> None:
    """Sizes of heads by layer, negative for columns. Layers of MLPs with the same names stay whole."""
    pytest.importorskip("transformers")
    from tests.routing.transformers_models import build

    model = build(name)
    found: dict[str, int] = {}
    for path, cut in cuts(model, True).items():
        if cut:
            assert re.search("att|temporal", path, re.IGNORECASE)
            size = cut["split_sizes"]
            found[path.rpartition(".")[2]] = -size if "split_side" in cut else size
    assert found == expected


# -- training ----------------------------------------------------------------------------------------------------------


def attention(model: nn.Module, x: Tensor) -> Tensor:
    """Return attention with heads of 4, by the layers q, k, v and o of model.a."""
    q, k, v = (model.get_submodule(f"a.{name}")(x).unflatten(-1, (-1, 4)).transpose(1, 2) for name in "qkv")
    y = nn.functional.scaled_dot_product_attention(q, k, v)
    out: Tensor = model.get_submodule("a.o")(y.transpose(1, 2).flatten(2))
    return out


def of_heads(x: Tensor, name: str) -> list[Tensor]:
    """Return the heads of a weight or of its gradient, each in separate memory."""
    return [part.clone() for part in x.split(4, int(name == "o"))]


@pytest.mark.parametrize("kind", [Cosmos, Muon, SOAP])
def test_a_trained_model_equals_one_with_a_parameter_for_every_head(kind: Any) -> None:
    """Bit for bit, on the gradients of attention."""
    model = named(dict.fromkeys(("a.q", "a.k", "a.v", "a.o"), (16, 16))).double()
    weights = {name: model.get_submodule(f"a.{name}").weight for name in "qkvo"}
    apart = {name: [nn.Parameter(w) for w in of_heads(weights[name].detach(), name)] for name in "qkvo"}
    hyper = {"lr": 0.01, "weight_decay": 0.1} | ({} if kind is SOAP else {"ns_dtype": torch.float64})
    hyper |= {"rank": 3} if kind is Cosmos else {}
    a = kind(param_groups(model, kind.rule, split_heads=4), **hyper)
    b = kind([{"params": [p for held in apart.values() for p in held], "rule": kind.rule}], **hyper)
    for step in range(STEPS):
        a.zero_grad()
        attention(model, gradient((2, 5, 16), step, torch.float64)).square().sum().backward()
        for name, held in apart.items():
            for p, g in zip(held, of_heads(weights[name].grad, name), strict=True):
                p.grad = g
        a.step()
        b.step()
    for name, held in apart.items():
        assert torch.equal(weights[name], torch.cat(held, int(name == "o")))


def test_a_checkpoint_with_other_heads_is_refused() -> None:
    model = named(dict.fromkeys(("a.q", "a.k", "a.v", "a.o"), (16, 16)))
    saved = Muon(param_groups(model, "muon", split_heads=4)).state_dict()
    Muon(param_groups(model, "muon", split_heads=4)).load_state_dict(copy.deepcopy(saved))
    with pytest.raises(ValueError, match="was saved with split_sizes=4, here it has split_sizes=8"):
        Muon(param_groups(model, "muon", split_heads=8)).load_state_dict(copy.deepcopy(saved))
    with pytest.raises(ValueError, match=r"the checkpoint has 2 parameter groups, this optimizer has 1|split_sizes"):
        Muon(param_groups(model, "muon")).load_state_dict(saved)
