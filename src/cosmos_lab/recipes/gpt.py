"""The paper's other settings: modded-NanoGPT on FineWeb, and GPT-2 with rotary positions on WikiText-103.

What the paper leaves to the speed-run's public logs (warm-up, length of the decay, steps at 350M, epsilon) is taken
from those logs' settings; each such value is named below.
"""

from __future__ import annotations

import math

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.recipe import Recipe, recipe
from cosmos_lab.recipes.variants import variants

FINEWEB = "data/fineweb_gpt2"
WIKITEXT = "data/wikitext-103_gpt2"


def _nanogpt(name: str, model: str, steps: int, lr: float, **fields: object) -> RunConfig:
    return RunConfig().replace(
        model=model, data=FINEWEB, optimizer="cosmos-paper", lr=lr, beta2=0.95, gamma=0.2, rank=64, steps=steps,
        batch=512, schedule="wsd", warmup=0.0, val_every=125, val_tokens=10_485_760, checkpoint_every=500, recipe=name,
        **fields,
    )  # fmt: skip


@recipe
def nanogpt_124m() -> Recipe:
    """Modded-NanoGPT 124M: 6200 steps of 512 x 1024 tokens, rates of the public log, beta1 searched.

    From the log: no warm-up, linear decay over the last 1800 steps, one matrix for embedding and head at 3.6e-3.
    """
    grid = [
        {"optimizer": name, "lr": 3.6e-4, "beta1": beta1, **own}
        for name, own in (("muon", {"gamma": None, "rank": None}), ("cosmos-paper", {}))
        for beta1 in (0.9, 0.95)
    ]
    config = _nanogpt("nanogpt-124m", "nanogpt-124m", 6200, 3.6e-4, adam_lr=3.6e-3, decay=1800 / 6200)
    return Recipe(
        "nanogpt-124m",
        "Modded-NanoGPT 124M on FineWeb: MUON, COSMOS",
        "Figure of modded-NanoGPT, 124M",
        config,
        tuple(grid),
    )


@recipe
def nanogpt_350m() -> Recipe:
    """Modded-NanoGPT 350M: embedding at 0.3, head at 3e-3, both with beta1 0.8, as its log sets them.

    From the log: 7500 steps, decay over the last 40 %, scalars at 0.015, epsilon 1e-10, MUON at 0.025 with a scale of
    sqrt(m / n). Here the scale is sqrt(m), so the same step is 0.025 / sqrt(1024), as the paper's appendix reckons.
    """
    lr = 0.025 / math.sqrt(1024)
    grid = [
        {"optimizer": name, "lr": lr, "beta1": beta1, **own}
        for name, own in (("muon", {"gamma": None, "rank": None}), ("cosmos-paper", {}))
        for beta1 in (0.9, 0.95)
    ]
    config = _nanogpt(
        "nanogpt-350m", "nanogpt-350m", 7500, lr,
        adam_lr=0.015, decay=0.4, embedding_lr=0.3, head_lr=3e-3, adam_beta1=0.8, eps=1e-10,
    )  # fmt: skip
    return Recipe(
        "nanogpt-350m",
        "Modded-NanoGPT 350M on FineWeb: MUON, COSMOS",
        "Figure of modded-NanoGPT, 350M",
        config,
        tuple(grid),
    )


def _gpt2(name: str, adam_lr: float, lr: float) -> Recipe:
    """5,000 steps of 1024 x 1024 tokens; many epochs, so the paper compares training losses."""
    config = RunConfig().replace(
        model=name, data=WIKITEXT, optimizer="cosmos-paper", lr=lr, adam_lr=adam_lr, rank=64, steps=5000, batch=1024,
        val_every=250, val_tokens=262_144, checkpoint_every=500, recipe=name,
    )  # fmt: skip
    return Recipe(
        name,
        f"{name} with rotary positions on WikiText-103: Adam, MUON, COSMOS by training loss",
        "Figure of GPT-2 on WikiText-103",
        config,
        (
            *variants("adam", (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), adam_lr="lr", rank=None),
            *variants("muon", (lr,), rank=None),
            *variants("cosmos-paper", (lr,)),
        ),
        metric="final_train_loss",
    )


@recipe
def gpt2_small() -> Recipe:
    """GPT-2 small: embedding at 4e-3, Adam's best rate; hidden matrices at 4e-4."""
    return _gpt2("gpt2-small", 4e-3, 4e-4)


@recipe
def gpt2_medium() -> Recipe:
    """GPT-2 medium: embedding at 2e-3, Adam's best rate; hidden matrices at 5e-4."""
    return _gpt2("gpt2-medium", 2e-3, 5e-4)
