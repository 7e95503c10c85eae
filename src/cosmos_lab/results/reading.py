"""Read run folders without failing on their content: anything missing or broken becomes a note.

A run folder holds config.json, metrics.jsonl (one object per line) and, if the run is finished, summary.json. Training,
comparisons and reports all read it here.
"""

from __future__ import annotations

import io
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
DIAGNOSTICS = ("energy", "drift", "update_rms", "ratio")
_COLUMNS = ("tokens_per_s", "optimizer_ms", "memory_gb", "mfu")
_FINAL_SHARE = 0.05  # the final training loss is the mean over this share of the steps: single batches are noisy


class Status(StrEnum):
    """The state of a run, the worst one first; the words are those of summary.json, compare.json and the report."""

    DIVERGED = "diverged"
    BROKEN = "broken"  # no loss, and no config.json that can be read
    EMPTY = "empty"  # no loss
    UNFINISHED = "unfinished"  # losses, but no result: it can be continued
    FAILED = "failed"  # in this comparison
    NOT_STARTED = "not started"  # in this comparison, because there was no time
    WAITING = "waiting"  # in a live table
    RUNNING = "running"
    DONE = "done"

    @property
    def ended(self) -> bool:
        """Tell whether nothing is left to train, or an error ended the training."""
        return self not in (Status.UNFINISHED, Status.NOT_STARTED, Status.WAITING, Status.RUNNING)


def worst(states: Iterable[Status]) -> Status:
    """Return the worst of some states.

    >>> worst([Status.DONE, Status.UNFINISHED, Status.DONE])
    <Status.UNFINISHED: 'unfinished'>
    """
    return min(states, key=list(Status).index)


@dataclass(frozen=True)
class Point:
    """One logged value and when in training it was taken."""

    step: float
    tokens: float | None
    time: float | None
    value: float  # may be nan or inf: the reader of a diverged run wants to see when


@dataclass(frozen=True)
class Snapshot:
    """The diagnostics of every matrix at one step: ``values[matrix][metric]``."""

    step: float
    tokens: float | None
    values: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Run:
    """What one run folder holds."""

    folder: Path
    status: Status
    finished: bool = False
    notes: tuple[str, ...] = ()
    name: str = ""
    recipe: str = ""
    model: str = ""
    optimizer: str = ""
    lr: float | None = None
    adam_lr: float | None = None
    seed: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)  # the content of config.json
    stats: Mapping[str, float] = field(default_factory=dict)
    train: tuple[Point, ...] = ()
    validation: tuple[Point, ...] = ()
    diagnostics: tuple[Snapshot, ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the fields of the run's ``RunConfig``, which config.json has under "config"."""
        config = self.about.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def score(self) -> float | None:
        """Return the final validation loss, or the training loss of a run that never validated."""
        return self.stats.get("final_val_loss", self.stats.get("final_train_loss"))


def number(value: Any) -> float | None:
    """Return ``value`` if it is a number (nan and inf included), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        float(value)
    except OverflowError:
        return math.inf
    return value


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """List the run folders at or below each path, in a stable order, each once; a folder without any counts as one."""
    if not paths:
        raise ValueError("no runs to report on: give at least one run folder, or a folder that holds some")
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise ValueError(f"{str(path)!r} is not a folder: give run folders, or a folder that holds some")
        for folder in sorted(_run_folders(path)) or [path]:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _run_folders(path: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(path):
        names = {*files, *subfolders}
        stopped_early = not names  # a run that wrote nothing
        if stopped_early or not names.isdisjoint((CONFIG, METRICS, SUMMARY)):
            subfolders.clear()  # a folder inside a run (checkpoints) is not another run
            yield Path(folder)


def read_run(folder: Path) -> Run:
    """Read one run folder; never raise because of its content."""
    notes: list[str] = []
    if not any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY)):
        note = f"the folder holds no {CONFIG}, {METRICS} or {SUMMARY}"
        return Run(folder, Status.EMPTY, notes=(note,), name=folder.name)
    about = _read_object(folder / CONFIG, notes) or {}
    summary = read_summary(folder, notes)
    log = read_log(folder, notes)
    stats = _stats(summary or {}, about, log)
    return Run(
        folder,
        status=_status(about, summary, log, stats),
        finished=summary is not None,
        notes=tuple(notes),
        name=_text(about.get("name")) or folder.name,
        recipe=_text(about.get("recipe")),
        model=_text(about.get("model")),
        optimizer=_text(about.get("optimizer")),
        lr=number(about.get("lr")),
        adam_lr=number(about.get("adam_lr")),
        seed=_text(about.get("seed")),
        about=about,
        stats=stats,
        train=tuple(log.train),
        validation=tuple(log.validation),
        diagnostics=tuple(log.diagnostics),
    )


def read_summary(folder: Path, notes: list[str] | None = None) -> dict[str, Any] | None:
    """Return the summary of a finished run, else None: a run is finished if and only if its summary can be read."""
    path = folder / SUMMARY
    return _read_object(path, [] if notes is None else notes) if path.exists() else None


def status_of(summary: Mapping[str, Any]) -> Status:
    """Return the state that a summary tells; a word that no run writes counts as unfinished."""
    written = (Status.DONE, Status.DIVERGED)
    return next((state for state in written if state == summary.get("status")), Status.UNFINISHED)


def read_metrics(folder: Path, notes: list[str] | None = None, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl; one that cannot be read (a kill cuts the last one short) is left out.

    ``last`` is the number of bytes at the end of the file that are read (None: all of it).
    """
    path = folder / METRICS
    notes = [] if notes is None else notes
    bad = 0
    try:
        with path.open("rb") as file:
            begin = 0 if last is None else max(0, file.seek(0, os.SEEK_END) - last)
            file.seek(begin)
            if begin:
                file.readline()  # the rest of a line
            for line in filter(str.strip, io.TextIOWrapper(file, encoding="utf-8", errors="replace")):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    yield row
                else:
                    bad += 1
    except OSError as error:
        notes.append(_problem(path, error))
    if bad:
        notes.append(f"{path.name}: unreadable lines left out: {bad}")


def _read_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        notes.append(_problem(path, error))
        return None
    if isinstance(value, dict):
        return value
    notes.append(f"{path.name} holds a {type(value).__name__}, not an object")
    return None


def _problem(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path.name} is missing"
    return f"{path.name} cannot be read ({type(error).__name__}: {error})"


def _text(value: Any) -> str:
    """Return a text as it is, any other value as JSON, and "" for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


@dataclass
class Log:
    """The content of metrics.jsonl, collected line by line."""

    train: list[Point] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    diagnostics: list[Snapshot] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})
    offset: float = 0.0  # added to the clock of a run that counted from zero again after a resume

    def add(self, row: dict[str, Any]) -> None:
        """Add one line: a training loss, a validation loss or diagnostics; one without a step is left out.

        >>> log = Log()
        >>> log.add({"step": 10, "tokens": 640, "time": 2.5, "loss": 3.1})
        >>> log.train
        [Point(step=10, tokens=640, time=2.5, value=3.1)]
        """
        step, tokens, time = (number(row.get(key)) for key in ("step", "tokens", "time"))
        if step is None or not math.isfinite(step):
            return
        for points, key in ((self.train, "loss"), (self.validation, "val_loss")):
            if key in row:
                value = number(row[key])
                value = math.nan if value is None else value  # JSON has no nan: a diverged run logs null
                _rewind(points, step)
                points.append(Point(step, tokens, self._clock(points, time), value))
        if isinstance(row.get("diagnostics"), dict):
            _rewind(self.diagnostics, step)
            matrices = {
                name: {metric: value for metric in DIAGNOSTICS if (value := number(values.get(metric))) is not None}
                for name, values in row["diagnostics"].items()
                if isinstance(values, dict)
            }
            self.diagnostics.append(Snapshot(step, tokens, matrices))
        for key, column in self.columns.items():
            value = number(row.get(key))
            if value is not None and math.isfinite(value):
                column.append(value)

    def _clock(self, points: list[Point], time: float | None) -> float | None:
        """Return the time since the run began, also after a resume that counted from zero again."""
        if time is None:
            return None
        last = points[-1].time if points else None
        if last is not None and time + self.offset < last:
            self.offset = last
        return time + self.offset


def read_log(folder: Path, notes: list[str] | None = None) -> Log:
    """Read all of metrics.jsonl, sorted into losses, diagnostics and measurements."""
    log = Log()
    for row in read_metrics(folder, notes):
        log.add(row)
    return log


def _rewind(points: list[Any], step: float) -> None:
    """Drop the points logged after the checkpoint from which a run was resumed."""
    while points and points[-1].step >= step:
        points.pop()


def last_step_before_final(steps: int) -> int:
    """Return the last step that does not count for the final training loss.

    >>> last_step_before_final(1000)
    950
    """
    return math.floor(steps - max(1, _FINAL_SHARE * steps))


def summarize(log: Log, steps: int | None = None) -> dict[str, Any]:
    """Compute a run's result from its log alone, so that a resumed run has the same one; None for what it lacks.

    Rates are medians over log lines, ``final_train_loss`` is a mean over the last 5 % of ``steps``.
    """
    points = log.train or log.validation
    if not points:
        return {}
    last = points[-1]
    val_losses = [point.value for point in log.validation]
    final = val_losses[-1] if val_losses else math.nan
    speed = _median(log.columns["tokens_per_s"])
    return {
        "final_val_loss": _finite_or_none(final),
        "final_val_ppl": math.exp(final) if final < 700 else None,
        "best_val_loss": min(filter(math.isfinite, val_losses), default=None),
        "final_train_loss": _final_train_loss(log.train, steps or int(last.step)),
        "tokens": last.tokens,
        "steps": last.step,
        "time": last.time,
        "tokens_per_s": speed,
        "step_ms": 1e3 * last.tokens / last.step / speed if speed and last.tokens and last.step else None,
        "optimizer_ms": _median(log.columns["optimizer_ms"]),
        "mfu": _median(log.columns["mfu"]),
    }


def _final_train_loss(points: Sequence[Point], steps: int) -> float | None:
    """Average the last losses, each weighted by the steps since the line before it; None if one is not finite.

    >>> _final_train_loss([Point(90, None, None, 4.0), Point(97, None, None, 3.0), Point(100, None, None, 2.0)], 100)
    2.7
    """
    if not points:
        return None
    begin = points[-1].step - steps + last_step_before_final(steps)
    before = [0.0, *(point.step for point in points)]
    weighted = [(p.value, max(1, p.step - b)) for p, b in zip(points, before, strict=False) if p.step > begin]
    return _finite_or_none(sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _stats(summary: dict[str, Any], about: dict[str, Any], log: Log) -> dict[str, float]:
    """Return the numbers of the summary; those it lacks come from the log, so that an unfinished run has them too."""
    config = about.get("config")
    steps = number(config.get("steps")) if isinstance(config, dict) else None
    logged = {
        **summarize(log, steps if isinstance(steps, int) else None),
        "peak_memory_gb": max(log.columns["memory_gb"], default=None),
        "parameters": about.get("parameters"),
        "state_bytes": about.get("state_bytes"),
    }
    return _numbers(logged) | _numbers(summary)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are numbers."""
    return {key: found for key, value in values.items() if (found := number(value)) is not None}


def _status(about: dict[str, Any], summary: dict[str, Any] | None, log: Log, stats: dict[str, float]) -> Status:
    """Return a run's state: that of the summary, unless the last losses are missing or not finite."""
    last_losses = [points[-1].value for points in (log.train, log.validation) if points]
    last_losses += [stats[key] for key in ("final_val_loss", "final_train_loss") if key in stats]
    if not last_losses:
        return Status.EMPTY if about else Status.BROKEN
    if not all(map(math.isfinite, last_losses)):
        return Status.DIVERGED
    return status_of(summary or {})
