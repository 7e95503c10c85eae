"""Draw chart specifications as PNG and SVG files for papers and slides, through matplotlib.

Imported only when figures are drawn: the page itself does not need matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from cosmos_lab.formatting import format_count
from cosmos_lab.io import atomic_write, valid_text
from cosmos_lab.report.charts import Axis, Chart, Line, Section
from cosmos_lab.report.style import THEMES, Look

_INK, _SOFT, _GRID = (THEMES["light"][key] for key in ("ink", "soft", "grid"))
_STYLE: dict[Any, Any] = {
    "font.size": 9, "font.family": "sans-serif",
    "axes.edgecolor": _SOFT, "axes.labelcolor": _INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": _GRID, "xtick.color": _SOFT, "ytick.color": _SOFT,
    "legend.frameon": False, "lines.scale_dashes": False,
    "svg.fonttype": "none",  # text stays text: it can be searched and edited
    "svg.hashsalt": "cosmos-lab",  # the same runs give the same file
}  # fmt: skip
_POINTS = 0.75  # of a pixel: the specification's widths are in pixels
_LONG_NAME = 28  # characters: a legend with longer names would cover the curves


def draw_all(sections: Sequence[Section], folder: Path) -> None:
    """Write every line chart twice, as FILE.png and FILE.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():  # a figure of an earlier report must not pass for one of this
        if re.fullmatch(r"(loss-by-(tokens|time)|learning-rate-sweep|diagnostics-\w+)[\w.-]*\.(png|svg)", old.name):
            old.unlink()
    with matplotlib.rc_context(_STYLE):
        for spec in sections:
            for chart in spec.charts:
                _save(_lines(spec, chart), folder / chart.file)


def _save(figure: Figure, stem: Path) -> None:
    for ending in ("png", "svg"):
        buffer = BytesIO()
        figure.savefig(buffer, format=ending, metadata={"Date": None} if ending == "svg" else None)
        with atomic_write(stem.with_name(f"{stem.name}.{ending}")) as file:
            file.write(buffer.getvalue())


def _lines(spec: Section, chart: Chart) -> Figure:
    """Draw the series that the page shows when it opens."""
    figure = Figure(figsize=(5.6, 3.8), dpi=200, layout="constrained")
    axes: Axes = figure.subplots()
    lines = [line for line in spec.lines if spec.series[line.series].shown]
    for line in lines:
        _line(axes, spec, chart, line)
    axes.set(xlabel=chart.x.title, ylabel=chart.title, xlim=chart.x.range)
    if spans := [line.view for line in lines if line.view]:
        log = any(control.on for control in spec.controls if control.key == "logY")
        _y_axis(axes, min(low for low, _ in spans), max(high for _, high in spans), chart.pad, log)
        names = [spec.series[line.series].label for line in lines]
        if max(map(len, names)) <= _LONG_NAME:
            axes.legend(fontsize=8)
        else:
            figure.legend(fontsize=8, loc="outside lower left")
    _x_axis(axes, chart.x)
    return figure


def _y_axis(axes: Axes, low: float, high: float, pad: float, log: bool) -> None:
    """Set range and scale; ``pad`` is the share of the axis to leave free at both ends."""
    if not log or low <= 0:
        room = pad * ((high - low) or 1)
        axes.set_ylim((low - room, high + room))
        return
    factor = (high / low) ** pad
    axes.set_ylim((low / factor, high * factor))
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 4, 6)))
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda y, _: f"{y:g}"))  # 4 x 10^1 would leave no room for the label


def _x_axis(axes: Axes, axis: Axis) -> None:
    """Set scale and ticks; of given ticks, as many as fit beside each other."""
    if axis.log:
        axes.set_xscale("log")
    if axis.ticks:
        kept: list[Any] = []
        for value, text in axis.ticks:
            if not kept or math.log(value / kept[-1][0]) > 0.07 * math.log(axis.range[1] / axis.range[0]):
                kept.append((value, text))
        axes.xaxis.set_major_locator(FixedLocator([value for value, _ in kept]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([text for _, text in kept])
    elif axis.unit == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_count(x)))


def _line(axes: Axes, spec: Section, chart: Chart, line: Line) -> None:
    """Draw one line with its band or error bars, and its marks."""
    series = spec.series[line.series]
    look, xs = spec.methods[series.method], line.x[chart.key]
    known = [i for i, (x, y) in enumerate(zip(xs, line.y, strict=True)) if x is not None and y is not None]
    x, y = [xs[i] for i in known], [line.y[i] for i in known]
    dash: Any = (0, look.dash) if look.dash and not line.faint else "-"
    label = "_" if line.faint else _legend_text(series.label)
    style: dict[str, Any] = {"color": look.light, "linestyle": dash, "linewidth": _POINTS * line.width}
    if set(line.marks.values()) - {"failed"}:  # for the legend alone: `_mark` draws them
        style |= {"marker": look.marker, "markersize": 5, "markevery": []}
    axes.plot(x, y, **style, alpha=line.opacity, label=label)
    if line.lo:
        low, high = ([values[i] for i in known] for values in (line.lo, line.hi))
        if spec.marked:
            axes.vlines(x, low, high, color=look.light, linewidth=1.2)
        else:
            axes.fill_between(x, low, high, color=look.light, alpha=0.16, linewidth=0)
    for i, kind in line.marks.items():
        if xs[i] is None:
            continue
        if line.y[i] is not None:
            _mark(axes, kind, look, xs[i], line.y[i])
        else:
            _mark_without_value(axes, kind, look, xs[i], line.notes[i])


def _legend_text(label: str) -> str:
    """Return a label as matplotlib shows it: "$" would start a formula, and a "_" in front leave the label out."""
    text = valid_text(label).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _mark(axes: Axes, kind: str, look: Look, x: float, y: float, **more: Any) -> None:
    """Draw the mark of one point: a small dot, a point, an open one, a cross, or a point in a ring for the best."""
    marker = "x" if kind == "failed" else look.marker
    face, width = "none" if kind == "open" else look.light, 3 if kind == "dot" else 5
    shape: Any = {"marker": marker, "markersize": width, "markerfacecolor": face}
    axes.plot(x, y, **shape, color=look.light, clip_on=kind == "dot", **more)
    if kind == "best":
        axes.plot(x, y, marker="o", markersize=10, markerfacecolor="none", color=look.light)


def _mark_without_value(axes: Axes, kind: str, look: Look, x: float, note: str) -> None:
    """Draw the mark of a point without a value on the upper edge, with the reason to its left."""
    edge = axes.get_xaxis_transform()  # x in data, y as a share of the height
    left: Any = {"xytext": (-6, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(note, (x, 1.0), xycoords=edge, fontsize=7, color=look.light, **left)
    _mark(axes, kind, look, x, 1.0, transform=edge)
