"""Batches for training and validation: documents in an order set by the seed, packed into windows.

The documents of an epoch are permuted and laid end to end as one stream. Window w is tokens w T to (w + 1) T + 1 of it,
T = seq_len: T inputs and the T targets one place to the right, so all but the first token are targets once an epoch.
Windows are numbered through all epochs. A batch is the next `batch * world` windows, of which each rank takes `batch`:
what a step sees depends on the seed and the number of windows taken, not on how they were split over ranks or batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from cosmos_lab.data.source import Positions, TokenSource

Batch = tuple[torch.Tensor, torch.Tensor]


class Batches:
    """Endless iterator over `(tokens, targets)`, each `(batch, seq_len)` int64 on the CPU, with exact resume.

    A batch has `batch` windows of `seq_len` tokens; the windows of the `world` ranks are disjoint. The seed sets the
    order of documents, another one in each epoch; without `shuffle` it is that of the files. A batch may hold the end
    of one epoch and the start of the next. `tokens` and `targets` share memory: do not write to them in place.
    """

    def __init__(
        self, source: TokenSource, batch: int, seq_len: int, seed: int, rank: int = 0, world: int = 1,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        if batch < 1 or seq_len < 1:
            raise ValueError(f"batch is {batch} and seq_len is {seq_len}; both must be at least 1")
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank} of a world of {world}; it must be 0..{world - 1}")
        self.source, self.batch, self.seq_len, self.seed = source, batch, seq_len, seed
        self.rank, self.world, self.shuffle = rank, world, shuffle
        self.windows = _windows(source, seq_len)
        self.epoch, self.window = 0, 0  # Where the next batch of all ranks starts: the window is counted in its epoch.
        self._order: tuple[int, Positions, Positions] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        pieces, epoch, start = [], self.epoch, self.window + self.rank * self.batch
        left = self.batch
        while left:
            epoch, start = epoch + start // self.windows, start % self.windows
            count = min(left, self.windows - start)
            pieces.append(self._read(epoch, start, count))
            start, left = start + count, left - count
        after = self.window + self.batch * self.world
        self.epoch, self.window = self.epoch + after // self.windows, after % self.windows
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([tokens for tokens, _ in pieces]), torch.cat([targets for _, targets in pieces])

    def state_dict(self) -> dict[str, Any]:
        """Return where the next batch starts: plain values, the same on every rank."""
        return {
            "epoch": self.epoch, "position": self.window, "seed": self.seed, "seq_len": self.seq_len,
            "shuffle": self.shuffle, "fingerprint": self.source.fingerprint,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with any batch size and number of ranks; other data is an error."""
        own = self.state_dict()
        if missing := sorted(set(own) - set(state)):
            raise ValueError(f"the data position to resume from lacks {', '.join(missing)}; it has {sorted(state)}")
        for key in ("fingerprint", "seq_len", "seed", "shuffle"):
            if state[key] != own[key]:
                raise ValueError(
                    f"cannot resume: the data position was saved with {key} {state[key]!r}, but {self.source.name} has "
                    f"{own[key]!r}; resume with the same data and settings, or start a new run"
                )
        if not (state["epoch"] >= 0 and 0 <= state["position"] < self.windows):
            raise ValueError(
                f"cannot resume: epoch {state['epoch']}, position {state['position']} is outside the "
                f"{self.windows} windows of {self.source.name}"
            )
        self.epoch, self.window = int(state["epoch"]), int(state["position"])

    def _read(self, epoch: int, start: int, count: int) -> Batch:
        """Read windows `start` to `start + count` of one epoch."""
        if self._order is None or self._order[0] != epoch:
            sizes = np.diff(self.source.documents)
            order = permutation(sizes.size, self.seed, epoch) if self.shuffle else np.arange(sizes.size)
            self._order = (epoch, order, np.cumsum(sizes[order]))
        _, order, ends = self._order  # of the documents, and where each ends in the stream
        a, b = start * self.seq_len, (start + count) * self.seq_len + 1
        first, last = np.searchsorted(ends, (a, b - 1), side="right")  # The documents that hold tokens a and b - 1.
        chosen, bounds = order[first : last + 1], self.source.documents
        starts, lengths = bounds[chosen], bounds[chosen + 1] - bounds[chosen]
        before = a - (int(ends[first]) - int(lengths[0]))
        starts[0] += before
        lengths[0] -= before
        lengths[-1] -= int(ends[last]) - b
        return _as_batch(self.source.gather(starts, lengths), self.seq_len)


def permutation(n: int, seed: int, epoch: int) -> Positions:
    """Return 0..n-1 in a random order: sorted by a 64-bit hash (SplitMix64's finalizer) of seed, epoch and number.

    The result of numpy's `permutation` may change with its version, but a run must resume on another machine.
    """
    with np.errstate(over="ignore"):
        key = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)) + np.uint64(epoch)
        hashes = _mix(_mix(key) + np.arange(n, dtype=np.uint64))
    return np.argsort(hashes, kind="stable")


def _mix(x: Any) -> Any:
    """Apply SplitMix64's output function (Steele, Lea and Flood 2014), a bijection of 64-bit numbers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def validation_windows(source: TokenSource, seq_len: int, max_tokens: int | None = None) -> int:
    """Return the number of windows to validate with: as many as `max_tokens` targets hold, and at least one."""
    count = _windows(source, seq_len)
    return count if max_tokens is None else min(count, max(1, max_tokens // seq_len))


def validation_batches(
    source: TokenSource, batch: int, seq_len: int, max_tokens: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return `(tokens, targets, count)` of the first windows of `source` in order, the same at every call.

    `validation_windows` says how many there are; the last batch may be smaller. Ranks take turns: batch k is that of
    rank k % world. All get equally many, so that collectives in the model's forward pass match: a rank with none left
    gets the last batch again. `count` is the number of windows to count: all of a batch, or none of a repeated one.
    """
    if batch < 1 or not 0 <= rank < world:
        raise ValueError(f"batch is {batch}, rank {rank} of {world}; batch must be at least 1 and rank below world")
    windows = validation_windows(source, seq_len, max_tokens)
    starts = range(0, windows, batch)

    def read(number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        start = starts[min(number, len(starts) - 1)]
        row = source.read(start * seq_len, min(start + batch, windows) * seq_len + 1)
        tokens, targets = _as_batch(row.astype(np.int64), seq_len)
        return tokens, targets, len(tokens) if number < len(starts) else 0

    return map(read, range(rank, rank + len(starts), world))


def _as_batch(row: Positions, seq_len: int) -> Batch:
    stream = torch.from_numpy(row)
    return stream[:-1].view(-1, seq_len), stream[1:].view(-1, seq_len)


def _windows(source: TokenSource, seq_len: int) -> int:
    if seq_len < 1 or (count := (len(source) - 1) // seq_len) < 1:
        raise ValueError(
            f"{source.name} has {len(source)} tokens; a window of seq_len {seq_len} needs {seq_len + 1}: "
            "give more text or a smaller --seq-len"
        )
    return count
