"""Runs that are not in the paper: its comparison at a size for one GPU and a minute, and for a laptop."""

from __future__ import annotations

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.base import Recipe, recipe, variants
from cosmos_lab.recipes.llama import GALORE, matrix_like


@recipe
def llama_60m() -> Recipe:
    """LLaMA-60M on 52M tokens, all eight optimizers: a minute a run on one large GPU."""
    lrs = (2.5e-4, 5e-4, 1e-3, 2e-3)
    adam_lrs = (1e-3, 2e-3, 4e-3, 8e-3)
    grid = [
        *variants("adam", adam_lrs, adam_lr="lr", rank=None),
        *variants("adam-mini", adam_lrs, adam_lr="lr", rank=None),
        *variants("galore", (5e-3, 1e-2, 2e-2, 4e-2), adam_lr="lr", rank=128, options=GALORE),
        *variants("soap", adam_lrs, adam_lr="lr", rank=None),
        *matrix_like(lrs, "muon", "muon-norm", "normuon", "cosmos"),
    ]
    config = RunConfig().replace(
        model="llama-60m", data="data/wiki_t5", lr=5e-4, adam_lr=2e-3, rank=64, steps=800, batch=64,
        val_every=100, val_tokens=1_048_576, checkpoint_every=400, diagnostics_every=100, recipe="llama-60m",
    )  # fmt: skip
    return Recipe("llama-60m", "LLaMA-60M on 52M tokens, eight optimizers tuned", "this project", config, tuple(grid))


@recipe
def tiny() -> Recipe:
    """A 1.6M-parameter LLaMA on the embedded text: seconds a run on a laptop."""
    config = RunConfig().replace(
        model="tiny", data="embedded", seq_len=128, lr=2e-3, adam_lr=4e-3, rank=32, steps=200, batch=16,
        val_every=50, val_tokens=65_536, checkpoint_every=100, diagnostics_every=20, recipe="tiny",
    )  # fmt: skip
    grid = [
        *variants("adam", (2e-3, 4e-3, 8e-3), adam_lr="lr", rank=None),
        *variants("muon", (1e-3, 2e-3, 4e-3), rank=None),
        *variants("soap", (2e-3, 4e-3, 8e-3), rank=None),
        *variants("cosmos", (1e-3, 2e-3, 4e-3)),
    ]
    return Recipe("tiny", "A tiny LLaMA on the embedded text", "this project", config, tuple(grid))
