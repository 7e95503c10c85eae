"""Whose a run folder is: finished, half-finished, another config's, or another process's."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from cosmos_lab.config import RunConfig
from cosmos_lab.io import NO_SPACE, disk_error, read_json
from cosmos_lab.optimizers import settings
from cosmos_lab.run import checkpoint, launch

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
# Fields that may differ between a finished run and the one asked for: they change no number.
_HARMLESS = {
    "out", "name", "device", "compile", "log_every", "tensorboard", "wandb", "resume", "keep", "cache_dir",
    "checkpoint_every", "diagnostics_every",
}  # fmt: skip
# What a run may change on its way, and should know that it does.
_COURSE = ("steps", "schedule", "warmup", "decay", "final_lr", "clip", "precision", "val_tokens", "micro_batch")


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a kill is left out."""
    path = folder / METRICS
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a finished run, else None."""
    summary: dict[str, Any] | None = read_json(folder / SUMMARY)
    return summary


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run if it is finished; a folder that holds a finished run of another config is an error."""
    folder = config.folder
    if config.logging.resume == "never" and (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds a run already; choose another --name, or --resume auto to continue it")
    summary = read_summary(folder)
    if summary is not None:
        _check_same(folder, config)
    return summary


@contextmanager
def alone(config: RunConfig, world: launch.World) -> Iterator[dict[str, Any] | None]:
    """Hold the run folder against other processes; gives the summary if one of them has finished the run meanwhile."""
    folder, error = config.folder, None
    lock = None
    if world.main:
        try:
            lock = hold(folder)
        except (ValueError, OSError) as problem:
            error = problem
    world.agree(error)
    try:
        yield finished(config) if world.most(read_summary(folder) is not None) else None
    finally:
        if lock is not None:
            let_go(folder, lock)


def check_unfinished(config: RunConfig) -> None:
    """ValueError if the run's folder holds a checkpoint of a run with another config."""
    folder = config.folder
    if checkpoint.latest(folder / "checkpoints") is not None:
        _check_same(folder, config)


def _check_same(folder: Path, config: RunConfig) -> None:
    about = read_json(folder / CONFIG) or {}
    asked = {k: list(v) if isinstance(v, tuple) else v for k, v in config.flat().items() if k not in _HARMLESS}
    asked |= settings(config.optimizer, config.model.model)  # defaults may have been others when the run was made
    saved = {**about.get("config", {}), **about.get("settings", {})}
    checkpoint.check_identity(folder, {k: saved.get(k, v) for k, v in asked.items()}, asked)


def tell_changes(folder: Path, config: RunConfig) -> None:
    """Warn where a run goes on otherwise than it began: config.json will say it had always been so."""
    before, now = (read_json(folder / CONFIG) or {}).get("config", {}), config.flat()
    changed = [name for name in _COURSE if before.get(name, now[name]) != now[name]]
    if changed:
        what = ", ".join(f"{name} {now[name]} instead of {before[name]}" for name in changed)
        warnings.warn(f"{folder} goes on with {what}", stacklevel=2)


def hold(folder: Path) -> TextIO:
    """Hold a run folder's lock for as long as the file is open; a killed process lets go of it."""
    path = folder / ".lock"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            advice = "wait for it or choose another --name"
            raise ValueError(f"another process is training in {path.parent}; {advice}") from None
        except OSError:  # some network file systems have no locks
            pass
    return handle


def let_go(folder: Path, lock: TextIO) -> None:
    """Give up the lock; a folder with nothing else in it goes, too: nothing came of the run."""
    if [path.name for path in folder.iterdir()] == [".lock"]:
        (folder / ".lock").unlink()
        with suppress(OSError):  # the folder of all runs, where this is the first
            folder.rmdir()
            folder.parent.rmdir()
    lock.close()


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """An error of the disk in here names the file and says what to do."""
    try:
        yield
    except OSError as error:
        advice = "free some space and start the same command again to continue"
        raise disk_error(error, path, advice if error.errno in NO_SPACE else "choose another --out") from error
