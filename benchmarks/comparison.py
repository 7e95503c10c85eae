"""What the comparison of docs/protocol.md compares: the optimizers, how tokens are spent, and the settings of a run.

A row ("entry") is an optimizer with its starting rates. A regime is a number of steps and a batch. A run is a point:
a model, a regime, a row, both rates, beta2, a seed, and at most one change of benchmarks/variants.py. Which runs the
comparison makes, and in what order, is in benchmarks/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.variants import VARIANTS
from cosmos_lab.config import RunConfig

BETA2 = 0.98  # The search starts from this value.
POINTS = 25  # number of points of each curve


@dataclass(frozen=True)
class Entry:
    """One row of the comparison; ``start`` has (hidden rate, rate of embedding, head and norms) by regime."""

    optimizer: str
    start: Mapping[str, tuple[float, float]]
    options: tuple[str, ...] = ()
    cost: float = 1.0  # Expected time of a step, relative to the usual row; it counts until the row has run.


@dataclass(frozen=True)
class Regime:
    """How tokens are spent."""

    steps: int
    batch: int  # Sequences in a step, all in one forward pass.
    seq_len: int = 1024
    epochs: int = 1  # How often a token may be seen.
    like: str = ""  # Take the settings of this regime instead of a search.


@dataclass(frozen=True)
class Run:
    """One run of the comparison."""

    model: str
    regime: str
    entry: str
    lr: float
    adam_lr: float
    beta2: float = BETA2
    seed: int = 0
    share: float = 1.0  # Of the regime's steps, with a complete schedule.
    variant: str = ""  # A name in VARIANTS.

    @property
    def id(self) -> str:
        """Return the name of the result file."""
        name = id_prefix(self.model, self.regime, self.entry)
        name += f"{self.lr:g}-emb{self.adam_lr:g}-b{self.beta2:g}-s{self.seed}"
        name = name if self.share == 1 else f"{name}-share{self.share:g}"
        return f"{name}-{self.variant}" if self.variant else name

    @property
    def plain(self) -> Run:
        """Return the same run without its variant."""
        return replace(self, variant="")


def id_prefix(model: str, regime: str, entry: str) -> str:
    """Return how the ids of an entry's runs begin; "lr" tells "soap-f1" from "soap-f10"."""
    return f"{model}-{regime}-{entry}-lr"


# The first searches, in regime B, began at an outer rate of 2e-3 and found the best at 1.6e-2 or 3.2e-2. Others begin
# at 1.6e-2.
_FIRST = {"A": (1e-3, 1.6e-2), "B": (5e-4, 2e-3)}
_LATER = {"A": (1e-3, 1.6e-2), "B": (5e-4, 1.6e-2)}
_EVERY_STEP = 3.5  # cost of a basis at every step: 33 ms in results/wiki-60m-soap.json, 14 ms all else in regime B


@dataclass(frozen=True)
class Comparison:
    """The rows, the regimes and the texts of the comparison; tests make a small one."""

    model: str = "llama-60m"
    preset: str = ""  # The lab's model, if it has another name.
    sizes: Mapping[str, Any] = field(default_factory=lambda: {"vocab_size": 32_100})  # Instead of the preset's.
    regimes: Mapping[str, Regime] = field(
        default_factory=lambda: {
            "A": Regime(800, 64), "B": Regime(3200, 16), "long": Regime(3200, 64, epochs=2, like="B"),
        }
    )  # fmt: skip
    entries: Mapping[str, Entry] = field(
        default_factory=lambda: {
            "adamw": Entry("adam", {"A": (2e-3, 1.6e-2), "B": (1e-3, 2e-3)}),
            "cosmos": Entry("cosmos", _FIRST),
            "muon": Entry("muon", _FIRST),
            "normuon": Entry("normuon", _FIRST),
            "soap-f10": Entry("soap", {"A": (2e-3, 1.6e-2), "B": (2e-3, 2e-3)}, ("frequency=10",)),
            "soap-f1": Entry("soap", {"A": (4e-3, 1.6e-2), "B": (2e-3, 1.6e-2)}, ("frequency=1",), cost=_EVERY_STEP),
            # The paper's outer rate: its gamma is lr / adam_lr, so a search from 1.6e-2 has little Muon left in it.
            "cosmos-paper": Entry("cosmos-paper", {"A": (1e-3, 2e-3), "B": (5e-4, 2e-3)}),
            "muon-eq": Entry("muon", _LATER, ("equal_rows=True",)),
            "soap-polar": Entry("soap-polar", _LATER, ("frequency=10",), cost=2.0),
        }
    )
    cut: int = 1_048_577  # The validation text ends with the first document that ends at this token or after it.
    block: int = 65_536  # Final losses are also kept as means over blocks of this many tokens.
    curve_tokens: int = 131_072  # Read from each text at every point of a curve.

    def config(self, run: Run) -> RunConfig:
        """Return the lab's configuration of a run, without its folders."""
        entry, regime = self.entries[run.entry], self.regimes[run.regime]
        steps = round(regime.steps * run.share)
        config = RunConfig().replace(
            model=self.preset or run.model, seq_len=regime.seq_len, optimizer=entry.optimizer, lr=run.lr,
            adam_lr=run.adam_lr, beta1=0.9, beta2=run.beta2, eps=1e-8, weight_decay=0.0, options=entry.options,
            steps=steps, batch=regime.batch, micro_batch=regime.batch, clip=1.0, seed=run.seed, schedule="linear",
            warmup=0.1, recipe="protocol", name=run.id, log_every=max(1, steps // 50),
            val_every=max(1, steps // POINTS), val_tokens=self.curve_tokens, diagnostics_every=0, checkpoint_every=0,
        )  # fmt: skip
        if run.variant:
            variant = VARIANTS[run.variant]
            rates = {name: factor * run.adam_lr for name, factor in variant.outer.items()}
            config = config.replace(**rates, **variant.fields, options=(*entry.options, *variant.options))
            if variant.trial:
                config = config.replace(optimizer=f"trial-{entry.optimizer}")
        return config.replace(**self.sizes)

    def tokens(self, run: Run) -> int:
        """Return the tokens that a run trains on."""
        regime = self.regimes[run.regime]
        return round(regime.steps * run.share) * regime.batch * regime.seq_len
