"""Rank runs: sort them into tasks (what was trained), methods (with what) and groups (one setting, one run per seed).

The best group of a method is the one with the lowest mean final loss among those in which every seed ended with a
finite loss. A group with an unfinished or diverged seed is never the best.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosmos_lab.config import COMPARABLE, NOT_IDENTITY, TASK, marked
from cosmos_lab.display import rate
from cosmos_lab.results.reading import Run, number

# These fields do not make another method, or a row of a table names them separately.
_NOT_SETTINGS = {
    *marked(NOT_IDENTITY), *marked(COMPARABLE), "optimizer", "lr", "adam_lr", "seed", "recipe",
    "options",  # each option counts separately
}  # fmt: skip
_TASK = marked(TASK)


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
    def status(self) -> str:
        """Return the worst of the seeds' states."""
        bad = {run.status for run in self.runs} - {"done"}
        order = ("diverged", "broken", "empty", "unfinished", *sorted(bad), "done")
        return next(state for state in order if state in bad or state == "done")

    @property
    def complete(self) -> bool:
        """Tell whether every seed ended with a finite loss."""
        return self.status == "done"

    @property
    def counted(self) -> tuple[Run, ...]:
        """Return the seeds that means are taken over: those that are done, else all that logged something."""
        done = tuple(run for run in self.runs if run.status == "done")
        return done or tuple(run for run in self.runs if run.score is not None)

    def stat(self, key: str) -> Spread | None:
        """Return mean and spread of one number over the seeds that have it."""
        values = [run.stats[key] for run in self.counted if math.isfinite(run.stats.get(key, math.nan))]
        if not values:
            return None
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))

    def score(self, key: str) -> float:
        """Return the mean that groups are ranked by, infinite for a diverged or empty group."""
        spread = None if self.status == "diverged" else self.stat(key)
        return spread.mean if spread else math.inf


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
        lines = {
            method: sorted(
                (group for group in self.groups if group.method == method and 0 < (group.lr or 0) < math.inf),
                key=lambda group: group.lr or 0,
            )
            for method in self.methods
        }
        several = any(len({group.lr for group in line}) > 1 for line in lines.values())
        return {method: line for method, line in lines.items() if line} if several else {}


def best_of(groups: Iterable[Group], key: str, by: Callable[[Group], str]) -> dict[str, Group]:
    """Return the best group of each method or optimizer: the lowest mean of a complete group, the first of equals."""
    best: dict[str, Group] = {}
    for group in groups:
        score, name = group.score(key), by(group)
        if group.complete and math.isfinite(score) and (name not in best or score < best[name].score(key)):
            best[name] = group
    return best


def at_edge(group: Group, groups: Iterable[Group]) -> str | None:
    """Say if a group's rate is the lowest or highest tried of its method, so that one beyond it may be better."""
    own = [other.lr for other in groups if other.method == group.method]
    rates = {lr for lr in own if lr is not None and 0 < lr < math.inf}
    if len(rates) < 2 or group.lr not in (min(rates), max(rates)):
        return None
    return "lowest" if group.lr == min(rates) else "highest"


def _config(run: Run) -> Mapping[str, Any]:
    config = run.config.get("config")
    return config if isinstance(config, Mapping) else {}


def _settings(run: Run) -> dict[str, str]:
    """Return what may distinguish two methods of one optimizer: all fields but names, paths, rates and seeds."""
    config = _config(run)
    found = {key: json.dumps(value, default=str) for key, value in config.items() if key not in _NOT_SETTINGS}
    options = config.get("options")
    return found | dict(str(o).partition("=")[::2] for o in (options if isinstance(options, list | tuple) else ()))


def resolved(run: Run, key: str) -> Any:
    """Return a field of a run's config; for one left at None, the value that the run used, if its folder tells."""
    value = _config(run).get(key)
    if value is not None:
        return value
    if key in ("width", "depth", "mlp", "vocab_size"):
        return _size(run, key)
    used = run.config.get("settings")
    found = used.items() if isinstance(used, Mapping) else ()
    return next((v for name, v in found if name.partition(".")[2] == key and not name.startswith("adam.")), None)


def _size(run: Run, key: str) -> int | None:
    """Return a size of the model that its config leaves to the preset, or to the data."""
    from cosmos_lab.models import resolve  # brings torch, which takes seconds

    data = run.config.get("data")
    if key == "vocab_size" and _config(run).get("data") == "embedded" and isinstance(data, Mapping):
        return number(data.get("vocab_size"))  # type: ignore[return-value]
    try:
        return int(getattr(resolve(run.model), key))
    except ValueError:  # a preset that this version does not have
        return None


def _given_name(run: Run) -> str:
    """Return the name that the user gave with --name, or "" for one that a recipe made up."""
    name = _config(run).get("name")
    return name if isinstance(name, str) and not name.startswith(f"{run.recipe}-{run.optimizer}-lr") else ""


def arrange(runs: Iterable[Run]) -> tuple[list[Task], list[Run]]:
    """Return the tasks in order of appearance, and the runs that belong to none because they name no optimizer."""
    buckets: dict[tuple[str, ...], list[Run]] = {}
    misfits = []
    for run in runs:
        if run.optimizer:
            extra = [_text(run) if key == "data" else _spelled(run, key) for key in _TASK]
            members = buckets.setdefault((run.model, run.recipe, *extra), [])
            # Another spelling of the same text makes no other method.
            same = {**_config(run), "data": _config(members[0]).get("data")} if members else _config(run)
            members.append(replace(run, config={**run.config, "config": same}))
        else:
            misfits.append(run)
    titles = _titles({key: _spelled(members[0], "data") for key, members in buckets.items()})
    return [_task(title, members) for title, members in zip(titles, buckets.values(), strict=True)], misfits


def _spelled(run: Run, key: str) -> str:
    return json.dumps(resolved(run, key), default=str).strip('"')


def _text(run: Run) -> str:
    """Return the hashes of what a run trained on and validated with, or the spelling of --data if it has none."""
    about = run.config.get("data")
    hashes = [about.get(name) for name in ("fingerprint", "val_fingerprint")] if isinstance(about, Mapping) else []
    return ", ".join(map(str, filter(None, hashes))) or _spelled(run, "data")


def _titles(spellings: Mapping[tuple[str, ...], str]) -> list[str]:
    """Name tasks by model and recipe (the recipe alone if it names the model), and what else distinguishes them.

    ``spellings`` has the tasks and how each spells its data, which gets its hashes if another task spells it alike.
    """
    titles = []
    for key, spelling in spellings.items():
        model, recipe, *own = key
        rivals = {other[2:]: data for other, data in spellings.items() if other[:2] == (model, recipe)}
        at = _TASK.index("data")
        alike = {rival[at] for rival, data in rivals.items() if data == spelling}
        shown = [*own]
        shown[at] = f"{spelling} (hashes {own[at]})" if len(alike) > 1 and own[at] != spelling else spelling
        extra = [f"{name} {shown[i]}" for i, name in enumerate(_TASK) if len({rival[i] for rival in rivals}) > 1]
        titles.append(" · ".join(filter(None, ("" if recipe.startswith(model) else model, recipe, *extra))) or "runs")
    return titles


def _task(title: str, runs: Sequence[Run]) -> Task:
    """Group runs, mark the best group of each method, and put methods with a lower loss first."""
    groups = group_runs(runs)
    task = Task(title, any("final_val_loss" in run.stats for run in runs), tuple(groups))
    best = best_of(groups, task.score_key, lambda group: group.method)
    leading = {m: best.get(m) or min((g for g in groups if g.method == m), key=task.score) for m in task.methods}
    names = task.methods
    order = sorted(groups, key=lambda group: (names.index(group.method), group.lr or 0))
    order.sort(key=lambda group: task.score(leading[group.method]))
    marked = [replace(g, best=g is best.get(g.method), shown=g is leading[g.method]) for g in order]
    return replace(task, groups=tuple(marked))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs that differ in their seed alone into one group, in order of appearance; name methods and groups."""
    methods, varying = _methods(runs)
    buckets: dict[tuple[str, float | None, float | None, int], list[Run]] = {}
    copies: dict[tuple[str, float | None, float | None, str], int] = {}
    for method, run in zip(methods, runs, strict=True):
        same = (method, run.lr, run.adam_lr, run.seed)
        copy = copies.get(same, 0)  # a second run with one seed is a repetition, not another seed
        copies[same] = copy + 1
        buckets.setdefault((method, run.lr, run.adam_lr, copy), []).append(run)
    groups = []
    for (method, lr, adam_lr, copy), members in buckets.items():
        # The second rate and the repetition are named only if they are needed to tell groups apart.
        own = len({other[2] for other in buckets if other[:2] == (method, lr)}) > 1
        label = f"{method} {rate(lr)}{f', adam {rate(adam_lr)}' if own else ''}{f' #{copy + 1}' if copy else ''}"
        first = members[0]
        rates = {run.adam_lr for run in runs if (run.optimizer, run.lr) == (first.optimizer, lr)}
        has = [key for key in varying[first.optimizer] if _settings(first).get(key, "null") != "null"]
        name = _given_name(first) if len(members) == 1 else ""
        groups.append(Group(tuple(members), method, label, name, (*(["adam_lr"] if len(rates) > 1 else []), *has)))
    return groups


def _methods(runs: Sequence[Run]) -> tuple[list[str], dict[str, list[str]]]:
    """Name each run's method, and list the settings in which runs of each optimizer differ.

    A method is the optimizer's name, with two of those settings, or as many as are needed to tell methods apart.
    """
    of, names, varying = [_settings(run) for run in runs], [run.optimizer for run in runs], {}
    for optimizer in dict.fromkeys(names):
        own = {i: of[i] for i, run in enumerate(runs) if run.optimizer == optimizer}
        keys = dict.fromkeys(key for some in own.values() for key in some)
        differing = [key for key in keys if len({some.get(key) for some in own.values()}) > 1]
        shown = _with_defaults({i: runs[i] for i in own}, own, differing)
        kinds = len({tuple(some.get(key) for key in differing) for some in shown.values()})
        for depth in range(min(2, len(differing)), len(differing) + 1):
            marked = {i: _marked(optimizer, some, differing, depth) for i, some in shown.items()}
            if len(set(marked.values())) == kinds:
                break
        for i, name in marked.items():
            names[i] = name
        varying[optimizer] = differing
    return names, varying


def _with_defaults(
    runs: Mapping[int, Run], own: Mapping[int, Mapping[str, str]], differing: Iterable[str]
) -> dict[int, dict[str, str]]:
    """Put the value that runs used in place of a setting left at None, unless it follows from their rates."""
    found = {i: dict(some) for i, some in own.items()}
    for key in differing:
        left = [i for i, some in own.items() if some.get(key, "null") == "null" and key in some]
        used = {json.dumps(resolved(runs[i], key), default=str) for i in left}
        if len(used) == 1:
            for i in left:
                found[i] |= {key: min(used)}
    return found


def _marked(optimizer: str, own: Mapping[str, str], differing: Sequence[str], depth: int) -> str:
    """Add the first few of the settings that differ and that the run has to the optimizer's name."""
    has = [key for key in differing if own.get(key, "null") != "null"][:depth]
    marks = ", ".join(f"{key} {own[key].strip(chr(34))}" for key in has)
    return f"{optimizer} ({marks})" if marks else optimizer
