"""The precision of the matrix products in a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Switches(NamedTuple):
    """Torch's settings for float32 products, which hold for all threads.

    common: the older switch for all backends; None if torch refuses to read it, because a backend's own was set.
    backends: the newer switches, of cuBLAS and of oneDNN. One that was never set shows the value that it follows.
    """

    common: str | None
    backends: tuple[str, ...]


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full precision inside, and restore the caller's settings afterwards.

    TF32 or autocast would lose the small eigenvalues.
    """
    _SHARED.enter()
    try:
        with torch.autocast(device.type, enabled=False):  # autocast is a setting of each thread
            yield
    finally:
        _SHARED.leave()


class SharedSwitches:
    """The switches while steps run in any number of threads.

    The first step saves them and the last one restores them. If other code changes one meanwhile, its value is kept
    for afterwards, and the next step that begins sets the switch to full precision again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before = self._ours = Switches(None, ())

    def enter(self) -> None:
        """Begin a step: set the switches to full precision, unless another step has done that."""
        with self._lock:
            now = current_switches()
            if not self._running:
                self._before = now
            elif now != self._ours:
                self._before = self._wanted(now)
            if not self._running or now != self._ours:
                set_exact(now)
                self._ours = current_switches()
            self._running += 1

    def leave(self) -> None:
        """End a step: if it is the last one that runs, restore the switches."""
        with self._lock:
            self._running -= 1
            if not self._running:
                restore(self._wanted(current_switches()))

    def _wanted(self, now: Switches) -> Switches:
        """Return the settings of the caller: those from before, except switches that other code has changed since."""
        pairs = zip(now.backends, self._ours.backends, self._before.backends, strict=True)
        common = self._before.common if now.common in (None, self._ours.common) else now.common
        return Switches(common, tuple(before if value == ours else value for value, ours, before in pairs))


def backends() -> tuple[Any, ...]:
    """Return the modules of torch with a switch for the matrix products of a backend."""
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def current_switches() -> Switches:
    """Return the current settings."""
    own = tuple(backend.fp32_precision for backend in backends())
    try:
        return Switches(torch.get_float32_matmul_precision(), own)
    except RuntimeError:
        return Switches(None, own)


def set_exact(now: Switches) -> None:
    """Set full precision, by the common switch if the caller uses that."""
    if now.common is not None:
        torch.set_float32_matmul_precision("highest")
        return
    for backend in backends():
        backend.fp32_precision = "ieee"


def restore(wanted: Switches) -> None:
    """Set the switches to these values. A backend set to "none" follows the common switch again."""
    if wanted.common is not None:
        torch.set_float32_matmul_precision(wanted.common)
    for backend, own in zip(backends(), wanted.backends, strict=True):
        backend.fp32_precision = "none"
        if backend.fp32_precision != own:
            backend.fp32_precision = own


_SHARED = SharedSwitches()
