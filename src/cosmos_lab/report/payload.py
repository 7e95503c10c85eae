"""What the page's script draws, as plain JSON: short lists, rounded, without nan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from cosmos_lab.display import significant
from cosmos_lab.report import curves
from cosmos_lab.report.style import HEAT, looks_of
from cosmos_lab.results.ranking import Group, Task

_X_DIGITS, _Y_DIGITS = 7, 6  # more than a screen can show


def embed(tasks: Sequence[Task]) -> str:
    """The page's data as JSON that is safe inside a script element, whatever names the runs have.

    >>> "</script>" in embed([])
    False
    """
    maps = sum(bool(run.diagnostics) for task in tasks for group in task.groups for run in group.runs)
    budget = curves.MOST_CELLS // max(1, maps)
    data = {"heat": HEAT, "tasks": [_task(task, budget) for task in tasks]}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def heats(task: Task, budget: int = curves.MOST_CELLS) -> list[tuple[str, curves.Heat]]:
    """Every run's heat map with a label, those of best groups first."""
    found = []
    for group in sorted(task.groups, key=lambda group: (not group.best, not group.shown, task.score(group))):
        for run in group.runs:
            heat = curves.heat(run, budget)
            if heat is not None and heat.metrics:
                seed = f", seed {run.seed}" if len(group.runs) > 1 else ""
                found.append((f"{group.label}{seed}{' (best)' if group.best else ''}", heat))
    return found


def _task(task: Task, budget: int) -> dict[str, Any]:
    looks = looks_of(task)
    return {
        "title": task.title,
        "validated": task.validated,
        "loss": "validation loss" if task.validated else "training loss",
        "result": result_name(task),
        "methods": [
            {"name": name, "light": look.light, "dark": look.dark, "dash": look.dash, "marker": look.marker}
            for name, look in looks.items()
        ],
        "series": [_series(group, list(looks)) for group in task.groups],
        "sweep": [
            {"method": list(looks).index(method), "points": [_sweep_point(task, group) for group in line]}
            for method, line in task.sweeps.items()
        ],
        "heats": [_heat(label, heat) for label, heat in heats(task, budget)],
    }


def result_name(task: Task) -> str:
    """The number that a sweep shows."""
    return "final validation perplexity" if task.validated else "final training loss"


def _series(group: Group, methods: list[str]) -> dict[str, Any]:
    validation = curves.validation(group)
    return {
        "method": methods.index(group.method),
        "label": group.label,
        "rate": group.label.removeprefix(group.method).strip(),
        "best": group.best,
        "shown": group.shown,
        "status": group.status,
        "val": _curve(validation) if validation else None,
        "train": [_curve(curve) for curve in curves.training(group)],
    }


def _curve(curve: curves.Curve) -> dict[str, Any]:
    return {
        "tokens": [_round(x, _X_DIGITS) for x in curve.tokens],
        "time": [_round(x, _X_DIGITS) for x in curve.time],
        "y": [_round(y, _Y_DIGITS) for y in curve.value],
        "lo": [_round(y, _Y_DIGITS) for y in curve.low],
        "hi": [_round(y, _Y_DIGITS) for y in curve.high],
        "nan": curve.diverged,
    }


def _sweep_point(task: Task, group: Group) -> dict[str, Any]:
    spread = group.stat("final_val_ppl" if task.validated else "final_train_loss")
    if spread is None or group.status in ("diverged", "broken", "empty"):
        reason = "no number, or one too large to show" if group.complete else group.status
        return {"lr": group.lr, "y": None, "best": False, "text": reason}
    note = f" ± {significant(spread.deviation, 2)} over {spread.n} seeds" if spread.n > 1 else ""
    state = "" if group.complete else f", {group.status}"
    return {
        "lr": group.lr,
        "y": _round(spread.mean, _Y_DIGITS),
        "lo": _round(spread.mean - spread.deviation, _Y_DIGITS),
        "hi": _round(spread.mean + spread.deviation, _Y_DIGITS),
        "best": group.best,
        "open": not group.complete,
        "text": f"{significant(spread.mean)}{note}{state}",
    }


def _heat(label: str, heat: curves.Heat) -> dict[str, Any]:
    return {
        "label": label,
        "steps": heat.steps,
        "tokens": [_round(x, _X_DIGITS) for x in heat.tokens],
        "metrics": heat.metrics,
        "panels": [
            {
                "kind": panel.kind,
                "layers": panel.layers,
                "names": panel.names,
                "values": {metric: panel.values[metric] for metric in heat.metrics},
            }
            for panel in heat.panels
        ],
    }


def _round(value: float | None, digits: int) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
