"""Checkpoints that are whole or absent.

A checkpoint is written into a hidden folder beside its final place, flushed to the disk and renamed: a kill at any
moment, or a full disk, leaves the previous one as it was. Layout of ``checkpoints/step_000123``:

    meta.json      step, clock, what was trained (model, optimizer, data), number of processes
    state.pt       model and optimizer (one process, or DDP), or
    shards/        the same from torch.distributed.checkpoint (FSDP2)
    process_0.pt   data position, random states and losses of each process
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.data import TokenSource
from cosmos_lab.io import disk_error, read_json, write_json
from cosmos_lab.models import Decoder, ModelConfig, build
from cosmos_lab.run import launch

_NAME = re.compile(r"step_(\d{6,})")
_COUNTS = ("step", "seconds", "loss_sum", "logged", "bad_losses")  # of TrainingState, in meta.json
_ADVICE = "the checkpoints already there are untouched; free some space and start the same command again to continue"


@dataclass
class TrainingState:
    """What a checkpoint holds: the live objects, and how far training has come."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0  # of the losses since the last log line, so that the log continues without a gap
    logged: int = 0  # step of that line
    bad_losses: int = 0  # log lines in a row without a finite loss, so that a run diverges at the same step
    position: dict[str, Any] | None = None


def latest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in ``folder``, or None."""
    whole = [path for path in _steps(folder) if (path / "meta.json").exists()]
    return whole[-1] if whole else None


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(path.name.removeprefix("step_"))


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    return sorted((p for p in folder.glob("step_*") if _NAME.fullmatch(p.name)), key=step_of)


def remove_temporary(folder: Path) -> None:
    """Remove the checkpoints that were written only for a resume."""
    for path in _steps(folder):
        if (read_json(path / "meta.json") or {}).get("passing"):
            shutil.rmtree(path, ignore_errors=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def save(
    folder: Path, state: TrainingState, identity: Mapping[str, Any], world: launch.World, keep: int, temporary: bool
) -> None:
    """Write ``folder/step_N`` atomically and keep the newest ``keep`` checkpoints; every process must call.

    A resume compares ``identity``. `remove_temporary` removes a temporary one when the run is finished.
    """
    final = folder / f"step_{state.step:06d}"
    unfinished = folder / f".writing_{final.name}"
    error: Exception | None = None
    try:
        if world.main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        world.barrier()
        _write(unfinished, state, identity, world, temporary)
    except (OSError, RuntimeError) as problem:  # torch reports a short write as a RuntimeError
        error = _explain(problem, final)
    try:
        world.raise_together(error)
    except Exception:
        if world.main:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if world.main:
        # Flushed before and after the rename, so that the name never shows an unfinished checkpoint.
        _flush_folder(unfinished)
        shutil.rmtree(final, ignore_errors=True)  # only a rewrite of the same step finds one
        os.replace(unfinished, final)
        _flush_folder(folder)
        for old in _steps(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    world.barrier()


def load(path: Path, state: TrainingState, identity: Mapping[str, Any], world: launch.World) -> None:
    """Fill ``state`` from a checkpoint; one of another model, optimizer or data is a ValueError that names both."""
    meta = _read_meta(path)
    check_identity(path, {**identity, **meta["identity"]}, identity)  # older checkpoints have fewer entries
    if meta["sharded"] != (world.sharding == "fsdp"):
        how = "with" if meta["sharded"] else "without"
        raise ValueError(f"{path} was written {how} --sharding fsdp: resume it the same way")
    if meta["sharded"]:
        launch.load_sharded(state.model, state.optimizer, path / "shards")
    else:
        saved = _read_tensors(path / "state.pt", world.device)
        state.model.load_state_dict(saved["model"])
        state.optimizer.load_state_dict(saved["optimizer"])
    process = world.rank if world.rank < meta["processes"] else 0  # the data position is the same on every process
    own = _read_tensors(path / f"process_{process}.pt", torch.device("cpu"))
    for name in _COUNTS:
        setattr(state, name, meta.get(name, 0))  # older ones have no bad_losses
    state.position, state.loss_sum = own["position"], own.get("loss_sum", state.loss_sum)
    _set_random_state(own["random"], world)


def load_trained(run: Path) -> Decoder:
    """Load the model of a run folder, with the weights of its newest checkpoint."""
    if not run.is_dir():
        raise ValueError(f"there is no run folder {run}")
    newest = latest(run / "checkpoints")
    if newest is None:
        if not (run / "config.json").is_file():
            raise ValueError(f"{run} is not a run folder, which has a config.json: give one of those inside")
        raise ValueError(f"{run} has no checkpoint; train with --checkpoint-every above 0")
    meta = _read_meta(newest)
    if meta["sharded"]:
        raise ValueError(f"{newest} is sharded (fsdp): join it with torch's dcp_to_torch_save first")
    fields = {name: value for name, value in meta["identity"]["model"].items() if name != "name"}
    model = build(ModelConfig(**fields))
    model.load_state_dict(_read_tensors(newest / "state.pt", torch.device("cpu"))["model"])
    return model


def _read_meta(path: Path) -> dict[str, Any]:
    meta: dict[str, Any] | None = read_json(path / "meta.json")
    if meta is None:
        raise ValueError(f"{path}/meta.json is not JSON; remove that folder to continue from an older checkpoint")
    return meta


def _read_tensors(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} cannot be read ({reason}); remove its folder to continue from an older checkpoint"
        ) from error
    return found


def identity(
    config: RunConfig, model: Decoder, source: TokenSource, val_source: TokenSource, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a checkpoint must agree with to be continued; ``settings`` are the optimizer's, except its rates."""
    return {
        "model": {"name": config.model.model, **dataclasses.asdict(model.config)},
        **{name: config.get(name) for name in ("optimizer", "rank", "seq_len", "batch", "seed")},
        "data": source.fingerprint,
        "validation data": val_source.fingerprint,
        **{name: value for name, value in settings.items() if not name.endswith(".lr")},
    }


def check_identity(where: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first thing in which a saved run differs from the one asked for."""
    for what, value in asked.items():
        if saved.get(what) != value:
            raise ValueError(
                f"{where} was trained with {what} {saved.get(what)!r}, this run asks for {what} {value!r}: "
                "resume with the same, or choose another --name or --out"
            )


def _random_state(world: launch.World) -> dict[str, Any]:
    """Return the state of every random generator that training uses, as plain values."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if world.cuda:
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def _set_random_state(state: Mapping[str, Any], world: launch.World) -> None:
    """Restore every generator to a saved state."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if world.cuda and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)


def _write(
    folder: Path, state: TrainingState, identity: Mapping[str, Any], world: launch.World, temporary: bool
) -> None:
    if world.sharding == "fsdp":
        launch.save_sharded(state.model, state.optimizer, folder / "shards")
    elif world.main:
        _save(folder / "state.pt", {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()})
    own = {"position": state.position, "random": _random_state(world), "loss_sum": state.loss_sum}
    _save(folder / f"process_{world.rank}.pt", own)
    if world.main:
        write_json(
            folder / "meta.json",
            {
                **{name: getattr(state, name) for name in _COUNTS},
                "identity": dict(identity),
                "processes": world.size,
                "sharded": world.sharding == "fsdp",
                "passing": temporary,
            },
        )


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
