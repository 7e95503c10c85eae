"""Kernels compiled side by side, before any of them is launched.

A step launches some forty kernels one after the other, and without a cache each launch would wait for the compiler.
Here the launches are put off: every kernel that some work would launch is compiled by a pool of threads, with the
small C module that passes its arguments, and is found ready when the work is done in earnest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from cosmos_optim.cuda.kernels.launch import INTERPRET, KERNELS, current, triton

# The compiler holds Python's lock for a part of its time, which bounds what more threads could gain.
THREADS = 16
_one_at_a_time = threading.Lock()
# The thread whose launches are put off.
_rehearsing: int | None = None


def compile_ahead(device: torch.device, works: Sequence[Callable[[], Any]]) -> None:
    """Compile the kernels that these launch; they run here, with kernels that do nothing, for their launches alone.

    What they read is noise then, so that failures say nothing. A kernel that cannot be compiled fails again when it is
    launched in earnest, where that is reported. Under a capture by the user nothing can be tried out.
    """
    if device.type != "cuda" or INTERPRET or not hasattr(triton, "AsyncCompileMode"):
        return
    if torch.cuda.is_current_stream_capturing():
        return
    with _one_at_a_time, suppress(Exception), current(device), _Loading(threads(), device) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True), _launches_put_off():
            for work in works:
                with suppress(Exception):
                    work()


def threads() -> int:
    """This process's share of the cores: under torchrun others compile the same at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class _Loading(ThreadPoolExecutor):
    """Threads that load what they have compiled."""

    def __init__(self, threads: int, device: torch.device) -> None:
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, fn: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_loaded, fn, *args, **kwargs)


def _loaded(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = fn(*args, **kwargs)
    _ = kernel.run  # makes the module that passes arguments, and brings the code to the device
    return kernel


def rehearsing() -> bool:
    """Whether launches of this thread are put off, so that what kernels should have written is noise."""
    return _rehearsing == threading.get_ident()


@contextmanager
def _launches_put_off() -> Iterator[None]:
    """Every launch of a kernel in this thread asks for its compilation alone."""
    global _rehearsing
    _rehearsing = threading.get_ident()

    def compile_only(kernel: Any) -> Callable[..., Any]:
        plain = kernel.run

        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return plain(*args, grid=grid, warmup=warmup or rehearsing(), **kwargs)

        return run

    try:
        for kernel in KERNELS:
            kernel.run = compile_only(kernel)
        yield
    finally:
        _rehearsing = None
        for kernel in KERNELS:
            vars(kernel).pop("run", None)
