"""Run folders, read so that nothing in them can stop a report: what is missing or broken becomes a note.

A run folder holds config.json, metrics.jsonl (one object a line) and, when the run ended, summary.json.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = ("energy", "drift", "update_rms", "ratio")
_FILES = ("config.json", "metrics.jsonl", "summary.json")
_COLUMNS = ("tokens_per_s", "optimizer_ms", "memory_gb", "mfu")


@dataclass(frozen=True)
class Point:
    """One logged value and where in training it was taken."""

    step: float
    tokens: float | None
    time: float | None
    value: float  # may be nan or inf: the reader of a diverged run wants to see where


@dataclass(frozen=True)
class Snapshot:
    """The diagnostics of every matrix at one step: ``values[matrix][metric]``."""

    step: float
    tokens: float | None
    values: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Run:
    """One run folder. ``status`` is done, unfinished, diverged, empty, broken, or the word the summary gives."""

    folder: Path
    status: str
    notes: tuple[str, ...] = ()
    name: str = ""
    recipe: str = ""
    model: str = ""
    optimizer: str = ""
    lr: float | None = None
    adam_lr: float | None = None
    seed: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, float] = field(default_factory=dict)
    train: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()
    diagnostics: tuple[Snapshot, ...] = ()

    @property
    def score(self) -> float | None:
        """Final validation loss, or the training loss of a run that never validated."""
        return self.stats.get("final_val_loss", self.stats.get("final_train_loss"))


def number(value: Any) -> float | None:
    """A float (nan and inf included) if ``value`` is a number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run folders at or below each path, in a stable order, each once; a folder without any is listed itself.

    Raises:
        ValueError: no path was given, or one of them is not a folder.
    """
    if not paths:
        raise ValueError("no runs to report on: give at least one run folder, or a folder that holds some")
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise ValueError(f"{str(path)!r} is not a folder: give run folders, or a folder that holds some")
        for folder in sorted(_below(path)) or [path]:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _below(path: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(path):
        if any(name in files or name in subfolders for name in _FILES):
            subfolders.clear()  # what lies inside a run (checkpoints) is not another run
            yield Path(folder)
        elif not files and not subfolders:  # a run that was stopped before it wrote anything
            yield Path(folder)


def load_run(folder: Path) -> Run:
    """Reads one run folder; never raises for what is in it."""
    notes: list[str] = []
    present = [name for name in _FILES if (folder / name).exists()]
    if not present:
        return Run(folder, "empty", ("the folder holds no config.json, metrics.jsonl or summary.json",), folder.name)
    config = _read_object(folder / "config.json", notes)
    summary = _read_object(folder / "summary.json", notes) if "summary.json" in present else {}
    log = _read_log(folder / "metrics.jsonl", notes)
    stats = _stats(summary, config, log)
    return Run(
        folder=folder,
        status=_status(config, summary, log, stats),
        notes=tuple(notes),
        name=_text(config.get("name")) or folder.name,
        recipe=_text(config.get("recipe")),
        model=_text(config.get("model")),
        optimizer=_text(config.get("optimizer")),
        lr=number(config.get("lr")),
        adam_lr=number(config.get("adam_lr")),
        seed=_text(config.get("seed")),
        config=config,
        stats=stats,
        train=tuple(log.train),
        validation=tuple(log.validation),
        diagnostics=tuple(log.diagnostics),
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__}: {error})")
    else:
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name} holds a {type(value).__name__}, not an object")
    return {}


@dataclass
class _Log:
    """What metrics.jsonl holds, gathered line by line."""

    train: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    diagnostics: list[Snapshot] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    offset: float = 0.0  # added to the clock of a run that counted from zero again after a resume

    def add(self, row: dict[str, Any]) -> None:
        step, tokens, time = (number(row.get(key)) for key in ("step", "tokens", "time"))
        if step is None:
            return
        for points, key in ((self.train, "loss"), (self.validation, "val_loss")):
            if key in row:
                value = number(row[key])
                value = math.nan if value is None else value  # JSON has no nan: a diverged run logs null
                _rewind(points, step)
                points.append(Point(step, tokens, self._clock(points, time), value))
        if isinstance(row.get("diagnostics"), dict):
            _rewind(self.diagnostics, step)
            self.diagnostics.append(Snapshot(step, tokens, _matrices(row["diagnostics"])))
        for key, column in self.columns.items():
            value = number(row.get(key))
            if value is not None and math.isfinite(value):
                column.append(value)

    def _clock(self, points: list[Point], time: float | None) -> float | None:
        last = points[-1].time if points else None
        if time is not None and last is not None and time + self.offset < last:
            self.offset = last
        return None if time is None else time + self.offset


def _rewind(points: list[Any], step: float) -> None:
    """Drops what a run logged after the checkpoint it went back to."""
    while points and points[-1].step >= step:
        points.pop()


def _read_log(path: Path, notes: list[str]) -> _Log:
    log = _Log()
    for row in _rows(path, notes):
        log.add(row)
    return log


def _rows(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    bad += 1
                    continue
                if isinstance(row, dict):
                    yield row
                else:
                    bad += 1
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__}: {error})")
    if bad:
        notes.append(f"{path.name}: unreadable lines left out: {bad}")


def _matrices(raw: dict[str, Any]) -> dict[str, dict[str, float]]:
    matrices = {}
    for name, values in raw.items():
        if isinstance(values, dict):
            numbers = {metric: number(values.get(metric)) for metric in METRICS}
            matrices[name] = {metric: value for metric, value in numbers.items() if value is not None}
    return matrices


def _stats(summary: dict[str, Any], config: dict[str, Any], log: _Log) -> dict[str, float]:
    """The summary's numbers; what it lacks is taken from the log, so that an unfinished run has a row too."""
    stats: dict[str, float] = {}
    if log.train:
        stats["final_train_loss"] = log.train[-1].value
    if log.validation:
        stats["final_val_loss"] = log.validation[-1].value
    points = log.train + log.validation
    for key, values in (
        ("steps", [point.step for point in points]),
        ("tokens", [point.tokens for point in points if point.tokens is not None]),
        ("time", [point.time for point in points if point.time is not None]),
        ("peak_memory_gb", log.columns["memory_gb"]),
    ):
        if values:
            stats[key] = max(values)
    for key in ("tokens_per_s", "optimizer_ms", "mfu"):
        if log.columns[key]:
            stats[key] = sorted(log.columns[key])[len(log.columns[key]) // 2]  # median: the first steps warm up
    for key in ("parameters", "state_bytes"):
        value = number(config.get(key))
        if value is not None:
            stats[key] = value
    for key, raw in summary.items():
        value = number(raw)
        if value is not None:
            stats[key] = value
    if "final_val_loss" in stats:
        loss = stats["final_val_loss"]
        stats.setdefault("final_val_ppl", math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan)
    return stats


def _status(config: dict[str, Any], summary: dict[str, Any], log: _Log, stats: dict[str, float]) -> str:
    last = [points[-1].value for points in (log.train, log.validation) if points]
    last += [stats[key] for key in ("final_val_loss", "final_train_loss") if key in stats]
    if last and not all(map(math.isfinite, last)):
        return "diverged"
    if not last:
        return "empty" if config else "broken"
    return _text(summary.get("status"))[:40] or "unfinished"
