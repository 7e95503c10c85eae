"""The two learning rates of `Cosmos`, from the one of AdamW."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """The rate of the hidden matrices, and the rate of embeddings, output head, norms and biases."""

    lr: float
    adam_lr: float


def rates_from_adamw(lr: float) -> Rates:
    """Return starting rates for `Cosmos`, given the best rate of AdamW on the same task: lr / 2 and 2 lr.

    The rule is a start for a sweep of `lr` by factors of 2. It was measured in pre-training on English Wikipedia, one
    seed, rates in steps of a factor of 2 (docs/results.md, docs/protocol.md). The best `lr` over AdamW's best rate:

        0.5    LLaMA-60M, 800 steps (1e-3 over 2e-3; `CosmosPaper`)
        0.5    LLaMA-60M, 3,200 steps (5e-4 over 1e-3)
        0.8    GPT-2 of width 512, 480 steps (8e-4 over 1e-3)
        0.4    NanoGPT of width 512, 480 steps (7.2e-4 over 1.8e-3)

    In these four, half of AdamW's rate is within a factor of 1.6 of the best. On a LLaMA of width 128 with 300 steps
    the ratio was 1 or more: 1e-3 over 1e-3, AdamW's lowest that was tried. LLaMA-130M had too few rates to tell.

    At LLaMA-60M with 800 steps and `lr` 1e-3, an `adam_lr` of 2, 4, 8 and 16 times AdamW's rate ends at a perplexity of
    31.8, 31.3, 31.0 and 31.2. With 3,200 steps and 5e-4, 2, 4, 8, 16 and 32 times its rate end at 30.6, 29.8, 29.2,
    29.1 and 28.8. So try higher ones if you train from scratch. Nothing was measured above 130M parameters or in runs
    of more than 3,200 steps. In fine-tuning (docs/fine-tuning.md) both had their best rate at the end of the range,
    with a ratio of 0.5.

    >>> rates_from_adamw(2e-3)
    Rates(lr=0.001, adam_lr=0.004)
    """
    return Rates(lr / 2, 2 * lr)
