"""The two learning rates of `Cosmos`: by a measured rule, or from the one of AdamW."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from numbers import Integral
from typing import NamedTuple

from torch import nn

from cosmos_optim.hyperparameters import is_bool, require, require_number
from cosmos_optim.routing.param_groups import routes
from cosmos_optim.routing.route import matrix_shape

# The sweeps from which the rule of `rates` comes: smallest and largest.
LARGEST = 163_000_000  # parameters of the largest model, LLaMA-130M with embedding and head
MEASURED = {"width": (256, 768), "tokens_per_step": (8_192, 65_536), "tokens in all": (3_276_800, 52_428_800)}


class Rates(NamedTuple):
    """The rate of the hidden matrices, and the rate of embeddings, output head, norms and biases."""

    lr: float
    adam_lr: float


def rates(model: nn.Module | int, steps: int, tokens_per_step: int) -> Rates:
    """Return rates for `Cosmos` to train a language model from scratch, so that a first run needs no sweep.

        lr      = 4.8e-4 * (512 / width) ** 0.5 * (tokens_per_step / 8,192) ** 0.4
        adam_lr = 3.3e-2 * (13.1M / (steps * tokens_per_step)) ** 0.3

    The rule is fitted to eleven sweeps on English Wikipedia: LLaMA of width 256 to 768 (10M to 130M), 400 to 3,200
    steps of 8,192 to 65,536 tokens, a linear schedule with 10 % warm-up, clipping at 1.0. Compared with the best rates
    it costs at most 0.8 % of perplexity in these, and at most 1.7 % in a sweep left out of the fit, by interpolation
    between runs (docs/rates.md). Outside of this range it is a guess, and a warning says so. There, no rate is higher
    than at the end of the range: a larger batch does not raise `lr` further, and a smaller model or a shorter run
    raises neither. For fine-tuning, use `rates_from_adamw`.

    Args:
        model: the model, or its width. A model's width is the most common size of its hidden matrices. If that is not
            its width, as in Mamba, give the number.
        steps: optimizer steps of the whole run.
        tokens_per_step: tokens in one optimizer step, over all processes and accumulated batches.

    >>> rates(512, steps=3200, tokens_per_step=16_384)
    Rates(lr=0.00063, adam_lr=0.022)
    """
    if isinstance(model, nn.Module):
        width = _width(model)
    elif isinstance(model, Integral) and not is_bool(model):
        width = _positive("width", model)
    else:
        raise TypeError(f"give the model, or its width as an int, got a {type(model).__name__}")
    steps, tokens_per_step = _positive("steps", steps), _positive("tokens_per_step", tokens_per_step)
    given = {"width": width, "tokens_per_step": tokens_per_step, "tokens in all": steps * tokens_per_step}
    outside = [
        f"{name} {given[name]:,} ({low:,} to {high:,})"
        for name, (low, high) in MEASURED.items()
        if not low <= given[name] <= high
    ]
    if isinstance(model, nn.Module):
        outside += _not_measured(model)
    if outside:
        advice = "so they are a guess: also try the paper's, lr=5e-4 and adam_lr=2e-3, before a long run"
        warnings.warn(f"rates: outside of the measured range: {', '.join(outside)}; {advice}", stacklevel=2)
    width = max(width, MEASURED["width"][0])
    batch = min(tokens_per_step, MEASURED["tokens_per_step"][1])
    tokens = max(given["tokens in all"], MEASURED["tokens in all"][0])
    lr = 4.8e-4 * (512 / width) ** 0.5 * (batch / 8_192) ** 0.4
    adam_lr = 3.3e-2 * (1600 * 8_192 / tokens) ** 0.3
    return Rates(float(f"{lr:.1e}"), float(f"{adam_lr:.1e}"))


def _not_measured(model: nn.Module) -> list[str]:
    """Return what keeps a model out of the measured range; warn of frozen parameters, which is not from scratch."""
    parameters = list(model.parameters())
    if not all(p.requires_grad for p in parameters):
        advice = "these rates are for training from scratch, so use rates_from_adamw instead"
        warnings.warn(f"rates: the model has frozen parameters, and {advice}", stacklevel=3)
    count = sum(p.numel() for p in parameters)
    return [f"{count:,} parameters (at most {LARGEST:,})"] if count > LARGEST else []


def _positive(name: str, value: float) -> int:
    """Return a number as Python's int, which cannot overflow. Raise ValueError if it is below 1 or not finite."""
    require_number(name, value)
    require(1 <= value < math.inf, name, value, "it must be 1 or more")
    return int(value)


def _width(model: nn.Module) -> int:
    """Return the most common size of the hidden matrices and of their blocks; if several are, the smallest of them."""
    try:
        routed = routes(model, frozen=True)
    except ValueError as error:  # it advises on other functions
        advice = "give it, as in rates(512, steps, tokens_per_step)"
        raise ValueError(f"the model's width is not known: {advice}. {error}") from None
    sizes: Counter[int] = Counter()
    for parameter, route in routed:
        if route.rule == "cosmos":
            rows, columns = matrix_shape(parameter.p, route.settings)
            # An LSTM with four gates has four blocks, each as wide as its state.
            blocks = route.settings.get("split_sizes", ()) if "split_side" not in route.settings else ()
            sizes.update(size for block in blocks or (rows,) for size in (block, columns))
    if not sizes:
        raise ValueError("the model has no hidden matrix: give its width, as in rates(512, steps, tokens_per_step)")
    return min(sizes, key=lambda size: (-sizes[size], size))


def rates_from_adamw(lr: float) -> Rates:
    """Return starting rates for `Cosmos`, given the best rate of AdamW on the same task: lr / 2 and 2 lr.

    The rule is a start for a sweep of `lr` by factors of 2. It was measured in pre-training on English Wikipedia, one
    seed, rates in steps of a factor of 2 (docs/results.md). The best `lr` over AdamW's best rate:

        0.5    LLaMA-60M, 800 steps (1e-3 over 2e-3; `CosmosPaper`)
        0.5    LLaMA-60M, 3,200 steps (5e-4 over 1e-3)
        0.8    GPT-2 of width 512, 480 steps (8e-4 over 1e-3)
        0.4    NanoGPT of width 512, 480 steps (7.2e-4 over 1.8e-3)

    In these four, half of AdamW's rate is within a factor of 1.6 of the best. In the first of them, AdamW's best rate
    is 1e-3 if it has a second, tuned rate for embedding, head and norms, so the ratio is then 1. On a LLaMA of width
    128 with 300 steps it was 1 or more: 1e-3 over 1e-3, AdamW's lowest that was tried. LLaMA-130M had too few rates
    to tell.

    To train from scratch, use `rates`: there, 4 to 16 times AdamW's rate was better as `adam_lr` (docs/rates.md).
    Nothing was measured above 130M parameters or in runs of more than 3,200 steps. In fine-tuning (docs/fine-tuning.md)
    AdamW and `Cosmos` had their best rate at the end of the range, with a ratio of 0.5.

    >>> rates_from_adamw(2e-3)
    Rates(lr=0.001, adam_lr=0.004)
    """
    require_number("lr", lr)
    require(0 < lr < math.inf, "lr", lr, "it must be positive")
    return Rates(lr / 2, 2 * lr)
