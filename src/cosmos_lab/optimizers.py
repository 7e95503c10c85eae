"""From a run's optimizer options to an optimizer, through cosmos_optim's public names."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import cosmos_optim
from cosmos_lab.config import ONE_RULE, OptimizerOptions, RunConfig, parse_options
from cosmos_lab.models import Decoder, resolve
from cosmos_lab.models import build as build_model

WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}  # what --weights names


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of that name, or the class with an option; an unknown name is a ValueError."""
    known: dict[str, Any] = {**cosmos_optim.OPTIMIZERS, "muon-norm": partial(cosmos_optim.Muon, normalize=True)}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"unknown optimizer {name!r}; {hint}known: {', '.join(known)}")
    return known[name]


FIELDS = ("adam_lr", "rank", "gamma")  # hyper-parameters that are fields of OptimizerOptions
# What --options cannot give, because it has its own flags: two values would be recorded, and one would be used.
_FLAGS = {
    "params": "--model", "lr": "--lr", "betas": "--beta1 and --beta2", "eps": "--eps", "weight_decay": "--weight-decay",
    **{name: f"--{name.replace('_', '-')}" for name in FIELDS},
}  # fmt: skip


def build_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Build the optimizer that the options describe, over all parameters of ``model``."""
    build = optimizer_class(options.optimizer)
    takes = inspect.signature(build).parameters
    own: Any = getattr(build, "func", build)  # of a partial
    rule: str = own.rule
    given = {name: getattr(options, name) for name in FIELDS}
    hyper: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if rule in ONE_RULE:  # which has no group at `adam_lr`: `_overrides` makes them
        hyper.pop("adam_lr", None)
    if "momentum" in takes:  # Muon's beta1
        hyper["momentum"] = options.beta1
    if "head_dim" in takes and isinstance(model, Decoder):  # Adam-mini's blocks of queries and keys
        hyper["head_dim"] = model.config.head_dim
    more = parse_options(options.options)
    for name in more.keys() & _FLAGS.keys():
        raise ValueError(f"--options {name}={more[name]}: give {_FLAGS[name]} instead")
    if more.get("weight_correction") and any(p.dtype is not torch.bfloat16 for p in model.parameters()):
        raise ValueError("weight_correction is for bfloat16: add --weights bf16, or weights=bf16 to a row of a profile")
    hyper |= more
    # The paper has one weight decay for all parameters.
    params = cosmos_optim.param_groups(
        model, rule=rule, overrides=_overrides(model, options, rule), decay="all",
        split_heads=hyper.pop("split_heads", False),
    )  # fmt: skip
    hyper |= {"betas": (options.beta1, options.beta2), "eps": options.eps, "weight_decay": options.weight_decay}
    try:
        return build(params, lr=options.lr, **hyper)
    except TypeError as error:  # an option that this optimizer does not have
        raise ValueError(str(error)) from error


def miniature(model: str) -> Decoder:
    """Return a model of this preset with few parameters, to try options on before anything large is built."""
    preset = resolve(model)
    with torch.random.fork_rng(devices=[]):  # the run's random numbers stay as they were
        return build_model(preset, width=preset.head_dim, depth=1, mlp=8, vocab_size=8, max_seq_len=1)


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Return a run's hyper-parameters by "rule.name", defaults included, as JSON has them; a list if groups differ.

    They come from an optimizer for a miniature of the model, before anything large is built. A wrong option is a
    ValueError. A run's config.json has them under "settings".
    """
    model = miniature(config.model.model).to(WEIGHTS[config.training.weights])
    groups = build_optimizer(model, config.optimizer).param_groups
    found: dict[str, list[Any]] = {}
    for group in groups:
        for key in group.keys() - {"params", "param_names", "rule"}:
            values = found.setdefault(f"{group['rule']}.{key}", [])
            if group[key] not in values:
                values.append(group[key])
    alone = {key: values[0] if len(values) == 1 else values for key, values in sorted(found.items())}
    return dict(json.loads(json.dumps(alone, default=str)))


def _overrides(model: nn.Module, options: OptimizerOptions, rule: str) -> dict[str, dict[str, Any]] | None:
    """Return the separate rates for embedding, head and vectors, as ``param_groups`` takes them."""
    rates = {name: getattr(options, name) for name in ("embedding_lr", "head_lr", "vector_lr")}
    if rule in ONE_RULE and options.adam_lr != options.lr:
        rates = {name: options.adam_lr if lr is None else lr for name, lr in rates.items()}
    overrides: dict[str, dict[str, Any]] = {}
    own = rule if rule in ONE_RULE else "adam"
    names = {name for name, _ in model.named_parameters()}  # a tied head has no separate matrix
    for name, lr in (("embed.weight", rates["embedding_lr"]), ("head.weight", rates["head_lr"])):
        group: dict[str, Any] = {} if lr is None else {"lr": lr}
        if options.adam_beta1 is not None and name in names:
            group["betas"] = (options.adam_beta1, options.beta2)
        if group:
            overrides[name] = {"rule": own, **group}
    if rates["vector_lr"] is not None:
        vectors = (name for name, parameter in model.named_parameters() if parameter.ndim < 2)
        overrides |= {name: {"rule": "adam", "lr": rates["vector_lr"]} for name in vectors}
    return overrides or None
