"""A tiny text, a tiny run and reports without figures, so that a whole training takes a second."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cosmos_optim
from cosmos_lab.config import RunConfig
from cosmos_lab.data import write_shard
from cosmos_optim.rules import RULES

VOCAB = 64


@pytest.fixture(scope="session")
def lab_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shards of a text in which each token follows from the one before, nine times out of ten: easy to learn."""
    folder = tmp_path_factory.mktemp("shards")
    write_text(folder)
    return str(folder / "toy")


def write_text(folder: Path) -> None:
    """Write the shards toy_train.bin and toy_val.bin."""
    rng = np.random.default_rng(0)
    follows = rng.permutation(VOCAB)
    for split, length in (("train", 20_000), ("val", 2_000)):
        tokens = rng.integers(0, VOCAB, length)
        for i in range(1, length):
            if rng.random() < 0.9:
                tokens[i] = follows[tokens[i - 1]]
        write_shard(folder / f"toy_{split}.bin", tokens)


@pytest.fixture
def only_the_packages_rules() -> Iterator[None]:
    """Forget rules and optimizers that a test enters."""
    kept = [(table, dict(table)) for table in (RULES, cosmos_optim.OPTIMIZERS)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports without figures, which take seconds to draw."""
    monkeypatch.setattr("cosmos_lab.report._figures", lambda specs, folder: None)


@pytest.fixture
def tiny_run(tmp_path: Path, lab_data: str) -> RunConfig:
    """Eight steps of a one-block model."""
    return tiny_config(tmp_path, lab_data)


def tiny_config(folder: Path, data: str) -> RunConfig:
    """Return the config of such a run in ``folder``."""
    return RunConfig().replace(
        model="tiny", width=64, depth=1, mlp=96, vocab_size=VOCAB,
        data=data, seq_len=16, cache_dir=str(folder / "cache"),
        optimizer="cosmos", lr=2e-3, adam_lr=1e-2, rank=8, steps=8, batch=8, device="cpu", val_tokens=512,
        log_every=1, val_every=4, diagnostics_every=4, checkpoint_every=4, out=str(folder / "runs"), name="run",
    )  # fmt: skip
