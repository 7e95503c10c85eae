"""Run two jobs at a time, so that the messages of one stack are sent while another computes.

Each worker is a thread with its own CUDA stream, but only one thread runs at any moment: a job runs until it has
started a message, then the other worker continues. Who runs next depends only on the jobs, never on time, so every
process starts its messages in the same order. If the order varied, ranks would wait for each other forever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch

from cosmos_optim.engine.layout import Job


class _Scheduler:
    """Which worker may run: `running`, one of those that are still `active`."""

    def __init__(self, workers: int) -> None:
        self.changed = threading.Condition()
        self.active = list(range(workers))
        self.running = 0
        self.error: BaseException | None = None

    def wait_for_turn(self, worker: int) -> None:
        """Block until this worker may run."""
        self.changed.wait_for(lambda: self.running == worker or self.error is not None)
        if self.error is not None:
            raise _Stopped

    def run_next(self, worker: int) -> None:
        """Let the next active worker run, if there is another."""
        others = [x for x in self.active if x > worker] + [x for x in self.active if x < worker]
        if others:
            self.running = others[0]
            self.changed.notify_all()

    def finish(self, worker: int) -> None:
        """Remove this worker, and let the next one run."""
        self.run_next(worker)
        self.active.remove(worker)
        self.changed.notify_all()


class _Stopped(BaseException):
    """Another worker failed."""


_thread = threading.local()
_streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def let_others_run() -> None:
    """Let the other worker run until it calls this too. Return at once if there is no other."""
    scheduler: _Scheduler | None = getattr(_thread, "scheduler", None)
    if scheduler is not None:
        with scheduler.changed:
            scheduler.run_next(_thread.worker)
            scheduler.wait_for_turn(_thread.worker)


def run(jobs: Sequence[Job], device: torch.device, *, width: int = 2) -> None:
    """Run all jobs, `width` at a time, started in the order given. Raise the first error of a job."""
    width = min(width, len(jobs))
    if width < 2:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for job in jobs:
                job()
        return
    waiting, scheduler = iter(jobs), _Scheduler(width)
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device.type)
    caller = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def work(worker: int) -> None:
        _thread.scheduler, _thread.worker = scheduler, worker
        try:
            with scheduler.changed:
                scheduler.wait_for_turn(worker)
            # torch keeps these two settings for each thread.
            with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=autocast):
                with _own_stream(device, worker, caller):
                    for job in waiting:
                        job()
        except _Stopped:
            pass
        except BaseException as error:
            scheduler.error = error
        finally:
            with scheduler.changed:
                scheduler.finish(worker)

    threads = [threading.Thread(target=work, args=(i,), name=f"cosmos overlap worker {i}") for i in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if caller is not None:
        for worker in range(width):
            if (device, worker) in _streams:
                caller.wait_stream(_streams[device, worker])
    if scheduler.error is not None:
        raise scheduler.error


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
