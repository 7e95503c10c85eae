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
from typing import Any, NamedTuple

from cosmos_lab.formatting import format_rate
from cosmos_lab.report.curves import Curve, training, validation
from cosmos_lab.report.heat import MOST_CELLS, HeatSection, heat_section
from cosmos_lab.report.style import Look, looks_of
from cosmos_lab.results.ranking import Group, Spread, Task
from cosmos_lab.results.reading import Status

Numbers = Sequence[Any]  # finite numbers, or None
_X_DIGITS, _Y_DIGITS = 7, 6  # more than a screen can show
_SKIPPED_SHARE = 0.12  # of the x axis: the first steep fall would flatten all that follows
_MOST_DOTS = 30  # points of a line that are marked; more would run together


class _TimeUnit(NamedTuple):
    seconds: int
    short: str
    name: str


_TIME_UNITS = (
    _TimeUnit(1, "s", "seconds"),
    _TimeUnit(60, "min", "minutes"),
    _TimeUnit(3600, "h", "hours"),
    _TimeUnit(86400, "d", "days"),
)


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
    status: Status = Status.DONE
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


class _Extent(NamedTuple):
    """How far the loss curves of a task reach, and the unit for its times."""

    tokens: float
    seconds: float
    unit: _TimeUnit


def _losses(task: Task, suffix: str) -> Section | None:
    """Specify loss over tokens and over time: validation wide, training thin and smoothed, seeds' spread as a band."""
    found = [_curves(task, group) for group in task.groups]
    extent = _extent([curve for main, faint in found for curve in (main, *faint) if curve])
    behind: list[Line] = []
    minor: list[Line] = []
    front: list[Line] = []
    for index, (group, (main, faint)) in enumerate(zip(task.groups, found, strict=True)):
        behind += _faint_lines(index, faint, extent)
        if main is not None and main.value:
            (front if group.best else minor).append(_main_line(task, index, main, extent))
    lines = [*behind, *minor, *front]
    if not lines:
        return None
    return Section(
        "curves",
        list(looks_of(task).values()),
        [_series(task, group) for group in task.groups],
        lines,
        _loss_charts(task, lines, extent, suffix),
        [
            Control("logY", "Loss", False, scale=True),
            Control("logX", "Tokens and time", False, scale=True),
            *([Control("faint", "Training loss", True)] if behind else []),
            Control("full", "Full range", False),
        ],
    )


def _curves(task: Task, group: Group) -> tuple[Curve | None, list[Curve]]:
    """Return the curve that counts, and those to draw faintly; without a validation loss, that of a seed counts."""
    main, faint = validation(group) if task.validated else None, training(group)
    if main is None and faint:
        main, *faint = faint
    return main, faint


def _extent(curves: Sequence[Curve]) -> _Extent:
    """Return how far the curves reach, with the smallest unit that keeps the numbers on the time axis below 150."""
    seconds = _most(time for curve in curves for time in curve.time)
    unit = next((unit for unit in _TIME_UNITS if seconds < 150 * unit.seconds), _TIME_UNITS[-1])
    return _Extent(_most(tokens for curve in curves for tokens in curve.tokens), seconds, unit)


def _faint_lines(series: int, curves: Sequence[Curve], extent: _Extent) -> list[Line]:
    """Specify the lines behind the one that counts: many seeds must not hide it."""
    opacity = round(0.6 / math.sqrt(len(curves) or 1), 3)
    return [_loss(series, c, extent, faint=True, width=1.2, opacity=opacity) for c in curves if c.value]


def _main_line(task: Task, series: int, curve: Curve, extent: _Extent) -> Line:
    """Specify the line that counts: few points are dots, a single one a point, and the end of a diverged run a cross.

    ``series`` is the index of the group, which is drawn thin unless it is shown when the page opens.
    """
    group, last = task.groups[series], len(curve.value) - 1
    style: dict[str, Any] = {} if group.shown else {"width": 1.3, "opacity": 0.75}
    marks: dict[int, str] = {}
    if task.validated and last < _MOST_DOTS:
        marks = dict.fromkeys(range(last + 1), "dot")
    if curve.diverged:
        return _loss(series, curve, extent, marks={**marks, last: "failed"}, notes={last: "diverged here"}, **style)
    return _loss(series, curve, extent, marks=marks if last else {0: "point"}, **style)


def _loss_charts(task: Task, lines: Sequence[Line], extent: _Extent, suffix: str) -> list[Chart]:
    """Specify the same lines twice, by tokens and by time."""
    loss, remark = ("validation loss", "") if task.validated else ("training loss", ", smoothed")
    if any(line.faint for line in lines):
        remark = "; thin lines: training, smoothed"
    unit = extent.unit
    found = []
    for key, about, title, short, end in (
        ("tokens", "by tokens", "tokens", "tokens", extent.tokens),
        ("time", "by wall-clock time", f"wall-clock {unit.name}", unit.short, extent.seconds / unit.seconds),
    ):
        low = min((x for line in lines for x in line.x[key] if x and x > 0), default=1)
        axis = Axis(title, (0, end or 1), low, short)
        found.append(Chart(key, f"loss-by-{key}{suffix}", loss, about + remark, axis, task.validated, aspect=0.68))
    return found


def _series(task: Task, group: Group) -> Series:
    method, short = task.methods.index(group.method), group.name or group.label.removeprefix(group.method).strip()
    return Series(method, group.title, short, group.best, group.shown, group.status, bool(group.name))


def _loss(series: int, curve: Curve, extent: _Extent, faint: bool = False, **style: Any) -> Line:
    """Specify one curve as a line; its view leaves out the first steep fall."""
    x = {"tokens": _round(curve.tokens, _X_DIGITS)}
    x["time"] = _round([None if t is None else t / extent.unit.seconds for t in curve.time], _X_DIGITS)
    lo, y, hi = (_round(values, _Y_DIGITS) for values in (curve.low, curve.value, curve.high))
    late = [i for i, t in enumerate(x["tokens"]) if t is None or t >= _SKIPPED_SHARE * extent.tokens] or range(len(y))
    view = _span([values[i] for values in (lo or y, hi or y) for i in late])
    if view and faint:
        view = (view[0], view[0])  # training must not flatten the other lines
    return Line(series, x, y, view, _span([*lo, *y, *hi]), lo, hi, faint=faint, **style)


def _span(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def _sweep(task: Task, suffix: str) -> Section | None:
    """Specify the final result over learning rate, one line per method; None unless some method has several rates."""
    lines = [_sweep_line(index, groups, task.result_key) for index, groups in enumerate(task.sweeps.values())]
    if not lines:
        return None
    results = [y for line in lines for y in line.y if y is not None]
    wide = bool(results) and min(results) > 0 and max(results) > 2.5 * min(results)
    return Section(
        "sweep",
        list(looks_of(task).values()),
        [Series(task.methods.index(name), name) for name in task.sweeps],
        lines,
        [_sweep_chart(task, lines, suffix)],
        [Control("logY", "Scale", wide, scale=True)],
        marked=True,
    )


def _sweep_line(series: int, groups: Sequence[Group], key: str) -> Line:
    """Specify the results of one method, a mean with its deviation per rate; a failed rate has a mark but no value."""
    no_number = (Status.DIVERGED, Status.BROKEN, Status.EMPTY)
    spreads = [None if group.status in no_number else group.stat(key) for group in groups]
    bands = [(s.mean - s.deviation, s.mean, s.mean + s.deviation) if s else (None,) * 3 for s in spreads]
    lo, y, hi = (_round(values, _Y_DIGITS) for values in zip(*bands, strict=True))
    rates, span = _round([group.lr for group in groups], _X_DIGITS), _span([*lo, *hi])
    marks, notes = {}, {}
    for i, (group, spread) in enumerate(zip(groups, spreads, strict=True)):
        marks[i], notes[i] = _mark(group, spread), _note(group, spread)
    return Line(series, {"lr": rates}, y, span, span, lo, hi, marks, notes)


def _sweep_chart(task: Task, lines: Sequence[Line], suffix: str) -> Chart:
    """Specify the chart with a log axis of rates, and a tick at each of them."""
    rates = sorted({x for line in lines for x in line.x["lr"] if x})
    low, high = rates[0] / 1.15, rates[-1] * 1.15
    axis = Axis("learning rate", (low, high), low, log=True, ticks=[(x, format_rate(x)) for x in rates])
    title = "final validation perplexity" if task.validated else "final training loss"
    about = "by learning rate; a ring marks the best"
    return Chart("lr", f"learning-rate-sweep{suffix}", title, about, axis, perplexity=False, aspect=0.42, pad=0.06)


def _mark(group: Group, spread: Spread | None) -> str:
    if spread is None:
        return "failed"
    if group.best:
        return "best"
    return "point" if group.complete else "open"


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
