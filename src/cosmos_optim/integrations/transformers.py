"""transformers' Trainer, TRL's trainers and axolotl: a factory that gets the model when the framework has prepared it.

Trainer(model, args, optimizer_cls_and_kwargs=(CosmosFactory, {"args": args}), ...)

`optimizers=(Cosmos(model), None)` is built too early for TRL's `peft_config` (the adapters do not exist yet, so nothing
would train) and is refused by transformers under FSDP.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from cosmos_optim.integrations import build
from cosmos_optim.optimizer import MatrixOptimizer


class CosmosFactory:
    """Build the optimizer from the model: transformers calls `Factory()(model, **kwargs)`, axolotl adds `args`."""

    def __call__(self, model: nn.Module | None = None, args: Any = None, **options: Any) -> MatrixOptimizer:
        """Return the optimizer.

        Args:
            model: the model as it will be trained, with adapters or shards.
            args: TrainingArguments; `learning_rate` and `weight_decay` come from there if they are not given. A warning
                says that `adam_beta1`, `adam_beta2`, `adam_epsilon` and `optim_args` do not.
            options: arguments of `cosmos_optim.integrations.build`: `optimizer="muon"`, `lr`, `adam_lr`, `overrides`,
                `rank` and so on. Without `adam_lr`, the rate of embeddings and norms is 4 times `lr`.
        """
        if model is None:  # transformers calls what it is given, and then that with the model
            raise TypeError("give transformers the class: (CosmosFactory, {...}) instead of (CosmosFactory(), {...})")
        if args is None and "lr" not in options:
            raise ValueError(
                "CosmosFactory was given no rate, and transformers does not tell it the learning_rate: write "
                'optimizer_cls_and_kwargs=(CosmosFactory, {"args": training_args}), or {"lr": ...} for another rate'
            )
        if args is not None:
            _warn_of_other_settings(args, options)
            options.setdefault("lr", args.learning_rate)
            options.setdefault("weight_decay", args.weight_decay)
        optimizer = build(model, **options)
        if not {"stochastic_rounding", "weight_correction"} & options.keys():
            _warn_of_rounding(optimizer)
        return optimizer


def _warn_of_rounding(optimizer: MatrixOptimizer) -> None:
    """Warn if weights are bfloat16, as transformers may have loaded them."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    count = sum(p.dtype is torch.bfloat16 for p in trained)
    if count:
        warnings.warn(
            f"{count} of {len(trained)} trained tensors are bfloat16, and lose updates below their last place: give "
            '"stochastic_rounding": True or "weight_correction": True beside "args", or load the model with '
            'dtype=torch.float32 and train with bf16=True. "stochastic_rounding": False trains them as they are',
            stacklevel=3,
        )


def _warn_of_other_settings(args: Any, options: dict[str, Any]) -> None:
    """Warn of settings for the optimizers of transformers: `optim_args`, and Adam's unless betas or eps are given."""
    if given := getattr(args, "optim_args", None):
        warnings.warn(
            f'this optimizer does not read optim_args={given!r} of TrainingArguments: give these options beside "args"',
            stacklevel=3,
        )
    defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    held = {name: getattr(args, name, value) for name, value in defaults.items()}
    changed = ", ".join(f"{name}={value}" for name, value in held.items() if value != defaults[name])
    if changed and not {"betas", "eps"} & options.keys():
        warnings.warn(
            f'this optimizer does not read {changed} of TrainingArguments: give betas or eps beside "args"',
            stacklevel=3,
        )
