"""Variants, the runs of a recipe's grid: their names, how they are chosen, and how they run at other settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from cosmos_lab.config import ONE_RULE, OptimizerOptions

Variant = Mapping[str, Any]

# Fields that a variant's name shows if the variant sets them, and how it abbreviates them.
_SHORT = {"rank": "rank", "gamma": "gamma", "beta1": "momentum", "weight_decay": "decay"}
COSMOS = ("cosmos", "cosmos-paper")  # optimizers with a gamma
_FIELDS = {field.name for field in dataclasses.fields(OptimizerOptions)} - {"optimizer", "lr", "options"}


def label(variant: Variant, shown: Collection[str] = ()) -> str:
    """Return a short name for a variant: the optimizer, its rate, what else it sets of _SHORT and ``shown``, options.

    >>> label({"optimizer": "cosmos", "lr": 5e-4, "rank": 32, "gamma": 0.1})
    'cosmos-lr0.0005-rank32-gamma0.1'
    """
    changes = (f"{name}{value}" for name, value, _ in _changes(variant, shown))
    return "-".join([str(variant["optimizer"]), f"lr{variant['lr']:g}", *changes])


def _changes(variant: Variant, shown: Collection[str] = ()) -> list[tuple[str, str, str]]:
    """Return what a variant sets in addition to its rate: short name, value and name of the field."""
    fields = [*_SHORT, *sorted(set(shown) - set(_SHORT))]
    found = [(_SHORT.get(f, f), f"{variant[f]:g}", f) for f in fields if variant.get(f) is not None]
    options = (option.partition("=") for option in variant.get("options", ()))
    return found + [(name, value, name) for name, _, value in options]


def select(variants: Sequence[Variant], only: Sequence[str]) -> list[Variant]:
    """Return the variants that match any of the names, in order; a name without a match is an error that lists all.

    >>> cosmos = {"optimizer": "cosmos", "lr": 1e-3}
    >>> variants = [cosmos, {**cosmos, "rank": 32}, {**cosmos, "options": ("nesterov=True",)}]
    >>> [label(variant) for variant in select(variants, ["rank-32", "base"])]
    ['cosmos-lr0.001', 'cosmos-lr0.001-rank32']
    """
    for name in only:
        if not any(_fits(variant, name) for variant in variants):
            known = dict.fromkeys("+".join(f"{n}-{value}" for n, value, _ in _changes(v)) or "base" for v in variants)
            raise ValueError(f"--only {name} matches no run; the runs are {', '.join(known)}")
    return [variant for variant in variants if any(_fits(variant, name) for name in only)]


def _fits(variant: Variant, name: str) -> bool:
    """Tell whether every part of "rank-32+gamma-0.5" is something the variant sets; "base" sets nothing."""
    changes = _changes(variant)
    words = {label(variant), "-".join(f"{short}{value}" for short, value, _ in changes) or "base"}
    for short, value, field in changes:
        words |= {short, field, f"{short}{value}", f"{field}{value}"}
        if value[:1].isalpha() and value not in ("True", "False"):
            words.add(value)
    return {_bare(part) for part in name.split("+")} <= {_bare(word) for word in words}


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def with_fields(
    variants: Sequence[Variant], extra: Sequence[tuple[str, Mapping[str, Any]]], options: tuple[str, ...]
) -> list[tuple[Variant, tuple[str, ...]]]:
    """Return each variant with the fields that ``extra`` gives its optimizer, and the fields that its name must show.

    An optimizer that occurs twice in ``extra`` runs in both ways; unknown fields are options of the optimizer.
    Variants without options keep those of the set-up.
    """
    if unused := sorted({name for name, _ in extra} - {variant["optimizer"] for variant in variants}):
        raise ValueError(f"--extra is for {', '.join(unused)}, but no run of the grid has that optimizer")
    for name in ("optimizer", "lr"):
        if any(name in fields for _, fields in extra):
            raise ValueError(f"--extra cannot set {name}: choose with --{name}s")
    found: list[tuple[Variant, tuple[str, ...]]] = []
    for variant in variants:
        for fields in [fields for name, fields in extra if name == variant["optimizer"]] or [{}]:
            own = {name: value for name, value in fields.items() if name in _FIELDS}
            for name, value in own.items():
                if value is not None and not isinstance(value, (int, float)):
                    raise ValueError(f"--extra: {name} takes a number; got {value!r}")
            added = {name: f"{name}={value}" for name, value in fields.items() if name not in _FIELDS}
            kept = [option for option in variant.get("options", options) if option.partition("=")[0] not in added]
            new_options = {"options": (*kept, *added.values())} if added else {}
            found.append(({**variant, **own, **new_options}, tuple(own)))
    return found


def with_rates(
    grid: Sequence[Variant], optimizers: Sequence[str], lrs: Mapping[str, Sequence[float]] | Sequence[float]
) -> list[Variant]:
    """Return the variants of these optimizers at other rates, with the fields that the grid gives them."""
    chosen: list[Variant] = []
    unused = sorted(set(lrs) - set(optimizers)) if isinstance(lrs, Mapping) else []
    if unused:
        raise ValueError(f"--lrs has rates for {', '.join(unused)}, but the runs are of {', '.join(optimizers)}")
    for name in optimizers:
        rates = lrs.get(name) if isinstance(lrs, Mapping) else lrs
        if rates is None:
            chosen += [v for v in grid if v["optimizer"] == name]
            continue
        for like in _without_rate(grid, name):
            chosen += [{**like, "lr": lr, **({"adam_lr": lr} if like.get("adam_lr") == "lr" else {})} for lr in rates]
    return chosen


def _without_rate(grid: Sequence[Variant], name: str) -> list[dict[str, Any]]:
    """Return an optimizer's distinct variants without the rate; adam_lr "lr" marks one that follows it."""
    own = [variant for variant in grid if variant["optimizer"] == name]
    follows = all(variant.get("adam_lr") == variant["lr"] for variant in own)
    found: list[dict[str, Any]] = []
    for variant in own:
        like = {key: value for key, value in variant.items() if key != "lr"} | ({"adam_lr": "lr"} if follows else {})
        if like not in found:
            found.append(like)
    return found or [plain(name)]


def plain(name: str) -> dict[str, Any]:
    """Return the fields of an optimizer that the recipe does not run.

    They are its default rank, a gamma only for COSMOS, and one rate if it has one rule.
    """
    gamma, rate = ({} if name in COSMOS else {"gamma": None}), ({"adam_lr": None} if name in ONE_RULE else {})
    return {"optimizer": name, "rank": None, **gamma, **rate}


def at_rates(optimizer: str, lrs: Iterable[float], **fields: Any) -> list[Variant]:
    """Return one variant for each rate; a field given as "lr" takes the rate itself."""
    return [{"optimizer": optimizer, "lr": lr, **{k: lr if v == "lr" else v for k, v in fields.items()}} for lr in lrs]
