"""One buffer of device memory for the temporaries of Newton-Schulz, reused within a step without the allocator.

The allocator keeps freed blocks of every size that a step ever asked for, on every stream: several times what is in use
at any time. The products of all chunks run one after the other on one stream, so one buffer serves them all. A part of
it is free again as soon as its tensor is deleted.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import padded_row
from cosmos_optim.linalg.newton_schulz import NewtonSchulz, gram_count

# Every part begins at a multiple of this many bytes.
ALIGN = 1024


class MemoryPool:
    """A buffer, and which tensors use which part of it.

    A view of a tensor from `empty_stack` must not outlive that tensor: its part would be given to the next one.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.used: list[tuple[int, int, weakref.ref[Tensor]]] = []  # begin, end, tensor; in order of begin

    def empty_stack(self, A: Tensor, rows: int) -> Tensor:
        """Return an empty stack of (rows, s) matrices with rows padded to 16 bytes; s and dtype are those of A.

        If the pool is full, the tensor is allocated outside of it.
        """
        batch, s, size = A.shape[0], A.shape[2], A.element_size()
        row_stride = padded_row(s, size)
        count = batch * rows * row_stride
        begin = self._find(count * size)
        if begin is None:
            return A.new_empty(batch, rows, row_stride)[:, :, :s]
        part = self.memory[begin : begin + count * size].view(A.dtype).view(batch, rows, row_stride)[:, :, :s]
        self.used.append((begin, begin + count * size, weakref.ref(part)))
        self.used.sort(key=lambda item: item[0])
        return part

    def _find(self, size: int) -> int | None:
        """Return the first offset with `size` free bytes, or None."""
        self.used = [item for item in self.used if item[2]() is not None]
        begin = 0
        for first, end, _ in self.used:
            if begin + size <= first:
                return begin
            begin = -(-end // ALIGN) * ALIGN
        return begin if begin + size <= self.memory.numel() else None


def iterate_bytes(batch: int, length: int, width: int, element: int, grams: int, steps: int) -> int:
    """Return the bytes that `newton_schulz.iterate` needs at the same time in addition to X.

    Args:
        batch, length, width: the shape of X.
        element: bytes of an element.
        grams: number of iterations that compute the Gram matrix from X.
        steps: number of all iterations.
    """
    row_bytes = padded_row(width, element) * element
    like_X, squares = min(grams - 1, 2), 2 if grams == steps else 4
    parts = [batch * length * row_bytes] * like_X + [batch * width * row_bytes] * squares
    return sum(-(-part // ALIGN) * ALIGN for part in parts)


def newton_schulz_bytes(batch: int, m: int, n: int, ns: NewtonSchulz) -> int:
    """Return the bytes of temporaries of Newton-Schulz on a half-precision stack (batch, m, n)."""
    long, short = max(m, n), min(m, n)
    grams = gram_count(long, short, ns.steps, torch.float16)
    return iterate_bytes(batch, long, short, 2, grams, ns.steps)
