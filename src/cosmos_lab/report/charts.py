"""Specify every chart once, as plain data: numbers, axes, ranges, labels, colours, controls.

The page's script and the figures (``figures.py``) draw these specifications and decide nothing themselves. Each task
has a section of line charts for its loss curves, one for its learning-rate sweep, and one of heat maps (``heat.py``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cosmos_lab.display import rate
from cosmos_lab.report.curves import Curve, training, validation
from cosmos_lab.report.heat import MOST_CELLS, HeatSection, heat_section
from cosmos_lab.report.style import Look, looks_of
from cosmos_lab.results.ranking import Group, Spread, Task

Numbers = Sequence[Any]  # finite numbers, or None
_X_DIGITS, _Y_DIGITS = 7, 6  # more than a screen can show
_SKIPPED_SHARE = 0.12  # of the x axis: the first steep fall would flatten all that follows
_MOST_DOTS = 30  # points of a line that are marked; more would run together
_TIME_UNITS = ((1, "s", "seconds"), (60, "min", "minutes"), (3600, "h", "hours"), (86400, "d", "days"))


@dataclass(frozen=True)
class Line:
    """One line, with one list of x for each chart of its section; a point that failed has no y."""

    series: int
    x: dict[str, Numbers]
    y: Numbers
    view: tuple[float, float] | None  # the range of y that shows what matters
    full: tuple[float, float] | None  # the range of y that shows all
    lo: Numbers = ()  # one standard deviation below y, and above
    hi: Numbers = ()
    marks: dict[int, str] = field(default_factory=dict)  # by index: dot, point, best, open or failed
    notes: dict[int, str] = field(default_factory=dict)
    faint: bool = False
    width: float = 2.2
    opacity: float = 1.0


@dataclass(frozen=True)
class Axis:
    """The x axis of a chart; ``low`` is where a log axis begins, ``ticks`` are values with their texts."""

    title: str
    range: tuple[float, float]
    low: float
    unit: str = ""
    log: bool = False
    ticks: Sequence[tuple[Any, str]] | None = None


@dataclass(frozen=True)
class Chart:
    """One chart of a section: the name of its figure, its axes, its height as a share of its width."""

    key: str
    file: str
    title: str
    about: str
    x: Axis
    perplexity: bool  # values are losses, to be read out with their exponential
    aspect: float
    pad: float = 0.05  # of the y axis, above and below the lines


@dataclass(frozen=True)
class Series:
    """One entry of the legend; ``short`` is its name beside that of its method, ``named`` if the user gave it."""

    method: int
    label: str
    short: str = ""
    best: bool = False
    shown: bool = True
    status: str = "done"
    named: bool = False


@dataclass(frozen=True)
class Control:
    """A switch that is on or off, or between a linear and a log scale: logX, logY, faint lines, full range."""

    key: str
    text: str
    on: bool
    scale: bool = False


@dataclass(frozen=True)
class Section:
    """Line charts that share lines (in drawing order), legend and controls."""

    name: str
    methods: list[Look]
    series: list[Series]
    lines: list[Line]
    charts: list[Chart]
    controls: list[Control]
    marked: bool = False  # markers and error bars instead of bands


def specify(tasks: Sequence[Task]) -> list[list[Section | HeatSection]]:
    """Return the specifications of each task's charts."""
    maps = sum(bool(run.diagnostics) for task in tasks for group in task.groups for run in group.runs)
    found = []
    for index, task in enumerate(tasks):
        slug = re.sub(r"[^a-z0-9]+", "-", task.title.lower()).strip("-")[:60] or "task"
        suffix = f"-{slug}-{index + 1}" if len(tasks) > 1 else ""
        sections = (_losses(task, suffix), _sweep(task, suffix), heat_section(task, MOST_CELLS // max(1, maps)))
        found.append([section for section in sections if section])
    return found


def embed(specs: Sequence[Sequence[Any]]) -> str:
    """Return the specifications as JSON that is safe inside a script element, for any names of runs.

    >>> "</script>" in embed([["</script>"]])
    False
    """
    text = json.dumps(specs, allow_nan=False, separators=(",", ":"), default=vars)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _losses(task: Task, suffix: str) -> Section | None:
    """Specify loss over tokens and over time: validation wide, training thin and smoothed, seeds' spread as a band."""
    found = [(group, validation(group) if task.validated else None, training(group)) for group in task.groups]
    every = [curve for _, main, faint in found for curve in ([main] if main else []) + faint]
    tokens, time = _most(x for c in every for x in c.tokens), _most(x for c in every for x in c.time)
    unit, short, long = next(u for u in _TIME_UNITS if time < 150 * u[0] or u[0] == 86400)
    behind: list[Line] = []
    minor: list[Line] = []
    front: list[Line] = []
    for index, (group, main, faint) in enumerate(found):
        if main is None and faint:
            main, *faint = faint
        opacity = round(0.6 / math.sqrt(len(faint) or 1), 3)  # many seeds must not hide the line that counts
        behind += [_loss(index, c, unit, tokens, faint=True, width=1.2, opacity=opacity) for c in faint if c.value]
        if main is not None and main.value:
            last, failed = len(main.value) - 1, main.diverged or group.status == "diverged"
            dots = dict.fromkeys(range(last + 1), "dot") if task.validated and last < _MOST_DOTS else {}
            marks = {**dots, last: "failed"} if failed else dots if last else {0: "point"}
            style: Any = {} if group.shown else {"width": 1.3, "opacity": 0.75}
            style |= {"marks": marks, "notes": {last: "diverged here"} if failed else {}}
            (front if group.best else minor).append(_loss(index, main, unit, tokens, **style))
    lines = [*behind, *minor, *front]
    if not lines:
        return None

    def chart(key: str, about: str, title: str, unit: str, end: float) -> Chart:
        low = min((x for line in lines for x in line.x[key] if x and x > 0), default=1)
        loss, axis = "validation" if task.validated else "training", Axis(title, (0, end or 1), low, unit)
        about += "; thin lines: training, smoothed" if behind else "" if task.validated else ", smoothed"
        return Chart(key, f"loss-by-{key}{suffix}", f"{loss} loss", about, axis, task.validated, 0.68)

    return Section(
        "curves",
        list(looks_of(task).values()),
        [_series(task, group) for group in task.groups],
        lines,
        [
            chart("tokens", "by tokens", "tokens", "tokens", tokens),
            chart("time", "by wall-clock time", f"wall-clock {long}", short, time / unit),
        ],
        [
            Control("logY", "Loss", False, scale=True),
            Control("logX", "Tokens and time", False, scale=True),
            *([Control("faint", "Training loss", True)] if behind else []),
            Control("full", "Full range", False),
        ],
    )


def _series(task: Task, group: Group) -> Series:
    method, short = task.methods.index(group.method), group.name or group.label.removeprefix(group.method).strip()
    return Series(method, group.title, short, group.best, group.shown, group.status, bool(group.name))


def _loss(series: int, curve: Curve, unit: float, end: float, faint: bool = False, **style: Any) -> Line:
    x = {"tokens": _round(curve.tokens, _X_DIGITS)}
    x["time"] = _round([None if t is None else t / unit for t in curve.time], _X_DIGITS)
    lo, y, hi = (_round(values, _Y_DIGITS) for values in (curve.low, curve.value, curve.high))
    late = [i for i, t in enumerate(x["tokens"]) if t is None or t >= _SKIPPED_SHARE * end] or range(len(y))
    view = _span([values[i] for values in (lo or y, hi or y) for i in late])
    if view and faint:
        view = (view[0], view[0])  # training must not flatten the other lines
    return Line(series, x, y, view, _span([*lo, *y, *hi]), lo, hi, faint=faint, **style)


def _span(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _sweep(task: Task, suffix: str) -> Section | None:
    """Specify the final result over learning rate, one line per method; None unless some method has several rates."""
    lines: list[Line] = []
    for groups in task.sweeps.values():
        spreads = [None if g.status in ("diverged", "broken", "empty") else g.stat(task.result_key) for g in groups]
        known = [(s.mean - s.deviation, s.mean, s.mean + s.deviation) if s else (None,) * 3 for s in spreads]
        lo, y, hi = (_round(values, _Y_DIGITS) for values in zip(*known, strict=True))
        span = _span([*lo, *hi])
        marks, notes = {}, {}
        for i, (g, s) in enumerate(zip(groups, spreads, strict=True)):
            marks[i] = "failed" if s is None else "best" if g.best else "point" if g.complete else "open"
            notes[i] = _note(g, s)
        lines.append(
            Line(len(lines), {"lr": _round([g.lr for g in groups], _X_DIGITS)}, y, span, span, lo, hi, marks, notes)
        )
    if not lines:
        return None
    rates = sorted({x for line in lines for x in line.x["lr"] if x})
    low, high, values = rates[0] / 1.15, rates[-1] * 1.15, [y for line in lines for y in line.y if y is not None]
    axis = Axis("learning rate", (low, high), low, log=True, ticks=[(x, rate(x)) for x in rates])
    title = "final validation perplexity" if task.validated else "final training loss"
    about = "by learning rate; a ring marks the best"
    wide = bool(values) and min(values) > 0 and max(values) > 2.5 * min(values)
    return Section(
        "sweep",
        list(looks_of(task).values()),
        [Series(task.methods.index(name), name) for name in task.sweeps],
        lines,
        [Chart("lr", f"learning-rate-sweep{suffix}", title, about, axis, False, 0.42, 0.06)],
        [Control("logY", "Scale", wide, scale=True)],
        marked=True,
    )


def _note(group: Group, spread: Spread | None) -> str:
    if spread is None:
        return "no number, or one too large to show" if group.complete else group.status
    return ", ".join([f"{spread.n} seeds"] * (spread.n > 1) + [group.status] * (not group.complete))


def _most(values: Iterable[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _round(values: Iterable[float | None], digits: int) -> Numbers:
    """Round to this many digits; None if not finite, and whole numbers as int."""
    short = [float(f"{v:.{digits}g}") if v is not None and math.isfinite(v) else None for v in values]
    return [int(v) if v is not None and v.is_integer() and abs(v) < 2**53 else v for v in short]
