"""Pass a list of matrices of equal shape to a kernel, as a table of their addresses on the device.

Nothing is stacked or copied: kernels read and write each matrix in its own memory. Each table is written once,
through pinned memory and without synchronization, and never changed: a captured CUDA graph that reads it stays valid.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import tl
from cosmos_optim.engine.capture import is_capturing
from cosmos_optim.rules.rule import M_SCALE

# Maximum number of cached tables, because gradients may have new addresses at every step.
_KEPT = 512
_tables: OrderedDict[Any, Tensor] = OrderedDict()
# A graph reads its tables, and the host memory they are copied from, at every replay. This list keeps them alive;
# inside `keep_tables_in` it is the list of the graph's owner.
_captured: list[tuple[Tensor, Tensor | None]] = []

# Triton's names of the types of a matrix's elements.
ELEMENT_TYPES = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8"
}  # fmt: skip


class _PinnedMemory:
    """Pinned memory, handed out once and never reused; allocated in advance, because a capture forbids it."""

    SIZE = 1 << 16

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int64, device="cpu")
        self.used = 0

    def take(self, values: Sequence[int]) -> Tensor:
        """Return a pinned tensor with these values."""
        if self.used + len(values) > self.memory.numel():
            size = max(self.SIZE, len(values))
            self.memory = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
            self.used = 0
        piece = self.memory[self.used : self.used + len(values)]
        self.used += len(values)
        return piece.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))


_pinned = _PinnedMemory()


@contextmanager
def keep_tables_in(held: list[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Append the tables that a capture reads to `held`, which must live as long as the graph."""
    global _captured
    before, _captured = _captured, held
    try:
        yield
    finally:
        _captured = before


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Return the int64 table of the addresses of these tensors, on their device."""
    device = tensors[0].device
    pointers = tuple([t.data_ptr() for t in tensors])
    if device.type != "cuda":
        return torch.tensor(pointers, dtype=torch.int64, device=device)
    capturing = is_capturing(device)
    key = (device, pointers)
    table, host = _tables.get(key), None
    if table is None:
        host = _pinned.take(pointers)
        table = host.to(device, non_blocking=True)
    if capturing:
        _captured.append((table, host))
    if not capturing or host is None:  # memory allocated during a capture is filled only by a replay
        _tables[key] = table
        _tables.move_to_end(key)
    if len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return table


@dataclass(frozen=True, eq=False)
class MatrixList:
    """A list of (m, n) matrices with one dtype and one pair of strides, and the table of their addresses.

    scales: if the matrices are integers, the scales of their blocks (see `linalg.int8_momentum`).
    corrections: if the matrices are weights of 24 bits, the corrections of their bfloat16 (see `linalg.weight24`).
    """

    tensors: list[Tensor]
    table: Tensor
    scales: MatrixList | None = None
    corrections: MatrixList | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], table: Tensor | None = None) -> MatrixList:
        """Return the operand for these tensors, or for similar ones with the addresses in `table`."""
        return cls(list(tensors), addresses(tensors) if table is None else table)

    @classmethod
    def momentum(cls, state: Mapping[str, list[Tensor]]) -> MatrixList:
        """Return the operand for M, with its scales if the state has them."""
        M, scales = state["M"], state.get(M_SCALE)
        return cls(M, addresses(M), None if scales is None else cls.of(scales))

    @classmethod
    def weights(cls, params: Sequence[Tensor], corrections: Sequence[Tensor] | None) -> MatrixList:
        """Return the operand for parameters, with their corrections if they have some."""
        return cls(list(params), addresses(params), None, None if corrections is None else cls.of(corrections))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (m, n) of each matrix."""
        m, n = self.tensors[0].shape
        return m, n

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors)

    def source(self) -> dict[str, Any]:
        """Return the arguments by which a kernel reads the matrices at `table`: strides, element type, alignment.

        ALIGNMENT_CLASSES: rows i and i + ALIGNMENT_CLASSES have the same offset modulo 16 bytes (see `kernels.tiles`).
        ALIGNED: every matrix begins at a multiple of 16 bytes, so rows of one class can be loaded 16 bytes at a time.
        """
        t = self.tensors[0]
        width = 16 // t.element_size()
        classes = width // math.gcd(max(t.stride()), width)
        loadable = classes == 1 or t.stride(1) == 1
        aligned = loadable and all(x.data_ptr() % 16 == 0 for x in self.tensors)
        return {"sm": t.stride(0), "sn": t.stride(1), "ELEMENT": getattr(tl, ELEMENT_TYPES[t.dtype]),
                "ALIGNED": aligned, "ALIGNMENT_CLASSES": classes if aligned else 1}  # fmt: skip

    def rows_source(self) -> dict[str, Any]:
        """Return the same for a kernel with tiles of neighbouring rows: ALIGNED then needs all rows aligned."""
        source = self.source()
        one_class = source.pop("ALIGNMENT_CLASSES") == 1
        return source | {"ALIGNED": source["ALIGNED"] and one_class}


def same_layout(tensors: Sequence[Tensor]) -> bool:
    """Return whether a kernel can read these as one list: equal shapes, dtypes and strides, one of the strides 1."""
    t = tensors[0]
    same = all((x.shape, x.dtype, x.stride(), x.device) == (t.shape, t.dtype, t.stride(), t.device) for x in tensors)
    return same and t.ndim == 2 and t.dtype in ELEMENT_TYPES and 1 in t.stride()
