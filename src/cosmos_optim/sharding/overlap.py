"""Run two jobs at a time, so that the messages of one stack are sent while another computes.

Each worker is a thread with its own CUDA stream, but only one thread runs at any moment: a job runs until it has
started a message, then the other worker continues. The order depends only on the jobs, never on timing, so every
process starts its messages in the same order. Otherwise, ranks would wait for each other forever.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from cosmos_optim.engine.layout import Job


class _Stopped(BaseException):
    """Another worker failed."""


class _Turns:
    """The workers that wait for their turn, the next one first, and the first error."""

    def __init__(self) -> None:
        self.waiting: deque[threading.Semaphore] = deque()
        self.error: BaseException | None = None

    def run_next(self) -> None:
        """Let the next worker run, if one waits."""
        if self.waiting:
            self.waiting.popleft().release()


_thread = threading.local()
_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def let_others_run() -> None:
    """Let the other worker run until it calls this too. Return at once if there is none."""
    turns: _Turns | None = getattr(_thread, "turns", None)
    if turns is not None:
        turns.waiting.append(_thread.turn)
        turns.run_next()
        _wait_for_turn(turns)


def _wait_for_turn(turns: _Turns) -> None:
    _thread.turn.acquire()
    if turns.error is not None:
        raise _Stopped


def run(jobs: Sequence[Job], device: torch.device, *, width: int = 2) -> None:
    """Run all jobs, `width` at a time, started in the order given. Raise the first error of a job."""
    width = min(width, len(jobs))
    if width < 2:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for job in jobs:
                job()
        return
    remaining, turns = iter(jobs), _Turns()
    turns.waiting.extend(threading.Semaphore(0) for _ in range(width))
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device.type)
    caller = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def work(worker: int, turn: threading.Semaphore) -> None:
        _thread.turns, _thread.turn = turns, turn
        try:
            _wait_for_turn(turns)
            # These two settings are per thread.
            with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=autocast):
                with _own_stream(device, worker, caller):
                    for job in remaining:
                        job()
        except _Stopped:
            pass
        except BaseException as error:
            turns.error = error
        finally:
            turns.run_next()

    threads = [threading.Thread(target=work, args=x, name=f"cosmos overlap worker {x[0]}")
               for x in enumerate(turns.waiting)]  # fmt: skip
    for thread in threads:
        thread.start()
    turns.run_next()
    for thread in threads:
        thread.join()
    if caller is not None:
        for worker in range(width):
            if (device, worker) in _streams:
                caller.wait_stream(_streams[device, worker])
    if turns.error is not None:
        raise turns.error


@contextlib.contextmanager
def _own_stream(device: torch.device, worker: int, caller: torch.cuda.Stream | None) -> Iterator[None]:
    """Enter the worker's stream, which waits for everything that the caller has queued."""
    if caller is None:
        yield
        return
    if (device, worker) not in _streams:
        _streams[device, worker] = torch.cuda.Stream(device)
    stream = _streams[device, worker]
    stream.wait_stream(caller)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
