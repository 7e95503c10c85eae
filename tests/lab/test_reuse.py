"""Runs of a grid share one compiled model: nothing compiles twice, and no run depends on the one before it."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from cosmos_lab.config import RunConfig
from cosmos_lab.models import Decoder
from cosmos_lab.results.reading import read_metrics
from cosmos_lab.run import build, checkpoint, distributed, model_cache
from cosmos_lab.run.train import Trainer, train


@pytest.fixture
def compiled(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """Return a compiled run of four steps; aot_eager traces as inductor does, without a C++ compiler."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: real(model, **{**how, "backend": "aot_eager"}))
    model_cache.clear()
    torch._dynamo.reset()
    yield tiny_run.replace(compile="on", steps=4, diagnostics_every=0)
    model_cache.clear()
    torch._dynamo.reset()


def graphs() -> int:
    """Count the graphs that were compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def trained(config: RunConfig) -> dict[str, torch.Tensor]:
    """Train, and return the final weights."""
    train(config)
    newest = checkpoint.latest(config.folder / "checkpoints")
    assert newest is not None
    weights: dict[str, torch.Tensor] = torch.load(newest / "state.pt", weights_only=True)["model"]
    return weights


def log(config: RunConfig) -> list[Any]:
    """Return every loss of a run's log, to the last bit."""
    lines = read_metrics(config.folder)
    return [(line["step"], line.get("loss"), line.get("val_loss")) for line in lines]


def alone(config: RunConfig) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Train a run as in its own process."""
    model_cache.clear()
    torch._dynamo.reset()
    weights = trained(config)
    model_cache.clear()
    return weights, log(config)


def same(config: RunConfig, expected: tuple[dict[str, torch.Tensor], list[Any]]) -> bool:
    weights, lines = expected
    found = trained(config)
    return log(config) == lines and all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_second_run_compiles_nothing_and_gives_the_same_bits(compiled: RunConfig) -> None:
    seeds = [compiled.replace(name=f"alone{seed}", seed=seed) for seed in (0, 1)]
    expected = [alone(config) for config in seeds]
    train(compiled.replace(name="first", optimizer="adam", rank=None, lr=1e-2))
    before = graphs()
    assert before > 0
    for seed in (1, 0):  # the run before one differs in optimizer, then in seed
        assert same(compiled.replace(name=f"again{seed}", seed=seed), expected[seed])
    assert graphs() == before


@pytest.mark.parametrize("how", ["on", "blocks"])
def test_a_smaller_last_validation_batch_compiles_nothing(compiled: RunConfig, how: Any) -> None:
    config = compiled.replace(compile=how)
    found = []
    for windows in (32, 35):  # batches of 8
        model_cache.clear()
        torch._dynamo.reset()
        before = graphs()
        train(config.replace(name=f"{how}{windows}", val_tokens=16 * windows))
        found.append(graphs() - before)
    assert found[0] == found[1] > 0


def test_a_diverged_or_interrupted_run_does_not_change_later_runs(compiled: RunConfig) -> None:
    expected = alone(compiled.replace(name="alone"))
    broken = {"optimizer": "adam", "rank": None, "lr": 1e30, "adam_lr": 1e30, "warmup": 0.0, "checkpoint_every": 0}
    assert train(compiled.replace(name="diverged", **broken))["status"] == "diverged"
    assert same(compiled.replace(name="after"), expected)

    class Stop(Exception):
        pass

    def fall(record: Any) -> None:
        if record["step"] == 3:
            raise Stop

    cut = compiled.replace(name="cut", checkpoint_every=2)
    with pytest.raises(Stop):
        train(cut, progress=fall)
    assert not model_cache._stored  # the model of a failed run is not used again
    assert same(cut, expected)
    assert same(compiled.replace(name="last"), expected)


@pytest.mark.parametrize(
    "change",
    [{"width": 128}, {"vocab_size": 128}, {"micro_batch": 4}, {"seq_len": 8}, {"checkpointing": True},
     {"deterministic": True}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_graph_is_shared_unless_a_field_it_depends_on_changes(compiled: RunConfig, change: dict[str, Any]) -> None:
    world = distributed.World(0, 0, 1, torch.device("cpu"), "none")

    def key(config: RunConfig, world: distributed.World = world, bf16: bool = False) -> Any:
        return model_cache._graph_key(config, build.model_config(config), world, bf16)

    assert key(compiled.replace(lr=1.0, seed=5, optimizer="adam")) == key(compiled)
    assert key(compiled.replace(**change)) != key(compiled) != key(compiled, bf16=True)
    assert key(compiled.replace(compile="off")) is None
    for sharding in ("ddp", "fsdp"):
        assert key(compiled, distributed.World(0, 0, 2, world.device, sharding)) is None


def test_the_last_model_is_freed_before_another_is_built(compiled: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    train(compiled.replace(name="first"))
    weight = weakref.ref(model_cache._stored[0].model.embed.weight)
    real, alive = build.build_model, []

    def build_model(*arguments: Any) -> Any:
        gc.collect()
        alive.append(weight() is not None)
        return real(*arguments)

    monkeypatch.setattr(build, "build_model", build_model)
    train(compiled.replace(name="second", lr=1e-3))
    train(compiled.replace(name="other", compile="off"))
    assert alive == [True, False] and not model_cache._stored


def test_hooks_gradients_and_frozen_weights_do_not_affect_the_next_run(compiled: RunConfig) -> None:
    expected = alone(compiled.replace(name="alone"))
    train(compiled.replace(name="first"))
    (kept,) = model_cache._stored
    for parameter in kept.model.parameters():
        assert parameter.grad is None
        parameter.requires_grad_(False)
        parameter.grad = torch.ones_like(parameter)
    kept.model.eval()
    kept.model.blocks[0].attn.cos.zero_()
    assert same(compiled.replace(name="second"), expected)
    assert model_cache._stored == [kept]
    calls: list[int] = []
    kept.model.embed.register_forward_hook(lambda *_: calls.append(1))
    assert same(compiled.replace(name="third"), expected)
    assert model_cache._stored != [kept] and not calls


def test_two_runs_at_a_time_do_not_share_a_model(compiled: RunConfig) -> None:
    train(compiled.replace(name="first"))
    with distributed.session("cpu", "auto") as world:
        one, two = (Trainer(compiled.replace(name=name), world) for name in ("one", "two"))
        assert one.model is not two.model
        one.close(), two.close()
    assert not model_cache._stored


def test_runs_compiled_by_blocks_share_their_graphs(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decoder.compile_parts
    monkeypatch.setattr(Decoder, "compile_parts", lambda model, **how: real(model, **{**how, "backend": "aot_eager"}))
    config = tiny_run.replace(compile="blocks", steps=4, diagnostics_every=0)
    model_cache.clear()
    torch._dynamo.reset()
    first = train(config.replace(name="first"))
    before = graphs()
    again = train(config.replace(name="again"))
    assert graphs() == before and again["final_val_loss"] == first["final_val_loss"]
    model_cache.clear()
    torch._dynamo.reset()
    plain = train(config.replace(name="plain", compile="off"))
    assert plain["final_val_loss"] == pytest.approx(first["final_val_loss"], rel=1e-5)
