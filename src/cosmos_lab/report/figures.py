"""The page's charts as PNG and SVG files for papers and slides, through matplotlib.

Imported only when figures are drawn: the page itself does not need matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from cosmos_lab.display import count, rate
from cosmos_lab.io import atomic_write
from cosmos_lab.report import curves, payload
from cosmos_lab.report.style import THEMES, Look, looks_of
from cosmos_lab.results.ranking import Group, Task
from cosmos_lab.results.reading import DIAGNOSTICS

_INK, _SOFT, _GRID = (THEMES["light"][key] for key in ("ink", "soft", "grid"))
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "legend.frameon": False,
    "lines.scale_dashes": False,
    "svg.fonttype": "none",  # text stays text: it can be searched and edited
    "svg.hashsalt": "cosmos-lab",  # the same runs give the same file
}
_SKIPPED_SHARE = 0.12  # of the x axis: the first steep fall would flatten all that follows
_LONG_NAME = 28  # characters: a longer one would cover the curves
_METRIC_TITLES = {
    "energy": "Share of the gradient's energy in the subspace",
    "drift": "Turn of the subspace in one step",
    "update_rms": "RMS of the update",
    "ratio": "SOAP half over MUON half",
}


def draw_all(tasks: Sequence[Task], folder: Path) -> dict[str, str]:
    """Writes every figure of every task twice, as NAME.png and NAME.svg; returns the names by what they show.

    Heat maps are drawn of the first run the page offers: the best one with diagnostics.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():  # a figure of an earlier report must not pass for one of this
        if re.fullmatch(r"(loss-by-(tokens|time)|learning-rate-sweep|diagnostics-\w+)[\w.-]*\.(png|svg)", old.name):
            old.unlink()
    names: dict[str, str] = {}
    with matplotlib.rc_context(_STYLE):
        for index, task in enumerate(tasks):
            for key, stem, figure in _figures(task):
                suffix = f"-{_slug(task.title)}-{index + 1}" if len(tasks) > 1 else ""
                names[f"{index}-{key}"] = stem + suffix
                _save(figure, folder / (stem + suffix))
    return names


def _figures(task: Task) -> list[tuple[str, str, Figure]]:
    found = [
        ("loss-tokens", "loss-by-tokens", _loss(task, "tokens")),
        ("loss-time", "loss-by-time", _loss(task, "time")),
    ]
    if task.sweeps:
        found.append(("sweep", "learning-rate-sweep", _sweep(task)))
    for label, heat in payload.heats(task)[:1]:
        for metric in DIAGNOSTICS:
            if metric in heat.metrics:
                found.append((f"heat-{metric}", f"diagnostics-{metric}", _heat(label, heat, metric)))
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "task"


def _save(figure: Figure, stem: Path) -> None:
    """Writes both files. ``savefig`` would draw each figure twice, to let a layout settle that is fixed here."""
    png, svg = BytesIO(), BytesIO()
    canvas: Any = FigureCanvasAgg(figure)  # Any: matplotlib gives these methods no types
    canvas.print_png(png)
    canvas = FigureCanvasSVG(figure)
    canvas.print_svg(svg, metadata={"Date": None})
    for ending, buffer in (("png", png), ("svg", svg)):
        with atomic_write(stem.with_name(f"{stem.name}.{ending}")) as file:
            file.write(buffer.getvalue())


def _chart() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.8), dpi=200)
    return figure, figure.subplots(gridspec_kw={"left": 0.11, "right": 0.98, "top": 0.955, "bottom": 0.13})


def _legend(figure: Figure, axes: Axes) -> None:
    """Among the lines where the names are short, else below them, where it makes the figure higher."""
    lines, names = axes.get_legend_handles_labels()
    if max(map(len, names), default=0) <= _LONG_NAME:
        axes.legend(fontsize=8)
        return
    (left, bottom, wide, high), (width, height) = axes.get_position().bounds, figure.get_size_inches()
    whole = height + 0.17 * len(names) + 0.1
    figure.set_size_inches(width, whole)
    axes.set_position((left, 1 - (1 - bottom) * height / whole, wide, high * height / whole))
    figure.legend(lines, names, fontsize=8, loc="lower left", bbox_to_anchor=(left, 0))


def _dashes(look: Look) -> tuple[int, tuple[int, ...]] | str:
    return (0, look.dash) if look.dash else "-"


def _plain(text: str) -> str:
    """A dollar sign would start a formula."""
    return text.replace("$", r"\$")


Axis = Callable[[curves.Curve], list[float | None]]


def _loss(task: Task, kind: str) -> Figure:
    """Validation loss (solid) of the groups shown when the page opens, training loss (faint) behind."""
    figure, axes = _chart()
    shown = [group for group in task.groups if group.shown]
    axis, title = _tokens_or_time(shown, kind)
    compared: list[tuple[float, float]] = []
    for group in shown:
        validation = curves.validation(group) if task.validated else None
        training = curves.training(group)
        for curve in training if validation else training[1:]:
            _line(
                axes,
                curve,
                axis,
                color=looks_of(task)[group.method].light,
                linewidth=0.7,
                alpha=0.3 / math.sqrt(len(training)),
            )
        main = validation or (training[0] if training else None)
        if main:
            compared += _main_line(axes, task, group, main, axis)
    axes.set_ylabel("validation loss" if task.validated else "training loss")
    axes.set_xlabel(title)
    if compared:
        _limits(axes, compared)
        _legend(figure, axes)
    if kind == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
    return figure


def _tokens_or_time(groups: Sequence[Group], kind: str) -> tuple[Axis, str]:
    """The numbers of the x axis and its title; times in the unit that suits the longest."""
    if kind == "tokens":
        return lambda curve: curve.tokens, "tokens"
    longest = max((run.stats.get("time", 0.0) for group in groups for run in group.runs), default=0.0)
    units = ((1, "seconds"), (60, "minutes"), (3600, "hours"), (86400, "days"))
    unit, name = next((unit, name) for unit, name in units if longest < 150 * unit or unit == 86400)
    return lambda curve: [None if x is None else x / unit for x in curve.time], f"wall-clock {name}"


def _main_line(axes: Axes, task: Task, group: Group, curve: curves.Curve, axis: Axis) -> list[tuple[float, float]]:
    kept = _line(
        axes,
        curve,
        axis,
        color=looks_of(task)[group.method].light,
        linewidth=1.7,
        linestyle=_dashes(looks_of(task)[group.method]),
        label=_plain(group.label),
    )
    band = [item for item in zip(axis(curve), curve.low, curve.high, strict=False) if item[0] is not None]
    if band:
        x, low, high = zip(*band, strict=True)
        axes.fill_between(x, low, high, color=looks_of(task)[group.method].light, alpha=0.16, linewidth=0)
    if curve.diverged and kept:
        axes.plot(*kept[-1], marker="x", color=looks_of(task)[group.method].light, markersize=7, markeredgewidth=1.8)
    return kept


def _line(axes: Axes, curve: curves.Curve, axis: Axis, **style: Any) -> list[tuple[float, float]]:
    points = [(x, y) for x, y in zip(axis(curve), curve.value, strict=True) if x is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)
    return points


def _limits(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    end = max(x for x, _ in points)
    shown = [y for x, y in points if x >= _SKIPPED_SHARE * end] or [y for _, y in points]
    pad = 0.05 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - pad, max(shown) + pad)
    axes.set_xlim(left=0)


def _sweep(task: Task) -> Figure:
    """Final perplexity (or loss) over learning rate, one line a method; a ring marks the best."""
    figure, axes = _chart()
    axes.set_xscale("log")
    values = [value for method, line in task.sweeps.items() for value in _sweep_line(axes, task, method, line)]
    rates = sorted({group.lr for line in task.sweeps.values() for group in line if group.lr})
    ticks: list[float] = []
    for value in rates:  # those whose names fit beside each other
        if not ticks or math.log(value / ticks[-1]) > 0.09 * math.log(rates[-1] / rates[0]):
            ticks.append(value)
    if ticks:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: rate(x)))
    if values and min(values) > 0 and max(values) > 2.5 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 4, 6)))
        for name in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            name(FuncFormatter(lambda y, _: f"{y:g}"))  # the usual 4 x 10^1 would leave no room for the label
    axes.set_xlabel("learning rate")
    axes.set_ylabel(payload.result_name(task))
    _legend(figure, axes)
    return figure


def _sweep_line(axes: Axes, task: Task, method: str, line: Sequence[Group]) -> list[float]:
    """One method's line; what diverged is a cross on the upper edge, above every number."""
    key = "final_val_ppl" if task.validated else "final_train_loss"
    points = [(group, spread) for group in line if group.status != "diverged" and (spread := group.stat(key))]
    look = looks_of(task)[method]
    values = [spread.mean for _, spread in points]
    error = [spread.deviation for _, spread in points]
    axes.errorbar(
        [group.lr or 0.0 for group, _ in points], values, yerr=error if any(error) else None, color=look.light,
        marker=look.marker, markersize=4.5, linestyle=_dashes(look), linewidth=1.4, label=_plain(method),
    )  # fmt: skip
    for group, spread in points:
        if group.best and group.lr:
            axes.plot(group.lr, spread.mean, marker="o", markersize=10, markerfacecolor="none", color=look.light)
    edge = axes.get_xaxis_transform()
    for group in line:
        if group.status == "diverged" and group.lr:
            axes.plot(group.lr, 1.0, marker="x", color=look.light, transform=edge, clip_on=False)
            axes.annotate(
                "diverged", (group.lr, 1.0), xycoords=edge, xytext=(-6, 0), textcoords="offset points",
                ha="right", va="center", fontsize=7, color=look.light,
            )  # fmt: skip
    return values


def _heat(label: str, heat: curves.Heat, metric: str) -> Figure:
    """One panel a kind of matrix, one row a layer, one column a step."""
    across = min(4, len(heat.panels))
    down = -(-len(heat.panels) // across)
    width, height = 2.1 * across + 1.1, 1.6 * down + 0.8
    figure = Figure(figsize=(width, height), dpi=200)
    place = {"left": 0.35 / width, "right": 1 - 0.8 / width, "top": 1 - 0.6 / height, "bottom": 0.3 / height}
    grid = figure.subplots(down, across, squeeze=False, gridspec_kw={**place, "hspace": 0.36, "wspace": 0.12})
    cells = sorted(c for panel in heat.panels for row in panel.values[metric] for c in row if c is not None)
    low, high = cells[round(0.01 * (len(cells) - 1))], cells[round(0.99 * (len(cells) - 1))]
    norm = LogNorm(low, high) if low > 0 and high / low > 20 else Normalize(low, high)
    for index, axes in enumerate(grid.flat):
        if index < len(heat.panels):
            _panel(axes, heat, heat.panels[index], metric, norm)
        else:
            axes.set_visible(False)
    bar = figure.add_axes((1 - 0.6 / width, place["bottom"], 0.12 / width, place["top"] - place["bottom"]))
    figure.colorbar(ScalarMappable(norm, "viridis"), cax=bar)
    title = f"{_METRIC_TITLES[metric]}, {_plain(label)}, by layer over tokens"
    figure.suptitle(title, fontsize=9.5, x=place["left"], y=1 - 0.1 / height, ha="left", va="top")
    return figure


def _panel(axes: Axes, heat: curves.Heat, panel: curves.Panel, metric: str, norm: Normalize) -> None:
    rows = [[math.nan if cell is None else cell for cell in row] for row in panel.values[metric]]
    first, last = heat.tokens[0] or 0, heat.tokens[-1] or len(heat.steps)
    extent = (first, max(last, first + 1), len(rows) - 0.5, -0.5)
    axes.imshow(rows, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm, extent=extent)
    axes.grid(False)
    axes.set_title(_plain(panel.kind), fontsize=9, loc="left", pad=3)
    spec = axes.get_subplotspec()
    axes.set_xticks(extent[:2], [count(first), count(last)], fontsize=7)
    axes.set_yticks([0, len(rows) - 1] if spec is not None and spec.is_first_col() else [])
    left, right = axes.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
