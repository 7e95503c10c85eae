"""The presets and recipes of modded-NanoGPT against the published records that they name."""

import math

import pytest
import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.models import build, resolve
from cosmos_lab.optimizers import build_optimizer
from cosmos_lab.recipes import get_recipe
from cosmos_lab.run.schedule import lr_factor

RECIPES = ["nanogpt-124m-record4", "nanogpt-124m-record5", "nanogpt-350m-plain"]
# Mean loss of the records' own models (two layers in float32, rotary tables of record 5 in float32 too), with the
# weights and tokens of the test below. They turn queries and keys the other way, so there the second half of each
# head has the opposite sign.
RECORD_LOSS = {"nanogpt-124m-record4": (128, 4.498177), "nanogpt-124m-record5": (256, 4.421766)}


def factors(config: RunConfig) -> list[float]:
    """Return the share of the peak rate at every step."""
    return [lr_factor(step + 1, config.training.steps, config.schedule) for step in range(config.training.steps)]


def groups_of(config: RunConfig) -> dict[str, dict[str, object]]:
    """Return the optimizer's parameter group of each parameter of a narrow model."""
    preset = resolve(config.model.model)
    model = build(preset, width=preset.head_dim, depth=1, mlp=96, vocab_size=128)
    groups = build_optimizer(model, config.optimizer).param_groups
    return {name: group for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("preset", RECORD_LOSS)
def test_a_records_preset_computes_the_loss_of_the_records_model(preset: str) -> None:
    width, expected = RECORD_LOSS[preset]
    model = build(preset, width=width, depth=2, mlp=4 * width, vocab_size=61)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            wave = torch.arange(i, i + p.numel(), dtype=torch.float64).square().sin()
            p.copy_(0.1 * wave.view_as(p))
    tokens = torch.arange(33).square() % 61
    assert model(tokens[None, :-1], tokens[None, 1:]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("preset", "vocabulary", "heads", "output"), [(RECIPES[0], 50_257, 12, 1.0), (RECIPES[1], 50_304, 6, 0.0)]
)
def test_a_records_preset_has_its_sizes_and_initial_weights(
    preset: str, vocabulary: int, heads: int, output: float
) -> None:
    config = resolve(preset)
    assert (config.width, config.depth, config.mlp) == (768, 12, 3072)
    assert (config.vocab_size, config.heads) == (vocabulary, heads)
    assert config.tied and config.residual_fp32
    model = build(preset, depth=1, vocab_size=1000)
    block = model.blocks[0]
    inside = (model.embed.weight, block.attn.q.weight, block.mlp.up.weight)
    outputs = (block.attn.o.weight, block.mlp.down.weight)
    for matrix, share in [*((w, 1.0) for w in inside), *((w, output) for w in outputs)]:
        # Uniform up to 1 / sqrt(n) in the log: the variance is 1 / (3 n).
        assert float(matrix.detach().std()) == pytest.approx(share / math.sqrt(3 * matrix.shape[1]), rel=0.02)


@pytest.mark.parametrize(("name", "steps", "fall"), [(RECIPES[0], 6200, 1800), (RECIPES[1], 5100, 1450)])
def test_the_schedule_of_a_short_record_is_the_logs(name: str, steps: int, fall: int) -> None:
    """The logs count steps from 0: constant, then (steps - step) / fall."""
    config = get_recipe(name).config
    assert config.training.steps == steps
    assert (config.training.batch, config.data.seq_len, config.logging.val_tokens) == (512, 1024, 10_485_760)
    assert factors(config) == pytest.approx([min(1.0, (steps - step) / fall) for step in range(steps)])


def test_the_schedule_of_the_medium_track_falls_to_a_tenth() -> None:
    """The log counts steps from 0: w + 0.1 (1 - w) with w = min(1, (1 - step / 7500) / 0.4)."""
    weights = [min(1.0, (1 - step / 7500) / 0.4) for step in range(7500)]
    assert factors(get_recipe("nanogpt-350m-plain").config) == pytest.approx([w + 0.1 * (1 - w) for w in weights])


@pytest.mark.parametrize("name", RECIPES[:2])
def test_adams_beta1_stays_the_logs_if_the_momentum_of_muon_changes(name: str) -> None:
    runs = get_recipe(name).runs()
    assert sorted((run.optimizer.optimizer, run.optimizer.beta1) for run in runs) == [
        ("cosmos-paper", 0.9), ("cosmos-paper", 0.95), ("muon", 0.9), ("muon", 0.95),
    ]  # fmt: skip
    for run in runs:
        groups = groups_of(run)
        hidden, embedding = groups["blocks.0.attn.q.weight"], groups["embed.weight"]
        momentum = hidden["momentum"] if run.optimizer.optimizer == "muon" else hidden["betas"][0]  # type: ignore[index]
        assert momentum == run.optimizer.beta1
        assert (hidden["lr"], hidden["weight_decay"]) == (3.6e-4, 0.0)
        assert (embedding["lr"], embedding["betas"], embedding["eps"]) == (3.6e-3, (0.9, 0.95), 1e-8)


def test_the_medium_track_has_its_unusual_rates() -> None:
    for run in get_recipe("nanogpt-350m-plain").runs():
        groups = groups_of(run)
        assert groups["embed.weight"]["lr"] == 0.3 and groups["head.weight"]["lr"] == 3e-3
        for name in ("embed.weight", "head.weight"):
            assert groups[name]["betas"] == (0.8, 0.95) and groups[name]["eps"] == 1e-10
        hidden = groups["blocks.0.attn.q.weight"]
        assert hidden["lr"] == pytest.approx(0.025 / 32)
        if run.optimizer.optimizer == "cosmos-paper":
            assert hidden["betas"] == (run.optimizer.beta1, 0.95) and hidden["gamma"] == 0.2


def test_the_reduced_comparison_has_the_model_rates_and_schedule_of_record_5() -> None:
    reduced, record = get_recipe("wiki-nanogpt").config, get_recipe("nanogpt-124m-record5").config
    assert reduced.model.model == record.model.model and reduced.schedule == record.schedule
    for name in ("lr", "adam_lr", "adam_beta1", "beta2", "eps", "gamma"):
        assert reduced.get(name) == record.get(name), name
    for run in get_recipe("wiki-nanogpt").runs():
        assert groups_of(run)["embed.weight"]["lr"] == run.optimizer.adam_lr


def test_a_model_with_scaled_attention_is_not_a_llama() -> None:
    assert resolve("tiny").is_llama and not resolve("tiny", scaled_attention=True).is_llama
