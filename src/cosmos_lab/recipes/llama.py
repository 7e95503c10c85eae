"""The paper's LLaMA runs on C4: Tables 2 to 4 and the figures of its appendix.

COSMOS as the paper defines it is "cosmos-paper"; Table 2 also has a row of this library's defaults ("cosmos").

Common to all (appendix A): T5 tokens, sequence 1024, betas (0.9, 0.98), eps 1e-8, no weight decay, 10 % linear warm-up
and linear decay to 0. Embedding and head of Muon and COSMOS use AdamW at 2e-3, gamma is lr / 2e-3; the learning rate is
the only hyper-parameter tuned. SOAP, GaLore, Adam-mini and AdamW use one rate for all parameters.
"""

from __future__ import annotations

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.recipe import Setup, recipe
from cosmos_lab.recipes.variants import Variant, at_rates

ADAM_LR = 2e-3  # AdamW's best rate at 130M, used for embedding and head from then on
ADAM_LRS = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
MATRIX_LRS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
GALORE_LRS = (5e-3, 1e-2, 2e-2, 4e-2)
_ROWS = ("adam", "adam-mini", "galore", "soap", "muon", "cosmos-paper")
GALORE = ("update_gap=50", "scale=0.25")
# Published perplexities by size and optimizer, by optimizer and rate, and by rank and gamma.
TABLE_2 = {
    "130M": dict(zip(_ROWS, (21.28, 21.78, 24.07, 20.59, 20.69, 20.54))),
    "350M": dict(zip(_ROWS, (17.28, 18.03, 19.03, 16.32, 16.49, 16.21))),
    "1B": {"adam": 12.97, "muon": 12.57, "cosmos-paper": 12.46},
}
TABLE_3 = {
    "muon": {2e-4: 21.72, 5e-4: 20.75, 1e-3: 20.69, 2e-3: 26.74},
    "cosmos-paper": {2e-4: 21.17, 5e-4: 20.54, 1e-3: 20.62, 2e-3: 21.00},
}
TABLE_4 = {
    32: {0.1: 20.58, 0.25: 20.55, 0.5: 20.54, 1: 20.54},
    64: {0.1: 20.62, 0.25: 20.54, 0.5: 20.57, 1: 20.61},
    128: {0.1: 20.65, 0.25: 20.58, 0.5: 20.63, 1: 20.72},
}


def llama(model: str, steps: int, batch: int, **fields: object) -> RunConfig:
    """Return the common set-up."""
    return RunConfig().replace(
        model=model, data="data/c4_t5", optimizer="cosmos-paper", lr=5e-4, adam_lr=ADAM_LR, rank=64, steps=steps,
        batch=batch, val_every=steps // 20, val_tokens=10_485_760, checkpoint_every=steps // 10,
        diagnostics_every=steps // 20,
    ).replace(**fields)  # fmt: skip


def matrix_like(lrs: tuple[float, ...], *names: str) -> list[Variant]:
    """Return variants of Muon and COSMOS, embedding and head at 2e-3; only the paper's COSMOS has the set-up's rank."""
    own = {name: {} if name == "cosmos-paper" else {"rank": None} for name in names}
    return [v for name in names for v in at_rates(name, lrs, adam_lr=ADAM_LR, **own[name])]


def _table_2(galore_rank: int, soap_lrs: tuple[float, ...]) -> list[Variant]:
    """Return the optimizers of Table 2; ``rank`` None drops the set-up's rank, which is COSMOS's."""
    return [
        *at_rates("adam", ADAM_LRS, adam_lr="lr", rank=None),
        *at_rates("adam-mini", (ADAM_LR,), adam_lr="lr", rank=None),
        *at_rates("galore", GALORE_LRS, adam_lr="lr", rank=galore_rank, options=GALORE),
        *at_rates("soap", soap_lrs, adam_lr="lr", rank=None),
        *matrix_like(MATRIX_LRS, "muon", "cosmos-paper"),
        *matrix_like((5e-4,), "cosmos"),
    ]


@recipe("Table 2, 130M(5B)", published=TABLE_2["130M"])
def llama_130m() -> Setup:
    """Tune six optimizers on LLaMA-130M and 5B tokens of C4."""
    return llama("llama-130m", 5000, 960), _table_2(256, (5e-4, 1e-3, 2e-3, 4e-3))


@recipe("Table 2, 350M(10B)", published=TABLE_2["350M"])
def llama_350m() -> Setup:
    """Tune six optimizers on LLaMA-350M and 10B tokens of C4."""
    return llama("llama-350m", 5000, 2000), _table_2(384, ADAM_LRS)


@recipe("Table 2, 1B(26B)", published=TABLE_2["1B"])
def llama_1b() -> Setup:
    """Compare AdamW, Muon and COSMOS on LLaMA-1B and 26B tokens of C4.

    AdamW at 2e-3 had loss spikes; the paper's baseline is 1e-3.
    """
    adam = at_rates("adam", (1e-3, 2e-3), adam_lr="lr", rank=None)
    return llama("llama-1b", 13_000, 2000), [*adam, *matrix_like((5e-4,), "muon", "cosmos-paper", "cosmos")]


@recipe("Appendix, smaller learning rate on LLaMA-1B")
def llama_1b_small_lr() -> Setup:
    """Compare Muon and COSMOS on LLaMA-1B at the smaller of the two rates tried, 2e-4."""
    return llama("llama-1b", 13_000, 2000, lr=2e-4), matrix_like((2e-4,), "muon", "cosmos-paper")


@recipe("Table 3", published={f"{name}-lr{lr:g}": ppl for name, row in TABLE_3.items() for lr, ppl in row.items()})
def llama_130m_lr() -> Setup:
    """Vary the learning rate of Muon and COSMOS on LLaMA-130M."""
    return llama("llama-130m", 5000, 960), matrix_like((2e-4, 5e-4, 1e-3, 2e-3), *TABLE_3)


@recipe(
    "Table 4",
    published={f"cosmos-paper-lr0.0005-rank{r}-gamma{g:g}": p for r, row in TABLE_4.items() for g, p in row.items()},
)
def llama_130m_rank_gamma() -> Setup:
    """Vary rank and gamma of COSMOS on LLaMA-130M."""
    grid = [{"optimizer": "cosmos-paper", "lr": 5e-4, "rank": r, "gamma": g} for r, row in TABLE_4.items() for g in row]
    return llama("llama-130m", 5000, 960), grid


# The paper prints GaLore's rates (5e-3 to 4e-2) for Muon with NORM. We use Muon's: the updates are as large.
_NORM = matrix_like(MATRIX_LRS, "muon", "muon-norm", "cosmos-paper")


@recipe("Appendix, normalization ablation")
def llama_130m_norm() -> Setup:
    """Test on LLaMA-130M whether NORM alone explains the difference between COSMOS and Muon."""
    return llama("llama-130m", 5000, 960), _NORM


@recipe("Appendix, normalization ablation")
def llama_350m_norm() -> Setup:
    """Test on LLaMA-350M whether NORM alone explains the difference between COSMOS and Muon."""
    return llama("llama-350m", 5000, 2000), _NORM


@recipe("Appendix, shorter sequences")
def llama_130m_256() -> Setup:
    """Compare GaLore with AdamW and COSMOS on LLaMA-130M at sequence length 256, for which GaLore was published.

    The batch keeps the tokens of a step.
    """
    grid = [
        *at_rates("adam", (1e-3, 2e-3, 4e-3), adam_lr="lr", rank=None),
        *at_rates("galore", GALORE_LRS, adam_lr="lr", rank=256, options=GALORE),
        *matrix_like((5e-4,), "cosmos-paper"),
    ]
    return llama("llama-130m", 5000, 3840, seq_len=256), grid
