"""Where sharded parameters are told from whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cosmos_optim.layout import Layout
from cosmos_optim.rules.base import Rule


def layout_of(name: str, p: Tensor, rule: Rule, group: dict[str, Any]) -> Layout:
    """The layout of a parameter, read from the parameter."""
    return Layout(name, p, rule, group)


def agree(values: Tensor, layouts: Sequence[Any]) -> Tensor:
    """The largest of each value over all processes that share these parameters."""
    return values
