"""Two buckets at a time, so that the messages of one travel while the other computes.

Each job runs in a thread of its own with a CUDA stream of its own, but only one thread runs at any moment: a job holds
the floor until it has started a message, then the other lane goes on. The turns depend on the jobs alone, never on
time, so every process starts its messages in the same order: with messages in an order that varied, ranks would wait
for each other for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

Job = Callable[[], None]


class _Floor:
    """Who may run: lane `turn` of those still `open`."""

    def __init__(self, lanes: int) -> None:
        self.changed = threading.Condition()
        self.open = list(range(lanes))
        self.turn = 0
        self.error: BaseException | None = None

    def wait_for(self, lane: int) -> None:
        self.changed.wait_for(lambda: self.turn == lane or self.error is not None)
        if self.error is not None:
            raise _Stopped

    def pass_on(self, lane: int, *, leave: bool = False) -> None:
        later = [other for other in self.open if other > lane] + [other for other in self.open if other < lane]
        if leave:
            self.open.remove(lane)
        if later:
            self.turn = later[0]
            self.changed.notify_all()


class _Stopped(BaseException):
    """Another lane failed."""


_mine = threading.local()
_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def let_others_run() -> None:
    """Let the other lane run until it rests; at once back where there is none."""
    floor: _Floor | None = getattr(_mine, "floor", None)
    if floor is not None:
        with floor.changed:
            floor.pass_on(_mine.lane)
            floor.wait_for(_mine.lane)


def run(jobs: Sequence[Job], device: torch.device, *, width: int = 2) -> None:
    """All jobs, `width` at a time, each begun in the order given. Errors of a job are raised here."""
    width = min(width, len(jobs))
    if width < 2:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for job in jobs:
                job()
        return
    waiting, floor = iter(jobs), _Floor(width)
    settings = (torch.is_grad_enabled(), torch.is_autocast_enabled(device.type))

    def work(lane: int) -> None:
        _mine.floor, _mine.lane = floor, lane
        try:
            with floor.changed:
                floor.wait_for(lane)
            with _like_the_caller(device, *settings), _own_stream(device, lane, caller):
                for job in waiting:
                    job()
        except _Stopped:
            pass
        except BaseException as error:
            floor.error = error
        finally:
            with floor.changed:
                floor.pass_on(lane, leave=True)
                floor.changed.notify_all()

    caller = torch.cuda.current_stream(device) if device.type == "cuda" else None
    threads = [threading.Thread(target=work, args=(lane,), name=f"cosmos lane {lane}") for lane in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if caller is not None:
        for lane in range(width):
            if (device, lane) in _streams:
                caller.wait_stream(_streams[device, lane])
    if floor.error is not None:
        raise floor.error


@contextlib.contextmanager
def _like_the_caller(device: torch.device, grad: bool, autocast: bool) -> Iterator[None]:
    """Settings that torch keeps for each thread."""
    with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=autocast):
        yield


@contextlib.contextmanager
def _own_stream(device: torch.device, lane: int, caller: torch.cuda.Stream | None) -> Iterator[None]:
    """The lane's stream, which begins after all that the caller has asked for."""
    if caller is None:
        yield
        return
    if (device, lane) not in _streams:
        _streams[device, lane] = torch.cuda.Stream(device)
    stream = _streams[device, lane]
    stream.wait_stream(caller)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
