"""Batches prepared by a background thread, in pinned memory, each with the state of the data after it.

The thread reads further than training has come, so the state to save is the one after the last batch handed out.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from cosmos_lab.data import Batches


class Prefetcher:
    """Reads up to ``depth`` batches in advance; ``data_state`` continues after the last one that ``next`` returned."""

    def __init__(self, batches: Batches, device: torch.device, depth: int = 4) -> None:
        self.data_state = batches.state_dict()
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(batches, device), daemon=True, name="batches")
        self._thread.start()

    def _fill(self, batches: Batches, device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread starts on GPU 0, where other processes work
            for tokens, targets in batches:
                if device.type == "cuda":
                    tokens, targets = tokens.pin_memory(), targets.pin_memory()
                self._put((tokens, targets, batches.state_dict()))
                if self._stop.is_set():
                    return
        except BaseException as error:  # passed to the training thread, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch, or raise the error that reading it gave."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        tokens, targets, self.data_state = item
        return tokens, targets

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
