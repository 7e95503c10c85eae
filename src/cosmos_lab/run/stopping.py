"""Stop on a signal: it is recorded, and the loop ends after its current step.

SLURM, Kubernetes, ``timeout`` and machines that may be taken away send SIGTERM, a terminal's Ctrl-C is SIGINT.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds in which a signal that comes again is the same one: `timeout`, SLURM and terminals send it to a process and to
# its group, and `torchrun` and `compare --parallel` forward what their processes may have received already.
_ECHO_S = 2.0


class Stopped(KeyboardInterrupt):
    """Work ended because a signal asked for it; code that handles Ctrl-C handles this too."""

    def __init__(self, signum: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")
        self.code = 128 + signum  # the exit code that shells expect, 143 or 130


class Request:
    """The request to stop: ``signum`` is the signal that came, 0 while there is none."""

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def check(self, where: str) -> None:
        """Raise ``Stopped`` if a signal came."""
        if self.signum:
            raise Stopped(self.signum, where)

    def listen(self) -> None:
        """Record signals from now on, except those that are ignored or that something other than Python handles."""
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (None, signal.SIG_IGN):
                self._before[signum] = signal.signal(signum, self._record)

    def restore(self) -> None:
        """Restore the handlers that signals had before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _record(self, signum: int, frame: object) -> None:
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
        elif time.monotonic() - self._since > _ECHO_S:  # the second signal: act at once
            self.restore()
            signal.raise_signal(signum)


_current: Request | None = None  # of the main thread


@contextmanager
def watch() -> Iterator[Request]:
    """Record SIGTERM and SIGINT until the end of the block; a second one has its usual effect.

    A block within another shares its request. The end of the outermost one raises ``Stopped`` if a signal came that
    nothing acted on. Signals reach only the main thread, so nothing is recorded in another one.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield Request()
    elif _current is not None:
        yield _current
    else:
        _current = request = Request()
        try:
            request.listen()
            yield request
        finally:
            request.restore()
            _current = None
        request.check("after all work was done")
