"""Compile kernels in parallel, before any of them is launched.

A step launches some forty kernels one after the other, and without a cache each launch would wait for the compiler.
This file runs the work once with launches disabled: a pool of threads compiles every kernel that it would launch, with
the small C module that passes its arguments.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch

from cosmos_optim.cuda.kernels.launch import KERNELS, on_device, triton
from cosmos_optim.engine.capture import is_capturing

# The compiler holds Python's lock part of the time, so more threads gain little.
THREADS = 16
_one_at_a_time = threading.Lock()
# The thread that has its launches disabled.
_disabled_in: int | None = None


class Precompiler:
    """Collects work of new kinds, and compiles the kernels of all of it at once.

    Without it, the first steps and the recorded step would compile their kernels one after the other.
    """

    _known: set[Hashable] = set()

    def __init__(self) -> None:
        self._new: dict[torch.device, list[Callable[[], Any]]] = defaultdict(list)

    def add(self, device: torch.device, kind: Hashable, work: Callable[[], Any]) -> None:
        """Add work, unless work of this kind has been added in this process before."""
        if (device, kind) not in self._known:
            self._known.add((device, kind))
            self._new[device].append(work)

    def run(self) -> None:
        """Compile what the work needs, and release it: it holds gradients, which must be free before the next step."""
        while self._new:
            compile_in_parallel(*self._new.popitem())


def compile_in_parallel(device: torch.device, works: Sequence[Callable[[], Any]]) -> None:
    """Compile every kernel that `works` would launch, in parallel.

    The callables run with launches disabled and read uninitialized memory, so their exceptions are ignored. A kernel
    that does not compile fails again, and is reported, when it is launched. While the user captures a
    CUDA graph, this does nothing.
    """
    if device.type != "cuda" or not hasattr(triton, "AsyncCompileMode") or is_capturing(device):
        return
    with _one_at_a_time, suppress(Exception), on_device(device), _LoadingPool(thread_count(), device) as pool:
        with triton.AsyncCompileMode(pool, ignore_errors=True), _disable_launches():
            for work in works:
                with suppress(Exception):
                    work()


def launches_disabled() -> bool:
    """Return whether launches of this thread are disabled; kernel outputs are then uninitialized."""
    return _disabled_in == threading.get_ident()


def thread_count() -> int:
    """Return this process's share of the cores: under torchrun, other processes compile at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(THREADS, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class _LoadingPool(ThreadPoolExecutor):
    """Threads that also load what they have compiled."""

    def __init__(self, threads: int, device: torch.device) -> None:
        super().__init__(threads, initializer=torch.cuda.set_device, initargs=(device,))

    def submit(self, fn: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_compile_and_load, fn, *args, **kwargs)


def _compile_and_load(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernel = fn(*args, **kwargs)
    _ = kernel.run  # builds the module that passes arguments, and copies the code to the device
    return kernel


@contextmanager
def _disable_launches() -> Iterator[None]:
    """Turn every launch of a kernel in this thread into a request for its compilation."""
    global _disabled_in
    _disabled_in = threading.get_ident()

    def compile_only(kernel: Any) -> Callable[..., Any]:
        plain = kernel.run

        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return plain(*args, grid=grid, warmup=warmup or launches_disabled(), **kwargs)

        return run

    try:
        for kernel in KERNELS:
            kernel.run = compile_only(kernel)
        yield
    finally:
        _disabled_in = None
        for kernel in KERNELS:
            vars(kernel).pop("run", None)
