"""Count the steps that were skipped because a gradient was not finite, and warn of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from cosmos_optim.engine.capture import is_capturing
from cosmos_optim.engine.gradients import GradientCheck

# Skipped steps in a row before a warning; the next one comes after ten times as many.
MANY = 20
ADVICE = (
    "To find the cause, give nonfinite='raise', which stops and names the parameter, and run the backward pass in "
    "torch.autograd.detect_anomaly(). Usual causes are a rate that is too high, no warm-up, no gradient clipping, and "
    "float16 without a GradScaler. `skipped_steps` counts such steps; the next warning comes if many follow each other"
)


class SkippedStepWarning(RuntimeWarning):
    """Steps were skipped because a gradient was NaN or inf."""


class HostCopy:
    """A number on its way from the GPU to the host, which does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._value = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
        self._event = torch.cuda.Event()

    def start(self, number: Tensor) -> None:
        """Start the copy, after the work that the GPU already has."""
        self._value.copy_(number, non_blocking=True)
        self._event.record(torch.cuda.current_stream(self._device))

    def value(self) -> int | None:
        """Return the number, or None if it has not arrived."""
        return int(self._value) if self._event.query() else None


class SkippedSteps:
    """Count skipped steps, and warn of the first and of many in a row.

    If only the GPU knows, it counts there. The count is copied to the host after each step, and a later step reads it,
    so the host never waits, and warnings come a little later.

    number: this object's, counted from 0 in its process.
    should_warn: return whether this process of a job should print a text, given whether it knows the cause.
    """

    _numbers = itertools.count()

    def __init__(self, should_warn: Callable[[str, bool], bool] = lambda text, knows_cause: True) -> None:
        self._should_warn, self.number = should_warn, next(self._numbers)
        self._on_host = 0  # steps that the host knows to be skipped
        self._on_device: Tensor | None = None  # steps that only the GPU knows to be skipped
        self._copy: HostCopy | None = None
        self._count_in_last_copy = 0
        self._steps_before_copy = self._steps_since_copy = 0  # steps that the copy under way covers, and those after it
        self._consecutive, self._warn_at = 0, MANY  # skipped steps up to now, and how many make a warning
        self._streaks, self._warned = 0, False  # streaks of `MANY` so far, and whether there was any warning

    def count(self, check: GradientCheck, device: torch.device) -> None:
        """Count a step if it is skipped. Warn if the host knows it; otherwise `report` does."""
        self._on_host += check.skip_on_host
        if device.type == "cuda" or check.skip is not None:
            self._count_on_device(check, device)
        if check.skip is None:
            self._warn_if_due(int(check.skip_on_host), 1, check)

    def _count_on_device(self, check: GradientCheck, device: torch.device) -> None:
        elsewhere = self._on_device is None or self._on_device.device != device
        if elsewhere and not is_capturing(device):  # in a capture, every replay would reset it
            self._on_host, self._on_device = self.total(), torch.zeros((), dtype=torch.int64, device=device)
            self._copy, self._count_in_last_copy, self._steps_since_copy = None, 0, 0
        if check.skip is not None and self._on_device is not None and self._on_device.device == device:
            self._on_device.add_(check.skip)
            self._steps_since_copy += 1

    def report(self, check: GradientCheck) -> None:
        """Warn of steps that the GPU has skipped, as far as the host knows by now, and ask for the newest count."""
        if check.skip is None or self._on_device is None or is_capturing(self._on_device.device):
            return
        if self._copy is None:
            self._copy = HostCopy(self._on_device.device)
        else:
            total = self._copy.value()
            if total is None:
                return
            self._warn_if_due(total - self._count_in_last_copy, self._steps_before_copy, check)
            self._count_in_last_copy = total
        self._copy.start(self._on_device)
        self._steps_before_copy, self._steps_since_copy = self._steps_since_copy, 0

    def _warn_if_due(self, skipped: int, steps: int, check: GradientCheck) -> None:
        """Warn if it is time to, after `steps` more steps of which some were skipped."""
        self._consecutive = self._consecutive + skipped if skipped and skipped >= steps else 0
        if self._consecutive < MANY:
            self._warn_at = MANY
        if self._consecutive >= self._warn_at:
            self._streaks, self._warned = self._streaks + (self._warn_at == MANY), True
            key = f"streak {self._streaks}, {self._warn_at} steps"
            while self._consecutive >= self._warn_at:
                self._warn_at *= 10
            self._warn(key, f"{self._consecutive} steps in a row were skipped, so nothing is trained: ", check)
        elif skipped and not self._warned:
            self._warned = True
            self._warn("first", "a step was skipped, and it changed nothing: ", check)

    def _warn(self, key: str, lead: str, check: GradientCheck) -> None:
        """Warn, if this process should: one that knows which gradient is not finite, or the first of the job."""
        x = check.not_finite
        is_elsewhere = check.skip_on_host and x is None  # a process that has it can name it
        if self._should_warn(f"skipped steps of optimizer {self.number}: {key}", not is_elsewhere):
            which = "a gradient of another process" if is_elsewhere else "a gradient"
            if x is not None:
                which = f"the gradient of parameter {x.layout.name!r} {tuple(x.p.shape)}"
            may_differ = check.skip is not None and any(e.layout.is_sharded for e in check.entries)
            other = ", or the ranks have gradients of different matrices" if may_differ else ""
            text = f"{lead}{which} is NaN or inf, or its square is{other}. {ADVICE}"
            warnings.warn(text, SkippedStepWarning, stacklevel=2)

    def total(self) -> int:
        """Return the number of skipped steps; waits for the GPU."""
        return self._on_host + (0 if self._on_device is None else int(self._on_device))
