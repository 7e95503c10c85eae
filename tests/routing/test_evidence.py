"""What decides a route: types, declared sizes, whole words. What does not: the name of a class, a part of a word."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from cosmos_optim import param_groups
from cosmos_optim.routing.param_groups import routes
from tests.optim.helpers import Decoder


def kinds(model: nn.Module, **kwargs) -> dict[str, tuple[str, str]]:
    return {parameter.name: (route.rule, route.kind) for parameter, route in routes(model, **kwargs)}


def holder(kind: str, sizes: dict[str, tuple[int, ...]], **declared: int) -> nn.Module:
    """Return a module of a class with this name, with plain parameters and attributes."""
    module = type(kind, (nn.Module,), {})()
    for name, size in sizes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(size)))
    for name, value in declared.items():
        setattr(module, name, value)
    return module


CLASS_NAMES = (
    "GatedAttention", "LinearViT", "NavigateNet", "Nonlinearity", "Router", "StackedGroupedExperts", "MixtureOfExperts",
    "Norm", "LinearEmbedding", "Conv1D", "FSDPExperts", "Plain",
)  # fmt: skip


@pytest.mark.parametrize("kind", CLASS_NAMES)
def test_the_name_of_a_class_makes_no_matrix_of_a_table(kind: str) -> None:
    tables = {"pos_embed": (7, 16), "codebook": (64, 16), "relative_position_bias_table": (169, 4),
              "rel_pos": (3, 13, 13), "cls_token": (1, 1, 16), "latents": (8, 16),
              "tokens_delta": (3, 16)}  # fmt: skip
    for model in (holder(kind, tables), nn.ModuleDict({"stack": holder(kind, tables)})):
        assert set(kinds(model).values()) <= {("adam", "embedding"), ("adam", "vector")}


@pytest.mark.parametrize("kind", CLASS_NAMES)
def test_the_name_of_a_class_does_not_route_an_unknown_parameter(kind: str) -> None:
    for size in ((7, 16), (4, 8, 6)):
        with pytest.raises(ValueError, match=r"'mixing'.*overrides=\{'mixing': 'adam'\}"):
            param_groups(holder(kind, {"mixing": size}))


def test_routes_do_not_change_when_every_class_is_renamed() -> None:
    model = nn.ModuleDict({
        "decoder": Decoder(), "router": holder("TopKRouter", {"weight": (3, 8)}), "lstm": nn.LSTM(4, 5),
        "experts": holder("Experts", {"up": (3, 8, 6), "up_bias": (3, 8)}),
        "norm": holder("RMSNorm", {"weight": (3, 4)}),
    })  # fmt: skip
    before = kinds(model)
    for i, module in enumerate(model.modules()):
        module.__class__ = type(f"X{i}", (type(module),), {})
    assert kinds(model) == before
    assert before["router.weight"] == before["experts.up"] == ("cosmos", "hidden")
    assert before["experts.up_bias"] == ("adam", "bias")
    assert before["norm.weight"] == ("adam", "norm")


def test_a_list_or_dict_of_parameters_gives_them_its_name() -> None:
    for holds in (nn.ParameterList([torch.zeros(6, 8)]), nn.ParameterDict({"default": torch.zeros(6, 8)})):
        assert set(kinds(nn.ModuleDict({"lora_embedding_A": holds})).values()) == {("adam", "embedding")}
        with pytest.raises(ValueError, match="is not known to be"):
            param_groups(nn.ModuleDict({"mixing": holds}))


def test_a_projection_of_embeddings_is_not_a_table() -> None:
    for name in ("embedding_proj", "pos_projection", "latent_kernel"):
        with pytest.raises(ValueError, match="is not known to be"):
            param_groups(holder("Layer", {name: (6, 8)}))


def test_parts_of_words_decide_nothing() -> None:
    for name in ("disposition", "rebiased", "tokenmixing", "upscaler", "abnormal", "embedder"):
        with pytest.raises(ValueError, match="is not known to be"):
            param_groups(holder("Layer", {name: (6, 8)}))
    for path in ("navigate", "irrelevant", "moeller", "routers_x"):
        with pytest.raises(ValueError, match="is not known to be"):
            param_groups(nn.ModuleDict({path: holder("Layer", {"weight": (6, 8)})}))


@pytest.mark.parametrize(
    "names",
    [("in_features", "out_features"), ("input_size", "output_size"), ("in_dim", "out_dim"),
     ("input_dim", "output_dim"), ("in_channels", "out_channels")],
)  # fmt: skip
def test_a_layer_that_declares_its_sizes_is_linear_also_in_parts(names: tuple[str, str]) -> None:
    sizes = dict(zip(names, (8, 12), strict=True))
    for shape in ((12, 8), (6, 8), (12, 4)):  # whole, a part of the rows, a part of the columns
        assert kinds(holder("Any", {"weight": shape}, **sizes)) == {"weight": ("cosmos", "hidden")}
    adapter = holder("Any", {"weight": (12, 8), "lora_a": (2, 8), "lora_b": (12, 2), "pos_embed": (5, 8)}, **sizes)
    assert {name: rule for name, (rule, _) in kinds(adapter).items()} == {
        "weight": "cosmos", "lora_a": "cosmos", "lora_b": "cosmos", "pos_embed": "adam",
    }  # fmt: skip
    with pytest.raises(ValueError, match="is not known to be"):
        param_groups(holder("Any", {"weight": (5, 9)}, **sizes))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cluster_centers", (10, 8)), ("memory", (64, 8)), ("queries", (3, 8)), ("slots_mu", (7, 8)), ("per_out", (12, 3)),
     ("weight_sigma", (12, 8)), ("weight_rho", (12, 8)), ("mask_scores", (12, 8)), ("square", (8, 8))],
)  # fmt: skip
def test_what_is_beside_a_layers_weight_is_unknown_unless_it_is_half_of_an_adapter(
    name: str, shape: tuple[int, int]
) -> None:
    """A table with one row for each code has as many columns as the layer has inputs. So has the noise of a weight."""
    model = holder("Any", {"weight": (12, 8), name: shape}, in_features=8, out_features=12)
    for layer in (model, holder("Any", {name: shape, "mean": shape}, input_dim=8, output_dim=12)):
        with pytest.raises(ValueError, match=f"'{name}'.*is not known to be"):
            param_groups(layer)
    assert kinds(model, overrides={name: "adam"})["weight"] == ("cosmos", "hidden")


def test_the_factors_of_an_adapter_around_a_layer_are_matrices_by_their_name() -> None:
    around = holder("Any", {"lora_A": (6, 8), "lora_B": (9, 3), "lora_scale": (1, 9)})
    with pytest.raises(ValueError, match="'lora_A'.*is not known to be"):
        param_groups(around)
    around.linear = nn.Linear(8, 12, bias=False)
    found = kinds(nn.ModuleDict({"blocks": nn.ModuleList([around]), "lm_head": copy.deepcopy(around)}))
    factors = {name: kind for name, kind in found.items() if name.endswith(("lora_A", "lora_B"))}
    assert len(factors) == 4 and set(factors.values()) == {("cosmos", "hidden")}
    assert found["lm_head.lora_scale"][0] == "adam"


@pytest.mark.parametrize("shapes", [{"lora_a": (8, 3), "lora_b": (3, 12)}, {"lora_weights": (5, 7)}])
def test_the_word_lora_alone_does_not_make_a_matrix(shapes: dict[str, tuple[int, int]]) -> None:
    """Factors that are stored (in, out) would get rows for columns without a message."""
    around = holder("Any", shapes)
    around.linear = nn.Linear(8, 12, bias=False)
    with pytest.raises(ValueError, match=r"is not known to be.*'layout': 'in_out'"):
        param_groups(around)


def test_a_square_layer_may_have_an_adapter_but_no_second_weight() -> None:
    sizes = {"weight": (8, 8), "down": (2, 8), "up": (8, 2)}
    found = kinds(holder("Any", sizes, in_features=8, out_features=8))
    assert found == dict.fromkeys(sizes, ("cosmos", "hidden"))
    with pytest.raises(ValueError, match="'weight_mu'.*neither is 1 other"):
        param_groups(holder("Any", {"weight_mu": (8, 8), "weight_rho": (8, 8)}, in_features=8, out_features=8))


def test_parts_of_a_normed_or_pruned_weight_stay_one() -> None:
    for part in ("weight_orig", "weight_v"):
        for model in (holder("Any", {part: (12, 8)}, in_dim=8, out_dim=12), nn.Linear(8, 12, bias=False)):
            if isinstance(model, nn.Linear):
                model.register_parameter(part, model._parameters.pop("weight"))
            assert kinds(model) == {part: ("cosmos", "hidden")}


def test_a_subclass_of_linear_may_hold_tables() -> None:
    layer = type("QuantizedLinear", (nn.Linear,), {})(16, 32, bias=False)
    layer.codebook = nn.Parameter(torch.zeros(256, 16))
    assert kinds(layer) == {"weight": ("cosmos", "hidden"), "codebook": ("adam", "embedding")}


def test_a_layer_that_declares_an_embeddings_sizes_is_one() -> None:
    for rows in (100, 50):  # whole, or one of two parts
        model = holder("VocabParallel", {"weight": (rows, 16)}, num_embeddings=100, embedding_dim=16)
        assert kinds(model) == {"weight": ("adam", "embedding")}


def test_state_space_parameters_get_adam_and_their_projections_do_not() -> None:
    mixer = holder("Mixer", {"A_log": (16, 4), "D": (2, 16), "dt_bias": (16,)})
    mixer.dt_proj, mixer.x_proj, mixer.conv1d = nn.Linear(4, 16), nn.Linear(16, 12), nn.Conv1d(16, 16, 4, groups=16)
    found = kinds(nn.ModuleDict({"mixer": mixer}))
    assert found["mixer.A_log"] == found["mixer.D"] == ("adam", "state space")
    assert found["mixer.dt_bias"][0] == "adam"
    assert found["mixer.conv1d.weight"] == ("adam", "depthwise convolution")
    assert found["mixer.dt_proj.weight"] == found["mixer.x_proj.weight"] == ("cosmos", "hidden")


def test_gates_and_kernels_with_one_row_are_vectors() -> None:
    model = nn.ModuleDict({"shared_expert_gate": nn.Linear(16, 1, bias=False), "eca": nn.Conv1d(1, 1, 3, bias=False),
                           "inputs": nn.Linear(1, 16, bias=False)})  # fmt: skip
    assert set(kinds(model).values()) == {("adam", "vector")}


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_convolution_with_one_output_is_one_row(dim: int) -> None:
    conv, kernel = getattr(nn, f"Conv{dim}d"), (3,) * dim
    model = nn.ModuleDict({"to_one": conv(8, 1, kernel), "from_one": conv(1, 8, kernel), "between": conv(8, 8, kernel)})
    found = {name: kind for name, kind in kinds(model).items() if name.endswith("weight")}
    assert found == {
        "to_one.weight": ("adam", "vector"), "from_one.weight": ("cosmos", "hidden"),
        "between.weight": ("cosmos", "hidden"),
    }  # fmt: skip


def test_a_linear_layer_of_relative_biases_is_a_table() -> None:
    found = kinds(nn.ModuleDict({"rel_pos_bias": nn.Linear(32, 12, bias=False), "bias_proj": nn.Linear(32, 12)}))
    assert found["rel_pos_bias.weight"] == ("adam", "embedding")
    assert found["bias_proj.weight"] == ("cosmos", "hidden")


def test_the_kind_of_a_parameter_survives_an_override() -> None:
    found = kinds(Decoder(), overrides={"*": {"weight_decay": 0.1}})
    assert found == kinds(Decoder())
    assert found["norm.bias"] == ("adam", "norm") and found["up.bias"] == ("adam", "bias")
    assert found["embed.weight"] == ("adam", "embedding") and found["lm_head.weight"] == ("adam", "output head")


def test_a_layer_called_norm_is_one_unless_its_type_is_linear_or_a_convolution() -> None:
    declared = holder("Any", {"weight": (12, 8)}, in_features=8, out_features=12)
    found = {
        name: kinds(nn.ModuleDict({"norm": layer}))["norm.weight"]
        for name, layer in {"declared": declared, "linear": nn.Linear(8, 12), "conv": nn.Conv1d(8, 12, 3)}.items()
    }
    assert found == {"declared": ("adam", "norm"), "linear": ("cosmos", "hidden"), "conv": ("cosmos", "hidden")}


@pytest.mark.parametrize(("size", "kind"), [((1, 7, 16), "embedding"), ((4, 8, 1), "vector"), ((8, 1), "vector")])
def test_a_table_for_the_whole_batch_and_single_columns_get_adam_without_a_name(
    size: tuple[int, ...], kind: str
) -> None:
    assert kinds(holder("Any", {"mixing": size})) == {"mixing": ("adam", kind)}


def test_a_kernel_for_each_sample_is_not_a_table_for_the_whole_batch() -> None:
    """StyleGAN2's modulated convolution stores (1, out, in, k, k)."""
    with pytest.raises(ValueError, match=r"'weight' of shape \(1, 8, 4, 3, 3\).*is not known to be"):
        param_groups(holder("ModulatedConv2d", {"weight": (1, 8, 4, 3, 3)}))
    tables = {"const": (1, 8, 4, 4), "prompt_pad": (1, 5, 3, 7, 9), "weight": (1, 7, 16)}
    assert set(kinds(holder("Any", tables)).values()) == {("adam", "embedding")}


def test_the_only_matrix_of_declared_sizes_is_the_weight_by_any_name() -> None:
    assert kinds(holder("Any", {"kernel": (12, 8), "b": (12,)}, in_dim=8, out_dim=12))["kernel"] == ("cosmos", "hidden")
    for shapes in ({"kernel": (11, 8)}, {"kernel": (12, 8), "sigma": (12, 8)}):
        with pytest.raises(ValueError, match="'kernel'.*is not known to be"):
            param_groups(holder("Any", shapes, in_dim=8, out_dim=12))


def test_scales_and_state_space_matrices_are_not_decayed() -> None:
    """They are matrices by shape only: decay would pull A_log towards 0 over a long run."""
    model = holder("Mixer", {"A_log": (16, 4), "D": (2, 16), "layer_scale": (3, 16)})
    (group,) = param_groups(model)
    assert (group["rule"], group["weight_decay"], len(group["params"])) == ("adam", 0.0, 3)
    (group,) = param_groups(model, decay="all")
    assert "weight_decay" not in group


# -- the advice in the error -------------------------------------------------------------------------------------------


def raw(rows: int = 8) -> nn.Module:
    """Return a layer of an unknown class, which is not recognized."""
    return holder("EqualLinear", {"weight": (rows, 8), "bias": (rows,)})


@pytest.mark.parametrize(
    ("model", "advised"),
    [(nn.Sequential(raw(), nn.Linear(8, 8), nn.Linear(8, 3)), ["0.weight"]),
     (nn.Sequential(raw(), nn.Linear(8, 8), raw()), ["0.weight", "2.weight"]),
     (nn.Sequential(raw(), raw()), ["*.weight"]),
     (nn.Sequential(raw(), nn.Sequential(nn.Linear(8, 8)), raw()), ["0.weight", "2.weight"]),
     (nn.ModuleDict({"layers": nn.ModuleList([raw(), nn.ModuleDict({"up": nn.Linear(8, 8)})])}), ["layers.0.weight"]),
     (nn.ModuleDict({"a": nn.ModuleList([raw(), raw()]), "up": nn.Linear(8, 8)}), ["a.*.weight"])],
)  # fmt: skip
def test_the_advice_of_the_error_changes_no_parameter_that_is_known(model: nn.Module, advised: list[str]) -> None:
    """A `*` matches dots too, so a pattern for all layers may match layers of another kind."""
    with pytest.raises(ValueError, match="is not known to be") as error:
        param_groups(model)
    (text,) = re.findall(r"overrides=(\{.*?\})\)", str(error.value))
    assert list(eval(text)) == advised
    linear = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert {name for name, kind in kinds(model, overrides=eval(text)).items() if kind == ("cosmos", "hidden")} == linear
