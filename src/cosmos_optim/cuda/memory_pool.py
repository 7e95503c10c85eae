"""One piece of device memory for the temporaries of Newton-Schulz, handed out and taken back without the allocator.

The allocator keeps freed blocks of every size that a step ever asked for, on every stream: several times what is in use
at once. The products of all chunks run one after the other on one stream, so one piece serves them all. A part of it is
free again as soon as the tensor made of it is gone.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

ALIGN = 1024


class MemoryPool:
    """A piece of memory and who holds which part of it. What is taken must not outlive, as a view, the tensor taken."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.held: list[tuple[int, int, weakref.ref[Tensor]]] = []  # begin, end, who, in order of place

    def like(self, A: Tensor, rows: int) -> Tensor:
        """An empty stack of `rows` x s matrices with rows padded to 16 bytes, as A has them; outside if full."""
        batch, s, size = A.shape[0], A.shape[2], A.element_size()
        pitch = -(-s * size // 16) * 16 // size
        count = batch * rows * pitch
        begin = self._gap(count * size)
        if begin is None:
            return A.new_empty(batch, rows, pitch)[:, :, :s]
        part = self.memory[begin : begin + count * size].view(A.dtype).view(batch, rows, pitch)[:, :, :s]
        self.held.append((begin, begin + count * size, weakref.ref(part)))
        self.held.sort(key=lambda item: item[0])
        return part

    def _gap(self, size: int) -> int | None:
        """Where so many bytes are free."""
        self.held = [item for item in self.held if item[2]() is not None]
        begin = 0
        for first, end, _ in self.held:
            if begin + size <= first:
                return begin
            begin = -(-end // ALIGN) * ALIGN
        return begin if begin + size <= self.memory.numel() else None


def newton_schulz_bytes(batch: int, length: int, width: int, element: int, fresh: int, steps: int) -> int:
    """What `iterate` needs at once: stacks like X beside X itself, and square ones."""
    pitch = -(-width * element // 16) * 16
    longs, squares = min(fresh - 1, 2), 2 if fresh == steps else 4
    parts = [batch * length * pitch] * longs + [batch * width * pitch] * squares
    return sum(-(-part // ALIGN) * ALIGN for part in parts)
