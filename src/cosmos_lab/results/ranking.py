"""Runs sorted into tasks (what was trained), methods (with what) and groups (one setting, one run a seed).

Best of a method means the lowest mean final loss among its finished groups; a group with a diverged seed never wins.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosmos_lab.report.style import Look, looks, rate
from cosmos_lab.results.reading import Run

# Differences in these are not a difference in method: they tell runs apart, or say where things lie.
_NOT_SETTINGS = frozenset(
    (
        *("seed", "name", "lr", "adam_lr", "optimizer", "recipe", "out", "resume", "device", "compile", "cache_dir"),
        "options",  # each counts for itself
        *("micro_batch", "log_every", "keep", "tensorboard", "wandb", "checkpoint_every", "diagnostics_every"),
        *("val_every", "deterministic", "sharding", "checkpointing"),
    )
)
# Runs that differ in one of these learnt something else: their losses must not be ranked together.
_TASK = ("model", "width", "depth", "mlp", "vocab_size", "data", "seq_len", "val_tokens")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds (0 for one seed)."""

    mean: float
    deviation: float
    n: int


@dataclass(frozen=True)
class Group:
    """The runs of one setting, which differ in their seed alone."""

    runs: tuple[Run, ...]
    method: str
    label: str
    look: Look
    best: bool = False  # of its method, among finished groups
    shown: bool = False  # drawn when the page opens: the best, or the leading one of a method that has not finished

    @property
    def lr(self) -> float | None:
        return self.runs[0].lr

    @property
    def status(self) -> str:
        """The worst of the seeds' states."""
        states = {run.status for run in self.runs}
        return next((state for state in ("diverged", "broken", "empty", "unfinished") if state in states), min(states))

    @property
    def finished(self) -> bool:
        return self.status == "done"

    @property
    def counted(self) -> tuple[Run, ...]:
        """The seeds that means are taken over: the finished ones, else all that logged something."""
        done = tuple(run for run in self.runs if run.status == "done")
        return done or tuple(run for run in self.runs if run.score is not None)

    def stat(self, key: str) -> Spread | None:
        """Mean and spread of one number over the seeds that have it."""
        values = [run.stats[key] for run in self.counted if math.isfinite(run.stats.get(key, math.nan))]
        if not values:
            return None
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


@dataclass(frozen=True)
class Task:
    """Everything trained on one model and recipe, so that its losses may be compared."""

    title: str
    validated: bool  # False: no run validated, so training losses are compared
    groups: tuple[Group, ...]

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(group.method for group in self.groups))

    @property
    def score_key(self) -> str:
        return "final_val_loss" if self.validated else "final_train_loss"

    def score(self, group: Group) -> float:
        """The number that groups are ranked by, infinite for a diverged or empty one."""
        spread = None if group.status == "diverged" else group.stat(self.score_key)
        return spread.mean if spread else math.inf

    @property
    def ranking(self) -> list[Group]:
        """The best group of each method, lowest loss first."""
        return sorted((group for group in self.groups if group.best), key=self.score)

    @property
    def sweeps(self) -> dict[str, list[Group]]:
        """Groups by method in order of learning rate; empty unless some method was run at several rates."""
        lines = {
            method: sorted(
                (group for group in self.groups if group.method == method and (group.lr or 0) > 0),
                key=lambda group: group.lr or 0,
            )
            for method in self.methods
        }
        several = any(len({group.lr for group in line}) > 1 for line in lines.values())
        return {method: line for method, line in lines.items() if line} if several else {}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as one level of dotted names."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def settings(run: Run) -> dict[str, str]:
    """What may tell two methods of one optimizer apart: the full configuration less names, places, rates and seeds."""
    flat = flatten(run.config.get("config"))
    found = {
        key: json.dumps(value, default=str)
        for key, value in flat.items()
        if key.rsplit(".", 1)[-1] not in _NOT_SETTINGS and not (isinstance(value, str) and "/" in value)
    }
    options = flat.get("options")
    return found | dict(str(option).partition("=")[::2] for option in (options if isinstance(options, list) else []))


def arrange(runs: Iterable[Run]) -> tuple[list[Task], list[Run]]:
    """Tasks in order of appearance, and the runs that cannot be placed (broken, or without an optimizer's name)."""
    buckets: dict[tuple[str, ...], list[Run]] = {}
    misfits = []
    for run in runs:
        if run.optimizer:
            flat = flatten(run.config.get("config"))
            extra = [json.dumps(flat.get(key), default=str).strip('"') for key in _TASK]
            buckets.setdefault((run.model, run.recipe, *extra), []).append(run)
        else:
            misfits.append(run)
    return [
        _task(title, members) for title, members in zip(_titles(list(buckets)), buckets.values(), strict=True)
    ], misfits


def _titles(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """Model and recipe (the recipe alone where it names the model), and what else tells tasks of that name apart."""
    titles = []
    for model, recipe, *own in keys:
        rivals = [other[2:] for other in keys if other[:2] == (model, recipe)]
        extra = [
            f"{name} {own[index]}" for index, name in enumerate(_TASK) if len({rival[index] for rival in rivals}) > 1
        ]
        titles.append(" · ".join(filter(None, ("" if recipe.startswith(model) else model, recipe, *extra))) or "runs")
    return titles


def _task(title: str, runs: Sequence[Run]) -> Task:
    methods = _methods(runs)
    names = list(dict.fromkeys(methods))
    first = {method: run.optimizer for method, run in reversed(list(zip(methods, runs, strict=True)))}
    style = dict(zip(names, looks([first[name] for name in names]), strict=True))
    buckets: dict[tuple[str, float | None, float | None, int], list[Run]] = {}
    copies: dict[tuple[str, float | None, float | None, str], int] = {}
    for method, run in zip(methods, runs, strict=True):
        same = (method, run.lr, run.adam_lr, run.seed)
        copy = copies.get(same, 0)  # a second run with one seed is a repetition, not another seed
        copies[same] = copy + 1
        buckets.setdefault((method, run.lr, run.adam_lr, copy), []).append(run)
    labels = _labels(list(buckets))
    groups = [
        Group(tuple(members), key[0], labels[key], style[key[0]])
        for key, members in sorted(buckets.items(), key=lambda item: (names.index(item[0][0]), item[0][1] or 0))
    ]
    task = Task(title, any("final_val_loss" in run.stats for run in runs), tuple(groups))
    marked = _mark(task)
    place = {group.method: task.score(group) for group in marked if group.shown}
    return replace(task, groups=tuple(sorted(marked, key=lambda group: place[group.method])))


def _methods(runs: Sequence[Run]) -> list[str]:
    """The optimizer's name; where settings differ among its runs, with two of them, or as many as it takes."""
    of = [settings(run) for run in runs]
    names = [run.optimizer for run in runs]
    for optimizer in dict.fromkeys(names):
        own = {i: of[i] for i, run in enumerate(runs) if run.optimizer == optimizer}
        keys = dict.fromkeys(key for some in own.values() for key in some)
        varying = [key for key in keys if len({some.get(key) for some in own.values()}) > 1]
        kinds = len({tuple(some.get(key) for key in varying) for some in own.values()})
        for depth in range(min(2, len(varying)), len(varying) + 1):
            marked = {i: _marked(optimizer, some, varying, depth) for i, some in own.items()}
            if len(set(marked.values())) == kinds:
                break
        for i, name in marked.items():
            names[i] = name
    return names


def _marked(optimizer: str, own: Mapping[str, str], varying: Sequence[str], depth: int) -> str:
    """The name with the first few of the settings that vary and that it has."""
    has = [key for key in varying if own.get(key, "null") != "null"][:depth]
    marks = ", ".join(f"{key.rsplit('.', 1)[-1]} {own[key].strip(chr(34))}" for key in has)
    return f"{optimizer} ({marks})" if marks else optimizer


def _labels(keys: Sequence[tuple[str, float | None, float | None, int]]) -> dict[Any, str]:
    """Method and rate; the second rate and the repetition only where they are needed to tell groups apart."""
    labels = {}
    for key in keys:
        method, lr, adam_lr, copy = key
        alike = [other for other in keys if other[:2] == key[:2]]
        second = f", adam {rate(adam_lr)}" if len({other[2] for other in alike}) > 1 else ""
        labels[key] = f"{method} {rate(lr)}{second}" + (f" #{copy + 1}" if copy else "")
    return labels


def _mark(task: Task) -> list[Group]:
    marked = []
    for group in task.groups:
        rivals = [other for other in task.groups if other.method == group.method]
        finished = [other for other in rivals if other.finished and math.isfinite(task.score(other))]
        best = min(finished, key=task.score) if finished else None
        leading = best or min(rivals, key=task.score)
        marked.append(replace(group, best=group is best, shown=group is leading))
    return marked
