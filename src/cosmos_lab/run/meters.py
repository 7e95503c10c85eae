"""Measurements that do not stall the device: optimizer time by CUDA events, memory, model FLOP utilization."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Dense bf16 peak of one device, FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
GIB = 2**30


def mfu(tokens_per_s: float, flops_per_token: float, device: torch.device, devices: int = 1) -> float | None:
    """Return useful FLOP/s (forward, backward, causal attention; nothing recomputed) over the peak of all devices.

    None if the peak is not known: on a CPU or an unlisted GPU.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return None if peak is None else tokens_per_s * flops_per_token / (peak * devices)


def peak_memory_gb(device: torch.device) -> float:
    """Return the most memory in use so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Stopwatch:
    """Durations of a repeated region, on a GPU by events: they are read only in `take`, so the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []  # events on a GPU, else seconds

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the region inside."""
        begin = self._now()
        yield
        self._marks.append((begin, self._now()))

    def take(self) -> list[float]:
        """Return the durations in ms since the last call. On a GPU call it after a synchronization."""
        marks, self._marks = self._marks, []
        return [begin.elapsed_time(end) if self._cuda else 1e3 * (end - begin) for begin, end in marks]


class Clock:
    """Seconds of training, over all resumes, without validation, checkpoints and the first step."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> float:
        """Stop counting and return the seconds so far."""
        self.seconds, self._since = self.read(), None
        return self.seconds

    def read(self) -> float:
        return self.seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)
