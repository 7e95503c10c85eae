"""The training loop: what it learns, what it writes, what it refuses."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.data import Split, shards, write_shard
from cosmos_lab.grid.compare import compare
from cosmos_lab.results.reading import read_metrics
from cosmos_lab.run import build, checkpoint
from cosmos_lab.run.train import train

# Gradients of micro-batches are added in another order: fp32 rounding, through eight steps.
ACCUMULATION_TOLERANCE = 1e-4

TRAIN_KEYS = {
    "step", "tokens", "time", "loss", "lr", "tokens_per_s", "mfu", "memory_gb", "optimizer_ms", "skipped_steps",
}  # fmt: skip
SUMMARY_KEYS = {
    "status", "final_val_loss", "final_val_ppl", "best_val_loss", "final_train_loss", "tokens", "steps", "time",
    "tokens_per_s", "step_ms", "optimizer_ms", "peak_memory_gb", "state_bytes",
}  # fmt: skip


def records(config: RunConfig, key: str) -> list[dict]:
    return [record for record in read_metrics(config.folder) if key in record]


@pytest.mark.parametrize("optimizer", ["adam", "cosmos"])
def test_training_lowers_the_loss_towards_the_entropy(tiny_run: RunConfig, optimizer: str) -> None:
    lr = 1e-2 if optimizer == "adam" else 5e-3
    rank = 8 if optimizer == "cosmos" else None
    summary = train(tiny_run.replace(optimizer=optimizer, lr=lr, rank=rank, steps=80, log_every=10, val_every=0))
    # The text's entropy is 0.1 log(64 / 0.1) + 0.9 log(1 / 0.9), about 0.74; guessing gives log 64 = 4.16.
    assert 0.7 < summary["final_val_loss"] < 2.0


def test_the_run_folder_holds_the_config_every_log_line_and_the_summary(tiny_run: RunConfig) -> None:
    seen: list[dict] = []
    summary = train(tiny_run, progress=lambda record: seen.append(dict(record)))
    folder = tiny_run.folder
    about = json.loads((folder / "config.json").read_text())
    assert RunConfig.from_flat(about["config"]) == tiny_run
    assert {"name", "recipe", "model", "optimizer", "lr", "adam_lr", "seed", "commit", "versions"} <= set(about)
    assert about["versions"]["torch"] == torch.__version__
    assert set(summary) >= SUMMARY_KEYS and json.loads((folder / "summary.json").read_text()) == summary
    lines = records(tiny_run, "loss")
    assert [line["step"] for line in lines] == list(range(1, 9)) and all(set(line) == TRAIN_KEYS for line in lines)
    assert [line["tokens"] for line in lines] == [step * 8 * 16 for step in range(1, 9)]
    assert [line["step"] for line in records(tiny_run, "val_loss")] == [4, 8]
    assert summary["final_val_ppl"] == pytest.approx(math.exp(summary["final_val_loss"]))
    assert summary["final_train_loss"] == pytest.approx(lines[-1]["loss"])
    assert "20,000 tokens" in seen[0]["about"] and seen[1:] == list(read_metrics(folder))


def test_cosmos_diagnostics_name_every_hidden_matrix(tiny_run: RunConfig) -> None:
    train(tiny_run)
    found = records(tiny_run, "diagnostics")
    assert [record["step"] for record in found] == [4, 8]
    assert set(found[0]["diagnostics"]) == {
        f"blocks.0.{name}.weight" for name in ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }
    for values in found[1]["diagnostics"].values():
        assert set(values) == {"energy", "drift", "update_rms", "ratio"} and 0 < values["energy"] <= 1


def test_gradient_accumulation_does_not_change_the_training(tiny_run: RunConfig) -> None:
    whole = train(tiny_run.replace(name="whole", micro_batch=8))
    parts = train(tiny_run.replace(name="parts", micro_batch=2))
    assert parts["final_val_loss"] == pytest.approx(whole["final_val_loss"], rel=ACCUMULATION_TOLERANCE)


def test_activation_checkpointing_does_not_change_the_training(tiny_run: RunConfig) -> None:
    plain = train(tiny_run.replace(name="plain"))
    assert train(tiny_run.replace(name="again", checkpointing=True))["final_val_loss"] == plain["final_val_loss"]


def test_the_same_seed_repeats_a_run_and_another_seed_changes_it(tiny_run: RunConfig) -> None:
    first, again, other = (train(tiny_run.replace(name=str(i), seed=seed)) for i, seed in enumerate((0, 0, 1)))
    assert first["final_val_loss"] == again["final_val_loss"] != other["final_val_loss"]


def test_clipping_bounds_the_gradient(tiny_run: RunConfig) -> None:
    # A huge epsilon makes Adam's update proportional to the gradient, so a clipped one leaves the loss where it was.
    still = tiny_run.replace(optimizer="adam", rank=None, lr=1e3, adam_lr=1e3, eps=1e3, val_every=1)
    train(still.replace(name="free"))
    train(still.replace(name="clipped", clip=1e-6))
    names = ("free", "clipped")
    free, clipped = ([r["val_loss"] for r in records(still.replace(name=name), "val_loss")] for name in names)
    assert free[0] - free[-1] > 0.1 > 1e-3 > abs(clipped[0] - clipped[-1])


def test_a_finished_run_is_not_trained_again(tiny_run: RunConfig) -> None:
    summary = train(tiny_run)
    written = (tiny_run.folder / "metrics.jsonl").stat().st_mtime_ns
    assert train(tiny_run) == summary
    assert (tiny_run.folder / "metrics.jsonl").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"trained with lr 0.002, this run asks for lr 0.004"):
        train(tiny_run.replace(lr=4e-3))
    with pytest.raises(ValueError, match="holds a run already"):
        train(tiny_run.replace(resume="never"))


@pytest.mark.parametrize("text", [None, "not JSON", "[]"])
def test_a_result_without_a_readable_config_is_not_taken_for_this_run(tiny_run: RunConfig, text: str | None) -> None:
    train(tiny_run)
    about = tiny_run.folder / "config.json"
    about.unlink()
    if text is not None:
        about.write_text(text)
    with pytest.raises(ValueError, match=r"has a result, but no readable config.json"):
        train(tiny_run.replace(optimizer="adam", rank=None))


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_finished_run_is_refused_if_its_text_has_changed(
    tiny_run: RunConfig, lab_data: str, tmp_path: Path, split: Split
) -> None:
    for part in ("train", "val"):
        shutil.copy(f"{lab_data}_{part}.bin", tmp_path / f"mine_{part}.bin")
    config = tiny_run.replace(data=str(tmp_path / "mine"))
    summary, first = train(config), build.load_source(config, split)
    tokens, shard = first.read(0, len(first)), tmp_path / f"mine_{split}.bin"
    write_shard(shard, tokens[::-1])
    before, now = first.fingerprint, build.load_source(config, split).fingerprint
    changed = f"was trained: its hash was {before} and is {now} now; choose another --out"
    with pytest.raises(ValueError, match=changed):
        train(config)
    with pytest.raises(ValueError, match=rf"no run was started because(.|\n)*{changed}"):
        compare([config, config.replace(name="new")], show=False, report=False)
    write_shard(shard, tokens)  # the same text in a new file
    assert train(config) == summary
    shard.unlink()
    with pytest.warns(UserWarning, match=f"cannot check that the text is still the one trained on: .*no {split} shard"):
        assert train(config) == summary


def test_a_finished_run_is_found_without_reading_its_text(
    tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = train(tiny_run)
    monkeypatch.setattr(shards, "_CHUNK", None)  # a pass over the tokens needs it
    assert train(tiny_run) == summary


def test_a_run_that_diverges_says_so_and_stops(tiny_run: RunConfig) -> None:
    summary = train(tiny_run.replace(optimizer="adam", rank=None, lr=1e30, adam_lr=1e30, warmup=0.0, steps=50))
    assert summary["status"] == "diverged" and summary["steps"] < 10 and summary["final_val_loss"] is None
    json.loads((tiny_run.folder / "summary.json").read_text(), parse_constant=pytest.fail)  # no NaN


@pytest.mark.parametrize("log_every", [0, 100])
def test_a_run_that_ends_without_a_finite_loss_has_diverged(tiny_run: RunConfig, log_every: int) -> None:
    config = tiny_run.replace(optimizer="adam", rank=None, lr=1e30, adam_lr=1e30, warmup=0.0, log_every=log_every)
    summary = train(config)
    assert summary["status"] == "diverged" and summary["final_val_ppl"] is None


@pytest.mark.parametrize("checkpoint_every", [0, 4])
def test_a_run_that_lost_its_folder_ends_with_an_error_that_names_it(
    tiny_run: RunConfig, checkpoint_every: int
) -> None:
    """A comparison shows such an error in its table and continues; a checkpoint makes the folder again."""

    def remove(record: Mapping[str, Any]) -> None:
        if record["step"] == 2:
            shutil.rmtree(tiny_run.folder, ignore_errors=True)

    with pytest.raises(ValueError, match="runs/run was removed or emptied during training"):
        train(tiny_run.replace(checkpoint_every=checkpoint_every), progress=remove)


def test_the_final_training_loss_does_not_depend_on_the_log(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(steps=60, checkpoint_every=0, val_every=0)
    losses = [train(config.replace(log_every=n, name=f"log{n}"))["final_train_loss"] for n in (1, 7, 0)]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)
    lines = [r["loss"] for r in read_metrics(Path(config.logging.out) / "log1") if "loss" in r]
    assert losses[0] == pytest.approx(sum(lines[-3:]) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": ("weight_decay=0.1",)}, "--options weight_decay=0.1: give --weight-decay instead"),
        ({"options": ("betas=(0.9, 0.9)",)}, "give --beta1 and --beta2 instead"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm'; did you mean adam"),
        ({"model": "llama-13m"}, "no preset 'llama-13m'"),
        ({"width": 100}, "width 100 is not a multiple of head_dim 64"),
        ({"vocab_size": 32}, r"token \d+ at position \d+ is beyond the vocabulary of 32"),
        ({"data": "nowhere/at/all"}, "missing shard"),
        ({"batch": 8, "micro_batch": 3}, "--batch 8 is not a multiple of --micro-batch 3"),
        ({"seq_len": 2000}, r"\(val\) has 2000 tokens; a window of seq_len 2000 needs 2001"),
        ({"steps": 0}, "--steps must be positive; got 0"),
        ({"seed": 2**64}, "--seed must have at most 63 bits"),
        ({"beta2": 1.5}, r"--beta2 must be in \[0, 1\); got 1.5"),
        ({"schedule": "stairs"}, "--schedule must be one of linear, cosine, wsd, constant"),
        ({"options": ("ns_stepz=4",)}, "ns_stepz"),
        ({"options": ("ns_steps",)}, "name=value"),
        ({"optimizer": "muon", "rank": 8}, "rank"),
        ({"wandb": "project"}, "pip install wandb"),
    ],
)
def test_bad_input_is_a_clear_error_and_leaves_no_run(tiny_run: RunConfig, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(tiny_run.replace(**change))
    assert not tiny_run.folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_a_clear_error(tiny_run: RunConfig) -> None:
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        train(tiny_run.replace(device="cuda"))


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_gpu_that_does_not_start_ends_the_run_instead_of_leaving_it_to_the_cpu(
    tiny_run: RunConfig, asked: Literal["auto", "cuda"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("the driver is too old\nand more lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ValueError, match=r"CUDA does not start \(the driver is too old\); use --device cpu"):
        train(tiny_run.replace(device=asked))
    train(tiny_run.replace(device="cpu", steps=2))


def test_an_unknown_field_is_refused_with_the_close_ones(tiny_run: RunConfig) -> None:
    with pytest.raises(ValueError, match="no field 'stepz'; did you mean steps"):
        tiny_run.replace(stepz=1)


def test_tensorboard_writes_its_events(tiny_run: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    train(tiny_run.replace(tensorboard=True, steps=2))
    assert list((tiny_run.folder / "tensorboard").glob("events.*"))


def test_micro_batches_fit_the_pass_and_divide_the_batch() -> None:
    config = RunConfig().replace(seq_len=1024, batch=960)
    assert build.micro_batch(config, 1) == 32
    assert build.micro_batch(config.replace(batch=2000), 8) == 25
    with pytest.raises(ValueError, match="--batch 960 does not divide over 7 processes"):
        build.micro_batch(config, 7)


@pytest.fixture
def beyond(tmp_path: Path) -> str:
    """Write data with ids beyond the 512 of the preset "tiny", 513 in the text to validate with alone."""
    write_shard(tmp_path / "book_train.bin", np.arange(4000) % 513)
    write_shard(tmp_path / "book_val.bin", np.arange(1000) % 514)
    return str(tmp_path / "book")


def test_data_that_records_its_vocabulary_needs_no_flag(tiny_run: RunConfig, beyond: str) -> None:
    facts = {"tokenizer": "own", "vocab_size": 600, "end_of_document": 0}
    Path(beyond + ".json").write_text(json.dumps(facts))
    config = tiny_run.replace(data=beyond, vocab_size=None, steps=2)
    train(config)
    assert checkpoint.load_trained(config.folder).model.config.vocab_size == 600
    sources = [build.load_source(config, split) for split in ("train", "val")]
    assert build.model_config(config.replace(model="llama-60m"), *sources).vocab_size == 32_000  # holds them all
    assert build.model_config(config.replace(vocab_size=514), *sources).vocab_size == 514
    assert build.model_config(config, sources[0]).vocab_size == 600
    with pytest.raises(ValueError, match=r"book_val.bin: token 513 at position 513 is beyond the vocabulary of 513"):
        build.model_config(config.replace(vocab_size=513), *sources)


def test_data_of_an_unknown_tokenizer_needs_a_vocabulary(tiny_run: RunConfig, beyond: str) -> None:
    with pytest.raises(ValueError, match=r"token 512 at position 512 is beyond .*--vocab-size 513"):
        train(tiny_run.replace(data=beyond, vocab_size=None))
    assert not tiny_run.folder.exists()


def test_a_run_that_fails_removes_only_the_folders_that_it_made(tiny_run: RunConfig, beyond: str) -> None:
    wrong = tiny_run.replace(data=beyond, vocab_size=None)
    for mine in ([], [wrong.folder.parent], [wrong.folder.parent, wrong.folder]):
        shutil.rmtree(wrong.folder.parent, ignore_errors=True)
        for folder in mine:
            folder.mkdir()
        with pytest.raises(ValueError, match="beyond"):
            train(wrong)
        assert [folder for folder in (wrong.folder.parent, wrong.folder) if folder.exists()] == mine


def test_training_leaves_the_callers_choice_of_deterministic_algorithms(tiny_run: RunConfig) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(tiny_run.replace(steps=1))
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_trained_model_can_be_loaded(tiny_run: RunConfig) -> None:
    train(tiny_run)
    model = checkpoint.load_trained(tiny_run.folder).model
    source = build.load_source(tiny_run, "val")
    tokens = torch.from_numpy(source.read(0, 513).astype("int64"))
    with torch.no_grad():
        loss = model(tokens[:-1].view(-1, 16), tokens[1:].view(-1, 16)).item()
    saved = json.loads((tiny_run.folder / "summary.json").read_text())
    assert loss == pytest.approx(saved["final_val_loss"], rel=1e-5)  # the same windows, batched otherwise


def test_the_error_for_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder"):
        checkpoint.load_trained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no checkpoint"):
        checkpoint.load_trained(tmp_path)
