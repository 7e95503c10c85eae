"""From options to optimizers: what a model's shape and a run's fields turn into."""

import pytest
import torch

from cosmos_lab.config import OptimizerOptions, RunConfig
from cosmos_lab.models import build
from cosmos_lab.optimizers import build_optimizer, hyperparameters


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("embedding_lr", [None, 0.1])
def test_adam_mini_knows_the_heads_of_queries_and_keys(head_dim: int, embedding_lr: float | None) -> None:
    model = build("tiny", width=128, depth=1, mlp=96, vocab_size=64, head_dim=head_dim)
    optimizer = build_optimizer(model, OptimizerOptions("adam-mini", lr=1e-3, embedding_lr=embedding_lr))
    tokens = torch.arange(16)[None]
    model(tokens, tokens).backward()
    optimizer.step()
    matrices = {name.split(".")[-2]: p for name, p in model.named_parameters() if p.dim() == 2}
    heads = 128 // head_dim
    rows = {"embed": 64, "v": 128, "o": 128, "gate": 96, "up": 96, "down": 128, "head": 64}
    assert {name: optimizer.state[p]["v"].numel() for name, p in matrices.items()} == {"q": heads, "k": heads, **rows}
    q = matrices["q"].grad
    assert q is not None
    mean = q.square().view(heads, head_dim * 128).mean(1)
    torch.testing.assert_close(optimizer.state[matrices["q"]]["v"].flatten(), (1 - 0.98) * mean)


@pytest.mark.parametrize(("option", "flag"), [("rank=4", "--rank"), ("adam_lr=2e-3", "--adam-lr"), ("lr=1e-3", "--lr")])
def test_an_option_with_its_own_flag_is_refused(option: str, flag: str) -> None:
    """The results would record the flag's value, and the option's would be used."""
    model = build("tiny", width=64, depth=1, mlp=96, vocab_size=64)
    with pytest.raises(ValueError, match=rf"--options {option.partition('=')[0]}=.*: give {flag} instead"):
        build_optimizer(model, OptimizerOptions("cosmos", rank=8, options=(option,)))


@pytest.mark.parametrize("name", ["adam", "adam-mini"])
def test_optimizers_with_one_rule_have_two_rates_if_adam_lr_is_given(name: str) -> None:
    model = build("tiny")
    outer = {"embed.weight", "head.weight", *(name for name, p in model.named_parameters() if p.ndim < 2)}
    for adam_lr, expected in ((None, 4e-3), (4e-3, 4e-3), (2e-2, 2e-2)):
        optimizer = build_optimizer(model, OptimizerOptions(name, lr=4e-3, adam_lr=adam_lr))
        rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
        assert rates == {name: expected if name in outer else 4e-3 for name, _ in model.named_parameters()}


def test_one_rate_of_adam_leaves_its_parameters_in_one_group() -> None:
    """So that checkpoints of one rate fit, however it is given."""
    counts = [
        len(build_optimizer(build("tiny"), OptimizerOptions("adam", lr=4e-3, adam_lr=adam_lr)).param_groups)
        for adam_lr in (None, 4e-3)
    ]
    assert counts == [1, 1]


def test_muon_norm_is_muon_with_normalized_updates() -> None:
    optimizer = build_optimizer(build("tiny"), OptimizerOptions("muon-norm", lr=1e-3, embedding_lr=4e-3))
    assert {group["normalize"] for group in optimizer.param_groups if group["rule"] == "muon"} == {True}


def test_an_option_that_the_optimizer_does_not_have_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"Muon has no argument 'nesterof' \(did you mean 'nesterov'\?\)"):
        build_optimizer(build("tiny"), OptimizerOptions("muon", options=("nesterof=True",)))


@pytest.mark.parametrize("optimizer", ["adam", "cosmos"])
def test_norms_run_at_their_separate_rate_with_embedding_and_head(optimizer: str) -> None:
    model = build("tiny", depth=1)
    rates = OptimizerOptions(optimizer, lr=1e-3, embedding_lr=4e-3, head_lr=4e-3, vector_lr=4e-3)
    rate = {p: group["lr"] for group in build_optimizer(model, rates).param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        outer = parameter.ndim < 2 or name in ("embed.weight", "head.weight")
        assert rate[parameter] == (4e-3 if outer else 1e-3), name


def test_split_heads_is_an_option_that_cuts_attention_by_the_heads_of_the_model() -> None:
    model = build("tiny", width=64, depth=1, mlp=96, vocab_size=64, head_dim=16)
    optimizer = build_optimizer(model, OptimizerOptions("cosmos", rank=8, options=("split_heads=true",)))
    cuts = {name: (group["split_sizes"], group["split_side"]) for group in optimizer.param_groups
            for name in group["param_names"] if group["split_sizes"]}  # fmt: skip
    assert cuts == {f"blocks.0.attn.{x}.weight": (16, "input" if x == "o" else "output") for x in "qkvo"}
    assert "cosmos.split_side" in hyperparameters(RunConfig().replace(model="tiny", options=("split_heads=true",)))
    with pytest.raises(ValueError, match="split_heads=True: AdamW"):
        build_optimizer(model, OptimizerOptions("adam", options=("split_heads=true",)))
