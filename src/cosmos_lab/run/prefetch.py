"""Batches made ready ahead of time by a background thread, in pinned memory, each with its place in the data.

The thread runs ahead of training, so the position to save is the one after the last batch handed out, not the reader's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Reader(Protocol):
    """What the feed needs of ``cosmos_lab.data.Batches``."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...
    def state_dict(self) -> dict[str, Any]: ...


class Feed:
    """Iterates over a reader's (tokens, targets), ``depth`` batches ahead; ``position`` resumes after the last one."""

    def __init__(self, reader: Reader, device: torch.device, depth: int = 4) -> None:
        self.position: dict[str, Any] = dict(reader.state_dict())
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(reader, device), daemon=True, name="batches")
        self._thread.start()

    def _fill(self, reader: Reader, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread starts on GPU 0, where other processes work
            for tokens, targets in reader:
                if device.type == "cuda":
                    tokens, targets = tokens.pin_memory(), targets.pin_memory()
                self._put((tokens, targets, dict(reader.state_dict())))
                if self._stop.is_set():
                    return
            self._put(None)
        except BaseException as error:  # handed to the training thread, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch; errors of the reader surface here."""
        item = self._ready.get()
        if item is None:
            raise ValueError("the data ended before the last step: the shards hold fewer tokens than one batch")
        if isinstance(item, BaseException):
            raise item
        tokens, targets, self.position = item
        return tokens, targets

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join(timeout=10)
