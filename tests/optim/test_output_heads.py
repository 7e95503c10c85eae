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
    with pytest.raises(ValueError, match="is not a module of this model"):
        rules(model, head="clasify")


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


def test_several_layers_shaped_as_an_embedding_are_not_heads() -> None:
    model = nn.ModuleDict({"positions": nn.Embedding(64, 16), "a": nn.Linear(16, 64), "b": nn.Linear(16, 64)})
    assert rules(model)["a.weight"] == rules(model)["b.weight"] == "cosmos"
    blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(16, 64)})])
    assert rules(nn.ModuleDict({"positions": nn.Embedding(64, 16), "blocks": blocks}))["blocks.0.up.weight"] == "cosmos"
