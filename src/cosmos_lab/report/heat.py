"""Specify the heat maps of diagnostics: one panel per kind of matrix, one row per layer, one column per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_lab.formatting import format_count, format_digits
from cosmos_lab.report.curves import thinned
from cosmos_lab.report.style import HEAT
from cosmos_lab.results.ranking import Group, Task
from cosmos_lab.results.reading import DIAGNOSTICS, Run, Snapshot

MOST_COLUMNS = 96
MOST_CELLS = 600_000  # of all heat maps together: about 4 MB of the page

_METRICS = {
    "energy": ("Energy", "Captured energy: the share of the gradient's energy in the tracked subspace, |GU|² / |G|²."),
    "drift": ("Drift", "How far the subspace turned in one step, 1 − |U′ₜ Uₜ₋₁|² / r: 0 is no turn, 1 a new subspace."),
    "update_rms": ("Update RMS", "Root mean square of the update's entries, before the learning rate."),
    "ratio": ("Ratio", "Size of the SOAP half of the update over the size of the Muon half."),
}
# Kinds of matrices in the order of the panels, and what they are.
KINDS = {
    "q": "query", "k": "key", "v": "value", "o": "output", "gate": "MLP gate", "up": "MLP up", "down": "MLP down",
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """One metric of a run: its texts, the range of its colours, and the texts of the colour bar."""

    name: str
    title: str
    about: str
    range: tuple[float, float]
    log: bool
    constant: bool
    ramp: tuple[str, str, str]


@dataclass(frozen=True)
class Panel:
    """The matrices of one kind: ``values[metric][layer row][column]``, None if nothing was logged."""

    kind: str
    about: str
    layers: list[int | None]
    names: list[str]
    values: dict[str, list[list[float | None]]]


@dataclass(frozen=True)
class HeatMap:
    """The diagnostics of one run, with the texts of the columns and of both ends of their axis."""

    label: str
    columns: list[str]
    ends: list[str]
    metrics: list[Metric]
    panels: list[Panel]


@dataclass(frozen=True)
class HeatSection:
    """The heat maps of a task, one run at a time."""

    runs: list[HeatMap]
    name: str = "heat"
    palette: Sequence[str] = HEAT


def heat_section(task: Task, budget: int) -> HeatSection | None:
    """Specify the heat maps of every run with diagnostics, COSMOS and best groups first; None if there is none."""
    runs = []

    def order(group: Group) -> tuple[Any, ...]:
        return not group.optimizer.startswith("cosmos"), not group.best, not group.shown, task.score(group)

    for group in sorted(task.groups, key=order):
        for run in group.runs:
            seed = f", seed {run.seed}" if len(group.runs) > 1 else ""
            found = heat_map(run, f"{group.title}{seed}{' (best)' if group.best else ''}", budget)
            runs += [found] if found else []
    return HeatSection(runs) if runs else None


def heat_map(run: Run, label: str = "", budget: int = MOST_CELLS) -> HeatMap | None:
    """Specify the heat maps of one run with at most ``budget`` cells, or None if it logged no diagnostics."""
    names = list(dict.fromkeys(name for snapshot in run.diagnostics for name in snapshot.values))
    shots = thinned(run.diagnostics, max(2, min(MOST_COLUMNS, budget // max(1, len(names) * len(DIAGNOSTICS)))))
    kinds = dict.fromkeys(kind_and_layer(name)[0] for name in names)
    panels = [_panel(kind, names, shots) for kind in sorted(kinds, key=lambda kind: [*KINDS, kind].index(kind))]
    metrics = [metric for name in DIAGNOSTICS if (metric := _metric(name, panels))]
    metrics.sort(key=lambda metric: metric.constant)  # the page opens on the first; a constant metric shows nothing
    if not metrics:
        return None
    steps = [f"step {shot.step:g}" for shot in shots]
    tokens = ["" if shot.tokens is None else f"{format_count(shot.tokens)} tokens" for shot in shots]
    columns = [f"{at}, {seen}" if seen else at for at, seen in zip(steps, tokens)]
    ends = [tokens[i] or steps[i] for i in (0, -1)]
    return HeatMap(label, columns, ends, metrics, panels)


def _panel(kind: str, names: Sequence[str], shots: Sequence[Snapshot]) -> Panel:
    """Specify the matrices of one kind, in the order of their layers."""
    layers = {name: layer for name in names for own, layer in [kind_and_layer(name)] if own == kind}
    rows = sorted(layers, key=lambda name: layers[name] or 0)
    values = {
        metric: [[_cell(shot.values.get(name, {}).get(metric)) for shot in shots] for name in rows]
        for metric in DIAGNOSTICS
    }
    return Panel(kind, KINDS.get(kind, ""), [layers[name] for name in rows], rows, values)


def _metric(name: str, panels: Sequence[Panel]) -> Metric | None:
    """Give the middle 98 % of the cells a range of colours, on a log axis if they span more than a factor of 20."""
    cells = sorted(cell for panel in panels for row in panel.values[name] for cell in row if cell is not None)
    if not cells:
        return None
    low, high = (cells[round(share * (len(cells) - 1))] for share in (0.01, 0.99))
    if low == high:
        low, high = cells[0], cells[-1]
    log = low > 0 and high / low > 20
    note = f"logarithmic, middle {format_digits(math.sqrt(low * high), 3)}" if log else "linear"
    note = f"{format_digits(low)} everywhere" if low == high else note
    first = ("≤ " if cells[0] < low else "") + format_digits(low, 3)
    last = ("≥ " if cells[-1] > high else "") + format_digits(high, 3)
    title, about = _METRICS[name]
    return Metric(name, title, about, (low, high), log, low == high, (first, last, note))


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """Return what a matrix does and in which layer, from its name.

    >>> kind_and_layer("blocks.11.attn.q.weight")
    ('q', 11)
    """
    parts = name.removesuffix(".weight").split(".")
    return parts[-1], next((int(part) for part in parts if part.isdecimal() and len(part) < 6), None)


def _cell(value: float | None) -> float | None:
    """Keep four digits: more would give the rounding noise of a constant metric a colour, and the page more bytes."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
