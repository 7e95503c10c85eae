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

from cosmos_lab.display import count
from cosmos_lab.io import atomic_write
from cosmos_lab.report.charts import Axis, Chart, Line, Section
from cosmos_lab.report.style import THEMES

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
    log = any(control.on for control in spec.controls if control.key == "logY")
    lines = [line for line in spec.lines if spec.series[line.series].shown]
    for line in lines:
        _line(axes, spec, chart, line)
    axes.set(xlabel=chart.x.title, ylabel=chart.title, xlim=chart.x.range)
    if spans := [line.view for line in lines if line.view]:
        low, high = min(low for low, _ in spans), max(high for _, high in spans)
        log = log and low > 0
        pad = (high / low) ** chart.pad if log else chart.pad * ((high - low) or 1)
        axes.set_ylim((low / pad, high * pad) if log else (low - pad, high + pad))
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 4, 6)))
            for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                set_formatter(FuncFormatter(lambda y, _: f"{y:g}"))  # 4 x 10^1 would leave no room for the label
        names = [spec.series[line.series].label for line in lines]
        if max(map(len, names)) <= _LONG_NAME:
            axes.legend(fontsize=8)
        else:
            figure.legend(fontsize=8, loc="outside lower left")
    _x_axis(axes, chart.x)
    return figure


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
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))


def _line(axes: Axes, spec: Section, chart: Chart, line: Line) -> None:
    """Draw one line with its band or error bars and its marks; a point without a value is on the upper edge."""
    series = spec.series[line.series]
    look = spec.methods[series.method]
    color, xs = look.light, line.x[chart.key]
    known = [i for i, (x, y) in enumerate(zip(xs, line.y, strict=True)) if x is not None and y is not None]
    x, y = [xs[i] for i in known], [line.y[i] for i in known]
    dash: Any = (0, look.dash) if look.dash and not line.faint else "-"
    label = "_" if line.faint else series.label.replace("$", r"\$")  # which would start a formula
    axes.plot(x, y, color=color, linestyle=dash, linewidth=_POINTS * line.width, alpha=line.opacity, label=label)
    if line.lo:
        low, high = ([values[i] for i in known] for values in (line.lo, line.hi))
        if spec.marked:
            axes.vlines(x, low, high, color=color, linewidth=1.2)
        else:
            axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
    edge = axes.get_xaxis_transform()
    for i, kind in line.marks.items():
        if xs[i] is None:
            continue
        at, where = (xs[i], line.y[i]), axes.transData
        if at[1] is None:
            at, where = (xs[i], 1.0), edge
            place: Any = {"xytext": (-6, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
            axes.annotate(line.notes[i], at, xycoords=edge, fontsize=7, color=color, **place)
        marker = "x" if kind == "failed" else look.marker
        face, width = "none" if kind == "open" else color, 3 if kind == "dot" else 5
        shape: Any = {"marker": marker, "markersize": width, "markerfacecolor": face}
        axes.plot(*at, **shape, color=color, transform=where, clip_on=kind == "dot")
        if kind == "best":
            axes.plot(*at, marker="o", markersize=10, markerfacecolor="none", color=color)
