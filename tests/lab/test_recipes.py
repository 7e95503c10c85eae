"""Recipes against the paper's text: tokens, rates, ranks; and what shrinking does."""

import re
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.config import RunConfig
from cosmos_lab.models import build, resolve
from cosmos_lab.optimizers import build_optimizer, hyperparameters, optimizer_class
from cosmos_lab.profile.config import PROFILES
from cosmos_lab.recipes import RECIPES, get_recipe, label

# Sizes are whole numbers of heads, blocks and sequences, so a shrunk recipe is off by rounding.
ROUNDING = 0.4


def tokens(config: RunConfig) -> int:
    return config.training.steps * config.training.batch * config.data.seq_len


def rates(name: str, optimizer: str) -> set[float]:
    return {variant["lr"] for variant in get_recipe(name).grid if variant["optimizer"] == optimizer}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_valid_runs_with_distinct_names(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.name == name == recipe.config.logging.recipe
    runs = recipe.runs(seeds=(0, 1))
    assert len({run.run_name for run in runs}) == len(runs) == 2 * len(recipe.grid)
    for run in runs:
        run.check()
        resolve(run.model.model)
        optimizer_class(run.optimizer.optimizer)


@pytest.mark.parametrize("name", RECIPES)
def test_every_optimizer_of_a_recipe_can_be_built(name: str) -> None:
    recipe = get_recipe(name)
    preset = resolve(recipe.config.model.model)
    model = build(preset, width=preset.head_dim, depth=1, mlp=96, vocab_size=128)
    built = {}
    for run in recipe.runs():
        built.setdefault(run.optimizer.optimizer, build_optimizer(model, run.optimizer))
    assert set(built) == {variant["optimizer"] for variant in recipe.grid}


@pytest.mark.parametrize(
    ("name", "billions", "batch"),
    [
        ("llama-130m", 5, 960),
        ("llama-350m", 10, 2000),
        ("llama-1b", 26, 2000),
        ("gpt2-small", 5, 1024),
        ("llama-130m-256", 5, 3840),
    ],
)
def test_tokens_and_batch_are_the_paper_s(name: str, billions: float, batch: int) -> None:
    config = get_recipe(name).config
    assert tokens(config) / 1e9 == pytest.approx(billions, rel=0.05) and config.training.batch == batch


def test_table_2_tunes_what_the_paper_tunes() -> None:
    assert rates("llama-130m", "adam") == {2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3}
    assert rates("llama-130m", "soap") == {5e-4, 1e-3, 2e-3, 4e-3}
    assert rates("llama-350m", "soap") == rates("llama-350m", "adam")
    assert rates("llama-130m", "adam-mini") == {2e-3}
    assert rates("llama-130m", "galore") == {5e-3, 1e-2, 2e-2, 4e-2}
    assert rates("llama-130m", "muon") == rates("llama-130m", "cosmos-paper") == {1e-4, 2e-4, 5e-4, 1e-3, 2e-3}
    for name, rank in (("llama-130m", 256), ("llama-350m", 384)):
        galore = [run for run in get_recipe(name).runs() if run.optimizer.optimizer == "galore"]
        assert {run.optimizer.rank for run in galore} == {rank}
        assert {run.optimizer.options for run in galore} == {("update_gap=50", "scale=0.25")}
    assert get_recipe("llama-1b").published == {"adam": 12.97, "muon": 12.57, "cosmos-paper": 12.46}


def test_common_hyper_parameters_are_the_paper_s() -> None:
    for name in ("llama-130m", "llama-350m", "llama-1b"):
        config = get_recipe(name).config
        o, s = config.optimizer, config.schedule
        assert (o.beta1, o.beta2, o.eps, o.weight_decay, o.rank, o.adam_lr) == (0.9, 0.98, 1e-8, 0.0, 64, 2e-3)
        assert (s.schedule, s.warmup, s.final_lr, config.data.seq_len) == ("linear", 0.1, 0.0, 1024)


def test_only_muon_and_cosmos_have_a_second_rate() -> None:
    for run in get_recipe("llama-130m").runs():
        o = run.optimizer
        assert o.adam_lr == (2e-3 if o.optimizer in ("muon", "cosmos-paper", "cosmos") else o.lr)


@pytest.mark.parametrize("name", ["llama-130m-lr", "llama-130m-rank-gamma"])
def test_published_numbers_belong_to_runs(name: str) -> None:
    recipe = get_recipe(name)
    assert set(recipe.published) == {label(variant) for variant in recipe.grid}


def test_the_normalization_ablation_uses_muons_rates() -> None:
    assert rates("llama-130m-norm", "muon-norm") == rates("llama-130m-norm", "muon") == {1e-4, 2e-4, 5e-4, 1e-3, 2e-3}


NANOGPT = ["nanogpt-124m-record4", "nanogpt-124m-record5", "nanogpt-350m-plain"]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the hyper-parameters that a run's optimizer really has, by "rule.name"."""
    return hyperparameters(config)


@pytest.mark.parametrize("name", NANOGPT)
def test_nanogpt_searches_beta1_and_keeps_the_other_settings_of_the_paper(name: str) -> None:
    """Appendix: beta1 in {0.9, 0.95} for Muon and COSMOS, beta2 0.95 and gamma 0.2 for COSMOS without a search."""
    runs = get_recipe(name).runs()
    assert [(run.optimizer.optimizer, run.optimizer.beta1) for run in runs] == [
        ("muon", 0.9), ("muon", 0.95), ("cosmos-paper", 0.9), ("cosmos-paper", 0.95),
    ]  # fmt: skip
    assert len({run.optimizer.lr for run in runs}) == 1
    for run in runs:
        o, found = run.optimizer, settings_of(run)
        assert (o.beta2, o.weight_decay) == (0.95, 0.0)
        if o.optimizer == "muon":
            assert found["muon.momentum"] == o.beta1 and (o.rank, o.gamma) == (None, None)
        else:
            assert found["cosmos.betas"] == [o.beta1, 0.95]
            assert (found["cosmos.gamma"], found["cosmos.rank"]) == (0.2, 64)
        # AdamW trains embedding and head, with the momentum of the log.
        assert found["adam.betas"] == [0.8 if name == "nanogpt-350m-plain" else 0.9, 0.95]


@pytest.mark.parametrize("name", ["llama-130m", "llama-350m", "tiny", "wiki-60m"])
def test_soap_updates_its_basis_at_every_step(name: str) -> None:
    """The paper's SOAP (Algorithm 2) takes a QR decomposition at every step."""
    runs = [run for run in get_recipe(name).runs() if run.optimizer.optimizer == "soap"]
    assert runs
    assert {settings_of(run)["soap.frequency"] for run in runs} == {1}


@pytest.mark.parametrize("name", NANOGPT)
def test_soap_is_not_in_nanogpt_but_can_be_added_with_any_frequency(name: str) -> None:
    """The paper compares Muon and COSMOS there. SOAP, if added, has the set-up's betas."""
    recipe = get_recipe(name)
    assert {variant["optimizer"] for variant in recipe.grid} == {"muon", "cosmos-paper"}
    for extra, frequency in (([], 1), ([("soap", {"frequency": 10})], 10)):
        (run,) = recipe.runs(optimizers=["soap"], lrs=[1e-3], extra=extra)
        found = settings_of(run)
        assert found["soap.frequency"] == frequency and found["soap.betas"] == [0.9, 0.95]


def test_gpt2_is_compared_on_training_loss() -> None:
    assert {get_recipe(name).metric for name in ("gpt2-small", "gpt2-medium")} == {"final_train_loss"}
    assert get_recipe("llama-130m").metric == "final_val_loss"


@pytest.mark.parametrize("name", ["llama-130m", "llama-1b", "gpt2-small", "nanogpt-350m-plain"])
@pytest.mark.parametrize("scale", [0.05, 0.25])
def test_scale_shrinks_model_and_tokens_together(name: str, scale: float) -> None:
    whole, small = get_recipe(name).config, get_recipe(name, scale).config.check()

    def hidden(config: RunConfig) -> float:
        model = resolve(config.model.model)
        width, depth = config.model.width or model.width, config.model.depth or model.depth
        return depth * (4 * width**2 + 3 * width * (config.model.mlp or model.mlp))

    assert hidden(small) / hidden(whole) == pytest.approx(scale, rel=ROUNDING)
    assert tokens(small) / tokens(whole) == pytest.approx(scale, rel=ROUNDING)
    assert small.training.batch < whole.training.batch and small.optimizer == whole.optimizer
    assert small.model.width % 64 == 0 and small.model.mlp % 8 == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5])
def test_a_scale_outside_its_range_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"--scale must be in \(0, 1\]"):
        get_recipe("llama-130m", scale)


def test_optimizers_rates_and_seeds_can_be_chosen() -> None:
    recipe = get_recipe("wiki-60m")
    runs = recipe.runs(optimizers=["soap", "cosmos"], lrs={"soap": [3e-3], "cosmos": [7e-4, 8e-4]}, seeds=(1, 2))
    assert [(r.optimizer.optimizer, r.optimizer.lr, r.training.seed) for r in runs] == [
        ("soap", 3e-3, 1), ("soap", 3e-3, 2),
        ("cosmos", 7e-4, 1), ("cosmos", 7e-4, 2), ("cosmos", 8e-4, 1), ("cosmos", 8e-4, 2),
    ]  # fmt: skip
    assert runs[0].optimizer.adam_lr == 3e-3 and runs[2].optimizer.adam_lr == 2e-3
    assert len(recipe.runs(optimizers=["adam"])) == 4
    assert len(get_recipe("llama-130m-rank-gamma").runs(lrs=[1e-3])) == 12
    with pytest.raises(ValueError, match="has no rates for normuon: give them with --lrs"):
        get_recipe("llama-130m").runs(optimizers=["normuon"])
    added = get_recipe("llama-130m").runs(optimizers=["normuon"], lrs=[5e-4])
    assert [(run.optimizer.optimizer, run.optimizer.lr) for run in added] == [("normuon", 5e-4)]


def test_only_selects_variants_by_name() -> None:
    recipe = get_recipe("wiki-60m-ablations")

    def names(*only: str) -> list[str]:
        start, end = "wiki-60m-ablations-cosmos-paper-lr0.0005-", "-s0"
        return [run.run_name.removeprefix(start).removesuffix(end) for run in recipe.runs(only=only)]

    assert names("rank-32+gamma-0.5", "nesterov") == ["rank32-gamma0.5", "nesterovTrue"]
    assert names("rank-32") == [f"rank32-gamma{gamma}" for gamma in ("0.1", "0.25", "0.5", "1")]
    assert names("gamma-0.5", "rank32-gamma0.1") == ["rank32-gamma0.1", *(f"rank{r}-gamma0.5" for r in (32, 64, 128))]
    assert names("ns_steps") == names("ns-steps-3", "ns_steps=4") == ["ns_steps3", "ns_steps4"]
    words = names("inside", "polar-express", "two_sided", "weight-decay", "residual_guard-0.0", "momentum-dtype")
    assert words == [
        "eps_placementinside", "ns_coefficientspolar-express", "residual_guard0.0", "two_sidedTrue", "decay0.1",
        "momentum_dtypetorch.bfloat16",
    ]  # fmt: skip
    (base,) = recipe.runs(only=["base"])
    assert base.optimizer == recipe.config.optimizer
    with pytest.raises(ValueError, match=r"--only rank-3 matches no run; the runs are base, rank-32\+gamma-0.1, "):
        names("rank-3")


def test_every_ablation_differs_from_the_others() -> None:
    grid = get_recipe("wiki-60m-ablations").runs()
    assert len({run.optimizer for run in grid}) == len(grid)


def test_extra_sets_fields_by_optimizer() -> None:
    recipe = get_recipe("wiki-60m")
    added = {"rank": 32, "adam_lr": 4e-3, "nesterov": True}
    extra = [("soap", {"frequency": 10}), ("cosmos-paper", {}), ("cosmos-paper", added)]
    runs = recipe.runs(optimizers=["adam", "soap", "cosmos-paper"], lrs=[1e-3], extra=extra)
    assert [run.run_name for run in runs] == [
        "wiki-60m-adam-lr0.001-s0", "wiki-60m-soap-lr0.001-frequency10-s0", "wiki-60m-cosmos-paper-lr0.001-s0",
        "wiki-60m-cosmos-paper-lr0.001-rank32-adam_lr0.004-nesterovTrue-s0",
    ]  # fmt: skip
    assert [run.optimizer.options for run in runs] == [(), ("frequency=10",), (), ("nesterov=True",)]
    assert (runs[3].optimizer.rank, runs[3].optimizer.adam_lr, runs[2].optimizer.rank) == (32, 4e-3, 64)
    (galore,) = recipe.runs(optimizers=["galore"], lrs=[1e-2], extra=[("galore", {"scale": 1.0, "rank": 64})])
    assert galore.optimizer.options == ("update_gap=50", "scale=1.0") and galore.optimizer.rank == 64
    base, extra = recipe.config.replace(options=("nesterov=False",)), [("muon", {"ns_steps": 4})]
    (muon,) = recipe.runs(base, optimizers=["muon"], lrs=[1e-3], extra=extra)
    assert muon.optimizer.options == ("nesterov=False", "ns_steps=4")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("galore", {"scale": 1.0}), "--extra is for galore, but no run of the grid has that optimizer"),
        (("cosmos-paper", {"lr": 1.0}), "--extra cannot set lr: choose with --lrs"),
        (("cosmos-paper", {"rank": "full"}), "--extra: rank takes a number; got 'full'"),
    ],
)
def test_extra_refuses_wrong_fields(extra: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_recipe("wiki-60m").runs(optimizers=["cosmos-paper"], extra=[extra])


def test_another_optimizer_starts_as_the_recipe_runs_it() -> None:
    recipe = get_recipe("llama-130m")
    galore = recipe.start("galore").optimizer
    assert (galore.lr, galore.adam_lr, galore.rank) == (2e-2, 2e-2, 256) and galore.options
    assert recipe.start("adam").optimizer.lr == 2e-3 and recipe.start("adam").optimizer.rank is None
    assert recipe.start("cosmos-paper") == recipe.config
    ours = recipe.start("cosmos").optimizer
    assert (ours.lr, ours.adam_lr, ours.rank, ours.gamma) == (5e-4, 2e-3, None, None)  # the library's own defaults
    assert recipe.start("normuon").optimizer.rank is None  # not in the paper: the set-up's own rates


def test_the_documentation_lists_every_recipe_and_profile() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lab.md").read_text().partition("## Recipes")[2].partition("\n## ")[0]
    listed = [name.replace("*", "") for name in re.findall(r"`([a-z0-9*-]+)`", text)]
    for name in (*RECIPES, *PROFILES):
        assert name in listed or any(name.startswith(start) for start in listed if start.endswith("-")), name


def test_an_unknown_recipe_gets_the_close_ones() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'lama-130m'; did you mean llama-130m"):
        get_recipe("lama-130m")


def test_a_recipe_without_checkpoints_has_none_when_shrunk() -> None:
    assert get_recipe("wiki-60m").config.logging.checkpoint_every == 0
    assert get_recipe("wiki-60m", 0.5).config.logging.checkpoint_every == 0
