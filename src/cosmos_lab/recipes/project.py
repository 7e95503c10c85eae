"""The study of this project on English Wikipedia: the paper's comparison and ablations at sizes for one GPU.

T5 tokens for the LLaMA runs, GPT-2 tokens for the others; sequence 1024, 65,536 tokens a step. The set-up is the
paper's (``recipes/llama.py``) but for size: 10 % warm-up, linear decay to 0, betas (0.9, 0.98), no weight decay.
"""

from __future__ import annotations

from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.llama import GALORE, matrix_like
from cosmos_lab.recipes.recipe import Recipe, recipe
from cosmos_lab.recipes.variants import Variant, variants

ADAM_LRS = (5e-4, 1e-3, 2e-3, 4e-3)
GALORE_LRS = (2.5e-3, 5e-3, 1e-2, 2e-2)
LRS = (2.5e-4, 5e-4, 1e-3, 2e-3)
SOAP_LRS = (1e-3, 2e-3, 4e-3, 8e-3)
ADDED = ("nesterov=True", "row_beta2=0.95")  # to the paper's COSMOS; NorMuon has both, and COSMOS by default
SOAP = ("frequency=1",)  # steps between turns of the basis; the 10 of Vyas et al. 2024 are too many for so few steps


def wiki(name: str, model: str, steps: int, **fields: Any) -> RunConfig:
    """The common set-up of the LLaMA runs."""
    common = RunConfig().replace(
        model=model, data="data/wiki_t5", optimizer="cosmos-paper", lr=5e-4, adam_lr=2e-3, rank=64, steps=steps,
        batch=64, val_every=steps // 8, val_tokens=1_048_576, checkpoint_every=0, diagnostics_every=steps // 8,
        recipe=name,
    )  # fmt: skip
    return common.replace(**fields)


def table(
    adam: tuple[float, ...],
    mini: tuple[float, ...],
    soap: tuple[float, ...],
    galore: tuple[float, ...],
    lrs: tuple[float, ...],
    rank: int = 128,
) -> tuple[Variant, ...]:
    """Table 2's rows, MUON + NORM, NorMuon and COSMOS with its defaults; the rank is GaLore's."""
    return (
        *variants("adam", adam, adam_lr="lr", rank=None),
        *variants("adam-mini", mini, adam_lr="lr", rank=None),
        *variants("galore", galore, adam_lr="lr", rank=rank, options=GALORE),
        *variants("soap", soap, adam_lr="lr", rank=None, options=SOAP),
        *matrix_like(lrs, "muon", "muon-norm", "normuon", "cosmos-paper", "cosmos"),
    )


def paper(*options: str, **fields: Any) -> Variant:
    """The paper's COSMOS at its usual rate with something changed."""
    return {"optimizer": "cosmos-paper", "lr": 5e-4, **fields, **({"options": options} if options else {})}


@recipe
def wiki_60m() -> Recipe:
    """LLaMA-60M on 52M tokens: every optimizer at four rates."""
    grid = table(ADAM_LRS, ADAM_LRS, SOAP_LRS, GALORE_LRS, LRS)
    return Recipe("wiki-60m", "LLaMA-60M on 52M tokens of English Wikipedia, nine optimizers tuned", "this project",
                  wiki("wiki-60m", "llama-60m", 800), grid)  # fmt: skip


@recipe
def wiki_130m() -> Recipe:
    """LLaMA-130M on 105M tokens at the rates found best at 60M (and half of Adam's), embedding and head at 4e-3."""
    grid = (
        *table((1e-3, 2e-3), (1e-3,), (4e-3,), (1e-2,), (), rank=256),
        *(v for name in ("muon", "muon-norm", "normuon") for v in variants(name, (1e-3,), adam_lr=4e-3, rank=None)),
        *variants("cosmos-paper", (1e-3,), adam_lr=4e-3, gamma=0.5),
        *variants("cosmos", (1e-3,), adam_lr=4e-3, rank=None),
    )
    return Recipe("wiki-130m", "LLaMA-130M on 105M tokens of English Wikipedia, at 60M's best rates", "this project",
                  wiki("wiki-130m", "llama-130m", 1600), grid)  # fmt: skip


@recipe
def wiki_60m_ablations() -> Recipe:
    """One change of COSMOS at a time."""
    grid = [
        paper(),
        *(paper(rank=rank, gamma=gamma) for rank in (32, 64, 128) for gamma in (0.1, 0.25, 0.5, 1.0)),
        paper("eps_placement=inside"),
        paper("nesterov=True"),
        paper("ns_steps=3"),
        paper("ns_steps=4"),
        paper("ns_coefficients=polar-express"),
        paper("residual_guard=0.0"),
        paper("side=smaller"),
        paper("two_sided=True"),
        paper(weight_decay=0.1),
        paper("momentum_dtype=torch.bfloat16"),
    ]
    return Recipe("wiki-60m-ablations", "LLaMA-60M on English Wikipedia: COSMOS, one change at a time", "this project",
                  wiki("wiki-60m-ablations", "llama-60m", 800), tuple(grid))  # fmt: skip


@recipe
def wiki_60m_beyond() -> Recipe:
    """What the paper does not have, for COSMOS and for NorMuon, which has row moments and looks a step ahead."""
    express = "ns_coefficients=polar-express"
    grid = [
        paper(lr=1e-3),
        paper("nesterov=True", lr=1e-3),
        paper("row_beta2=0.95", lr=1e-3),
        paper(*ADDED, lr=1e-3),
        paper("nesterov=5", "row_beta2=0.95", lr=1e-3),
        paper(*ADDED, lr=1e-3, rank=32),
        paper(*ADDED, express, lr=1e-3),
        paper(*ADDED, express, lr=1e-3, rank=32),
        *variants("normuon", (7e-4, 1e-3), rank=None),
        *variants("normuon", (1e-3,), rank=None, options=("nesterov=5",)),
        *variants("normuon", (1e-3,), rank=None, options=(express,)),
    ]
    return Recipe("wiki-60m-beyond", "LLaMA-60M on English Wikipedia: additions to COSMOS and NorMuon", "this project",
                  wiki("wiki-60m-beyond", "llama-60m", 800), tuple(grid))  # fmt: skip


@recipe
def wiki_60m_256() -> Recipe:
    """GaLore at the sequence length it was published with."""
    grid = (
        *variants("adam", (2e-3, 4e-3), adam_lr="lr", rank=None),
        *variants("galore", (5e-3, 1e-2), adam_lr="lr", rank=128, options=GALORE),
        paper(),
    )
    return Recipe("wiki-60m-256", "LLaMA-60M at sequence length 256: GaLore against Adam and COSMOS", "this project",
                  wiki("wiki-60m-256", "llama-60m", 800, seq_len=256, batch=256), grid)  # fmt: skip


def _gpt(name: str, model: str, adam_lr: float, lr: float, gamma: float | None = None, **fields: Any) -> Recipe:
    """``gamma`` is the paper's; beside it COSMOS with its defaults, which have their own, and the paper's with that."""
    grid = (
        *variants("adam", (adam_lr / 8, adam_lr / 4, adam_lr / 2, adam_lr), adam_lr="lr", rank=None, gamma=None),
        *variants("muon", (lr, 2 * lr, 4 * lr), rank=None, gamma=None),
        *variants("cosmos-paper", (lr, 2 * lr), gamma=gamma),
        *variants("cosmos-paper", (2 * lr, 4 * lr), gamma=1e3 * lr),
        *variants("cosmos", (lr, 2 * lr, 4 * lr), rank=None, gamma=None),
    )
    reduced = {"depth": 6, "width": 512, "mlp": 2048}
    config = wiki(name, model, 480, data="data/wiki_gpt2", lr=lr, adam_lr=adam_lr, gamma=gamma, **reduced, **fields)
    return Recipe(name, f"{model}, reduced, on 31M GPT-2 tokens of English Wikipedia", "this project", config, grid)


@recipe
def wiki_gpt2() -> Recipe:
    """GPT-2 with RoPE, six layers of width 512."""
    return _gpt("wiki-gpt2", "gpt2-small", 4e-3, 4e-4)


@recipe
def wiki_nanogpt() -> Recipe:
    """Modded-NanoGPT, six layers of width 512, with its WSD schedule."""
    return _gpt("wiki-nanogpt", "nanogpt-124m", 3.6e-3, 3.6e-4, gamma=0.2, beta2=0.95, schedule="wsd")
