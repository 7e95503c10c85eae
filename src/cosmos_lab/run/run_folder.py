"""Whose a run folder is: finished, half-finished, another config's, or another process's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.io import read_json
from cosmos_lab.optimizers import settings
from cosmos_lab.run import checkpoint, launch, run_log

# Fields that may differ between a finished run and the one asked for: they change no number.
_HARMLESS = {
    "out", "name", "device", "compile", "log_every", "tensorboard", "wandb", "resume", "keep", "cache_dir",
    "checkpoint_every", "diagnostics_every",
}  # fmt: skip
# What a run may change on its way, and should know that it does.
_COURSE = ("steps", "schedule", "warmup", "decay", "final_lr", "clip", "precision", "val_tokens", "micro_batch")


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The summary of the run if it is finished; a folder that holds a finished run of another config is an error."""
    folder = run_log.run_folder(config)
    if config.logging.resume == "never" and (folder / run_log.CONFIG).exists():
        raise ValueError(f"{folder} holds a run already; choose another --name, or --resume auto to continue it")
    summary = run_log.read_summary(folder)
    if summary is not None:
        _check_same(folder, config)
    return summary


@contextmanager
def alone(config: RunConfig, world: launch.World) -> Iterator[dict[str, Any] | None]:
    """Hold the run folder against other processes; gives the summary if one of them has finished the run meanwhile."""
    folder, error = run_log.run_folder(config), None
    lock = None
    if world.main:
        try:
            lock = run_log.hold(folder)
        except (ValueError, OSError) as problem:
            error = problem
    world.agree(error)
    try:
        yield finished(config) if world.most(run_log.read_summary(folder) is not None) else None
    finally:
        if lock is not None:
            run_log.let_go(folder, lock)


def check_unfinished(config: RunConfig) -> None:
    """ValueError if the run's folder holds a checkpoint of a run with another config."""
    folder = run_log.run_folder(config)
    if checkpoint.latest(folder / "checkpoints") is not None:
        _check_same(folder, config)


def _check_same(folder: Path, config: RunConfig) -> None:
    about = read_json(folder / run_log.CONFIG) or {}
    asked = {k: list(v) if isinstance(v, tuple) else v for k, v in config.flat().items() if k not in _HARMLESS}
    asked |= settings(config.optimizer, config.model.model)  # defaults may have been others when the run was made
    saved = {**about.get("config", {}), **about.get("settings", {})}
    checkpoint.check_identity(folder, {k: saved.get(k, v) for k, v in asked.items()}, asked)


def tell_changes(folder: Path, config: RunConfig) -> None:
    """Warn where a run goes on otherwise than it began: config.json will say it had always been so."""
    before, now = (read_json(folder / run_log.CONFIG) or {}).get("config", {}), config.flat()
    changed = [name for name in _COURSE if before.get(name, now[name]) != now[name]]
    if changed:
        what = ", ".join(f"{name} {now[name]} instead of {before[name]}" for name in changed)
        warnings.warn(f"{folder} goes on with {what}", stacklevel=2)
