"""Reduce logs to short lists of numbers for charts: thinned, averaged over seeds, never nan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cosmos_lab.results.ranking import Group
from cosmos_lab.results.reading import Point, Status

MOST_POINTS = 400  # a chart is about 500 pixels wide
_SMOOTHED = 0.06  # of a run, on either side of a point: batches differ more than the loss falls


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
    """Return the training loss of each seed, smoothed, averaged over stretches of equal length."""
    found = []
    for run in group.counted or group.runs:
        points = finite_points(run.train)
        width = max(1, math.ceil(len(points) / MOST_POINTS))
        rows = [points[start : start + width] for start in range(0, len(points), width)]
        curve = _curve(rows, run.status == Status.DIVERGED)
        found += [replace(curve, value=smoothed(smoothed(curve.value)))] if run.train else []
    return found


def smoothed(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours: equally many on both sides at the start, where the loss falls steeply.

    >>> [round(value, 2) for value in smoothed([4.0, 2.0] * 50)[48:52]]
    [3.08, 2.92, 3.08, 2.92]
    """
    reach = round(_SMOOTHED * len(values))
    spans = ((index, min(reach, index)) for index in range(len(values)))
    return [statistics.fmean(values[index - n : index + n + 1]) for index, n in spans]


def validation(group: Group) -> Curve | None:
    """Return the validation loss: of the one seed, or the mean over the steps that all counted seeds share."""
    runs = [run for run in group.counted or group.runs if run.validation]
    if not runs:
        return None
    tables = [{point.step: point for point in finite_points(run.validation)} for run in runs]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    if not steps:
        tables, steps = tables[:1], sorted(tables[0])
    rows = [[table[step] for table in tables] for step in thinned(steps, MOST_POINTS)]
    diverged = all(run.status == Status.DIVERGED for run in runs)
    return _curve(rows, diverged, spread=len(tables) > 1)


def finite_points(points: Sequence[Point]) -> list[Point]:
    """Return the points whose value is neither nan nor inf."""
    return [point for point in points if math.isfinite(point.value)]


def _curve(rows: Sequence[Sequence[Point]], diverged: bool, spread: bool = False) -> Curve:
    """Average each row of points to one point of the curve."""
    means = [statistics.fmean(point.value for point in row) for row in rows]
    deviations = [statistics.stdev(point.value for point in row) for row in rows] if spread else []
    return Curve(
        tokens=[_mean([point.tokens for point in row]) for row in rows],
        time=[_mean([point.time for point in row]) for row in rows],
        value=means,
        low=[mean - deviation for mean, deviation in zip(means, deviations, strict=False)],
        high=[mean + deviation for mean, deviation in zip(means, deviations, strict=False)],
        diverged=diverged,
    )


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` evenly spaced items, the last always among them: it is the result."""
    width = max(1, math.ceil(len(items) / most))
    return list(items[::-1][::width])[::-1]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None
