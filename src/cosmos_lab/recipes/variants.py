"""Rows of a recipe's grid: what they are called, how they are chosen, and how they are run at other settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cosmos_lab.config import OptimizerOptions

Variant = Mapping[str, Any]

# Fields that a row's name shows where the row sets them, and what it calls them.
_SHORT = {"rank": "rank", "gamma": "gamma", "beta1": "momentum", "weight_decay": "decay"}
COSMOS = ("cosmos", "cosmos-paper")  # names whose rows have a gamma
_FIELDS = {field.name for field in dataclasses.fields(OptimizerOptions)} - {"optimizer", "lr", "options"}


def label(variant: Variant, shown: Collection[str] = ()) -> str:
    """A short name for a variant: the optimizer, its rate, and what else it sets.

    >>> label({"optimizer": "cosmos", "lr": 5e-4, "rank": 32, "gamma": 0.1})
    'cosmos-lr0.0005-rank32-gamma0.1'

    Args:
        variant: the row.
        shown: further fields to show, beside rank, gamma, momentum, weight decay and options.
    """
    changes = (f"{name}{value}" for name, value, _ in _changes(variant, shown))
    return "-".join([str(variant["optimizer"]), f"lr{variant['lr']:g}", *changes])


def _changes(variant: Variant, shown: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """What a row sets beside its rate: the short name, the value, and the name of the field."""
    fields = [*_SHORT, *sorted(set(shown) - set(_SHORT))]
    found = [(_SHORT.get(f, f), f"{variant[f]:g}", f) for f in fields if variant.get(f) is not None]
    options = (option.partition("=") for option in variant.get("options", ()))
    return found + [(name, value, name) for name, _, value in options]


def select(rows: Sequence[Variant], only: Sequence[str]) -> list[Variant]:
    """The rows that any of the names fits, in the grid's order; a name that fits none is an error with all names.

    >>> cosmos = {"optimizer": "cosmos", "lr": 1e-3}
    >>> rows = [cosmos, {**cosmos, "rank": 32}, {**cosmos, "options": ("nesterov=True",)}]
    >>> [label(row) for row in select(rows, ["rank-32", "base"])]
    ['cosmos-lr0.001', 'cosmos-lr0.001-rank32']
    """
    for name in only:
        if not any(_fits(row, name) for row in rows):
            known = dict.fromkeys("+".join(f"{n}-{value}" for n, value, _ in _changes(row)) or "base" for row in rows)
            raise ValueError(f"--only {name} fits no row; the rows are {', '.join(known)}")
    return [row for row in rows if any(_fits(row, name) for name in only)]


def _fits(row: Variant, name: str) -> bool:
    """Whether every part of "rank-32+gamma-0.5" is something the row sets; "base" is a row that sets nothing."""
    changes = _changes(row)
    words = {label(row), "-".join(f"{short}{value}" for short, value, _ in changes) or "base"}
    for short, value, field in changes:
        words |= {short, field, f"{short}{value}", f"{field}{value}"} | ({value} if _is_word(value) else set())
    return {_bare(part) for part in name.split("+")} <= {_bare(word) for word in words}


def _is_word(value: str) -> bool:
    return value[:1].isalpha() and value not in ("True", "False")


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def extended(
    rows: Iterable[Variant], extra: Sequence[tuple[str, Mapping[str, Any]]], options: tuple[str, ...]
) -> list[tuple[Variant, tuple[str, ...]]]:
    """Each row with the fields that ``extra`` gives its optimizer, in as many ways, and what its name must show then.

    Args:
        rows: of the grid.
        extra: (optimizer, fields); a field that a run does not have is an option of the optimizer.
        options: those of the set-up, which rows without options of their own keep.
    """
    rows = list(rows)
    stray = sorted({name for name, _ in extra} - {row["optimizer"] for row in rows})
    if stray:
        raise ValueError(f"--extra is for {', '.join(stray)}, but no run of the grid has that optimizer")
    found: list[tuple[Variant, tuple[str, ...]]] = []
    for row in rows:
        ways = [fields for name, fields in extra if name == row["optimizer"]]
        found += [_with_fields(row, fields, options) for fields in ways or [{}]]
    return found


def _with_fields(row: Variant, fields: Mapping[str, Any], options: tuple[str, ...]) -> tuple[Variant, tuple[str, ...]]:
    for name in ("optimizer", "lr"):
        if name in fields:
            raise ValueError(f"--extra cannot set {name}: choose with --{name}s")
    own = {name: value for name, value in fields.items() if name in _FIELDS}
    for name, value in own.items():
        if value is not None and not isinstance(value, (int, float)):
            raise ValueError(f"--extra: {name} takes a number; got {value!r}")
    added = {name: f"{name}={value}" for name, value in fields.items() if name not in _FIELDS}
    if not added:
        return {**row, **own}, tuple(own)
    kept = (option for option in row.get("options", options) if option.partition("=")[0] not in added)
    return {**row, **own, "options": (*kept, *added.values())}, tuple(own)


def with_rates(
    grid: Sequence[Variant], optimizers: Sequence[str], lrs: Mapping[str, Sequence[float]] | Sequence[float]
) -> list[Variant]:
    """The grid's optimizers, with the fields they are run with there, at other rates."""
    chosen: list[Variant] = []
    stray = sorted(set(lrs) - set(optimizers)) if isinstance(lrs, Mapping) else []
    if stray:
        raise ValueError(f"--lrs has rates for {', '.join(stray)}, but the runs are of {', '.join(optimizers)}")
    for name in optimizers:
        rates = lrs.get(name) if isinstance(lrs, Mapping) else lrs
        if rates is None:
            chosen += [v for v in grid if v["optimizer"] == name]
            continue
        for like in _without_rate(grid, name):
            chosen += [{**like, "lr": lr, **({"adam_lr": lr} if like.get("adam_lr") == "lr" else {})} for lr in rates]
    return chosen


def _without_rate(grid: Sequence[Variant], name: str) -> list[dict[str, Any]]:
    """An optimizer's distinct variants apart from the rate; adam_lr "lr" marks one that follows it."""
    own = [variant for variant in grid if variant["optimizer"] == name]
    follows = all(variant.get("adam_lr") == variant["lr"] for variant in own)
    found: list[dict[str, Any]] = []
    for variant in own:
        like = {key: value for key, value in variant.items() if key != "lr"} | ({"adam_lr": "lr"} if follows else {})
        if like not in found:
            found.append(like)
    return found or [plain(name)]


def plain(name: str) -> dict[str, Any]:
    """An optimizer the recipe does not run: of its own rank, and without a gamma that belongs to COSMOS."""
    return {"optimizer": name, "rank": None, **({} if name in COSMOS else {"gamma": None})}


def variants(optimizer: str, lrs: Iterable[float], **fields: Any) -> list[Variant]:
    """One variant for each rate; a field given as "lr" takes the rate itself."""
    return [{"optimizer": optimizer, "lr": lr, **{k: lr if v == "lr" else v for k, v in fields.items()}} for lr in lrs]
