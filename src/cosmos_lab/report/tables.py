"""Build the page's HTML outside the charts: tables and folders not shown. All text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

from cosmos_lab.formatting import format_bytes, format_count, format_digits, format_seconds
from cosmos_lab.report.style import Look, looks_of
from cosmos_lab.report.words import reason, unequal
from cosmos_lab.results.ranking import Group, Spread, Task, at_edge
from cosmos_lab.results.reading import Run, Status

Form = Callable[[float], str]
Column = tuple[str, str, Form]

_short = partial(format_digits, digits=3)
# Heading, key in the run's statistics, format; those in units get one unit for the whole column.
_COLUMNS: tuple[Column, ...] = (
    ("Val loss", "final_val_loss", format_digits),
    ("Perplexity", "final_val_ppl", format_digits),
    ("Train loss", "final_train_loss", format_digits),
    ("Tokens", "tokens", format_count),
    ("Time", "time", format_seconds),
    ("Tokens/s", "tokens_per_s", format_count),
    ("MFU", "mfu", lambda share: f"{100 * share:.1f} %"),
    ("Step ms", "step_ms", _short),
    ("Optimizer ms", "optimizer_ms", _short),
    ("Peak memory", "peak_memory_gb", format_bytes),
    ("State", "state_bytes", format_bytes),
)
_IN_UNITS = {"tokens": 1, "time": 1, "tokens_per_s": 1, "peak_memory_gb": 2**30, "state_bytes": 1}  # of what is stored


def _columns(task: Task) -> list[Column]:
    """Return the columns that have a number, each with the unit that suits its smallest one."""
    found: list[Column] = []
    for head, key, form in _COLUMNS:
        means = [spread.mean for group in task.groups if (spread := group.stat(key))]
        if means and key in _IN_UNITS:
            like = min((mean * _IN_UNITS[key] for mean in means if mean), default=1)
            found.append((head, key, partial(_in_one_unit, form, key, like)))
        elif means:
            found.append((head, key, form))
    return found


def _in_one_unit(form: Callable[..., str], key: str, like: float, value: float) -> str:
    return form(value * _IN_UNITS[key], like)


def _tag(status: Status) -> str:
    look = status if status in (Status.DONE, Status.UNFINISHED) else "bad"
    return f'<span class="tag {look}">{escape(status)}</span>'


@dataclass(frozen=True)
class _Layout:
    """Which columns a table has beside optimizer and learning rate."""

    named: bool  # what the user called the runs
    state: bool  # done, unfinished, ...
    seeds: bool
    numbers: Sequence[Column]

    def heads(self) -> tuple[list[str], list[str]]:
        """Return the headings of the columns with words, and of those with numbers."""
        words = [*(["Name"] * self.named), "Optimizer", "Learning rate", *(["State of run"] * self.state)]
        return words, [*(["Seeds"] * self.seeds), *(name for name, _, _ in self.numbers)]


def table(task: Task, groups: Sequence[Group], caption: str, state: bool) -> str:
    """Return one row per group; with ``state``, show the state of its runs and star the best of each method."""
    layout = _Layout(
        named=any(group.name for group in groups),
        state=state,
        seeds=any(len(group.runs) > 1 for group in task.groups),
        numbers=_columns(task),
    )
    words, numbers = layout.heads()
    heads = "".join(_head(name, " class=l") for name in words) + "".join(map(_head, numbers))
    looks, winner = looks_of(task), None if state or unequal(task) else next(iter(groups), None)
    rows = "".join(_row(task, group, looks[group.method], layout, group is winner) for group in groups)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}, {escape(task.title)}">'
        f'<table class="data sortable{" all" if state else ""}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _head(name: str, attributes: str = "") -> str:
    return f'<th scope="col"{attributes}><button type="button">{name}</button></th>'


def _row(task: Task, group: Group, look: Look, layout: _Layout, winner: bool) -> str:
    """Return one row: the first column with the method's colour, the learning rate, and the numbers."""
    swatch = f'<i class="swatch m" style="--light:{look.light};--dark:{look.dark}"></i>'
    star = f'<span class="star" title="best rate of this {task.kind}"> ★<span hidden> best</span></span>'
    star = star if layout.state and group.best else ""
    first, *second = ([escape(group.title)] if layout.named else []) + [escape(group.method)]
    cells = f'<th scope="row" class="l">{swatch}{first}{star}</th>'
    cells += "".join(f'<td class="l">{text}</td>' for text in second)
    cells += _rate_cell(task, group)
    cells += f'<td class="l">{_tag(group.status)}</td>' if layout.state else ""
    done, total = len(group.counted), len(group.runs)
    cells += f"<td>{done if done == total else f'{done} of {total}'}</td>" if layout.seeds else ""
    scores = ("final_val_loss", "final_val_ppl") if task.validated else ("final_train_loss",)
    cells += "".join(_cell(group.stat(key), form, key in scores) for _, key, form in layout.numbers)
    kinds = " ".join(kind for kind, on in (("best", group.best), ("first", winner)) if on)
    return f'<tr class="{kinds}">{cells}</tr>'


def _rate_cell(task: Task, group: Group) -> str:
    """Return the learning rate, with a hint if it is the best and at the edge of the rates tried."""
    edge = at_edge(group, task.groups) if group.best else None
    hint = f' <span class="pm" title="the {edge} rate tried: one beyond it may be better">{edge}</span>' if edge else ""
    text = escape(group.label.removeprefix(group.method).strip())
    return f'<td class="l" data-sort="{group.lr if group.lr is not None else ""}">{text}{hint}</td>'


def _cell(spread: Spread | None, form: Form, score: bool) -> str:
    """Return a number; those that runs are compared by come with their spread over seeds."""
    text = escape(form(spread.mean)) if spread else "–"
    if spread and spread.n > 1 and score:
        text += f' <span class="pm">± {escape(format_digits(spread.deviation, 2))}</span>'
    return f'<td{" class=score" if score else ""} data-sort="{f"{spread.mean:.9g}" if spread else ""}">{text}</td>'


def not_shown(runs: Sequence[Run]) -> str:
    """Return the folders that hold no run that can be shown, each with its reason."""
    if not runs:
        return ""
    heads = "".join(f'<th scope="col" class="l">{name}</th>' for name in ("Folder", "State", "Reason"))
    items = "".join(
        f'<tr><th scope="row" class="l">{escape(str(run.folder))}</th><td class="l">{_tag(run.status)}</td>'
        f'<td class="l">{escape(reason(run))}</td></tr>'
        for run in runs
    )
    return (
        '<section id="not-shown"><div class="head"><h2>Folders not shown</h2></div><div class="scroll">'
        f'<table class="data"><thead><tr>{heads}</tr></thead><tbody>{items}</tbody></table></div></section>'
    )
