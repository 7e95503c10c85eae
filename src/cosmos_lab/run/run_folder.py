"""A run folder: its files, its lock, and whether it holds this run, finished or not, or another one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.data import Split
from cosmos_lab.io import disk_error, locked, read_json
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.results.reading import CONFIG, read_summary
from cosmos_lab.run import build, checkpoint, distributed

_LOCK = ".lock"
_FINGERPRINTS: dict[Split, str] = {"train": "fingerprint", "val": "val_fingerprint"}  # of config.json


def read_config(folder: Path) -> RunConfig:
    """Return the config that a run folder was made with."""
    about = read_json(folder / CONFIG)
    if not isinstance(about, dict) or "config" not in about:
        raise ValueError(f"{folder} has no readable {CONFIG}, which says how it was trained; give the whole run folder")
    return RunConfig.from_flat(about["config"])


def summary_if_finished(config: RunConfig) -> dict[str, Any] | None:
    """Return the summary if the run is finished; raise a ValueError if its folder holds another one."""
    if config.logging.resume == "never" and (config.folder / CONFIG).exists():
        raise ValueError(f"{config.folder} holds a run already; choose another --out, or --resume auto to continue it")
    summary = read_summary(config.folder)
    if summary is not None:
        if not isinstance(read_json(config.folder / CONFIG), dict):
            raise ValueError(
                f"{config.folder} has a result, but no readable {CONFIG}, which says of what: remove the folder, or "
                "choose another --out"
            )
        _check_same(config)
    return summary


@contextmanager
def locked_or_summary(config: RunConfig, world: distributed.World) -> Iterator[dict[str, Any] | None]:
    """Lock the run folder for these processes; if the run is finished, yield its summary without a lock.

    The first process looks, for all: a file may be visible to some processes before others see it.
    """
    summary: dict[str, Any] | None = None
    error: Exception | None = None
    with ExitStack() as lock:
        if world.main:
            try:
                summary = summary_if_finished(config)
                if summary is None:
                    made = [folder for folder in (config.folder, config.folder.parent) if not folder.exists()]
                    lock.enter_context(locked(config.folder / _LOCK, wait=False))
                    lock.callback(_remove_if_empty, config.folder, made)
                    summary = summary_if_finished(config)  # another process may have finished it meanwhile
            except BlockingIOError:
                advice = "wait for it or choose another --out"
                error = ValueError(f"another process is training in {config.folder}; {advice}")
            except OSError as problem:
                error = disk_error(problem, config.folder)
            except ValueError as problem:
                error = problem
        world.raise_together(error)
        yield world.gather(summary)[0]


def _remove_if_empty(folder: Path, made: Sequence[Path]) -> None:
    """Remove the lock and the folders that were made for it, if nothing else is there: nothing came of the run."""
    with suppress(OSError):  # somebody may have removed it
        if [path.name for path in folder.iterdir()] == [_LOCK]:
            (folder / _LOCK).unlink()
            for one in made:
                one.rmdir()


def check_unfinished(config: RunConfig) -> None:
    """Raise a ValueError if the run's folder holds a checkpoint of a run with another config or text."""
    if checkpoint.exists(config.folder):
        _check_same(config)


def _check_same(config: RunConfig) -> None:
    about = read_json(config.folder / CONFIG) or {}
    # The optimizer's defaults may have been others when the run was made.
    asked = config.identity() | hyperparameters(config)
    saved = {**asked, **checkpoint.EARLIER, **about.get("config", {}), **about.get("settings", {})}
    checkpoint.check_equal_settings(config.folder, saved, asked)
    _check_text(config, about.get("data", {}))


def _check_text(config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Raise a ValueError if the data has another hash than when the run was made; older runs do not have all hashes.

    This reads no tokens unless the files have changed. If the data is gone, the run keeps its result, with a warning.
    """
    for split, key in _FINGERPRINTS.items():
        if key not in saved:
            continue
        try:
            source = build.load_source(config, split)
        except (ValueError, OSError) as error:
            warnings.warn(f"cannot check that the text is still the one trained on: {error}", stacklevel=2)
            return
        if saved[key] != source.fingerprint:
            raise ValueError(
                f"{source.name} has changed since {config.folder} was trained: its hash was {saved[key]} and is "
                f"{source.fingerprint} now; choose another --out to train on the new text"
            )


def warn_of_changes(config: RunConfig) -> None:
    """Warn if a run continues with other values than it began with: config.json will only have the new ones."""
    now = config.identity()
    before = now | (read_json(config.folder / CONFIG) or {}).get("config", {})
    if changed := [f"{name} {now[name]} instead of {before[name]}" for name in now if before[name] != now[name]]:
        warnings.warn(f"{config.folder} continues with {', '.join(changed)}", stacklevel=2)
