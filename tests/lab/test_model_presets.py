"""Sizes, names, initial weights and error messages of the presets."""

from typing import Any

import pytest
import torch

from cosmos_lab.models import PRESETS, Decoder, build


@pytest.mark.parametrize(
    ("preset", "total", "without_embedding"),
    [
        ("tiny", 526_976, 461_440),
        ("llama-10m", 10_522_880, 8_425_728),
        ("llama-60m", 58_073_600, 41_689_600),
        ("llama-130m", 162_417_408, 137_841_408),
        ("llama-350m", 367_969_280, 335_201_280),
        ("llama-350m-16l", 267_158_528, 234_390_528),
        ("llama-1b", 1_339_082_752, 1_273_546_752),
        ("gpt2-small", 123_689_472, 123_689_472),
        ("gpt2-medium", 353_822_720, 353_822_720),
        ("nanogpt-124m-record4", 123_532_032, 123_532_032),
        ("nanogpt-124m-record5", 123_568_128, 123_568_128),
        ("nanogpt-350m-plain", 405_012_480, 353_501_184),
    ],
)
def test_presets_have_the_published_sizes(preset: str, total: int, without_embedding: int) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert (model.num_parameters(), model.num_parameters(non_embedding=True)) == (total, without_embedding)
    assert model.config.head_dim == (128 if preset == "nanogpt-124m-record5" else 64)


def test_every_preset_has_a_published_size_in_this_file() -> None:
    mark = test_presets_have_the_published_sizes.pytestmark[0]  # type: ignore[attr-defined]
    assert [row[0] for row in mark.args[1]] == list(PRESETS)


def test_parameters_have_the_names_that_the_optimizer_routes_by() -> None:
    names = {name: tuple(parameter.shape) for name, parameter in build("tiny", depth=1).named_parameters()}
    assert names == {
        "embed.weight": (512, 128),
        "blocks.0.norm1.weight": (128,),
        **{f"blocks.0.attn.{part}.weight": (128, 128) for part in "qkvo"},
        "blocks.0.norm2.weight": (128,),
        "blocks.0.mlp.gate.weight": (344, 128),
        "blocks.0.mlp.up.weight": (344, 128),
        "blocks.0.mlp.down.weight": (128, 344),
        "norm.weight": (128,),
        "head.weight": (512, 128),
    }
    assert set(build("tiny").state_dict()) == {name for name, _ in build("tiny").named_parameters()}


@pytest.mark.parametrize(("rule", "factor"), [("normal", 1.0), ("depth", 0.5), ("zero", 0.0)])
def test_initial_weights_follow_the_config(rule: str, factor: float) -> None:
    model = build("tiny", init_out=rule, embed_std=1.0)
    block = model.blocks[0]
    stds = [float(w.detach().std()) for w in (block.attn.q.weight, block.attn.o.weight, block.mlp.down.weight)]
    assert stds == pytest.approx([0.02, 0.02 * factor, 0.02 * factor], rel=0.03)  # 16,384 draws: 0.6 % standard error
    assert float(model.embed.weight.detach().std()) == pytest.approx(1.0, rel=0.03)
    assert torch.equal(block.norm1.weight, torch.ones(128))


def test_weights_depend_on_the_seed_alone() -> None:
    first, second = (build("tiny", generator=torch.Generator().manual_seed(7)) for _ in range(2))
    other = build("tiny", generator=torch.Generator().manual_seed(8))
    assert torch.equal(first.blocks[1].mlp.up.weight, second.blocks[1].mlp.up.weight)
    assert not torch.equal(first.blocks[1].mlp.up.weight, other.blocks[1].mlp.up.weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name_or_config": "llama-7b"}, "no preset 'llama-7b'; choose one of tiny, llama-10m"),
        ({"name_or_config": "tiny", "widht": 64}, "no field widht; the fields are activation"),
        ({"name_or_config": "tiny", "width": 100}, "width 100 is not a multiple of head_dim 64"),
        ({"name_or_config": "tiny", "depth": 0}, "depth is 0; give a positive integer"),
        ({"name_or_config": "tiny", "norm": "batch"}, "norm is 'batch'; choose one of rms"),
        ({"name_or_config": "tiny", "head_dim": 1}, "head_dim 1 is odd"),
    ],
)
def test_wrong_configs_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_too_long_a_sequence_is_explained() -> None:
    model = build("tiny", max_seq_len=8)
    with pytest.raises(ValueError, match="9 tokens in a sequence, but max_seq_len is 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))
