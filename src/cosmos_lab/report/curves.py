"""Curves and heat maps as short lists of numbers: thinned, averaged over seeds, never nan."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_lab.results.ranking import Group
from cosmos_lab.results.reading import DIAGNOSTICS, Point, Run

MOST_POINTS = 400  # a chart is about 500 pixels wide
MOST_COLUMNS = 96
MOST_CELLS = 600_000  # of all heat maps together: about 4 MB of the page

KINDS = ("q", "k", "v", "o", "qkv", "gate", "up", "down")
_ALIASES = {
    "q_proj": "q", "wq": "q", "query": "q", "k_proj": "k", "wk": "k", "key": "k", "v_proj": "v", "wv": "v",
    "value": "v", "o_proj": "o", "wo": "o", "out_proj": "o", "out": "o", "output": "o", "c_attn": "qkv",
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "c_fc": "up", "fc": "up", "fc1": "up",
    "fc_in": "up", "down_proj": "down", "w2": "down", "fc2": "down", "fc_out": "down",
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Values over tokens and time; ``low`` and ``high`` are one standard deviation around a mean over seeds."""

    tokens: list[float | None]
    time: list[float | None]
    value: list[float]
    low: list[float]
    high: list[float]
    diverged: bool = False


def training(group: Group) -> list[Curve]:
    """The training loss of each seed, averaged over stretches of equal length."""
    return [_thin(run.train) for run in group.counted or group.runs if run.train]


def validation(group: Group) -> Curve | None:
    """The validation loss: of the one seed, or the mean over the steps that all counted seeds share."""
    runs = [run for run in group.counted or group.runs if run.validation]
    if not runs:
        return None
    if len(runs) == 1:
        return _curve(runs[0].validation)
    tables = [{point.step: point for point in run.validation if math.isfinite(point.value)} for run in runs]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    if not steps:
        return _curve(runs[0].validation)
    rows = [[table[step] for table in tables] for step in _stride(steps)]
    means = [statistics.fmean(point.value for point in row) for row in rows]
    spread = [statistics.stdev(point.value for point in row) for row in rows]
    return Curve(
        tokens=[_mean([point.tokens for point in row]) for row in rows],
        time=[_mean([point.time for point in row]) for row in rows],
        value=means,
        low=[mean - deviation for mean, deviation in zip(means, spread, strict=True)],
        high=[mean + deviation for mean, deviation in zip(means, spread, strict=True)],
        diverged=group.status == "diverged",
    )


def _curve(points: Sequence[Point]) -> Curve:
    finite = [point for point in points if math.isfinite(point.value)]
    kept = _stride(finite)
    return Curve(
        [point.tokens for point in kept],
        [point.time for point in kept],
        [point.value for point in kept],
        [],
        [],
        len(finite) < len(points),
    )


def _thin(points: Sequence[Point]) -> Curve:
    finite = [point for point in points if math.isfinite(point.value)]
    width = max(1, math.ceil(len(finite) / MOST_POINTS))
    rows = [finite[start : start + width] for start in range(0, len(finite), width)]
    return Curve(
        [_mean([point.tokens for point in row]) for row in rows],
        [_mean([point.time for point in row]) for row in rows],
        [statistics.fmean(point.value for point in row) for row in rows],
        [],
        [],
        len(finite) < len(points),
    )


def _stride(items: Sequence[Any]) -> list[Any]:
    """Evenly spaced items, the last always among them: it is the result."""
    width = max(1, math.ceil(len(items) / MOST_POINTS))
    return list(items[::-1][::width])[::-1]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None


@dataclass(frozen=True)
class Panel:
    """The matrices of one kind: ``values[metric][layer row][column]``, None where nothing was logged."""

    kind: str
    layers: list[int | None]
    names: list[str]
    values: dict[str, list[list[float | None]]]


@dataclass(frozen=True)
class Heat:
    """The diagnostics of one run: a panel a kind, a row a layer, a column a step."""

    steps: list[float]
    tokens: list[float | None]
    panels: list[Panel]

    @property
    def metrics(self) -> list[str]:
        """The metrics that hold at least one number."""
        return [
            metric
            for metric in DIAGNOSTICS
            if any(cell is not None for panel in self.panels for row in panel.values[metric] for cell in row)
        ]


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """What a matrix does and in which layer, from its name.

    >>> kind_and_layer("model.layers.11.self_attn.q_proj.weight")
    ('q', 11)
    """
    parts = [part for part in re.split(r"[./]", name) if part not in ("weight", "kernel", "_orig_mod", "module")]
    digits = [part for part in parts if part.isdigit()]
    layer = int(digits[0]) if digits and len(digits[0]) < 6 else None
    leaf = parts[-1] if parts else name
    inside = "down" if any("mlp" in part or "feed" in part or "ffn" in part for part in parts[:-1]) else "o"
    if leaf in ("c_proj", "proj"):
        return inside, layer
    return _ALIASES.get(leaf, leaf), layer


def heat(run: Run, budget: int = MOST_CELLS) -> Heat | None:
    """The heat maps of one run with at most ``budget`` cells, or None if it logged no diagnostics."""
    names = list(dict.fromkeys(name for snapshot in run.diagnostics for name in snapshot.values))
    if not names:
        return None
    columns = max(2, min(MOST_COLUMNS, budget // (len(names) * len(DIAGNOSTICS))))
    width = max(1, math.ceil(len(run.diagnostics) / columns))
    shots = list(run.diagnostics[::-1][::width])[::-1]
    places = {name: kind_and_layer(name) for name in names}
    order = sorted({kind for kind, _ in places.values()}, key=lambda kind: (KINDS + (kind,)).index(kind))
    panels = []
    for kind in order:
        rows = sorted((name for name in names if places[name][0] == kind), key=lambda name: places[name][1] or 0)
        values = {
            metric: [[_cell(shot.values.get(name, {}).get(metric)) for shot in shots] for name in rows]
            for metric in DIAGNOSTICS
        }
        panels.append(Panel(kind, [places[name][1] for name in rows], rows, values))
    return Heat([shot.step for shot in shots], [shot.tokens for shot in shots], panels)


def _cell(value: float | None) -> float | None:
    """Four digits: more would give the rounding noise of a constant metric a colour, and the page more bytes."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
