"""Output heads: which layers are found, under any name and wrapper."""

import pytest
from torch import nn

from cosmos_optim.routing.param_groups import routes


def rules(model: nn.Module, **kwargs) -> dict[str, str]:
    return {parameter.name: route.rule for parameter, route in routes(model, **kwargs)}


def test_the_argument_head_decides_and_a_block_named_output_is_hidden() -> None:
    layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(4, 4)})])
    model = nn.ModuleDict({"classify": nn.Linear(4, 3), "layers": layers})
    assert rules(model)["classify.weight"] == "cosmos"
    assert rules(model)["layers.0.output.weight"] == "cosmos"
    assert rules(model, head="classify")["classify.weight"] == "adam"
    assert rules(model, head=model["classify"])["classify.weight"] == "adam"
    with pytest.raises(ValueError, match="head='clasify' is not a module of this model"):
        rules(model, head="clasify")
    with pytest.raises(ValueError, match="head='clasify' is not a module of this model"):
        rules(model, head=["classify", "clasify"])


def test_heads_that_are_given_are_added_to_those_found() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 16), "lm_head": nn.Linear(16, 49)})
    model["policy"], model["value"] = nn.Linear(16, 7), nn.Linear(16, 3)
    alone, both = {"embed.weight", "lm_head.weight"}, ("policy", model["value"])
    for head, added in (("policy", {"policy.weight"}), ([], set()), (both, {"policy.weight", "value.weight"}),
                        (["lm_head", *both], {"policy.weight", "value.weight"})):  # fmt: skip
        found = {name for name, rule in rules(model, head=head).items() if rule == "adam" and name.endswith("weight")}
        assert found == alone | added
    found = rules(model, head="policy", overrides={"lm_head.weight": "cosmos"})
    assert (found["policy.weight"], found["lm_head.weight"]) == ("adam", "cosmos")


def test_a_head_that_is_tied_to_an_earlier_layer_is_a_head() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 16), "proj": nn.Linear(16, 40, bias=False)})
    model["mid"], model["classify"] = nn.Linear(40, 16), nn.Linear(16, 40, bias=False)
    model["classify"].weight = model["proj"].weight
    assert rules(model)["proj.weight"] == "cosmos"
    assert rules(model, head="classify")["proj.weight"] == "adam"
    assert rules(model, head="classify")["mid.weight"] == "cosmos"
    assert rules(model, head="proj")["proj.weight"] == "adam"


class Wrapped(nn.Module):
    """A decoder with a given head under a given name."""

    def __init__(self, name: str, head: nn.Module) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.add_module(name, head)


class AsInTransformers(Wrapped):
    """A model that returns its head, which has an unusual name."""

    def __init__(self) -> None:
        super().__init__("vocab_mapping", nn.ModuleDict({"dense": nn.Linear(16, 16), "last": nn.Linear(16, 49)}))

    def get_output_embeddings(self) -> nn.Module:
        return self.vocab_mapping["last"]


class Adapted(nn.Module):
    """An adapter's copy beside the original."""

    def __init__(self) -> None:
        super().__init__()
        self.original_module = nn.Linear(16, 50)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(16, 50)})


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(16, 49, bias=False))


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (Wrapped("lm_head", nn.Linear(16, 49)), {"lm_head.weight"}),
        (Wrapped("classifier", nn.Linear(16, 3)), {"classifier.weight"}),
        (Wrapped("lm_head", normed()), {f"lm_head.parametrizations.weight.original{i}" for i in (0, 1)}),
        (nn.Sequential(Wrapped("lm_head", nn.Linear(16, 49))), {"0.lm_head.weight"}),
        (Wrapped("lm_head", nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 49))), {"lm_head.1.weight"}),
        (Wrapped("classifier", nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))), {"classifier.2.weight"}),
        (Wrapped("lm_head", Adapted()), {"lm_head.original_module.weight", "lm_head.modules_to_save.default.weight"}),
        (Wrapped("predict", nn.Linear(16, 50)), {"predict.weight"}),
        (AsInTransformers(), {"vocab_mapping.last.weight"}),
    ],
)
def test_wrapped_output_heads_are_found(model: nn.Module, heads: set[str]) -> None:
    """By name, by `get_output_embeddings`, or as the one layer with as many outputs as the embedding has rows."""
    found = {parameter.name for parameter, route in routes(model) if route.rule == "adam" and parameter.p.dim() > 1}
    assert {name for name in found if "embed" not in name} == heads


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(16, 50) for _ in range(count))


def test_several_layers_shaped_as_the_embedding_are_heads() -> None:
    model = Wrapped("lm_head", nn.Linear(16, 50))
    model.mtp, model.outs, model.extra = linears(3), linears(1), nn.Linear(16, 50)
    model.medusa = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 50)) for _ in range(2))
    found = {name for name, rule in rules(nn.ModuleDict({"module": model})).items() if rule == "cosmos"}
    assert found == {"module.up.weight", "module.medusa.0.0.weight", "module.medusa.1.0.weight"}


def test_layers_shaped_as_the_embedding_stay_hidden_in_blocks_and_if_a_layer_takes_their_output() -> None:
    model = Wrapped("lm_head", nn.Linear(16, 50))
    model.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 50), "heads": linears(2)}) for _ in range(2))
    model.mixed = nn.ModuleList([nn.Linear(16, 50), nn.Linear(16, 16)])
    found = rules(model)
    assert found["blocks.0.up.weight"] == found["blocks.1.heads.0.weight"] == found["mixed.0.weight"] == "cosmos"
    model.extra = nn.Linear(16, 50)
    assert rules(model)["extra.weight"] == "adam"
    model.down = nn.Linear(50, 16)
    assert rules(model)["extra.weight"] == "cosmos"
    assert rules(model)["lm_head.weight"] == rules(model, head="extra")["extra.weight"] == "adam"


def test_several_layers_shaped_as_a_table_of_positions_are_not_heads() -> None:
    model = nn.ModuleDict({"positions": nn.Embedding(64, 16), "a": nn.Linear(16, 64), "b": nn.Linear(16, 64)})
    assert rules(model)["a.weight"] == rules(model)["b.weight"] == "cosmos"
    blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 64)})])
    assert rules(nn.ModuleDict({"positions": nn.Embedding(64, 16), "blocks": blocks}))["blocks.0.up.weight"] == "cosmos"


class Attention(nn.Module):
    """An attention with a layer called output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(16, 8), nn.Linear(8, 16)


def test_a_layer_called_output_is_a_head_only_at_the_end_of_a_model() -> None:
    for name in ("attn", "attention", "mixer"):
        hidden = nn.ModuleDict({"embed": nn.Embedding(50, 16), name: Attention(), "lm_head": nn.Linear(16, 50)})
        assert rules(hidden)[f"{name}.output.weight"] == "cosmos"
        assert rules(hidden)["lm_head.weight"] == "adam"
    assert rules(Attention())["output.weight"] == "cosmos"
    for name in ("output", "fc", "last_linear"):
        model = Wrapped(name, nn.Linear(16, 3))
        assert rules(model)[f"{name}.weight"] == "adam"
        assert rules(nn.ModuleDict({"module": model}))[f"module.{name}.weight"] == "adam"
    first = nn.ModuleDict({"fc": nn.Linear(3, 16), "embed": nn.Embedding(50, 16), "up": nn.Linear(16, 16)})
    assert rules(first)["fc.weight"] == "cosmos"


def test_a_head_that_two_modules_share_is_found() -> None:
    shared = nn.Linear(16, 3)
    model = nn.ModuleDict({"decoder": nn.ModuleDict({"embed": nn.Embedding(50, 16), "refine": shared})})
    model["class_embed"] = nn.ModuleList([shared, nn.Linear(16, 3)])
    found = rules(model)
    assert found["decoder.refine.weight"] == found["class_embed.1.weight"] == "adam"


class Transform(nn.Module):
    """A dense layer before the output, or an output of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.norm, self.out_proj = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, width)


def test_the_last_layer_of_a_head_is_its_output() -> None:
    model = Wrapped("classifier", Transform(3))
    assert rules(model)["classifier.dense.weight"] == "cosmos"
    assert rules(model)["classifier.out_proj.weight"] == "adam"
    assert rules(Wrapped("pooling_head", Transform(16)))["pooling_head.out_proj.weight"] == "cosmos"


def test_a_head_that_feeds_another_head_is_hidden() -> None:
    model = Wrapped("prediction_head", Transform(24))
    model.decoder_head = nn.Linear(24, 3)
    assert rules(model)["prediction_head.out_proj.weight"] == "cosmos"
    assert rules(model)["decoder_head.weight"] == "adam"


class Declaring(Wrapped):
    """A model with several unusual heads, which it returns as timm does."""

    def __init__(self) -> None:
        super().__init__("top", nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 7)))
        self.second, self.mapping, self.num_classes = nn.Linear(16, 7), nn.Linear(8, 16), 16

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.top, self.second


def test_all_layers_of_declared_classifiers_are_heads() -> None:
    found = {name: rule for name, rule in rules(Declaring()).items() if name.endswith("weight")}
    assert {name for name, rule in found.items() if rule == "adam"} == {
        "embed.weight", "top.0.weight", "top.1.weight", "second.weight",
    }  # fmt: skip


def test_layers_with_as_many_outputs_as_declared_classes_are_heads() -> None:
    model = Wrapped("mapping", nn.ModuleDict({"before": nn.Linear(16, 8), "last": nn.Linear(8, 5)}))
    assert rules(model)["mapping.last.weight"] == "cosmos"
    model.num_classes = 5
    assert rules(model)["mapping.last.weight"] == "adam"
    assert rules(model)["mapping.before.weight"] == rules(model)["up.weight"] == "cosmos"
    model.num_classes = 16  # the width: a layer from 16 to 16 is hidden
    assert rules(model)["up.weight"] == "cosmos"


class MLP(nn.Module):
    """Layers in a list, applied one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 4)])


def test_all_outputs_of_an_adaptive_softmax_are_heads() -> None:
    softmax = nn.AdaptiveLogSoftmaxWithLoss(16, 100, [10, 50], div_value=2.0)
    found = rules(nn.ModuleDict({"embed": nn.Embedding(100, 16), "up": nn.Linear(16, 16), "out": softmax}))
    assert {name for name, rule in found.items() if rule == "cosmos"} == {
        "up.weight", "out.tail.0.0.weight", "out.tail.1.0.weight",
    }  # fmt: skip


def test_lists_of_heads_are_heads_and_an_mlp_in_a_head_has_one_output() -> None:
    model = Wrapped("class_embed", nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)]))
    model.bbox_predictor = MLP()
    heads = {name for name, rule in rules(model).items() if rule == "adam" and name.endswith("weight")}
    assert heads == {
        "embed.weight", "class_embed.0.weight", "class_embed.1.weight", "bbox_predictor.layers.1.weight",
    }  # fmt: skip


def test_a_key_with_a_hyphen_or_a_space_is_read_in_words() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head-1": nn.Linear(4, 3), "task head": nn.Linear(4, 2)})
    assert {name for name, rule in rules(model).items() if rule == "adam"} >= {"head-1.weight", "task head.weight"}
    assert rules(model)["body.weight"] == "cosmos"
