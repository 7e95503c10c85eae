"""Changes to try on top of a row of the comparison: a name, one line of what it does, and the settings it changes.

A variant runs at the best point that its row has so far. It is compared with the row's own run at that point. Variants
that win there should become rows with separate searches; nothing is concluded from one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MATRIX = ("cosmos", "normuon", "muon")
EVERY = (*MATRIX, "soap-f10", "adamw")


@dataclass(frozen=True)
class Variant:
    """One change.

    formula: what it does, in one line.
    rows: the rows of the comparison that can have it.
    outer: rates of a kind of parameter (fields of the lab's configuration), as multiples of the outer rate.
    fields: other fields of the lab's configuration.
    options: further options of the optimizer.
    trial: whether the options belong to `trials.TrialOptions`.
    """

    name: str
    formula: str
    rows: tuple[str, ...] = EVERY
    outer: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    trial: bool = False


def _trial(name: str, formula: str, *options: str, rows: tuple[str, ...] = EVERY, **outer: float) -> Variant:
    return Variant(name, formula, rows, outer, options=options, trial=True)


QUALITY = (  # In the order in which they should be tried.
    Variant("equal-rows", "rows of equal norm before Newton-Schulz", ("cosmos", "normuon"),
            options=("equal_rows=True",)),
    Variant("norms-quarter", "norms at a quarter of the outer rate", outer={"vector_lr": 0.25}),
    Variant("norms-eighth", "norms at an eighth of the outer rate", outer={"vector_lr": 1 / 8}),
    Variant("norms-half", "norms at half the outer rate", outer={"vector_lr": 0.5}),
    Variant("norms-sixteenth", "norms at a sixteenth of the outer rate", outer={"vector_lr": 1 / 16}),
    _trial("basis-b2-0.95", "S (the basis) with beta2 0.95, V as before", "basis_beta2=0.95", rows=("cosmos",)),
    Variant("embed-x4", "embedding at 4 times the outer rate", outer={"embedding_lr": 4}),
    Variant("head-x2", "head at twice the outer rate", outer={"head_lr": 2}),
    Variant("head-half", "head at half the outer rate", outer={"head_lr": 0.5}),
    Variant("embed-x2", "embedding at twice the outer rate", outer={"embedding_lr": 2}),
    _trial("embed-b1-0.7", "beta1 of the embedding 0.7 instead of 0.9", "embedding_betas=(0.7, 0.98)"),
    _trial("outer-b2-0.997", "beta2 of embedding and head 0.997", "embedding_betas=(0.9, 0.997)",
           "head_betas=(0.9, 0.997)"),
    _trial("head-matrix", "head by the rule of the hidden matrices, update RMS at the outer rate", "head_rule=True",
           rows=MATRIX),
    _trial("outer-rows", "AdamW's update of embedding and head with rows of equal size", "outer_rows=True"),
    _trial("balance", "gamma = sqrt(1 - r/n) |X| / sqrt(EMA |G - GUU'|^2), by matrix and step", "balance=1.0",
           rows=("cosmos",)),
    _trial("basis-b2-0.9", "S (the basis) with beta2 0.9, V as before", "basis_beta2=0.9", rows=("cosmos",)),
    _trial("basis-b2-0.995", "S (the basis) with beta2 0.995, V as before", "basis_beta2=0.995", rows=("cosmos",)),
    Variant("decay", "weight decay 0.1 on everything", fields={"weight_decay": 0.1}),
    _trial("decay-hidden", "weight decay 0.1 on hidden matrices", "decays={'hidden': 0.1}", rows=MATRIX),
    _trial("decay-embedding", "weight decay 0.1 on the embedding, times its rate", "decays={'embedding': 0.1}"),
    _trial("decay-head", "weight decay 0.1 on the head, times its rate", "decays={'head': 0.1}"),
    _trial("decay-vectors", "weight decay 0.1 on norms, times their rate", "decays={'vectors': 0.1}"),
    _trial("cautious", "weight decay 0.1 on hidden matrices, for elements for which it does not oppose the update",
           "cautious_decay=0.1"),
    Variant("momentum-0.95", "momentum of hidden matrices 0.95 instead of 0.9, as published", ("muon", "normuon"),
            options=("momentum=0.95",)),
    Variant("hidden-b1-0.95", "beta1 of hidden matrices and norms 0.95", ("cosmos",),
            fields={"beta1": 0.95, "adam_beta1": 0.9}),
    Variant("hidden-b1-0.85", "beta1 of hidden matrices and norms 0.85", ("cosmos",),
            fields={"beta1": 0.85, "adam_beta1": 0.9}),
    _trial("attention-x2", "hidden rate of attention times 2", "hidden_rates={'.attn.': 2}", rows=MATRIX),
    _trial("attention-half", "hidden rate of attention times 0.5", "hidden_rates={'.attn.': 0.5}", rows=MATRIX),
    _trial("queries-x2", "hidden rate of queries and keys times 2", "hidden_rates={'.q.': 2, '.k.': 2}", rows=MATRIX),
    _trial("queries-half", "hidden rate of queries and keys times 0.5", "hidden_rates={'.q.': 0.5, '.k.': 0.5}",
           rows=MATRIX),
    _trial("outputs-x2", "hidden rate of matrices that write to the residual times 2",
           "hidden_rates={'.o.': 2, '.down.': 2}", rows=MATRIX),
    _trial("outputs-half", "hidden rate of matrices that write to the residual times 0.5",
           "hidden_rates={'.o.': 0.5, '.down.': 0.5}", rows=MATRIX),
    Variant("heads", "each head of attention its own matrix", MATRIX, options=("split_heads=True",)),
    _trial("gamma-x2", "twice gamma", "gamma_attention=2.0", "gamma_mlp=2.0", rows=("cosmos",)),
    _trial("gamma-attention-half", "half of gamma in attention", "gamma_attention=0.5", rows=("cosmos",)),
    _trial("gamma-mlp-half", "half of gamma in the MLP", "gamma_mlp=0.5", rows=("cosmos",)),
    Variant("two-sided", "bases on both sides of a matrix", ("cosmos",), options=("two_sided=True",)),
    _trial("two-sided-half", "bases on both sides, half of gamma", "two_sided=True", "gamma_attention=0.5",
           "gamma_mlp=0.5", rows=("cosmos",)),
    _trial("lookahead-0.6", "gradient and step from x + 0.6 (lr/peak) EMA_0.99 of x's steps", "lookahead=0.6"),
    _trial("lookahead-0.3", "gradient and step from x + 0.3 (lr/peak) EMA_0.99 of x's steps", "lookahead=0.3"),
)  # fmt: skip
_M8, _ADAM8, _W24 = "momentum_dtype=torch.int8", "adam_dtype=torch.int8", "weight_correction=True"
_BF16 = {"weights": "bf16"}
MEMORY = (
    Variant("momentum-int8", "momentum of hidden matrices in int8", MATRIX, options=(_M8,)),
    Variant("adam-int8", "both moments of AdamW in int8", EVERY, options=(_ADAM8,)),
    Variant("states-8", "momentum and both moments of AdamW in int8", MATRIX, options=(_M8, _ADAM8)),
    Variant("weights-16", "weights as bfloat16, to compare the next two with: activations change too", fields=_BF16),
    Variant("weights-24", "weights as bfloat16 and 8 bits of correction", fields=_BF16, options=(_W24,)),
    Variant("all-8", "momentum and moments in int8, weights of 24 bits", MATRIX, fields=_BF16,
            options=(_W24, _M8, _ADAM8)),
)  # fmt: skip
VARIANTS = {variant.name: variant for variant in (*QUALITY, *MEMORY)}
