"""One small module for each training framework; docs/frameworks.md shows their use. None is imported until it is used.

`build` is what they share: an optimizer by name, from a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from cosmos_optim import OPTIMIZERS, param_groups
from cosmos_optim.optimizer import MatrixOptimizer


def optimizer_class(name: str) -> type[MatrixOptimizer]:
    """Return the optimizer of this name; a ValueError names them all."""
    if name not in OPTIMIZERS:
        raise ValueError(f"there is no optimizer {name!r}; the optimizers are {sorted(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def build(
    params: nn.Module | Iterable[Any], optimizer: str = "cosmos", *, lr: float | None = None,
    overrides: Any = None, head: Any = None, **options: Any,
) -> MatrixOptimizer:  # fmt: skip
    """Return the optimizer of this name.

    Args:
        params: a model, or anything that the optimizer takes.
        optimizer: a name in OPTIMIZERS.
        lr: learning rate of the hidden matrices; None means the optimizer's default.
        overrides, head: as `param_groups` takes them; they need a model.
        options: further arguments of the optimizer, such as adam_lr.

    >>> opt = build(nn.Linear(8, 16), lr=1e-5)
    >>> [(group["rule"], group["lr"]) for group in opt.param_groups]
    [('cosmos', 1e-05), ('adam', 4e-05)]
    """
    kind = optimizer_class(optimizer)
    if overrides is not None or head is not None:
        if not isinstance(params, nn.Module):
            raise TypeError("overrides and head need the model: pass it instead of its parameters")
        params = param_groups(params, kind.rule, overrides=overrides, head=head)
    rate: dict[str, Any] = {} if lr is None else {"lr": lr}
    return kind(params, **rate, **options)
