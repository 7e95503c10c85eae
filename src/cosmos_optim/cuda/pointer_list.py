"""Lists of equal matrices as one operand: a table of their addresses on the device.

Nothing is stacked or copied: kernels read and write each matrix where it lives. A table is written once for a set of
addresses, through pinned memory and without waiting, into a buffer of its own that is never rewritten, so that a
captured CUDA graph which reads it stays valid.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import tl

# Tables kept: gradients that move in memory at every step must not fill the device with tables.
_KEPT = 512
_tables: OrderedDict[Any, Tensor] = OrderedDict()
# A graph reads its tables, and the host memory they are copied from, at every replay: they live as long as this list,
# which is everybody's until `keeping` names another.
_captured: list[tuple[Tensor, Tensor | None]] = []

# Whether kernels may read rows that begin anywhere by 16 bytes at a time; `health` clears it where that fails.
WIDE_ODD_ROWS = True

_ELEMENT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class _Arena:
    """Pinned memory, taken piece by piece and never twice: none may be asked for while a graph is captured."""

    SIZE = 1 << 16

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.int64, device="cpu")
        self.used = 0

    def take(self, values: Sequence[int]) -> Tensor:
        """A pinned tensor with these values."""
        if self.used + len(values) > self.memory.numel():
            size = max(self.SIZE, len(values))
            self.memory = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
            self.used = 0
        piece = self.memory[self.used : self.used + len(values)]
        self.used += len(values)
        return piece.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))


_arena = _Arena()


@contextmanager
def keeping(held: list[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """What a capture inside reads goes to `held`, for the owner of the graph to keep."""
    global _captured
    before, _captured = _captured, held
    try:
        yield
    finally:
        _captured = before


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """The int64 table of where these tensors begin, on their device."""
    device = tensors[0].device
    where = tuple([t.data_ptr() for t in tensors])
    if device.type != "cuda":
        return torch.tensor(where, dtype=torch.int64, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    key = (device, where)
    table, host = _tables.get(key), None
    if table is None:
        host = _arena.take(where)
        table = host.to(device, non_blocking=True)
    if capturing:
        _captured.append((table, host))
    if not capturing or host is None:  # what a capture allocates holds values only once it is replayed
        _tables[key] = table
        _tables.move_to_end(key)
    if len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return table


@dataclass(frozen=True, eq=False)
class Matrices:
    """A list of (m, n) matrices with one dtype and one pair of strides.

    moves: the table will name other matrices of the same kind later, so only kernels that read it may be asked.
    """

    tensors: list[Tensor]
    table: Tensor
    moves: bool = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor], table: Tensor | None = None) -> Matrices:
        """The operand for these tensors, by a table of its own or by a given one that somebody else writes."""
        return cls(list(tensors), addresses(tensors) if table is None else table, table is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        m, n = self.tensors[0].shape
        return m, n

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.tensors[0].device

    def __len__(self) -> int:
        return len(self.tensors)

    def source(self) -> dict[str, Any]:
        """The arguments by which a kernel reads it: table, strides, element type, alignment.

        CLASSES: rows that far apart begin at multiples of 16 bytes from each other, 1 if all do. ALIGNED: every matrix
        begins at such a multiple, and wide loads are possible within a class.
        """
        t = self.tensors[0]
        width = 16 // t.element_size()
        classes = width // math.gcd(max(t.stride()), width)
        regular = classes == 1 or (t.stride(1) == 1 and WIDE_ODD_ROWS)
        aligned = regular and all(x.data_ptr() % 16 == 0 for x in self.tensors)
        return {"x": self.table, "sm": t.stride(0), "sn": t.stride(1), "ELEMENT": getattr(tl, _ELEMENT[t.dtype]),
                "ALIGNED": aligned, "CLASSES": classes if aligned else 1}  # fmt: skip

    def rows_source(self) -> dict[str, Any]:
        """The same for a kernel whose tiles hold neighbouring rows: aligned if all rows are."""
        source = self.source()
        aligned = source["ALIGNED"] and source.pop("CLASSES") == 1
        source.pop("CLASSES", None)
        return source | {"ALIGNED": aligned}

    def stacked(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy as one tensor (B, m, n)."""
        assert not self.moves, "a matrix that moves can be read through its table alone"
        return torch.stack([t.to(dtype) for t in self.tensors])


def uniform(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can take these as one list: equal shapes, dtypes and strides, one of the strides 1."""
    t = tensors[0]
    same = all((x.shape, x.dtype, x.stride(), x.device) == (t.shape, t.dtype, t.stride(), t.device) for x in tensors)
    return same and t.ndim == 2 and t.dtype in _ELEMENT and 1 in t.stride()
