"""Decide whether another run of a comparison would end in time: the flag ``--minutes``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from cosmos_lab.config import RunConfig


class Budget:
    """The time for the runs of one call, and whether another run would end within it.

    A run is expected to take as long as the longest one that this call has finished with the same model and number of
    tokens. A run of a new kind may start while any time is left, and the first run may always start.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not minutes >= 0:
            raise ValueError(f"--minutes must be 0 (no limit) or more; got {minutes}")
        self._clock = clock
        self._end = clock() + 60 * minutes if minutes else math.inf
        self._longest: dict[Any, float] = {}
        self._begun: dict[str, float] = {}

    def start(self, run: RunConfig) -> bool:
        """Tell whether ``run`` may start; if so, its time counts from now."""
        now = self._clock()
        allowed = not self._begun or now + self._longest.get(self._kind(run), 0.0) < self._end
        if allowed:
            self._begun[run.run_name] = now
        return allowed

    def finish(self, run: RunConfig) -> None:
        """Note how long ``run`` took: another one like it will take as long."""
        kind = self._kind(run)
        self._longest[kind] = max(self._longest.get(kind, 0.0), self._clock() - self._begun[run.run_name])

    @staticmethod
    def _kind(run: RunConfig) -> Any:
        return run.model, run.training.steps * run.training.batch * run.data.seq_len
