"""Copies between host and device on a CPU, made at the worst time that the order of events allows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_optim.cuda import pieces, staging
from cosmos_optim.cuda.staging import CopyStreams, Pairs

POISON = 0xFF  # NaN as a float, -1 as an int8


class LateCopies(CopyStreams):
    """Upload at once; download when something waits for it, and then poison the slot. `log` has all events in order."""

    log: list[tuple[str, int]]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pending: dict[int, Pairs] = {}
        self._count = 0

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Finish all downloads at the end, as the caller's stream waits for them."""
        yield
        for event in list(self.pending):
            self._finish(event)

    def upload(self, pairs: Pairs, free: Any) -> None:
        if free is not None:
            self._finish(free)
        super().upload(pairs, free)
        self.log.append(("upload", pairs[0][1].data_ptr()))

    def download(self, pairs: Pairs) -> int:
        self._count += 1
        self.pending[self._count] = pairs
        self.log.append(("computed", pairs[0][1].data_ptr()))
        return self._count

    def _finish(self, event: int) -> None:
        pairs = self.pending.pop(event, ())
        super().download(pairs)
        for _, staged in pairs:
            staged.view(torch.uint8).fill_(POISON)
        if pairs:
            self.log.append(("downloaded", pairs[0][1].data_ptr()))


def stage_late(monkeypatch: pytest.MonkeyPatch, least: int = 64) -> list[tuple[str, int]]:
    """Let every step on a CPU stage state of at least so many bytes, by late copies; return their log."""

    def in_host_memory(x: Tensor, device: torch.device) -> bool:
        return x.numel() * x.element_size() >= least

    log: list[tuple[str, int]] = []
    monkeypatch.setattr(LateCopies, "log", log, raising=False)
    monkeypatch.setattr(CopyStreams, "_known", {})
    monkeypatch.setattr(staging, "CopyStreams", LateCopies)
    for module in (staging, pieces):
        monkeypatch.setattr(module, "in_host_memory", in_host_memory)
    return log
