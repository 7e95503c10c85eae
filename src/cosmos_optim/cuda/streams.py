"""Run two chunks at a time on one GPU, so that small and memory-bound kernels overlap with large products.

A chunk runs on one of two streams of high priority; its Newton-Schulz products run on a third stream of low priority
that all chunks share. While the products of one chunk fill the GPU, the kernels of the next one use the
multiprocessors that become free. All streams wait for the caller's stream at the start, and it waits for them at the
end. Events fork and join the streams, so a CUDA graph can capture all this.

Memory: a chunk's stream allocates all that it uses, including what it shares with the product stream, because it waits
for that stream's result. The product stream allocates only what it alone uses, mostly in one pool for all chunks of a
step. So the order within each stream makes reuse safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cosmos_optim.cuda.memory_pool import MemoryPool


class Streams:
    """The streams of one device; without CUDA they do nothing."""

    _by_device: dict[torch.device, Streams] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.chunk_streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)] if is_cuda else []
        self.product_stream = torch.cuda.Stream(device, priority=0) if is_cuda else None
        self.depth = 0  # forks that are not joined yet
        self._pool: MemoryPool | None = None
        self._pool_bytes = 0

    @classmethod
    def of(cls, device: torch.device) -> Streams:
        """Return the streams of a device; create them on the first call."""
        if device not in cls._by_device:
            cls._by_device[device] = cls(device)
        return cls._by_device[device]

    @contextmanager
    def forked(self, pool_bytes: int = 0) -> Iterator[None]:
        """Fork the streams for all chunks of a step, and join them after it. Products need up to `pool_bytes`."""
        if self.product_stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        for stream in self.chunk_streams:
            stream.wait_stream(caller)
        self.depth += 1
        self._pool_bytes = pool_bytes
        try:
            yield
        finally:
            self.depth -= 1
            self._pool = None
            for stream in self.chunk_streams:
                caller.wait_stream(stream)

    @contextmanager
    def chunk(self, k: int) -> Iterator[None]:
        """Run chunk k on one of the two streams if they are forked, else on the current stream."""
        if not self.depth:
            yield
            return
        with torch.cuda.stream(self.chunk_streams[k % 2]):
            yield

    def pool(self, size: int) -> MemoryPool:
        """Return memory for the products: the step's pool, or a new one if that is too small."""
        if not self.depth:
            return MemoryPool(size, self.device)
        if self._pool is None or self._pool.memory.numel() < size:
            self._pool = None  # free it before allocating the next one
            self._pool = MemoryPool(max(size, self._pool_bytes), self.device)
        return self._pool

    @contextmanager
    def products(self) -> Iterator[None]:
        """Run the large products of a chunk on the shared stream if chunks overlap, else on the current stream."""
        if not self.depth or self.product_stream is None:
            yield
            return
        chunk_stream = torch.cuda.current_stream(self.device)
        self.product_stream.wait_stream(chunk_stream)
        with torch.cuda.stream(self.product_stream):
            yield
        chunk_stream.wait_stream(self.product_stream)
