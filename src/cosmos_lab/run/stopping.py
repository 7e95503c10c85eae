"""How a run is told to stop: a signal is noted, and the loop ends after the step it is in.

    with watch() as request:
        while not request.signum:
            step()

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
# its group, and `torchrun` and `compare --parallel` pass on what their workers may have had already.
_ECHO_S = 2.0


class Stopped(KeyboardInterrupt):
    """Work ended because a signal asked for it; whatever handles Ctrl-C handles this too.

    code: the exit code by which shells know the signal, 143 or 130.
    """

    def __init__(self, signum: int, where: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} {where}")
        self.code = 128 + signum


class Request:
    """What was asked for so far: ``signum`` is the signal that came, 0 while there is none."""

    def __init__(self) -> None:
        self.signum = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def check(self, where: str) -> None:
        """Raise ``Stopped`` if a signal came."""
        if self.signum:
            raise Stopped(self.signum, where)

    def listen(self) -> None:
        """Note signals from here on, but those that are ignored or that something other than Python handles."""
        for signum in SIGNALS:
            if signal.getsignal(signum) not in (None, signal.SIG_IGN):
                self._before[signum] = signal.signal(signum, self._note)

    def let_go(self) -> None:
        """Signals do again what they did before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, signum: int, frame: object) -> None:
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()
        elif time.monotonic() - self._since > _ECHO_S:  # asked twice: now
            self.let_go()
            signal.raise_signal(signum)


_current: Request | None = None  # of the main thread


@contextmanager
def watch() -> Iterator[Request]:
    """Until the end of the block note SIGTERM and SIGINT; a second one acts as without this.

    A block within another shares its request. The end of the outermost one raises ``Stopped`` if a signal came that
    nobody acted on. Signals reach the main thread alone, so in another thread nothing is noted.
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
            request.let_go()
            _current = None
        request.check("when all was done")
