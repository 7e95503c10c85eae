"""Checkpoints that are whole or absent.

A checkpoint is written into a hidden folder beside its final place, flushed to the disk and renamed: a kill at any
moment, or a full disk, leaves the previous one as it was. Layout of ``checkpoints/step_000123``:

    meta.json      step, clock, what was trained (model, optimizer, data), number of processes, hashes of the files
    state.pt       model and optimizer (one process, or DDP), or
    shards/        the same from torch.distributed.checkpoint (FSDP2)
    process_0.pt   data position, random states and losses of each process
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from cosmos_lab.config import FIXED, RunConfig, marked
from cosmos_lab.data import TokenSource
from cosmos_lab.io import disk_error, first_line, nan_to_none, read_json, valid_text, write_json
from cosmos_lab.models import Decoder, ModelConfig, build
from cosmos_lab.optimizers import WEIGHTS
from cosmos_lab.run import distributed, integrity, sharded_files
from cosmos_lab.run.build import cast_weights
from cosmos_lab.run.integrity import META, Damaged

_NAME = re.compile(r"step_(\d{6,})")
EARLIER = {"weights": "fp32"}  # what runs had before they could choose it
_COUNTS = {  # of TrainingState, by their keys in meta.json
    "step": "step", "seconds": "seconds", "loss_sum": "loss_sum", "logged": "last_logged_step",
    "bad_losses": "bad_losses",
}  # fmt: skip
_HIDDEN = ".*_step_*"  # not finished, or about to be removed
_ADVICE = "choose another --out; the checkpoints already there are untouched"


@dataclass
class TrainingState:
    """What a checkpoint holds: the live objects, and how far training has come."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # of the losses since the last log line, so that the log continues without a gap
    last_logged_step: int = 0  # that of this line
    bad_losses: int = 0  # log lines in a row without a finite loss, so that a run diverges at the same step
    data_state: dict[str, Any] | None = None  # of `Batches`


def folder_of(run: Path) -> Path:
    """Return the folder of the checkpoints of a run folder."""
    return run / "checkpoints"


def exists(run: Path) -> bool:
    """Tell whether a run folder has a checkpoint."""
    return latest(folder_of(run)) is not None


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in ``folder``, or None."""
    found = _steps(folder)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    return sorted((p for p in folder.glob("step_*") if _NAME.fullmatch(p.name)), key=step_of)


def remove_temporary(folder: Path) -> None:
    """Remove the checkpoints that were written only for a resume."""
    for path in _steps(folder):
        if (read_json(path / META) or {}).get("passing"):
            _remove(path)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process was writing or removing."""
    for path in folder.glob(_HIDDEN):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint in one moment, by renaming it first, so that none is ever found in part."""
    hidden = path.with_name(f".removing_{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def save(
    folder: Path,
    state: TrainingState,
    conditions: Mapping[str, Any],
    world: distributed.World,
    keep: int,
    temporary: bool,
) -> None:
    """Write ``folder/step_N`` atomically and keep the newest ``keep`` checkpoints; every process must call.

    A resume compares ``conditions`` (see `resume_conditions`). `remove_temporary` removes a temporary one when the run
    is finished.
    """
    final = folder / f"step_{state.step:06d}"
    unfinished = folder / f".writing_{final.name}"

    def attempt(work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return work(*arguments)
        except (OSError, RuntimeError) as problem:  # torch reports a short write as a RuntimeError
            raise _explain(problem, final) from problem

    try:
        world.together(attempt, _make_empty, unfinished, world)
        world.together(attempt, _write, unfinished, state, world)
        names = world.gather([str(p.relative_to(unfinished)) for p in unfinished.rglob("*") if p.is_file()])[0]
        share = names[world.rank :: world.size]
        hashes = world.gather(world.together(attempt, integrity.hash_files, unfinished, share))
        files = {name: found for part in hashes for name, found in part.items()}
        world.together(attempt, _write_meta, unfinished, state, conditions, world, temporary, files)
    except Exception:
        if world.main:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if world.main:
        # Flushed before and after the rename, so that the name never shows an unfinished checkpoint.
        _flush_folder(unfinished)
        if final.exists():  # only a rewrite of the same step finds one
            _remove(final)
        os.replace(unfinished, final)
        _flush_folder(folder)
        for old in _steps(folder)[:-keep]:
            _remove(old)
    world.barrier()


Check = Future[dict[str, Any]]


def start_check(folder: Path, world: distributed.World) -> Check | None:
    """Start to check the newest checkpoint in the background, if there is one."""
    newest, pool = latest(folder), ThreadPoolExecutor(1)
    check = None if newest is None else pool.submit(integrity.check, newest, world.rank, world.size)
    pool.shutdown(wait=False)
    return check


def resume(
    folder: Path, state: TrainingState, conditions: Mapping[str, Any], world: distributed.World, check: Check | None,
    skip_damaged: bool,
) -> None:  # fmt: skip
    """Fill ``state`` from the newest checkpoint, which `start_check` checks; every process must call.

    A damaged one is an error on every process. With ``skip_damaged`` the newest whole one is used, and those after it
    are removed.
    """
    found = _steps(folder)[::-1]
    for index, path in enumerate(found):
        try:
            load(path, state, conditions, world, check if index == 0 else None)
        except Damaged as error:
            if path == found[-1]:
                raise Damaged(f"{error}; no older checkpoint is left: remove {folder} to start again") from error
            older = found[index + 1].name
            if not skip_damaged:
                raise Damaged(f"{error}; add --resume previous to continue from {older}") from error
            if world.main:
                warnings.warn(f"{error}; trying {older} instead", stacklevel=2)
            continue
        if world.main:
            for damaged in found[:index]:
                _remove(damaged)
        return


def load(
    path: Path, state: TrainingState, conditions: Mapping[str, Any], world: distributed.World,
    check: Check | None = None,
) -> None:  # fmt: skip
    """Fill ``state`` from a checkpoint, on every process or on none.

    One of another model, optimizer or data is a ValueError that names both, a damaged one is ``Damaged``.
    """
    meta = world.together(check.result if check else lambda: integrity.check(path, world.rank, world.size))
    if world.main and "files" not in meta:
        warnings.warn(f"{path} was written without hashes, so it cannot be checked for damage", stacklevel=2)
    world.together(_fill, path, meta, state, conditions, world)


def _fill(
    path: Path, meta: Mapping[str, Any], state: TrainingState, conditions: Mapping[str, Any], world: distributed.World
) -> None:
    # Older checkpoints have fewer entries.
    check_equal_settings(path, {**conditions, **EARLIER, **meta["identity"]}, conditions)
    if meta["sharded"] != (world.sharding == "fsdp"):
        how = "with" if meta["sharded"] else "without"
        raise ValueError(f"{path} was written {how} --sharding fsdp: resume it the same way")
    if meta["sharded"]:
        try:
            sharded_files.load(state.model, state.optimizer, path / "shards")
        except OSError as error:
            raise Damaged(str(error)) from error
    else:
        saved = _read_tensors(path / "state.pt", world.device)
        state.model.load_state_dict(saved["model"])
        state.optimizer.load_state_dict(saved["optimizer"])
    process = world.rank if world.rank < meta["processes"] else 0  # the data position is the same on every process
    own = _read_tensors(path / f"process_{process}.pt", torch.device("cpu"))
    for key, attribute in _COUNTS.items():
        setattr(state, attribute, meta.get(key, 0))  # older ones have no bad_losses
    state.data_state, state.loss_sum = own["position"], own.get("loss_sum", state.loss_sum)
    _set_random_state(own["random"], world)


class Trained(NamedTuple):
    """A trained model, after how many steps, and what it was trained with (see `resume_conditions`)."""

    model: Decoder
    step: int
    conditions: dict[str, Any]


def _trained_checkpoint(run: Path, step: int | None) -> Path:
    """Return the newest checkpoint of a run folder, or that of ``step``."""
    if not run.is_dir():
        raise ValueError(f"there is no run folder {run}")
    found = {step_of(path): path for path in _steps(folder_of(run))}
    if not found:
        if not (run / "config.json").is_file():
            raise ValueError(f"{run} is not a run folder, which has a config.json: give one of those inside")
        raise ValueError(f"{run} has no checkpoint; train with --checkpoint-every above 0")
    if step is not None and step not in found:
        raise ValueError(f"{run} has no checkpoint of --step {step}; it has {', '.join(map(str, found))}")
    return found[max(found) if step is None else step]


def load_trained(run: Path, step: int | None = None) -> Trained:
    """Load the model of a run folder, with the weights of its newest checkpoint or of that of ``step``."""
    path = _trained_checkpoint(run, step)
    try:
        meta = integrity.check(path)
    except Damaged as error:
        raise Damaged(f"{error}; remove that folder to use an older checkpoint") from error
    fields = {name: value for name, value in meta["identity"]["model"].items() if name != "name"}
    model = build(ModelConfig(**fields))
    if meta["sharded"]:
        cast_weights(model, WEIGHTS[{**EARLIER, **meta["identity"]}["weights"]])
        sharded_files.fill({"model": model.state_dict()}, path / "shards")
    else:
        weights = _read_tensors(path / "state.pt", torch.device("cpu"))["model"]
        model.load_state_dict(weights, assign=True)  # in the type in which they were trained
    return Trained(model, meta["step"], meta["identity"])


def _read_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    # Mapped: the tensors are copied into those of the model and the optimizer, and need no copy before.
    mapped = valid_text(path) == str(path)  # torch maps no file if its path is not valid text
    try:
        with open(path, "rb") as file:
            source = path if mapped else file
            found: dict[str, Any] = torch.load(source, map_location=device, weights_only=True, mmap=mapped)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # torch raises many kinds for a file that it did not write
        raise Damaged(f"{path} cannot be read ({first_line(error)})") from error
    return found


def resume_conditions(
    config: RunConfig, model: Decoder, source: TokenSource, val_source: TokenSource, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a checkpoint must agree with to be continued; ``settings`` are the optimizer's, except its rates."""
    return {
        "model": {"name": config.model.model, **dataclasses.asdict(model.config)},
        **{name: config.get(name) for name in marked(FIXED)},
        "data": source.fingerprint,
        "validation data": val_source.fingerprint,
        **{name: value for name, value in settings.items() if not name.endswith(".lr")},
    }


def check_equal_settings(where: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first thing in which a saved run differs from the one asked for."""
    for what, value in asked.items():
        before = saved.get(what)
        if before == value:
            continue
        if isinstance(before, Mapping) and isinstance(value, Mapping):  # the model: name the size that differs
            part = min(name for name, _ in before.items() ^ value.items())
            what, before, value = f"{what} {part}", before.get(part), value.get(part)
        raise ValueError(
            f"{where} was trained with {what} {before!r}, this run asks for {what} {value!r}: "
            "resume with the same, or choose another --out"
        )


def _random_state(world: distributed.World) -> dict[str, Any]:
    """Return the state of every random generator that training uses, as plain values."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if world.cuda:
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def _set_random_state(state: Mapping[str, Any], world: distributed.World) -> None:
    """Restore every generator to a saved state."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if world.cuda and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)


def _make_empty(folder: Path, world: distributed.World) -> None:
    if world.main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)


def _write(folder: Path, state: TrainingState, world: distributed.World) -> None:
    if world.sharding == "fsdp":
        sharded_files.save(state.model, state.optimizer, folder / "shards")
    elif world.main:
        _save(folder / "state.pt", {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()})
    own = {"position": state.data_state, "random": _random_state(world), "loss_sum": state.loss_sum}
    _save(folder / f"process_{world.rank}.pt", own)


def _write_meta(
    folder: Path, state: TrainingState, conditions: Mapping[str, Any], world: distributed.World, temporary: bool,
    files: Mapping[str, Any],
) -> None:  # fmt: skip
    meta = {
        **{key: getattr(state, attribute) for key, attribute in _COUNTS.items()},
        "identity": dict(conditions),  # an older name, which files have
        "processes": world.size,
        "sharded": world.sharding == "fsdp",
        "passing": temporary,  # an older name, which files have
        "files": dict(files),
    }
    if world.main:
        write_json(folder / META, integrity.seal(nan_to_none(meta)))  # loss_sum may be nan


def _save(path: Path, value: Any) -> None:
    with open(path, "xb") as out:
        torch.save(value, out)
        out.flush()
        os.fsync(out.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(problem: Exception, final: Path) -> Exception:
    """Return the error with the checkpoint's name and what to do."""
    for cause in (problem, problem.__context__):
        if isinstance(cause, OSError):
            return disk_error(cause, final, _ADVICE)
    return RuntimeError(f"cannot write {final}: {problem}; {_ADVICE}")
