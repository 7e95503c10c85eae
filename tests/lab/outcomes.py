"""Read what runs computed, to the bit, and start runs in their own processes, which tests may end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.results.reading import read_metrics
from cosmos_lab.run import checkpoint

SRC = Path(__file__).resolve().parents[2] / "src"
_CLOCKS = {"time", "tokens_per_s", "mfu", "memory_gb", "optimizer_ms"}


def log_of(folder: Path) -> list[Any]:
    """Return a run's log without times and memory."""
    return [{k: v for k, v in record.items() if k not in _CLOCKS} for record in read_metrics(folder)]


def outcome(config: RunConfig) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return everything a run computed: its log, and the last checkpoint's content, random states included."""
    folder = config.folder
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    state, own = (torch.load(newest / name, weights_only=True) for name in ("state.pt", "process_0.pt"))
    return log_of(folder), state, own


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Compare nested containers to the bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}/{index}")
    else:
        assert a == b, where


def send(signum: int) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), signum)


def at_step(step: int, signum: int = signal.SIGTERM) -> Callable[[Any], None]:
    """Return a progress function that sends this process a signal when a step is logged."""
    return lambda record: send(signum) if record["step"] == step and "loss" in record else None


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start ``python ARGUMENTS`` in the background, with the lab importable and these environment variables."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)  # type: ignore[call-overload]


def wait_until(seen: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does; also return when it ends or takes two minutes."""
    deadline = time.monotonic() + 120
    while not seen() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
