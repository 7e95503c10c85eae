"""The two learning rates of `Cosmos`, from the one of AdamW."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """The rate of the hidden matrices, and the rate of embeddings, output head, norms and biases."""

    lr: float
    adam_lr: float


def rates_from_adamw(lr: float) -> Rates:
    """Return starting rates for `Cosmos`, given the best rate of AdamW on the same task: lr / 2 and 2 lr.

    Measured in pre-training on English Wikipedia (docs/results.md, docs/protocol.md), rates in steps of a factor of 2,
    one seed. The best `lr` over AdamW's best rate was

        0.5    LLaMA-60M, 800 steps           (1e-3 and 2e-3; each has a worse rate on either side)
        0.5    LLaMA-60M, 3,200 steps         (5e-4, the lowest tried, and 1e-3)
        0.8    GPT-2 of width 512, 480 steps  (8e-4 and 1e-3; each has a worse rate on either side)
        0.4    NanoGPT of width 512, 480 steps (7.2e-4 and 1.8e-3; each has a worse rate on either side)

    so half of AdamW's rate is right within a factor of 1.6. `adam_lr` was compared at LLaMA-60M with 800 steps only:
    1, 2 and 4 times AdamW's rate ended at a perplexity of 33.6, 32.1 and 31.6. Long runs may want less than 2 times.
    Nothing was measured above 130M parameters or in fine-tuning, so sweep `lr` by factors of 2 around this start.

    >>> rates_from_adamw(2e-3)
    Rates(lr=0.001, adam_lr=0.004)
    """
    return Rates(lr / 2, 2 * lr)
