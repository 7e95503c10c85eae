"""One small module for each training framework; docs/frameworks.md shows their use. None is imported until it is used.

`build` is what they share: an optimizer by name, from a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from cosmos_optim import OPTIMIZERS, param_groups
from cosmos_optim.hyperparameters import ROUTING
from cosmos_optim.optimizer import MatrixOptimizer


def optimizer_class(name: str) -> type[MatrixOptimizer]:
    """Return the optimizer of this name; a ValueError names them all."""
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {name!r}; the optimizers are {sorted(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def build(
    params: nn.Module | Iterable[Any], optimizer: str = "cosmos", *, lr: float | None = None, **options: Any
) -> MatrixOptimizer:
    """Return the optimizer of this name.

    Args:
        params: a model, or anything that the optimizer takes.
        optimizer: a name in OPTIMIZERS.
        lr: learning rate of the hidden matrices; None means the optimizer's default.
        options: further arguments of the optimizer, such as adam_lr. If `params` is a model, also those of
            `param_groups`: overrides, head, decay, split_heads.

    >>> opt = build(nn.Linear(8, 16), lr=1e-5, weight_decay=0.1, decay="all")
    >>> [(group["rule"], group["lr"], group["weight_decay"]) for group in opt.param_groups]
    [('cosmos', 1e-05, 0.1), ('adam', 4e-05, 0.1)]
    """
    kind = optimizer_class(optimizer)
    rates: dict[str, Any] = {} if lr is None else {"lr": lr}
    routing, options = split_off_routing(options)
    if routing:
        if not isinstance(params, nn.Module):
            raise TypeError(f"{' and '.join(routing)} need the model: pass it instead of its parameters")
        params = param_groups(params, kind.rule, **routing)
    return kind(params, **rates, **options)


def split_off_routing(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `param_groups` among these, and those of the optimizer; None is not given."""
    routing = {name: x for name, x in options.items() if name in ROUTING and x is not None}
    return routing, {name: x for name, x in options.items() if name not in ROUTING}
