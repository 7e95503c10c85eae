"""A run folder's files: config.json, metrics.jsonl, summary.json, and optional TensorBoard and W&B logs."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.io import NO_SPACE, atomic_write, disk_error, write_json
from cosmos_lab.results import reading

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, SUMMARY = reading.CONFIG, reading.METRICS, reading.SUMMARY
read_metrics, read_summary = reading.read_metrics, reading.read_summary


def run_folder(config: RunConfig) -> Path:
    """Where a run's files are."""
    return Path(config.logging.out) / config.run_name


def finite(value: Any) -> Any:
    """The value with nan and inf replaced by None, since JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return value


def versions() -> dict[str, str]:
    """Python and the packages that matter for a result."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("cosmos-optim", "numpy", "triton", "tokenizers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str | None:
    """The commit of the source tree this code runs from, with "+" if it has changes; None outside a repository."""
    here = Path(__file__).parents[1]
    try:
        sha = _git(here, "rev-parse", "HEAD")
        return sha + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.strip()


def hold(folder: Path) -> TextIO:
    """Hold a run folder's lock for as long as the file is open; a killed process lets go of it."""
    path = folder / ".lock"
    with _explained(folder):
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
def _explained(path: Path) -> Iterator[None]:
    """An error of the disk in here names the file and says what to do."""
    try:
        yield
    except OSError as error:
        advice = "free some space and start the same command again to continue"
        raise disk_error(error, path, advice if error.errno in NO_SPACE else "choose another --out") from error


class RunLog:
    """Appends records to a run folder, and to TensorBoard and W&B where asked."""

    def __init__(self, config: RunConfig, header: Mapping[str, Any], *, resumed_at: int = 0) -> None:
        self.folder = run_folder(config)
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / CONFIG, finite(dict(header)))
            (self.folder / SUMMARY).unlink(missing_ok=True)  # one that cannot be read
            self._truncate(resumed_at)
            self._file = (self.folder / METRICS).open("a", encoding="utf-8")
        self._board = self._open_board() if config.logging.tensorboard else None
        self._wandb = self._open_wandb(config) if config.logging.wandb else None

    def _truncate(self, step: int) -> None:
        """Drop what a killed run logged after its last checkpoint: those steps are done again."""
        kept = [json.dumps(record) + "\n" for record in read_metrics(self.folder) if record["step"] <= step]
        with atomic_write(self.folder / METRICS) as out:
            out.write("".join(kept).encode())

    def _open_board(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
        return SummaryWriter(str(self.folder / "tensorboard"))

    def _open_wandb(self, config: RunConfig) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--wandb needs the package wandb: pip install wandb") from error
        project, name, folder = config.logging.wandb, config.run_name, str(self.folder)
        return wandb.init(project=project, name=name, dir=folder, config=config.flat(), resume="allow")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        clean = finite(record)
        with _explained(self.folder / METRICS):
            self._file.write(json.dumps(clean) + "\n")
            self._file.flush()
        if self._board is None and self._wandb is None:
            return
        scalars = {name: value for name, value in clean.items() if isinstance(value, (int, float)) and name != "step"}
        for matrix, values in clean.get("diagnostics", {}).items():
            scalars |= {f"diagnostics/{name}/{matrix}": v for name, v in values.items() if v is not None}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=record["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        with _explained(self.folder / SUMMARY):
            write_json(self.folder / SUMMARY, finite(dict(summary)))

    def close(self) -> None:
        """Close the files."""
        with suppress(OSError):  # what could not be written has been told
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
