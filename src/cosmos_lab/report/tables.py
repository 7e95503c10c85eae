"""The page's HTML outside the charts: tables, configurations, folders that could not be shown. All text is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from cosmos_lab.display import count, rate, seconds, significant, size
from cosmos_lab.report.style import Look, looks_of
from cosmos_lab.report.words import at_edge, reason
from cosmos_lab.results.ranking import Group, Spread, Task, flatten
from cosmos_lab.results.reading import Run

Column = tuple[str, str, Callable[[float | None], str]]


def _ms(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else significant(value, 3)


# Heading, key in the run's statistics, format.
_COLUMNS: tuple[Column, ...] = (
    ("Val loss", "final_val_loss", significant),
    ("Perplexity", "final_val_ppl", significant),
    ("Train loss", "final_train_loss", significant),
    ("Tokens", "tokens", count),
    ("Time", "time", seconds),
    ("Tokens/s", "tokens_per_s", count),
    ("MFU", "mfu", lambda share: "–" if share is None else f"{100 * share:.1f} %"),
    ("Step ms", "step_ms", _ms),
    ("Optimizer ms", "optimizer_ms", _ms),
    ("Peak GB", "peak_memory_gb", _ms),
    ("State", "state_bytes", size),
)


def swatch(look: Look) -> str:
    """A square in a method's colour."""
    return f'<i class="swatch m" style="--light:{look.light};--dark:{look.dark}"></i>'


def columns(task: Task) -> list[Column]:
    """The columns in which at least one run has a number."""
    return [column for column in _COLUMNS if any(group.stat(column[1]) for group in task.groups)]


def best_table(task: Task) -> str:
    """One row a method, at its best rate, lowest loss first."""
    rows = [_row(task, group, first=index == 0) for index, group in enumerate(task.ranking)]
    return _table(task, rows, f"Best of each optimizer, {task.title}")


def full_table(task: Task) -> str:
    """One row a setting, with its state; the best of each method is starred."""
    return _table(
        task, [_row(task, group, state=True) for group in task.groups], f"All settings, {task.title}", state=True
    )


def _table(task: Task, rows: Sequence[str], caption: str, state: bool = False) -> str:
    heads = ["Optimizer", "Learning rate", *(["State of run"] if state else []), *_seed_head(task)]
    left = 3 if state else 2
    cells = [
        f'<th scope="col"{" class=l" if index < left else ""}><button type="button">{escape(name)}</button></th>'
        for index, name in enumerate(heads + [column[0] for column in columns(task)])
    ]
    kind = "data sortable all" if state else "data sortable"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><thead><tr>{"".join(cells)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _seed_head(task: Task) -> list[str]:
    return ["Seeds"] if any(len(group.runs) > 1 for group in task.groups) else []


def _row(task: Task, group: Group, *, first: bool = False, state: bool = False) -> str:
    edge = at_edge(task, group) if group.best else ""
    star = (
        '<span class="star" title="best of this optimizer"> ★<span hidden> best</span></span>'
        if state and group.best
        else ""
    )
    rate_text = escape(group.label.removeprefix(group.method).strip())
    hint = f' <span class="pm" title="the {edge} rate tried: a better one may lie beyond">{edge}</span>' if edge else ""
    cells = [
        f'<th scope="row" class="l">{swatch(looks_of(task)[group.method])}{escape(group.method)}{star}</th>',
        f'<td class="l" data-sort="{group.lr if group.lr is not None else ""}">{rate_text}{hint}</td>',
    ]
    if state:
        cells.append(f'<td class="l">{tag(group.status)}</td>')
    if _seed_head(task):
        done = len(group.counted)
        cells.append(f"<td>{done if done == len(group.runs) else f'{done} of {len(group.runs)}'}</td>")
    for _, key, form in columns(task):
        score = key in (("final_val_loss", "final_val_ppl") if task.validated else ("final_train_loss",))
        cells.append(_cell(group.stat(key), form, score))
    kinds = " ".join(kind for kind, on in (("best", group.best), ("first", first)) if on)
    return f'<tr class="{kinds}">{"".join(cells)}</tr>'


def _cell(spread: Spread | None, form: Callable[[float | None], str], score: bool) -> str:
    """A number; those that runs are compared by come with their spread over seeds."""
    kind = " class=score" if score else ""
    if spread is None:
        return f'<td{kind} data-sort="">–</td>'
    text = escape(form(spread.mean))
    if spread.n > 1 and score:
        text += f' <span class="pm">± {escape(significant(spread.deviation, 2))}</span>'
    return f'<td{kind} data-sort="{spread.mean:.9g}">{text}</td>'


def tag(status: str) -> str:
    """A run's state as a label."""
    kind = status if status in ("done", "unfinished") else "bad"
    return f'<span class="tag {kind}">{escape(status)}</span>'


def configurations(task: Task) -> str:
    """One fold-out a run; what differs between the runs stands out."""
    runs = [(group, run) for group in task.groups for run in group.runs]
    flats = [_flat(run) for _, run in runs]
    keys = {key for flat in flats for key in flat}
    differing = {key for key in keys if len({flat.get(key) for flat in flats}) > 1}
    folds = [_configuration(task, group, run, flat, differing) for (group, run), flat in zip(runs, flats, strict=True)]
    return f'<div class="folds">{"".join(folds)}</div>'


def _configuration(task: Task, group: Group, run: Run, flat: dict[str, str], differing: set[str]) -> str:
    rows = "".join(
        f"<div{' class=differs' if key in differing else ''}><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        for key, value in flat.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    state = tag(run.status) if run.status != "done" else ""
    return (
        f"<details><summary>{swatch(looks_of(task)[group.method])}{escape(run.name)} "
        f'<span class="dim">{escape(str(run.folder))}</span> {state}</summary>'
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
        + f'<dl class="keys">{rows}</dl></details>'
    )


def _flat(run: Run) -> dict[str, str]:
    """The configuration on one level, without the optimizer's defaults and what the head of the file repeats."""
    flat = {key: _plain(value) for key, value in flatten(run.config.get("config")).items()}
    rest = {key: value for key, value in run.config.items() if key not in ("config", "settings")}
    head = {key: _plain(value) for key, value in flatten(rest).items()}
    return {**{key: value for key, value in head.items() if flat.get(key) != value}, **flat}


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return rate(value)
    return json.dumps(value, default=str)


def misfits(runs: Sequence[Run]) -> str:
    """Folders that hold no run that can be shown, each with its reason."""
    if not runs:
        return ""
    items = "".join(
        f'<tr><th scope="row" class="l">{escape(str(run.folder))}</th><td class="l">{tag(run.status)}</td>'
        f'<td class="l">{escape(reason(run))}</td></tr>'
        for run in runs
    )
    return (
        '<section id="not-shown"><div class="head"><h2>Folders not shown</h2></div><div class="scroll">'
        '<table class="data"><thead><tr><th scope="col" class="l">Folder</th><th scope="col" class="l">State</th>'
        f'<th scope="col" class="l">Reason</th></tr></thead><tbody>{items}</tbody></table></div></section>'
    )
