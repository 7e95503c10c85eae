"""Which modules are blocks, which are models, and which layers are no heads although a name or a shape says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import param_groups, plan

WIDTH, VOCABULARY = 16, 50


def made(**parts: nn.Module) -> nn.Module:
    """Return a module with these parts, in this order."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def on_adam(model: nn.Module, **options: Any) -> set[str]:
    """Return the layers that AdamW trains, without embeddings."""
    tables = {path for path, m in model.named_modules() if isinstance(m, nn.Embedding)}
    found = {name.removesuffix(".weight") for group in param_groups(model, **options) if group["rule"] == "adam"
             for name, p in group["params"] if p.dim() > 1}  # fmt: skip
    return found - tables


class AttentionHead(nn.Module):
    """One head of attention, as in Karpathy's lecture."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, 4, bias=False) for _ in range(3))


class Lecture(nn.Module):
    """Attention of several heads, each a module."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList(AttentionHead() for _ in range(4)), nn.Linear(WIDTH, WIDTH)


class Block(nn.Module):
    """A block with hidden layers that have names of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.sa, self.score, self.down = Lecture(), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.predictor = nn.Linear(WIDTH, 3)


class Net(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)


class ClassificationHead(nn.Module):
    """Two layers, of which the last is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)


def language_model(**blocks: nn.Module) -> nn.Module:
    return made(embed=nn.Embedding(VOCABULARY, WIDTH), **blocks, lm_head=nn.Linear(WIDTH, VOCABULARY))


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [{"blocks": nn.ModuleList([Block(), Block()])}, {"blocks": nn.Sequential(Block(), Block())},
     {"blocks": nn.ModuleDict({"layer_0": Block(), "layer_1": Block()})}, {"block0": Block(), "block1": Block()},
     {"stages": made(stage1=Block(), stage2=Block())}, {"blocks": nn.ModuleList([Block()])}],
)  # fmt: skip
def test_blocks_hold_no_heads_under_any_numbered_names(blocks: dict[str, nn.Module]) -> None:
    assert on_adam(language_model(**blocks)) == {"lm_head"}


def test_modules_of_one_class_under_other_names_may_be_heads() -> None:
    for names in (("start", "end"), ("head1", "head2"), ("classifier_0", "classifier_1")):
        heads = {name: ClassificationHead() for name in names}
        found = on_adam(language_model(**heads))
        assert found == {"lm_head"} | {f"{name}.out_proj" for name in names if name not in ("start", "end")}
        found = on_adam(language_model(**heads), head=[heads[name].out_proj for name in names])
        assert found == {"lm_head"} | {f"{name}.out_proj" for name in names}
    towers = {name: made(body=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 3)) for name in ("actor", "critic")}
    assert on_adam(nn.ModuleDict(towers)) == {"actor.head", "critic.head"}


def test_the_last_of_several_numbered_containers_can_have_the_declared_classes() -> None:
    model = made(conv=nn.Conv2d(3, 8, 3), fc1=nn.Sequential(nn.Linear(8, 16)), fc2=nn.Sequential(nn.Linear(16, 7)))
    model.num_classes = 7
    assert on_adam(model) == {"fc2.0"}


@pytest.mark.parametrize("name", ["sa", "self_attn", "attention", "mha"])
def test_heads_of_attention_are_hidden_in_a_single_block(name: str) -> None:
    assert on_adam(language_model(blocks=nn.Sequential(made(**{name: Lecture()})))) == {"lm_head"}


def test_heads_of_attention_are_hidden_without_a_block() -> None:
    assert on_adam(language_model(sa_heads=Lecture(), ffwd=nn.Linear(WIDTH, WIDTH))) == {"lm_head"}


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "heads"),
    [(nn.ModuleList([Net()]), {"0.head"}), (nn.ModuleList([Net(), Net()]), {"0.head", "1.head"}),
     (nn.ModuleList([made(stem=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 5))]), {"0.head"}),
     (made(members=nn.ModuleList([Net(), Net()])), {"members.0.head", "members.1.head"}),
     (made(members=nn.ModuleList([Net()]), head=nn.Linear(100, 3)), {"members.0.head", "head"}),
     (made(net1=Net(), net2=Net()), {"net1.head", "net2.head"}),
     (made(online=Net(), target=Net()), {"online.head", "target.head"}),
     (nn.Sequential(Net(), Net()), {"0.head", "1.head"})],
)  # fmt: skip
def test_the_heads_of_several_models_are_found(model: nn.Module, heads: set[str]) -> None:
    assert on_adam(model) == heads
    assert "no output head" not in str(plan(model, lr=1e-3))


def test_a_block_with_relative_positions_is_not_a_model() -> None:
    """T5's first block has the table of all blocks."""
    first, second = Block(), Block()
    first.sa.relative_attention_bias = nn.Embedding(32, 4)
    assert on_adam(language_model(block=nn.ModuleList([first, second]))) == {"lm_head"}


def test_the_last_layer_of_attention_with_relative_positions_is_hidden() -> None:
    layers = {name: nn.Linear(WIDTH, 24) for name in "qkv"}
    for table in ({"rel": nn.Embedding(32, 4)}, {"position_bias": nn.Embedding(32, 4)}):
        assert on_adam(language_model(cross=made(**layers, **table, out=nn.Linear(24, WIDTH)))) == {"lm_head"}


# -- layers that another one takes -------------------------------------------------------------------------------------


def test_a_layer_with_the_name_of_a_head_is_hidden_if_the_next_one_takes_its_output() -> None:
    pool = made(score=nn.Linear(WIDTH, 24), fc=nn.Linear(24, WIDTH))
    assert on_adam(language_model(pool=pool)) == {"lm_head"}
    joint = made(pred=nn.Linear(WIDTH, 24), norm=nn.LayerNorm(24), out=nn.Linear(24, VOCABULARY))
    assert "joint.pred" not in on_adam(made(embed=nn.Embedding(VOCABULARY, WIDTH), joint=joint))


def test_heads_beside_each_other_are_heads() -> None:
    """A layer between them, or a second head that returns as many features as it takes, takes none of the output."""
    apart = language_model(score=nn.Linear(WIDTH, 24), other=nn.Linear(WIDTH, 8), mix=nn.Linear(24, WIDTH))
    assert on_adam(apart) == {"score", "lm_head"}
    image, text = made(proj=nn.Linear(24, WIDTH)), made(proj=nn.Linear(WIDTH, WIDTH))
    assert on_adam(made(stem=nn.Conv2d(3, 24, 3), image_head=image, text_head=text)) == {"image_head.proj"}


@pytest.mark.parametrize("name", ["pos", "time", "embed"])
def test_a_hidden_layer_shaped_as_a_table_is_not_a_head(name: str) -> None:
    mlp = {"up": nn.Linear(WIDTH, 64), "down": nn.Linear(64, WIDTH)}
    table = nn.Embedding(64, WIDTH)
    assert on_adam(made(**{name: table}, inputs=nn.Linear(12, WIDTH), **mlp, outputs=nn.Linear(WIDTH, 12))) == set()
    assert on_adam(made(embed=table, block=made(**mlp), readout=nn.Linear(WIDTH, 64))) == {"readout"}


def test_a_layer_shaped_as_a_table_of_positions_is_not_a_head() -> None:
    assert on_adam(made(pos=nn.Embedding(64, WIDTH), up=nn.Linear(WIDTH, 64))) == set()
    assert on_adam(made(tokens=nn.Embedding(64, WIDTH), up=nn.Linear(WIDTH, 64))) == {"up"}


# -- attributes that cannot be read ------------------------------------------------------------------------------------


class NotReady(nn.Module):
    """A module like Lightning's, with properties and methods that need what is not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.weight = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(8, WIDTH))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    @property
    def num_classes(self) -> int:
        raise RuntimeError("it is not attached to a trainer")

    config = in_features = num_embeddings = num_experts = head_dim = num_classes

    def get_output_embeddings(self) -> nn.Module:
        raise RuntimeError("call setup() first")

    get_classifier = get_output_embeddings


class WithoutClassifier(NotReady):
    """The same, and it is asked for the number of classes."""

    get_classifier = property(lambda self: self.missing)


@pytest.mark.parametrize("kind", [NotReady, WithoutClassifier])
def test_attributes_that_raise_do_not_end_routing(kind: type[nn.Module]) -> None:
    model = kind()
    assert on_adam(model, overrides={"weight": "cosmos"}) == {"lm_head"}
    with pytest.raises(ValueError, match="is not known to be"):
        param_groups(model)
    attention = made(model=model, **{name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj")})
    param_groups(attention, overrides={"model.weight": "cosmos"}, split_heads=4)


class Tower(nn.Module):
    """A part with an output that may be all that the model has."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(WIDTH, 24), nn.Linear(24, classes)


def test_numbered_modules_with_other_shapes_or_without_another_head_are_towers() -> None:
    for classes in ((2, 5), (3, 3)):
        model = made(branch1=Tower(classes[0]), branch2=Tower(classes[1]))
        assert on_adam(model) == {"branch1.head", "branch2.head"}
    assert on_adam(made(branch1=Tower(3), branch2=Tower(3), classifier=nn.Linear(WIDTH, 3))) == {"classifier"}


class TimeBlock(nn.Module):
    """A block with its own embedding, of time steps or labels."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.linear, self.out = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 24)


class WideBlock(nn.Module):
    """A block with a table as long as its layers are wide."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up, self.gate = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)


@pytest.mark.parametrize("kind", [TimeBlock, WideBlock])
def test_a_block_with_a_table_of_its_own_is_not_a_model(kind: type[nn.Module]) -> None:
    blocks = nn.ModuleList(kind() for _ in range(3))
    head = nn.Linear(WIDTH, VOCABULARY)
    assert on_adam(made(embed=nn.Embedding(VOCABULARY, WIDTH), blocks=blocks, lm_head=head)) == {"lm_head"}


def test_a_head_of_the_model_may_feed_its_predictions_back() -> None:
    back = nn.Linear(VOCABULARY, WIDTH)
    for name in ("lm_head", "classifier", "predictor"):
        parts = {name: nn.Linear(WIDTH, VOCABULARY), "conditioning": back}
        assert on_adam(made(trunk=nn.Linear(WIDTH, WIDTH), **parts)) == {name}


def test_an_item_of_a_list_may_also_be_elsewhere_in_the_model() -> None:
    """As in transformers' HGNetV2, whose classifier is a list with the pooling that the model also holds itself."""
    pool = nn.AdaptiveAvgPool2d(1)
    stem, head = nn.Conv2d(3, WIDTH, 4), nn.Linear(WIDTH, 7)
    model = made(stem=stem, pool=pool, classifier=nn.ModuleList([pool, head]))
    assert on_adam(model) == {"classifier.1"}


@pytest.mark.parametrize("name", ["final_layer", "proj_out", "fc_out", "decoder"])
def test_a_last_layer_with_the_name_of_one_is_a_head(name: str) -> None:
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(2))
    assert on_adam(made(patches=nn.Linear(12, WIDTH), blocks=blocks, **{name: nn.Linear(WIDTH, 12)})) == {name}
    assert on_adam(made(prenet=made(**{name: nn.Linear(12, WIDTH)}), blocks=blocks)) == set(), "not the last one"


def test_the_last_layer_of_a_diffusion_model_is_its_head() -> None:
    """DiT modulates the norm before it, and guided diffusion has a norm and an activation there."""
    linear, modulation = nn.Linear(WIDTH, 12), nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(2))
    transformer = made(blocks=blocks, final_layer=made(linear=linear, modulation=modulation))
    assert on_adam(transformer) == {"final_layer.linear"}
    out = nn.Sequential(nn.GroupNorm(4, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, 3, 3))
    assert on_adam(made(stem=nn.Conv2d(3, WIDTH, 3), middle=nn.Conv2d(WIDTH, WIDTH, 3), out=out)) == {"out.2"}


def up(n: int, m: int) -> nn.Module:
    """Return a block of a UNet."""
    return made(up=nn.ConvTranspose2d(n, m, 2), convs=nn.Sequential(nn.Conv2d(n, m, 3), nn.Conv2d(m, m, 3)))


@pytest.mark.parametrize("end", [
    nn.ModuleList([up(64, 32), up(32, 16)]),
    nn.ModuleList([nn.Conv2d(64, 32, 3), nn.Conv2d(32, 16, 3)]),
    made(project=nn.Linear(64, 32), block=made(up=nn.Linear(32, 48), down=nn.Linear(48, 32))),
    made(table=nn.Embedding(50, 32), mix=nn.Linear(64, 32), rnn=nn.GRU(32, 32)),
    nn.Sequential(nn.Conv2d(64, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
], ids=["blocks", "layers", "features", "recurrent", "norm"])  # fmt: skip
@pytest.mark.parametrize("name", ["decoder", "out"])
def test_a_last_part_that_is_no_layer_and_ends_in_none_is_not_a_head(name: str, end: nn.Module) -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3))
    assert on_adam(made(encoder=encoder, **{name: end})) == set()


def test_the_last_layer_of_an_autoencoder_is_its_head() -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3))
    decoder = nn.Sequential(nn.ConvTranspose2d(64, 32, 2), nn.ReLU(), nn.ConvTranspose2d(32, 3, 2), nn.Sigmoid())
    assert on_adam(made(encoder=encoder, decoder=decoder)) == {"decoder.2"}


def test_a_last_layer_beside_an_embedding_is_hidden_if_the_next_part_takes_its_output() -> None:
    """A quantizer has a codebook, and a block of a UNet a table of times."""
    quantizer = made(proj_in=nn.Linear(64, 8), codebook=nn.Embedding(50, 8), proj_out=nn.Linear(8, 64))
    block = made(times=nn.Embedding(50, 64), conv=nn.Conv2d(64, 64, 3), conv_out=nn.Conv2d(64, 32, 3))
    model = made(stem=nn.Conv2d(3, 64, 3), quantizer=quantizer, block=block, conv_out=nn.Conv2d(32, 3, 3))
    assert on_adam(model) == {"conv_out"}


def test_the_output_projection_of_a_block_is_hidden() -> None:
    mixer = made(in_proj=nn.Linear(WIDTH, 64), conv1d=nn.Conv1d(32, 32, 4), out_proj=nn.Linear(32, WIDTH))
    assert on_adam(mixer) == set()


def test_a_linear_layer_after_convolutions_is_not_the_conv_out_of_the_model() -> None:
    """An audio encoder of Qwen3 has it between its convolutions and its blocks, which come first in the module."""
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32) for _ in range(2))
    assert on_adam(made(blocks=blocks, conv=nn.Conv2d(1, 32, 3), conv_out=nn.Linear(32, WIDTH))) == set()
