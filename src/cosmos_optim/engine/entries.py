"""What a step works on, and the two numbers that every rule's update needs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from cosmos_optim.engine.layout import Layout
from cosmos_optim.rules import Rule


class Entry(NamedTuple):
    """A parameter with a gradient in this step. Hundreds are made before the GPU gets its work: a tuple is quick."""

    p: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    layout: Layout
    group: dict[str, Any]
    rule: Rule


def by_group(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries of one param group together, as they were collected."""
    for _, held in groupby(entries, key=lambda e: id(e.group)):
        yield list(held)


def decay_of(group: dict[str, Any]) -> float | Tensor:
    """1 - lr * weight_decay, a number or a tensor as lr is."""
    if not group["weight_decay"]:
        return 1.0
    decay: float | Tensor = 1 - group["lr"] * group["weight_decay"]
    return decay


def signed_lr(group: dict[str, Any]) -> float | Tensor:
    """lr, negative for maximize: every rule is odd in the gradient."""
    lr: float | Tensor = -group["lr"] if group["maximize"] else group["lr"]
    return lr


def settings(group: dict[str, Any]) -> Hashable:
    """The hyper-parameters of a group but those whose values reach the kernels as numbers at every step."""
    other = {"params", "param_names", "lr", "initial_lr", "weight_decay", "maximize"}
    return tuple((k, _fixed(v)) for k, v in group.items() if k not in other)


def _fixed(value: object) -> Hashable:
    """What a kernel was told of a value: itself, or where it is read from."""
    if isinstance(value, Tensor):
        return value.data_ptr() if value.is_cuda else repr(value)
    return repr(value)
