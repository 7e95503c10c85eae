"""The paper's LLaMA runs on C4: Tables 2 to 4 and the figures of its appendix.

COSMOS as the paper has it is "cosmos-paper"; Table 2 has a row of this library's defaults ("cosmos") beside it.

Common to all (appendix A): T5 tokens, sequence 1024, betas (0.9, 0.98), eps 1e-8, no weight decay, 10 % linear warm-up
and linear decay to 0. Embedding and head of MUON and COSMOS run Adam at 2e-3, gamma is lr / 2e-3; the learning rate is
the only hyper-parameter tuned. SOAP, GaLore, Adam-mini and Adam use one rate for all parameters.
"""

from __future__ import annotations

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.recipe import Recipe, recipe
from cosmos_lab.recipes.variants import Variant, variants

ADAM_LR = 2e-3  # Adam's best rate at 130M, used for embedding and head from then on
ADAM_LRS = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
MATRIX_LRS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
GALORE_LRS = (5e-3, 1e-2, 2e-2, 4e-2)
GALORE = ("update_gap=50", "scale=0.25")
C4 = "data/c4_t5"


def llama(name: str, model: str, steps: int, batch: int, **fields: object) -> RunConfig:
    """The common set-up."""
    return RunConfig().replace(
        model=model, data=C4, optimizer="cosmos-paper", lr=5e-4, adam_lr=ADAM_LR, rank=64, steps=steps, batch=batch,
        val_every=steps // 20, val_tokens=10_485_760, checkpoint_every=steps // 10, diagnostics_every=steps // 20,
        recipe=name, **fields,
    )  # fmt: skip


def adam_like(galore_rank: int, soap_lrs: tuple[float, ...]) -> list[Variant]:
    """The rows with one rate for all parameters. ``rank`` None keeps COSMOS's rank of the base set-up out of them."""
    return [
        *variants("adam", ADAM_LRS, adam_lr="lr", rank=None),
        *variants("adam-mini", (ADAM_LR,), adam_lr="lr", rank=None),
        *variants("galore", GALORE_LRS, adam_lr="lr", rank=galore_rank, options=GALORE),
        *variants("soap", soap_lrs, adam_lr="lr", rank=None),
    ]


def matrix_like(lrs: tuple[float, ...], *names: str) -> list[Variant]:
    """MUON's and COSMOS's rows: embedding and head at 2e-3. The set-up's rank is the paper's COSMOS's."""
    own = {name: {} if name == "cosmos-paper" else {"rank": None} for name in names}
    return [v for name in names for v in variants(name, lrs, adam_lr=ADAM_LR, **own[name])]


@recipe
def llama_130m() -> Recipe:
    """LLaMA-130M, 5B tokens of C4: six optimizers, each tuned."""
    return Recipe(
        "llama-130m",
        "LLaMA-130M on 5B tokens of C4, six optimizers tuned",
        "Table 2, 130M(5B)",
        llama("llama-130m", "llama-130m", 5000, 960),
        (
            *adam_like(256, (5e-4, 1e-3, 2e-3, 4e-3)),
            *matrix_like(MATRIX_LRS, "muon", "cosmos-paper"),
            *matrix_like((5e-4,), "cosmos"),
        ),
        published={
            "adam": 21.28,
            "adam-mini": 21.78,
            "galore": 24.07,
            "soap": 20.59,
            "muon": 20.69,
            "cosmos-paper": 20.54,
        },  # fmt: skip
    )


@recipe
def llama_350m() -> Recipe:
    """LLaMA-350M, 10B tokens of C4: six optimizers, each tuned."""
    return Recipe(
        "llama-350m",
        "LLaMA-350M on 10B tokens of C4, six optimizers tuned",
        "Table 2, 350M(10B)",
        llama("llama-350m", "llama-350m", 5000, 2000),
        (*adam_like(384, ADAM_LRS), *matrix_like(MATRIX_LRS, "muon", "cosmos-paper"), *matrix_like((5e-4,), "cosmos")),
        published={
            "adam": 17.28,
            "adam-mini": 18.03,
            "galore": 19.03,
            "soap": 16.32,
            "muon": 16.49,
            "cosmos-paper": 16.21,
        },  # fmt: skip
    )


@recipe
def llama_1b() -> Recipe:
    """LLaMA-1B, 26B tokens of C4: Adam (2e-3 spiked, 1e-3 is the baseline), MUON, COSMOS."""
    return Recipe(
        "llama-1b",
        "LLaMA-1B on 26B tokens of C4: Adam, MUON, COSMOS",
        "Table 2, 1B(26B)",
        llama("llama-1b", "llama-1b", 13_000, 2000),
        (
            *variants("adam", (1e-3, 2e-3), adam_lr="lr", rank=None),
            *matrix_like((5e-4,), "muon", "cosmos-paper", "cosmos"),
        ),
        published={"adam": 12.97, "muon": 12.57, "cosmos-paper": 12.46},
    )


@recipe
def llama_1b_small_lr() -> Recipe:
    """LLaMA-1B at the smaller of the two rates tried."""
    return Recipe(
        "llama-1b-small-lr",
        "LLaMA-1B at learning rate 2e-4: MUON, COSMOS",
        "Appendix, smaller learning rate on LLaMA-1B",
        llama("llama-1b-small-lr", "llama-1b", 13_000, 2000).replace(lr=2e-4),
        tuple(matrix_like((2e-4,), "muon", "cosmos-paper")),
    )


@recipe
def llama_130m_lr() -> Recipe:
    """Sensitivity to the learning rate."""
    rows = {
        "muon": {2e-4: 21.72, 5e-4: 20.75, 1e-3: 20.69, 2e-3: 26.74},
        "cosmos-paper": {2e-4: 21.17, 5e-4: 20.54, 1e-3: 20.62, 2e-3: 21.00},
    }
    return Recipe(
        "llama-130m-lr",
        "LLaMA-130M: how MUON and COSMOS depend on the learning rate",
        "Table 3",
        llama("llama-130m-lr", "llama-130m", 5000, 960),
        tuple(matrix_like((2e-4, 5e-4, 1e-3, 2e-3), "muon", "cosmos-paper")),
        published={f"{name}-lr{lr:g}": ppl for name, row in rows.items() for lr, ppl in row.items()},
    )


@recipe
def llama_130m_rank_gamma() -> Recipe:
    """Sensitivity to rank and discount factor."""
    rows = {
        32: {0.1: 20.58, 0.25: 20.55, 0.5: 20.54, 1: 20.54},
        64: {0.1: 20.62, 0.25: 20.54, 0.5: 20.57, 1: 20.61},
        128: {0.1: 20.65, 0.25: 20.58, 0.5: 20.63, 1: 20.72},
    }
    grid = [{"optimizer": "cosmos-paper", "lr": 5e-4, "rank": r, "gamma": g} for r, row in rows.items() for g in row]
    return Recipe(
        "llama-130m-rank-gamma",
        "LLaMA-130M: how COSMOS depends on rank and gamma",
        "Table 4",
        llama("llama-130m-rank-gamma", "llama-130m", 5000, 960),
        tuple(grid),
        published={f"cosmos-paper-lr0.0005-rank{r}-gamma{g:g}": p for r, row in rows.items() for g, p in row.items()},
    )


def _normalization(name: str, model: str, batch: int) -> Recipe:
    # Paper: the grid it prints for MUON + NORM is GaLore's (5e-3 to 4e-2); here: MUON's, whose updates are as large.
    return Recipe(
        name,
        f"{model}: is NORM alone what sets COSMOS apart from MUON?",
        "Appendix, normalization ablation",
        llama(name, model, 5000, batch),
        tuple(matrix_like(MATRIX_LRS, "muon", "muon-norm", "cosmos-paper")),
    )


@recipe
def llama_130m_norm() -> Recipe:
    """Normalization ablation at 130M."""
    return _normalization("llama-130m-norm", "llama-130m", 960)


@recipe
def llama_350m_norm() -> Recipe:
    """Normalization ablation at 350M."""
    return _normalization("llama-350m-norm", "llama-350m", 2000)


@recipe
def llama_130m_256() -> Recipe:
    """GaLore at the sequence length it was published with; the batch keeps the tokens of a step."""
    grid = [
        *variants("adam", (1e-3, 2e-3, 4e-3), adam_lr="lr", rank=None),
        *variants("galore", GALORE_LRS, adam_lr="lr", rank=256, options=GALORE),
        *matrix_like((5e-4,), "cosmos-paper"),
    ]
    return Recipe(
        "llama-130m-256",
        "LLaMA-130M at sequence length 256: GaLore against Adam and COSMOS",
        "Appendix, shorter sequences",
        llama("llama-130m-256", "llama-130m", 5000, 3840, seq_len=256),
        tuple(grid),
    )
