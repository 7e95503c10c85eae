"""The recipes of this project: the paper's comparison on a laptop, and its tables and ablations on English Wikipedia.

The Wikipedia runs have sizes for one GPU: T5 tokens for LLaMA, GPT-2 tokens for the others, sequence 1024, 65,536
tokens a step. Except for the size the set-up is the paper's (``recipes/llama.py``): 10 % warm-up, linear decay to 0,
betas (0.9, 0.98), no weight decay.
"""

from __future__ import annotations

from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.llama import GALORE, matrix_like
from cosmos_lab.recipes.recipe import Setup, recipe
from cosmos_lab.recipes.variants import Variant, at_rates

ADAM_LRS = (5e-4, 1e-3, 2e-3, 4e-3)
GALORE_LRS = (2.5e-3, 5e-3, 1e-2, 2e-2)
LRS = (2.5e-4, 5e-4, 1e-3, 2e-3)
SOAP_LRS = (1e-3, 2e-3, 4e-3, 8e-3)
ADDED = ("nesterov=True", "row_beta2=0.95")  # not in the paper's COSMOS; NorMuon and our COSMOS have both
EXPRESS = "ns_coefficients=polar-express"
SOAP = ("frequency=1",)  # steps between updates of the basis; the 10 of Vyas et al. 2024 are too many for so few steps


@recipe("this project")
def tiny() -> Setup:
    """Train a LLaMA of 1.4M parameters on the embedded text, in seconds on a laptop.

    Embedding, head and norms have the same rate for every optimizer, so that the table compares the hidden matrices.
    In the demo's grid, this rate ends at most 0.03 nats above the best of each optimizer.
    """
    config = RunConfig().replace(
        model="tiny", data="embedded", seq_len=128, lr=1e-3, adam_lr=3.2e-2, rank=32, steps=200, batch=16,
        val_every=50, val_tokens=65_536, checkpoint_every=100, diagnostics_every=20,
    )  # fmt: skip
    return config, [
        *at_rates("adam", (1e-3, 2e-3, 4e-3), rank=None),
        *at_rates("muon", (1e-3, 2e-3, 4e-3), rank=None),
        *at_rates("soap", (2e-3, 4e-3, 8e-3), rank=None),
        *at_rates("cosmos", (5e-4, 1e-3, 2e-3)),
    ]


def wiki(model: str, steps: int, **fields: Any) -> RunConfig:
    """Return the common set-up of the LLaMA runs."""
    return RunConfig().replace(
        model=model, data="data/wiki_t5", optimizer="cosmos-paper", lr=5e-4, adam_lr=2e-3, rank=64, steps=steps,
        batch=64, val_every=steps // 8, val_tokens=1_048_576, checkpoint_every=0, diagnostics_every=steps // 8,
    ).replace(**fields)  # fmt: skip


Rates = tuple[float, ...]


def table(adam: Rates, mini: Rates, soap: Rates, galore: Rates, lrs: Rates, rank: int = 128) -> list[Variant]:
    """Return the optimizers of Table 2, Muon with NORM, NorMuon and COSMOS with its defaults; the rank is GaLore's."""
    return [
        *at_rates("adam", adam, adam_lr="lr", rank=None),
        *at_rates("adam-mini", mini, adam_lr="lr", rank=None),
        *at_rates("galore", galore, adam_lr="lr", rank=rank, options=GALORE),
        *at_rates("soap", soap, adam_lr="lr", rank=None, options=SOAP),
        *matrix_like(lrs, "muon", "muon-norm", "normuon", "cosmos-paper", "cosmos"),
    ]


def paper(*options: str, **fields: Any) -> Variant:
    """Return the paper's COSMOS at its usual rate with something changed."""
    return {"optimizer": "cosmos-paper", "lr": 5e-4, **fields, **({"options": options} if options else {})}


@recipe("this project")
def wiki_60m() -> Setup:
    """Tune nine optimizers on LLaMA-60M and 52M tokens of English Wikipedia, at four rates each."""
    return wiki("llama-60m", 800), table(ADAM_LRS, ADAM_LRS, SOAP_LRS, GALORE_LRS, LRS)


@recipe("this project")
def wiki_130m() -> Setup:
    """Compare nine optimizers on LLaMA-130M and 105M tokens of English Wikipedia, at the best rates of 60M.

    AdamW also runs at half of its rate. Embedding and head run at 4e-3.
    """
    return wiki("llama-130m", 1600), [
        *table((1e-3, 2e-3), (1e-3,), (4e-3,), (1e-2,), (), rank=256),
        *(v for name in ("muon", "muon-norm", "normuon") for v in at_rates(name, (1e-3,), adam_lr=4e-3, rank=None)),
        *at_rates("cosmos-paper", (1e-3,), adam_lr=4e-3, gamma=0.5),
        *at_rates("cosmos", (1e-3,), adam_lr=4e-3, rank=None),
    ]


@recipe("this project")
def wiki_60m_ablations() -> Setup:
    """Change one thing of COSMOS at a time, on LLaMA-60M and English Wikipedia."""
    return wiki("llama-60m", 800), [
        paper(),
        *(paper(rank=rank, gamma=gamma) for rank in (32, 64, 128) for gamma in (0.1, 0.25, 0.5, 1.0)),
        *map(paper, ("eps_placement=inside", "nesterov=True", "ns_steps=3", "ns_steps=4", EXPRESS)),
        *map(paper, ("residual_guard=0.0", "side=smaller", "two_sided=True")),
        paper(weight_decay=0.1),
        paper("momentum_dtype=torch.bfloat16"),
    ]


@recipe("this project")
def wiki_60m_beyond() -> Setup:
    """Add to COSMOS and NorMuon what the paper does not have, on LLaMA-60M and English Wikipedia."""
    return wiki("llama-60m", 800), [
        paper(lr=1e-3),
        paper("nesterov=True", lr=1e-3),
        paper("row_beta2=0.95", lr=1e-3),
        paper(*ADDED, lr=1e-3),
        paper(*ADDED, lr=1e-3, rank=32),
        paper(*ADDED, EXPRESS, lr=1e-3),
        paper(*ADDED, EXPRESS, lr=1e-3, rank=32),
        *at_rates("normuon", (7e-4, 1e-3), rank=None),
        *at_rates("normuon", (1e-3,), rank=None, options=(EXPRESS,)),
    ]


@recipe("this project")
def wiki_60m_256() -> Setup:
    """Compare GaLore with AdamW and COSMOS on LLaMA-60M at sequence length 256, for which GaLore was published."""
    return wiki("llama-60m", 800, seq_len=256, batch=256), [
        *at_rates("adam", (2e-3, 4e-3), adam_lr="lr", rank=None),
        *at_rates("galore", (5e-3, 1e-2), adam_lr="lr", rank=128, options=GALORE),
        paper(),
    ]


def _gpt(model: str, adam_lr: float, lr: float, gamma: float | None = None, **fields: Any) -> Setup:
    """Return six layers of width 512 of ``model``, on 31M tokens.

    ``gamma`` is the paper's. COSMOS with its defaults has its own; the paper's COSMOS also runs with that one.
    """
    reduced = {"depth": 6, "width": 512, "mlp": 2048}
    config = wiki(model, 480, data="data/wiki_gpt2", lr=lr, adam_lr=adam_lr, gamma=gamma, **reduced, **fields)
    return config, [
        *at_rates("adam", (adam_lr / 8, adam_lr / 4, adam_lr / 2, adam_lr), adam_lr="lr", rank=None, gamma=None),
        *at_rates("muon", (lr, 2 * lr, 4 * lr), rank=None, gamma=None),
        *at_rates("cosmos-paper", (lr, 2 * lr), gamma=gamma),
        *at_rates("cosmos-paper", (2 * lr, 4 * lr), gamma=1e3 * lr),
        *at_rates("cosmos", (lr, 2 * lr, 4 * lr), rank=None, gamma=None),
    ]


@recipe("this project")
def wiki_gpt2() -> Setup:
    """Tune AdamW, Muon and COSMOS on a reduced GPT-2 with rotary positions and 31M tokens of English Wikipedia."""
    return _gpt("gpt2-small", 4e-3, 4e-4)


@recipe("this project")
def wiki_nanogpt() -> Setup:
    """Tune AdamW, Muon and COSMOS on a reduced modded-NanoGPT, with its schedule, and 31M tokens of Wikipedia.

    Model, rates and schedule are those of record 5 (see `nanogpt_124m_record5`).
    """
    wsd = {"schedule": "wsd", "warmup": 0.0, "decay": 1450 / 5100}
    return _gpt("nanogpt-124m-record5", 3.6e-3, 3.6e-4, gamma=0.2, adam_beta1=0.9, beta2=0.95, **wsd)
