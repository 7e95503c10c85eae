"""Shards written document by document, which can be cut back to an earlier state and continued."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cosmos_lab.data.shards import HEADER_BYTES, Tokens, header


class ShardWriter:
    """Writes `START_000000.bin`, `START_000001.bin`, ... of at most `limit` tokens each, no document cut in two.

    The open shard is called `.bin.part` until it is full. `sync` flushes what was written so far to the disk and
    returns its state; a writer made from that state removes everything that came after it.
    """

    def __init__(self, folder: Path, start: str, limit: int, state: dict[str, int] | None = None) -> None:
        self.folder, self.start, self.limit = folder, start, limit
        known = state or {}
        self.shards = known.get("shards", 0)  # Full ones.
        self.filled = known.get("filled", 0)  # Tokens in the open one.
        self.tokens = known.get("tokens", 0)  # In all.
        self.documents = known.get("documents", 0)
        self._out: BinaryIO | None = None
        self._cut_back()

    def add(self, tokens: Tokens, documents: int = 1) -> None:
        if self.filled and self.filled + tokens.size > self.limit:
            self.finish()
        if self._out is None:
            self._out = open(self._path(".bin.part"), "wb")  # noqa: SIM115 - it stays open from document to document
            self._out.write(header(0))
        self._out.write(tokens.astype("<u2").tobytes())
        self.filled += tokens.size
        self.tokens += tokens.size
        self.documents += documents

    def sync(self) -> dict[str, int]:
        """Flush all documents so far to the disk; return the state to start from later."""
        if self._out is not None:
            self._out.flush()
            os.fsync(self._out.fileno())
        return {name: getattr(self, name) for name in ("shards", "filled", "tokens", "documents")}

    def tail(self, count: int) -> Tokens:
        """Return the last `count` tokens."""
        self.sync()
        rows: list[Tokens] = []
        for number, size in reversed(list(enumerate(self._sizes()))):
            take = min(count, size)
            path = self._path(".bin.part" if number == self.shards else ".bin", number)
            if take:
                rows.insert(0, np.fromfile(path, "<u2", take, offset=HEADER_BYTES + 2 * (size - take)))
            count -= take
        return np.concatenate(rows)

    def without_tail(self, count: int, documents: int) -> dict[str, int]:
        """Return the state to start from if the last `count` tokens are to be removed."""
        sizes, left = self._sizes(), count
        while left >= sizes[-1] and len(sizes) > 1:
            left -= sizes.pop()
        shards, tokens = len(sizes) - 1, self.tokens - count
        return {"shards": shards, "filled": sizes[-1] - left, "tokens": tokens, "documents": self.documents - documents}

    def _sizes(self) -> list[int]:
        """Return the tokens in each full shard and in the open one."""
        full = [self._path(".bin", number).stat().st_size for number in range(self.shards)]
        return [*((size - HEADER_BYTES) // 2 for size in full), self.filled]

    def finish(self) -> None:
        """Complete the open shard, if any: its header, then its name."""
        if self._out is None:
            return
        self._out.seek(0)
        self._out.write(header(self.filled))
        self.sync()
        self.close()
        os.replace(self._path(".bin.part"), self._path(".bin"))
        self.shards, self.filled = self.shards + 1, 0

    def close(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            out.close()

    def _path(self, suffix: str, shard: int | None = None) -> Path:
        return self.folder / f"{self.start}_{self.shards if shard is None else shard:06d}{suffix}"

    def _cut_back(self) -> None:
        """Restore the saved state: remove later shards, cut the open one to its saved length."""
        part, whole = self._path(".bin.part"), self._path(".bin")
        if self.filled and not part.exists() and whole.exists():
            os.replace(whole, part)  # It was completed after the state was saved.
        for path in self.folder.glob(f"{self.start}_*"):
            number = path.name[len(self.start) + 1 :].split(".")[0]
            if path != part and number.isdigit() and int(number) >= self.shards:
                path.unlink()
        if not self.filled:
            part.unlink(missing_ok=True)
            return
        size = HEADER_BYTES + 2 * self.filled
        if not part.exists() or part.stat().st_size < size:
            raise ValueError(f"cannot continue: {part} is missing or too short; delete it and its state file")
        self._out = open(part, "r+b")  # noqa: SIM115
        self._out.truncate(size)
        self._out.seek(size)
