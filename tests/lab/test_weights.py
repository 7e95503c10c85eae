"""Runs with weights of bfloat16: built so, cached by it, resumed to the bit, evaluated and exported as trained."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.run import build as run_build
from cosmos_lab.run import checkpoint, distributed, model_cache
from cosmos_lab.run.evaluate import evaluate
from cosmos_lab.run.export import export_model
from cosmos_lab.run.train import train
from tests.lab.outcomes import assert_same, outcome
from tests.lab.test_resume import interrupt

LOSS_TOL = 1e-5  # float32 sums in another order
CORRECTED = ("weight_correction=true",)
SMALLEST = (*CORRECTED, "momentum_dtype=int8", "adam_dtype=int8")


@pytest.fixture
def run24(tiny_run: RunConfig) -> RunConfig:
    """Return the tiny run with weights of 24 bits."""
    return tiny_run.replace(weights="bf16", options=CORRECTED)


def weights_of(config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the weights in the last checkpoint of a run."""
    found: dict[str, torch.Tensor] = outcome(config)[1]["model"]
    return found


def test_the_train_command_trains_weights_of_24_bits(run24: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    c, flags = run24, ["--width=64", "--depth=1", "--mlp=96", "--vocab-size=64", "--steps=8", "--device=cpu"]
    flags += ["--data", c.data.data, "--seq-len=16", "--batch=8", "--val-tokens=512", "--checkpoint-every=4"]
    flags += ["--out", c.logging.out, "--name=run", "--weights=bf16", "--options", *CORRECTED]
    assert main(["train", "tiny", *flags]) == 0, capsys.readouterr().err
    assert {weight.dtype for weight in weights_of(run24).values()} == {torch.bfloat16}
    state = outcome(run24)[1]["optimizer"]["state"].values()
    assert all(one["correction"].any() for one in state)


def test_weights_stay_float32_unless_asked_and_tables_always_do(run24: RunConfig) -> None:
    shape = run_build.model_config(run24)
    for weights, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = run_build.build_model(run24.replace(weights=weights), shape, torch.device("cpu"))
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert {table.dtype for table in model.buffers()} == {torch.float32}


def test_weights_of_24_bits_need_bf16_and_the_error_names_the_flag(run24: RunConfig) -> None:
    for check in (hyperparameters, train):
        with pytest.raises(ValueError, match="weight_correction.*--weights bf16"):
            check(run24.replace(weights="fp32"))
    assert hyperparameters(run24)["cosmos.weight_correction"] is True
    with pytest.raises(ValueError, match="--weights must be one of fp32, bf16"):
        run24.replace(weights="bf8").check()


@pytest.mark.parametrize("options", [(), CORRECTED, SMALLEST], ids=["16", "24", "all-8"])
def test_a_run_with_bf16_weights_resumes_bit_for_bit(run24: RunConfig, options: tuple[str, ...]) -> None:
    config = run24.replace(options=options, checkpoint_every=3)
    train(config.replace(name="whole"))
    interrupt(config, 5)  # the newest checkpoint is of step 3: two steps are done again
    train(config)
    assert_same(outcome(config), outcome(config.replace(name="whole")))


def test_a_run_does_not_continue_with_weights_of_another_type(tiny_run: RunConfig) -> None:
    interrupt(tiny_run, 5)
    with pytest.raises(ValueError, match="trained with weights 'fp32', this run asks for weights 'bf16'"):
        train(tiny_run.replace(weights="bf16"))
    train(tiny_run)
    with pytest.raises(ValueError, match="trained with weights 'fp32', this run asks for weights 'bf16'"):
        train(tiny_run.replace(weights="bf16"))


def edit(path: Path, *keys: str) -> None:
    """Remove "weights" from a dictionary in a JSON file."""
    content = json.loads(path.read_text())
    inner: Any = content
    for key in keys:
        inner = inner[key]
    del inner["weights"]
    path.write_text(json.dumps(content))


def test_a_run_of_an_earlier_version_had_fp32_weights(tiny_run: RunConfig) -> None:
    train(tiny_run)
    edit(tiny_run.folder / "config.json", "config")
    assert train(tiny_run)["status"] == "done"
    with pytest.raises(ValueError, match="trained with weights 'fp32', this run asks for weights 'bf16'"):
        train(tiny_run.replace(weights="bf16"))


def test_evaluate_reads_the_weights_in_the_type_of_training(run24: RunConfig) -> None:
    summary = train(run24)
    assert {p.dtype for p in checkpoint.load_trained(run24.folder).model.parameters()} == {torch.bfloat16}
    assert evaluate(run24.folder, device="cpu")["val_loss"] == pytest.approx(summary["final_val_loss"], abs=LOSS_TOL)


def test_an_export_has_the_trained_bf16_weights_to_the_bit(run24: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    train(run24)
    export_model(checkpoint.load_trained(run24.folder).model, tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    trained = weights_of(run24)
    assert torch.equal(written["model.embed_tokens.weight"], trained["embed.weight"].float())
    assert torch.equal(written["lm_head.weight"].bfloat16(), trained["head.weight"])


def test_a_model_compiled_for_fp32_weights_does_not_serve_bf16_ones(
    run24: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: real(model, backend="aot_eager", **how))
    config = run24.replace(compile="on", steps=4, diagnostics_every=0)
    model_cache.clear()
    train(config.replace(name="alone"))
    train(config.replace(name="same"))  # by the graphs of the first
    train(config.replace(name="wide", weights="fp32", options=()))
    train(config.replace(name="after"))
    train(config.replace(name="wide-after", weights="fp32", options=()))
    model_cache.clear()
    for name in ("same", "after"):
        assert_same(outcome(config.replace(name=name)), outcome(config.replace(name="alone")))
    assert_same(outcome(config.replace(name="wide-after")), outcome(config.replace(name="wide")))
    world = distributed.World(0, 0, 1, torch.device("cpu"), "none")
    shape = run_build.model_config(config)
    wide, narrow = (model_cache._graph_key(config.replace(weights=w), shape, world, False) for w in ("fp32", "bf16"))
    assert None not in (wide, narrow) and wide != narrow
