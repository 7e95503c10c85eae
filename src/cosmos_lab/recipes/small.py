"""The paper's comparison at a size for a laptop."""

from __future__ import annotations

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.recipe import Recipe, recipe
from cosmos_lab.recipes.variants import variants


@recipe
def tiny() -> Recipe:
    """A 1.4M-parameter LLaMA on the embedded text: seconds a run on a laptop."""
    config = RunConfig().replace(
        model="tiny", data="embedded", seq_len=128, lr=1e-3, adam_lr=2e-3, rank=32, steps=200, batch=16,
        val_every=50, val_tokens=65_536, checkpoint_every=100, diagnostics_every=20, recipe="tiny",
    )  # fmt: skip
    grid = [
        *variants("adam", (1e-3, 2e-3, 4e-3), adam_lr="lr", rank=None),
        *variants("muon", (5e-4, 1e-3, 2e-3), rank=None),
        *variants("soap", (2e-3, 4e-3, 8e-3), adam_lr="lr", rank=None),
        *variants("cosmos", (5e-4, 1e-3, 2e-3)),
    ]
    return Recipe("tiny", "A tiny LLaMA on the embedded text", "this project", config, tuple(grid))
