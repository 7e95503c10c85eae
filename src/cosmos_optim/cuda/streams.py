"""Two chunks at a time on one GPU, so that small and memory-bound kernels hide behind large products.

A chunk runs on one of two lanes of high priority; its Newton-Schulz products run on a third stream of low priority that
all chunks share. While the products of one chunk fill the machine, the kernels of the next one take the multiprocessors
that become free. Everything waits for the caller's stream at the start, and the caller's stream for everything at the
end; streams are forked and joined by events, so that all this can be captured in a CUDA graph.

Memory: what a lane allocates is used on the lane and, before the lane waits for it, on the heavy stream; what the heavy
stream allocates is used there alone, most of it in one slab for all chunks of a step. So the order within each stream
is enough to keep reuse safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cosmos_optim.cuda.memory_pool import Slab


class Lanes:
    """The streams of one device; without CUDA everything runs in place."""

    _known: dict[torch.device, Lanes] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on = device.type == "cuda"
        self.lanes = [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if self.on else []
        self.heavy_stream = torch.cuda.Stream(device, priority=0) if self.on else None
        self.depth = 0
        self._slab: Slab | None = None
        self._room = 0

    @classmethod
    def of(cls, device: torch.device) -> Lanes:
        """The lanes of a device, made once."""
        if device not in cls._known:
            cls._known[device] = cls(device)
        return cls._known[device]

    @contextmanager
    def forked(self, room: int = 0) -> Iterator[None]:
        """Around all chunks of a step, the largest of which needs so much room in the slab."""
        if not self.on:
            yield
            return
        main = torch.cuda.current_stream(self.device)
        for stream in self.lanes:
            stream.wait_stream(main)
        self.depth += 1
        self._room = room
        try:
            yield
        finally:
            self.depth -= 1
            self._slab = None
            for stream in self.lanes:
                main.wait_stream(stream)

    @contextmanager
    def lane(self, k: int) -> Iterator[None]:
        """Around chunk k."""
        if not self.depth:
            yield
            return
        with torch.cuda.stream(self.lanes[k % 2]):
            yield

    def slab(self, size: int) -> Slab:
        """Memory for the products inside `heavy`: the step's, or a new piece where that is too small."""
        if not self.depth:
            return Slab(size, self.device)
        if self._slab is None or self._slab.memory.numel() < size:
            self._slab = None
            self._slab = Slab(max(size, self._room), self.device)
        return self._slab

    @contextmanager
    def heavy(self) -> Iterator[None]:
        """Around the large products of a chunk: on the shared stream if chunks overlap, else in place."""
        if not self.depth or self.heavy_stream is None:
            yield
            return
        lane = torch.cuda.current_stream(self.device)
        self.heavy_stream.wait_stream(lane)
        with torch.cuda.stream(self.heavy_stream):
            yield
        lane.wait_stream(self.heavy_stream)
