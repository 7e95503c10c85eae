"""Lists of equal matrices as one operand: a table of their addresses on the device.

Nothing is stacked or copied: kernels read and write each matrix where it lives. A table is written once for a set of
addresses, through pinned memory and without waiting, into a buffer of its own that is never rewritten, so that a
captured CUDA graph which reads it stays valid.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.kernels.backend import tl

# Tables kept: gradients that move in memory at every step must not fill the device with tables.
_KEPT = 512
_tables: OrderedDict[Any, tuple[Tensor, Tensor]] = OrderedDict()
_captured: list[tuple[Tensor, Tensor]] = []

_ELEMENT = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """The int64 table of where these tensors begin, on their device."""
    device = tensors[0].device
    key = (device, *[t.data_ptr() for t in tensors])
    if key in _tables:
        _tables.move_to_end(key)
        return _tables[key][1]
    host = torch.tensor(key[1:], dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    entry = (host, host.to(device, non_blocking=True))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(entry)  # the graph copies from this host buffer at every replay
        return entry[1]
    _tables[key] = entry
    if len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return entry[1]


@dataclass(frozen=True, eq=False)
class Matrices:
    """A list of (m, n) matrices with one dtype and one pair of strides."""

    tensors: list[Tensor]
    table: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Matrices:
        """The operand for these tensors."""
        return cls(list(tensors), addresses(tensors))

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
        """The arguments by which a kernel reads it: table, strides, element type, alignment."""
        t = self.tensors[0]
        pitch = max(t.stride()) * t.element_size()
        aligned = pitch % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in self.tensors)
        return {"x": self.table, "stride": 0, "sm": t.stride(0), "sn": t.stride(1),
                "TABLE": True, "ELEMENT": getattr(tl, _ELEMENT[t.dtype]), "ALIGNED": aligned}  # fmt: skip

    def stacked(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A copy as one tensor (B, m, n)."""
        return torch.stack([t.to(dtype) for t in self.tensors])


def uniform(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can take these as one list: equal shapes, dtypes and strides, one of the strides 1."""
    t = tensors[0]
    same = all((x.shape, x.dtype, x.stride(), x.device) == (t.shape, t.dtype, t.stride(), t.device) for x in tensors)
    return same and t.ndim == 2 and t.dtype in _ELEMENT and 1 in t.stride()
