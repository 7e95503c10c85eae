"""Find in which settings the runs of one optimizer differ, and name their methods after them.

A setting is a field of the config, or one option, that may make another method: not a name, a path, a rate or a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cosmos_lab.config import COMPARABLE, NOT_IDENTITY, marked
from cosmos_lab.results.reading import Run, number

# These fields do not make another method, or a row of a table names them separately.
_NOT_SETTINGS = {
    *marked(NOT_IDENTITY), *marked(COMPARABLE), "optimizer", "lr", "adam_lr", "seed", "recipe",
    "options",  # each option counts separately
}  # fmt: skip
_UNSET = "null"  # a field left at None, as JSON


def as_json(value: Any) -> str:
    return json.dumps(value, default=str)


def settings_of(run: Run) -> dict[str, str]:
    """Return what may distinguish two methods of one optimizer: all fields but names, paths, rates and seeds.

    Fields are JSON, options are as the user wrote them: ``{"rank": "64", "gamma": "null", "nesterov": "True"}``.
    """
    settings = {key: as_json(value) for key, value in run.config.items() if key not in _NOT_SETTINGS}
    options = run.config.get("options")
    if isinstance(options, list | tuple):
        for option in options:  # for example "nesterov=True"
            name, _, value = str(option).partition("=")
            settings[name] = value
    return settings


def is_set(settings: Mapping[str, str], key: str) -> bool:
    return settings.get(key, _UNSET) != _UNSET


def resolved(run: Run, key: str) -> Any:
    """Return a field of a run's config; for one left at None, the value that the run used, if its folder tells."""
    value = run.config.get(key)
    if value is not None:
        return value
    if key in ("width", "depth", "mlp", "vocab_size"):
        return _size(run, key)
    used = run.about.get("settings")  # with the rule before each name: {"adam.eps": 1e-8, "cosmos.rank": 64}
    if isinstance(used, Mapping):
        for full_name, value in used.items():
            rule, _, name = full_name.partition(".")
            if name == key and rule != "adam":  # the rule of embeddings and norms
                return value
    return None


def _size(run: Run, key: str) -> int | None:
    """Return a size of the model that its config leaves to the preset, or to the data."""
    from cosmos_lab.models import resolve  # brings torch, which takes seconds

    data = run.about.get("data")
    if key == "vocab_size" and run.config.get("data") == "embedded" and isinstance(data, Mapping):
        return number(data.get("vocab_size"))  # type: ignore[return-value]
    try:
        return int(getattr(resolve(run.model), key))
    except ValueError:  # a preset that this version does not have
        return None


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """List the settings in which runs of one optimizer differ, in order of appearance."""
    settings = [settings_of(run) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own)
    return [key for key in keys if len({own.get(key) for own in settings}) > 1]


def name_methods(runs: Sequence[Run], differing: Sequence[str]) -> list[str]:
    """Name the method of each run of one optimizer, for example "cosmos (rank 64, nesterov True)".

    A name has two of the settings in which the runs differ, or as many as are needed to tell all methods apart.
    """
    settings = _with_defaults(runs, differing)
    distinct = len({tuple(own.get(key) for key in differing) for own in settings})
    for most in range(2, max(2, len(differing)) + 1):
        names = [_method(run.optimizer, own, differing, most) for run, own in zip(runs, settings, strict=True)]
        if len(set(names)) == distinct:
            break
    return names


def _method(optimizer: str, settings: Mapping[str, str], differing: Sequence[str], most: int) -> str:
    """Add the first settings that differ and that the run has to the optimizer's name, at most ``most``.

    >>> _method("cosmos", {"rank": "64", "gamma": "null", "schedule": '"wsd"'}, ["gamma", "rank", "schedule"], 2)
    'cosmos (rank 64, schedule wsd)'
    """
    named = [key for key in differing if is_set(settings, key)][:most]
    text = ", ".join(f"{key} {settings[key].strip(chr(34))}" for key in named)
    return f"{optimizer} ({text})" if text else optimizer


def _with_defaults(runs: Sequence[Run], differing: Iterable[str]) -> list[dict[str, str]]:
    """Return the settings of each run, with the value that it used for one left at None.

    If runs that left it at None used different values, it followed from their rates and stays unset.
    """
    settings = [settings_of(run) for run in runs]
    for key in differing:
        unset = [(run, own) for run, own in zip(runs, settings, strict=True) if own.get(key) == _UNSET]
        used = {as_json(resolved(run, key)) for run, _ in unset}
        if len(used) == 1:
            (value,) = used
            for _, own in unset:
                own[key] = value
    return settings
