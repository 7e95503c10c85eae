"""The page's charts as PNG and SVG files for papers and slides, through matplotlib.

Imported only when figures are drawn: the page itself does not need matplotlib.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from cosmos_lab.data.files import atomic_write
from cosmos_lab.report import curves, payload
from cosmos_lab.report.loading import METRICS
from cosmos_lab.report.results import Group, Task
from cosmos_lab.report.style import THEMES, Look, rate

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
    "svg.fonttype": "none",  # text stays text: it can be searched and edited
    "svg.hashsalt": "cosmos-lab",  # the same runs give the same file
}
_SKIPPED_SHARE = 0.12  # of the x axis: the first steep fall would flatten all that follows
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
        ("loss-tokens", "loss-by-tokens", _loss(task, lambda curve: curve.tokens, "tokens")),
        ("loss-time", "loss-by-time", _loss(task, lambda curve: curve.time, "wall-clock time")),
    ]
    if task.sweeps:
        found.append(("sweep", "learning-rate-sweep", _sweep(task)))
    for label, heat in payload.heats(task)[:1]:
        for metric in METRICS:
            if metric in heat.metrics:
                found.append((f"heat-{metric}", f"diagnostics-{metric}", _heat(label, heat, metric)))
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "task"


def _save(figure: Figure, stem: Path) -> None:
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout holds for both files: working it out costs more than drawing
    endings: dict[str, dict[str, Any]] = {"png": {"dpi": 200}, "svg": {"metadata": {"Date": None}}}
    for ending, options in endings.items():
        buffer = BytesIO()
        figure.savefig(buffer, format=ending, **options)
        with atomic_write(stem.with_name(f"{stem.name}.{ending}")) as file:
            file.write(buffer.getvalue())


def _dashes(look: Look) -> tuple[int, tuple[int, ...]] | str:
    return (0, look.dash) if look.dash else "-"


def _plain(text: str) -> str:
    """A dollar sign would start a formula."""
    return text.replace("$", r"\$")


def _loss(task: Task, axis: Callable[[curves.Curve], list[float | None]], title: str) -> Figure:
    """Validation loss (solid) of the groups shown when the page opens, training loss (faint) behind."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    compared: list[tuple[float, float]] = []
    for group in (group for group in task.groups if group.shown):
        validation = curves.validation(group) if task.validated else None
        training = curves.training(group)
        for curve in training if validation else training[1:]:
            _line(axes, curve, axis, color=group.look.light, linewidth=0.7, alpha=0.3)
        main = validation or (training[0] if training else None)
        if main:
            compared += _main_line(axes, group, main, axis)
    axes.set_ylabel("validation loss" if task.validated else "training loss")
    axes.set_xlabel(title)
    if compared:
        _limits(axes, compared)
        axes.legend(fontsize=8)
    if title == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    else:
        _time_axis(axes, max((x for x, _ in compared), default=1.0))
    return figure


def _main_line(
    axes: Axes, group: Group, curve: curves.Curve, axis: Callable[[curves.Curve], list[float | None]]
) -> list[tuple[float, float]]:
    kept = _line(
        axes,
        curve,
        axis,
        color=group.look.light,
        linewidth=1.7,
        linestyle=_dashes(group.look),
        label=_plain(group.label),
    )
    band = [item for item in zip(axis(curve), curve.low, curve.high, strict=False) if item[0] is not None]
    if band:
        x, low, high = zip(*band, strict=True)
        axes.fill_between(x, low, high, color=group.look.light, alpha=0.16, linewidth=0)
    if curve.diverged and kept:
        axes.plot(*kept[-1], marker="x", color=group.look.light, markersize=7, markeredgewidth=1.8)
    return kept


def _line(
    axes: Axes, curve: curves.Curve, axis: Callable[[curves.Curve], list[float | None]], **style: Any
) -> list[tuple[float, float]]:
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


def _time_axis(axes: Axes, longest: float) -> None:
    unit, name = next(
        (unit, name)
        for unit, name in ((1, "s"), (60, "min"), (3600, "h"), (86400, "d"))
        if longest < 150 * unit or name == "d"
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / unit:.3g}"))
    axes.set_xlabel(f"wall-clock time, {name}")


def _sweep(task: Task) -> Figure:
    """Final perplexity (or loss) over learning rate, one line a method; a ring marks the best."""
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    key = "final_val_ppl" if task.validated else "final_train_loss"
    values = []
    for method, line in task.sweeps.items():
        points = [(group, spread) for group in line if group.status != "diverged" and (spread := group.stat(key))]
        look = line[0].look
        x = [group.lr or 0.0 for group, _ in points]
        y = [spread.mean for _, spread in points]
        error = [spread.deviation for _, spread in points]
        axes.errorbar(
            x, y, yerr=error if any(error) else None, color=look.light, marker=look.marker, markersize=4.5,
            linestyle=_dashes(look), linewidth=1.4, label=_plain(method),
        )  # fmt: skip
        for group, spread in points:
            if group.best and group.lr:
                axes.plot(group.lr, spread.mean, marker="o", markersize=10, markerfacecolor="none", color=look.light)
        values += y
    rates = sorted({group.lr for line in task.sweeps.values() for group in line if group.lr})
    axes.set_xscale("log")
    if len(rates) <= 9:
        axes.xaxis.set_major_locator(FixedLocator(rates))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: rate(x)))
    if values and min(values) > 0 and max(values) > 2.5 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel(payload.result_name(task))
    axes.legend(fontsize=8)
    return figure


def _heat(label: str, heat: curves.Heat, metric: str) -> Figure:
    """One panel a kind of matrix, one row a layer, one column a step."""
    across = min(4, len(heat.panels))
    down = -(-len(heat.panels) // across)
    figure = Figure(figsize=(2.2 * across + 0.8, 1.9 * down + 0.4), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    cells = sorted(c for panel in heat.panels for row in panel.values[metric] for c in row if c is not None)
    low, high = cells[round(0.01 * (len(cells) - 1))], cells[round(0.99 * (len(cells) - 1))]
    norm = LogNorm(low, high) if low > 0 and high / low > 100 else Normalize(low, high)
    image = None
    for place, axes in enumerate(grid.flat):
        if place >= len(heat.panels):
            axes.set_visible(False)
            continue
        panel = heat.panels[place]
        rows = [[float("nan") if cell is None else cell for cell in row] for row in panel.values[metric]]
        first, last = heat.tokens[0] or 0, heat.tokens[-1] or len(heat.steps)
        image = axes.imshow(
            rows, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm,
            extent=(first, max(last, first + 1), len(rows) - 0.5, -0.5),
        )  # fmt: skip
        axes.grid(False)
        axes.set_title(_plain(panel.kind), fontsize=9, loc="left")
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.locator_params(axis="x", nbins=3)
        axes.locator_params(axis="y", integer=True, nbins=5)
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.8, pad=0.02)
    figure.suptitle(f"{_METRIC_TITLES[metric]}, {_plain(label)}, by layer over tokens", fontsize=9.5, x=0.01, ha="left")
    return figure
