"""Rank runs: sort them into tasks (what was trained), methods (with what) and groups (one setting, one run per seed).

The best group of a method is the one with the lowest mean final loss among those in which every seed ended with a
finite loss. A group with an unfinished or diverged seed is never the best.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cosmos_lab.config import TASK, marked
from cosmos_lab.formatting import format_rate
from cosmos_lab.results.methods import as_json, differing_settings, is_set, name_methods, resolved, settings_of
from cosmos_lab.results.reading import Run, Status, worst

_TASK = marked(TASK)
_DATA = _TASK.index("data")


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
    name: str = ""  # what the user called it, if it is one run with --name
    repetition: int = 0  # of runs with the seeds of another group of this setting: 1, 2, ...
    differs: tuple[str, ...] = ()  # fields and options in which runs of this optimizer differ, beside the rate
    best: bool = False  # of its method, among complete groups
    shown: bool = False  # drawn when the page opens: the best, or the leading one of a method that has none

    @property
    def optimizer(self) -> str:
        return self.runs[0].optimizer

    @property
    def title(self) -> str:
        """Return the user's name, or else method and rate."""
        return self.name or self.label

    @property
    def lr(self) -> float | None:
        return self.runs[0].lr

    @property
    def status(self) -> Status:
        """Return the worst of the seeds' states."""
        return worst(run.status for run in self.runs)

    @property
    def complete(self) -> bool:
        """Tell whether every seed ended with a finite loss."""
        return self.status == Status.DONE

    @property
    def counted(self) -> tuple[Run, ...]:
        """Return the seeds that means are taken over: those that are done, else all that logged something."""
        done = tuple(run for run in self.runs if run.status == Status.DONE)
        return done or tuple(run for run in self.runs if run.score is not None)

    def stat(self, key: str) -> Spread | None:
        """Return mean and spread of one number over the seeds that have it."""
        values = [run.stats[key] for run in self.counted if math.isfinite(run.stats.get(key, math.nan))]
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return Spread(statistics.fmean(values), deviation, len(values))

    def score(self, key: str) -> float:
        """Return the mean that groups are ranked by, infinite for a diverged or empty group."""
        spread = self.stat(key)
        return math.inf if spread is None or self.status == Status.DIVERGED else spread.mean


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
    def kind(self) -> str:
        """Return what the methods are: optimizers, or settings if an optimizer has several."""
        return "setting" if len(self.methods) > len({group.optimizer for group in self.groups}) else "optimizer"

    @property
    def score_key(self) -> str:
        return "final_val_loss" if self.validated else "final_train_loss"

    @property
    def result_key(self) -> str:
        """Return the number that sentences and the sweep show."""
        return "final_val_ppl" if self.validated else "final_train_loss"

    def score(self, group: Group) -> float:
        """Return the number that a group is ranked by."""
        return group.score(self.score_key)

    @property
    def ranking(self) -> list[Group]:
        """Return the best group of each method, lowest loss first."""
        return sorted((group for group in self.groups if group.best), key=self.score)

    @property
    def sweeps(self) -> dict[str, list[Group]]:
        """Return the groups by method in order of rate; empty unless some method was run at several rates."""
        swept: dict[str, list[Group]] = {}
        for group in sorted((group for group in self.groups if _valid(group.lr)), key=lambda group: group.lr or 0):
            swept.setdefault(group.method, []).append(group)
        several_rates = any(len({group.lr for group in groups}) > 1 for groups in swept.values())
        return {method: swept[method] for method in self.methods if method in swept} if several_rates else {}


def best_of(groups: Iterable[Group], key: str, by: Callable[[Group], str]) -> dict[str, Group]:
    """Return the best group of each method or optimizer: the lowest mean of a complete group, the first of equals.

    ``key`` names the number to compare, and ``by`` returns the method or optimizer of a group.
    """
    best: dict[str, Group] = {}
    for group in groups:
        if not (group.complete and math.isfinite(group.score(key))):
            continue
        name = by(group)
        if name not in best or group.score(key) < best[name].score(key):
            best[name] = group
    return best


def at_edge(group: Group, groups: Iterable[Group]) -> str | None:
    """Say if a group's rate is the lowest or highest tried of its method, so that one beyond it may be better."""
    rates = sorted({other.lr or 0 for other in groups if other.method == group.method and _valid(other.lr)})
    if len(rates) < 2 or group.lr not in (rates[0], rates[-1]):
        return None
    return "lowest" if group.lr == rates[0] else "highest"


def _valid(lr: float | None) -> bool:
    """Tell whether a rate can be placed on a log axis."""
    return lr is not None and 0 < lr < math.inf


def _given_name(run: Run) -> str:
    """Return the name that the user gave with --name, or "" for one that a recipe made up."""
    name = run.config.get("name")
    return name if isinstance(name, str) and not name.startswith(f"{run.recipe}-{run.optimizer}-lr") else ""


class _TaskKey(NamedTuple):
    """What all runs of a task share; ``fields`` are the values of ``_TASK``, with hashes for the data."""

    model: str
    recipe: str
    fields: tuple[str, ...]


def arrange(runs: Iterable[Run]) -> tuple[list[Task], list[Run]]:
    """Return the tasks in order of appearance, and the runs that belong to none because they name no optimizer."""
    by_task: dict[_TaskKey, list[Run]] = {}
    without_optimizer = []
    for run in runs:
        if not run.optimizer:
            without_optimizer.append(run)
            continue
        members = by_task.setdefault(_task_key(run), [])
        members.append(_with_data_of(members[0], run) if members else run)
    first_runs = {key: members[0] for key, members in by_task.items()}
    return [_task(_title(key, first_runs), members) for key, members in by_task.items()], without_optimizer


def _task_key(run: Run) -> _TaskKey:
    fields = {name: _spelled(run, name) for name in _TASK}
    if hashes := _hashes(run):
        fields["data"] = hashes
    return _TaskKey(run.model, run.recipe, tuple(fields.values()))


def _spelled(run: Run, key: str) -> str:
    return as_json(resolved(run, key)).strip('"')


def _hashes(run: Run) -> str:
    """Return the hashes of the text that a run trained on and validated with, as far as its folder has them."""
    data = run.about.get("data")
    if not isinstance(data, Mapping):
        return ""
    return ", ".join(str(data[name]) for name in ("fingerprint", "val_fingerprint") if data.get(name))


def _with_data_of(first: Run, run: Run) -> Run:
    """Spell the data of a run as another run of its task does: another path to the same text is not another method."""
    config = {**run.config, "data": first.config.get("data")}
    return replace(run, about={**run.about, "config": config})


def _title(key: _TaskKey, first_runs: Mapping[_TaskKey, Run]) -> str:
    """Name a task: model, recipe, and the fields that tell it from other tasks with the same two.

    ``first_runs`` has one run of each task. The model is left out if the recipe's name begins with it.
    """
    alike = {other: run for other, run in first_runs.items() if other[:2] == key[:2]}
    parts = [key.recipe] if key.recipe.startswith(key.model) else [key.model, key.recipe]
    for index, name in enumerate(_TASK):
        if len({other.fields[index] for other in alike}) > 1:
            parts.append(f"{name} {_data_title(key, alike) if name == 'data' else key.fields[index]}")
    return " · ".join(filter(None, parts)) or "runs"


def _data_title(key: _TaskKey, runs: Mapping[_TaskKey, Run]) -> str:
    """Return the spelling of a task's data, with its hashes if other tasks have the same spelling for another text."""
    spelling = _spelled(runs[key], "data")
    texts = {other.fields[_DATA] for other, run in runs.items() if _spelled(run, "data") == spelling}
    hashes = _hashes(runs[key])
    return f"{spelling} (hashes {hashes})" if len(texts) > 1 and hashes else spelling


def _task(title: str, runs: Sequence[Run]) -> Task:
    """Group runs, mark the best group of each method, and put methods with a lower loss first."""
    groups = group_runs(runs)
    task = Task(title, any("final_val_loss" in run.stats for run in runs), tuple(groups))
    methods = task.methods  # in order of appearance
    best = best_of(groups, task.score_key, lambda group: group.method)
    shown = dict(best)
    for method in methods:
        if method not in best:
            shown[method] = min((group for group in groups if group.method == method), key=task.score)

    def order(group: Group) -> tuple[float, int, float]:
        return task.score(shown[group.method]), methods.index(group.method), group.lr or 0

    marked_groups = (
        replace(group, best=group is best.get(group.method), shown=group is shown[group.method])
        for group in sorted(groups, key=order)
    )
    return replace(task, groups=tuple(marked_groups))


class _Setting(NamedTuple):
    """What the runs of one group share. Runs that repeat a seed have another ``repetition``: 0, 1, ..."""

    method: str
    lr: float | None
    adam_lr: float | None
    repetition: int


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs that differ in their seed alone into one group, in order of appearance; name methods and groups."""
    by_optimizer: dict[str, list[Run]] = {}
    for run in runs:
        by_optimizer.setdefault(run.optimizer, []).append(run)
    differing = {optimizer: differing_settings(own) for optimizer, own in by_optimizer.items()}
    names = {optimizer: iter(name_methods(own, differing[optimizer])) for optimizer, own in by_optimizer.items()}
    by_setting: dict[_Setting, list[Run]] = {}
    seen: Counter[tuple[str, float | None, float | None, str]] = Counter()
    for run in runs:
        method = next(names[run.optimizer])
        same_seed = (method, run.lr, run.adam_lr, run.seed)
        by_setting.setdefault(_Setting(method, run.lr, run.adam_lr, seen[same_seed]), []).append(run)
        seen[same_seed] += 1
    groups = []
    for setting, members in by_setting.items():
        first = members[0]
        own_settings = settings_of(first)
        differs = [key for key in differing[first.optimizer] if is_set(own_settings, key)]
        if len({run.adam_lr for run in by_optimizer[first.optimizer] if run.lr == setting.lr}) > 1:
            differs.insert(0, "adam_lr")
        name = _given_name(first) if len(members) == 1 else ""
        label = _label(setting, by_setting)
        groups.append(Group(tuple(members), setting.method, label, name, setting.repetition, tuple(differs)))
    return groups


def _label(setting: _Setting, settings: Iterable[_Setting]) -> str:
    """Name a group by method and rate; the second rate and the repetition follow if they tell it from other groups."""
    label = f"{setting.method} {format_rate(setting.lr)}"
    if len({other.adam_lr for other in settings if (other.method, other.lr) == (setting.method, setting.lr)}) > 1:
        label += f", adam {format_rate(setting.adam_lr)}"
    return f"{label} #{setting.repetition + 1}" if setting.repetition else label
