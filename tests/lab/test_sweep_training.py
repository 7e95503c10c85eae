"""One run of the sweep on a CPU: its texts, its result, and a run that is continued."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import trials
from benchmarks.comparison import Regime
from benchmarks.kept_runs import run_of
from benchmarks.sweep_options import Options
from benchmarks.sweep_queue import Queue
from benchmarks.sweep_table import table
from benchmarks.sweep_training import TwoTextTrainer, check_texts, split, train
from cosmos_lab.data import open_data, write_shard
from cosmos_lab.run.stopping import Stopped
from cosmos_lab.run.train import Trainer
from tests.lab.tiny_sweep import TINY, fake, tiny_options


@pytest.fixture(autouse=True)
def _restored(only_the_packages_rules: None) -> None:
    """Forget the trial optimizers after each test."""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Write a text and return options for it."""
    return tiny_options(tmp_path)


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM in a step of every training run, as the queue does at the deadline."""
    take_step = Trainer._step

    def take_step_and_stop(trainer: Trainer) -> None:
        take_step(trainer)
        if trainer.state.step == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_step", take_step_and_stop)


def test_a_run_that_was_cut_off_and_continued_equals_the_unbroken_one(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TINY.at("B", "cosmos", {"lr": 0, "adam_lr": 0, "beta2": 0.98})
    unbroken = train(TINY, options, run)
    kept = dataclasses.replace(options, checkpoints=options.out / "kept")
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        with pytest.raises(Stopped):
            train(TINY, kept, run)
    queue = Queue(TINY, kept)
    assert queue._has_checkpoint(run) and queue.next()[0] != run and queue._first_fitting([], cold=True) == run
    continued = train(TINY, kept, run)
    assert (unbroken["continued_at"], continued["continued_at"]) == (0, 2)
    assert continued["wall_s"] >= continued["train_s"] > 0
    measured = {"continued_at", "wall_s", "train_s", "step_ms", "optimizer_ms", "tokens_per_s", "peak_memory_gb"}
    assert {k: v for k, v in continued.items() if k not in measured} == {
        k: v for k, v in unbroken.items() if k not in measured
    }


def test_a_run_that_was_stopped_begins_again_without_a_folder_for_checkpoints(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TINY.candidates({})[0]
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        with pytest.raises(Stopped):
            train(TINY, options, run)
    assert train(TINY, options, run)["continued_at"] == 0


def test_a_run_that_was_stopped_after_its_last_step_keeps_its_result(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kept = TINY.candidates({})[0], dataclasses.replace(options, checkpoints=options.out / "kept")
    final = TwoTextTrainer.final

    def final_and_stop(trainer: TwoTextTrainer) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return final(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(TwoTextTrainer, "final", final_and_stop)
        with pytest.raises(Stopped):
            train(TINY, kept, run)
        patched.setattr(TwoTextTrainer, "_step", None)  # it does not train again
        result = train(TINY, kept, run)
    assert result["status"] == "done" and len(result["curve"]) == 4 and result["wall_s"] >= result["train_s"]


def test_a_loss_without_a_perplexity_counts_as_diverged(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoTextTrainer, "read", lambda *_: [800.0])
    result = train(TINY, options, TINY.candidates({})[0])
    assert result["val_loss"] is None and result["test_ppl"] is None
    assert "diverged" in table(TINY, {result["id"]: result})


def test_a_long_regime_takes_its_settings_from_another_and_may_see_tokens_twice(options: Options) -> None:
    regimes = {**TINY.regimes, "long": Regime(steps=80, batch=4, seq_len=16, epochs=2, like="B")}
    long = dataclasses.replace(TINY, regimes=regimes, phases=[("long", ("cosmos",), ("seeds",))])
    runs = long.candidates(fake(TINY, 1))
    assert {(run.lr, run.adam_lr, run.beta2) for run in runs} == {(2e-3, 4e-3, 0.95)}
    assert train(long, options, runs[0])["tokens"] == 80 * 64  # of a text of 4,000
    regimes["long"] = dataclasses.replace(regimes["long"], epochs=1)
    with pytest.raises(ValueError, match="5,120 tokens asked for, 4,000 found, epochs 1: add a shard"):
        train(dataclasses.replace(long, regimes=regimes), options, runs[0])


def test_runs_of_a_regime_must_see_the_text_of_its_earlier_runs(options: Options, tmp_path: Path) -> None:
    first, second = TINY.candidates({})
    known = train(TINY, options, first)
    check_texts(TINY, options, [second], [known])
    write_shard(tmp_path / "toy_t5_train_1.bin", np.arange(2, 60))  # a further shard
    with pytest.raises(ValueError, match=f"is not the text of {first.id}: .*must see the same text"):
        check_texts(TINY, options, [second], [known])
    check_texts(TINY, options, [second], [{**known, "regime": "long"}])
    other = {**known, "data": {**known["data"], "fingerprint": "0"}}
    assert "CAUTION" not in table(TINY, {"one": known, "two": {**other, "regime": "long"}})
    assert "CAUTION: the runs of regime B saw 2 texts" in table(TINY, {"one": known, "two": other})


def test_the_text_is_cut_after_the_document_that_holds_the_cut(options: Options) -> None:
    whole = open_data(options.data, "val", cache_dir=options.cache)
    val, test = split(whole, TINY.cut, options.cache)
    assert (len(val), len(test)) == (510, 490)
    assert np.array_equal(np.concatenate([val.read(0, 510), test.read(0, 490)]), whole.read(0, 1000))
    assert val.read(509, 510) == 1 and len({val.fingerprint, test.fingerprint, whole.fingerprint}) == 3


def test_the_index_of_a_cut_text_is_in_the_given_cache(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = options.out / "elsewhere"
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(elsewhere))
    train(TINY, options, TINY.candidates({})[0])
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("entry", "variant"),
    [("cosmos", "balance"), ("adamw", "outer-rows"), ("cosmos", "embed-x4"), ("cosmos", "all-8")],
)
def test_a_variant_trains_as_the_sweep_trains_it(options: Options, entry: str, variant: str) -> None:
    trials.register()
    run = dataclasses.replace(TINY.at("B", entry, {"lr": 0, "adam_lr": 0, "beta2": 0.98}), variant=variant)
    result = train(TINY, options, run)
    assert result["id"].endswith(f"-s0-{variant}") and run_of(result) == run and result["status"] == "done"
    plain = train(TINY, options, run.plain)
    text = table(TINY, {r["id"]: r for r in (result, plain)})
    assert f"{entry} with {variant}: " in text and "1 seed(s)" in text
    assert result["test_loss"] != plain["test_loss"]
