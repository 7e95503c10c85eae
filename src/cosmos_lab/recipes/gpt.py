"""The paper's other settings: modded-NanoGPT on FineWeb, and GPT-2 with rotary positions on WikiText-103.

What the paper leaves to the speed-run's public logs (warm-up, length of the decay, steps at 350M, epsilon) is taken
from the settings in those logs. Each recipe names its log, a folder of github.com/KellerJordan/modded-nanogpt.
"""

from __future__ import annotations

import math

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.recipe import Setup, recipe
from cosmos_lab.recipes.variants import at_rates


def _nanogpt(model: str, steps: int, lr: float, **fields: object) -> Setup:
    """Return the set-up of the speed-run, and Muon and COSMOS with two values of beta1, which the paper searched.

    beta1 is the momentum of the hidden matrices. `adam_beta1`, that of AdamW for embedding and head, stays the log's.
    """
    config = RunConfig().replace(
        model=model, data="data/fineweb_gpt2", optimizer="cosmos-paper", lr=lr, beta2=0.95, gamma=0.2, rank=64,
        steps=steps, batch=512, schedule="wsd", warmup=0.0, val_every=125, val_tokens=10_485_760, checkpoint_every=500,
        **fields,
    )  # fmt: skip
    grid = [
        {"optimizer": name, "lr": lr, "beta1": beta1, **own}
        for name, own in (("muon", {"gamma": None, "rank": None}), ("cosmos-paper", {}))
        for beta1 in (0.9, 0.95)
    ]
    return config, grid


@recipe("Figure of modded-NanoGPT, 124M")
def nanogpt_124m_record4() -> Setup:
    """Compare Muon and COSMOS on record 4 of modded-NanoGPT and FineWeb, 6200 steps of 512 x 1024 tokens.

    Log: records/track_1_short/2024-10-10_Muon: no warm-up, linear decay over the last 1800 steps, one matrix for
    embedding and head at 3.6e-3 with betas 0.9 and 0.95. The paper names these steps and rates.
    """
    return _nanogpt("nanogpt-124m-record4", 6200, 3.6e-4, adam_lr=3.6e-3, adam_beta1=0.9, decay=1800 / 6200)


@recipe("modded-NanoGPT, record 5")
def nanogpt_124m_record5() -> Setup:
    """Compare Muon and COSMOS on record 5 of modded-NanoGPT and FineWeb, 5100 steps of 512 x 1024 tokens.

    Log: records/track_1_short/2024-10-14_ModernArch: another architecture at the rates of record 4, with a decay over
    the last 1450 steps. The paper does not name it.
    """
    return _nanogpt("nanogpt-124m-record5", 5100, 3.6e-4, adam_lr=3.6e-3, adam_beta1=0.9, decay=1450 / 5100)


@recipe("Figure of modded-NanoGPT, 350M")
def nanogpt_350m_plain() -> Setup:
    """Compare Muon and COSMOS at the rates of modded-NanoGPT's medium track, on a plain 350M decoder and FineWeb.

    Log: records/track_2_medium/2025-01-18 (record 2): 7500 steps, decay to 10 % of the rates over the last 40 %,
    embedding at 0.3 and head at 3e-3, both with betas 0.8 and 0.95, epsilon 1e-10. Muon is at 0.025 with a scale of
    sqrt(m / n); here the scale is sqrt(m), so the same step is 0.025 / sqrt(1024), as the paper's appendix computes.
    Not from the log: the model (see its preset), and Muon's momentum, which rises from 0.85 to 0.95 in 300 steps there.
    """
    own = {"embedding_lr": 0.3, "head_lr": 3e-3, "adam_beta1": 0.8, "eps": 1e-10, "final_lr": 0.1}
    return _nanogpt("nanogpt-350m-plain", 7500, 0.025 / math.sqrt(1024), adam_lr=0.015, decay=0.4, **own)


def _gpt2(model: str, adam_lr: float, lr: float) -> Setup:
    """Return 5,000 steps of 1024 x 1024 tokens; many epochs, so the paper compares training losses."""
    config = RunConfig().replace(
        model=model, data="data/wikitext-103_gpt2", optimizer="cosmos-paper", lr=lr, adam_lr=adam_lr, rank=64,
        steps=5000, batch=1024, val_every=250, val_tokens=262_144, checkpoint_every=500,
    )  # fmt: skip
    adam = at_rates("adam", (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), adam_lr="lr", rank=None)
    return config, [*adam, *at_rates("muon", (lr,), rank=None), *at_rates("cosmos-paper", (lr,))]


@recipe("Figure of GPT-2 on WikiText-103", metric="final_train_loss")
def gpt2_small() -> Setup:
    """Compare AdamW, Muon and COSMOS on GPT-2 small with rotary positions and WikiText-103, by training loss.

    The embedding runs at 4e-3, AdamW's best rate, hidden matrices at 4e-4.
    """
    return _gpt2("gpt2-small", 4e-3, 4e-4)


@recipe("Figure of GPT-2 on WikiText-103", metric="final_train_loss")
def gpt2_medium() -> Setup:
    """Compare AdamW, Muon and COSMOS on GPT-2 medium with rotary positions and WikiText-103, by training loss.

    The embedding runs at 2e-3, AdamW's best rate, hidden matrices at 5e-4.
    """
    return _gpt2("gpt2-medium", 2e-3, 5e-4)
