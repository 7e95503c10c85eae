"""Token shards: 256 little-endian int32 (20240520, 1, number of tokens, zeros), then the tokens as uint16.

A `.bin` file is memory-mapped as it is. A `.bin.xz` file is unpacked once into the cache folder and mapped from there.
One pass over a new shard yields its hash and its largest token id; both are kept in the cache folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import lzma
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cosmos_lab.io import atomic_write, cache_folder, disk_error, locked, read_json, write_json

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
MAX_VOCAB = 1 << 16  # Ids are uint16.
SUFFIXES = (".bin", ".bin.xz")

Tokens = npt.NDArray[np.uint16]

_CHUNK = 1 << 23  # Tokens (and bytes) handled at a time: 16 MB keeps the pass lean and the loop short.
CACHE_ADVICE = "set COSMOS_LAB_CACHE to another folder"


@dataclass(frozen=True)
class Shard:
    """One open shard: the file the user named, its tokens (mapped), their SHA-256, the largest id and its position."""

    path: Path
    tokens: Tokens
    sha256: str
    max_id: int
    max_at: int

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `ValueError` if the shard holds a token id that a vocabulary of `vocab_size` ids does not have."""
        if self.max_id >= vocab_size:
            raise ValueError(
                f"{self.path}: token {self.max_id} at position {self.max_at} is beyond the vocabulary of {vocab_size} "
                f"ids; give the model more (--vocab-size {self.max_id + 1} or above), or data of its tokenizer"
            )


def header(count: int) -> bytes:
    """Return the 1024 bytes in front of `count` tokens."""
    words = np.zeros(256, dtype="<i4")
    words[:3] = MAGIC, VERSION, count
    return words.tobytes()


def write_shard(path: str | os.PathLike[str], tokens: npt.ArrayLike) -> None:
    """Write token ids (in 0..65535, at least one) as a shard, atomically; a name that ends in `.xz` is packed."""
    path, values = Path(path), np.asarray(tokens)
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path}: a shard's name ends in .bin or .bin.xz")
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu":
        raise ValueError(f"{path}: tokens are {values.dtype} of shape {values.shape}; give a non-empty row of integers")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= MAX_VOCAB:
        raise ValueError(f"{path}: token ids are in {low}..{high}, but the format holds 0..{MAX_VOCAB - 1} (uint16)")
    content = header(values.size) + values.astype("<u2").tobytes()
    with atomic_write(path) as out:
        out.write(lzma.compress(content, preset=6) if path.suffix == ".xz" else content)


def open_shard(path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> Shard:
    """Open a `.bin` or `.bin.xz` shard, checked and memory-mapped."""
    path, cache = Path(path), cache_folder(cache_dir)
    if not path.is_file():
        raise ValueError(f"missing shard: there is no file {path}")
    if path.suffix != ".xz":
        tokens = _map(path, path)
        return Shard(path, tokens, **_facts(path, tokens, cache))
    for _ in range(2):
        plain = _unpacked(path, cache)
        tokens = _map(plain, path)
        facts = _facts(plain, tokens, cache)
        if facts["sha256"] == (read_json(_note(plain)) or {}).get("sha256"):
            return Shard(path, tokens, **facts)
        plain.unlink(missing_ok=True)  # The copy is not what was unpacked (a bad disk, or someone wrote to it).
    raise ValueError(f"{path}: its unpacked copy {plain} does not read back as written; check the cache's disk")


def document_ends(
    shard: Shard, end_of_document: int, cache_dir: str | os.PathLike[str] | None = None
) -> npt.NDArray[np.int64]:
    """Return the positions just after each end-of-document token and the shard's end: int64, ascending."""
    index = cache_folder(cache_dir) / "index" / f"{shard.sha256[:32]}-{end_of_document}.npy"
    with contextlib.suppress(OSError, ValueError):
        ends: npt.NDArray[np.int64] = np.load(index)
        if ends.size and ends[-1] == shard.tokens.size:
            return ends
    found = [
        np.flatnonzero(shard.tokens[start : start + _CHUNK] == end_of_document) + (start + 1)
        for start in range(0, shard.tokens.size, _CHUNK)
    ]
    if not found[-1].size or found[-1][-1] != shard.tokens.size:
        found.append(np.array([shard.tokens.size]))
    ends = np.concatenate(found).astype(np.int64)
    with contextlib.suppress(OSError), atomic_write(index) as out:  # The cache only saves time, so errors are ignored.
        np.save(out, ends)
    return ends


def is_shard(path: Path) -> bool:
    """Tell whether a file starts with a shard's header."""
    with open(path, "rb") as handle:
        return handle.read(8) == header(0)[:8]


def _count(start: bytes, shown: Path) -> int:
    """Return the number of tokens that a shard's header announces."""
    if len(start) < HEADER_BYTES:
        raise ValueError(f"truncated shard {shown}: it ends within its header ({len(start)} of {HEADER_BYTES} bytes)")
    magic, version, count = (int(word) for word in np.frombuffer(start, dtype="<i4", count=3))
    if magic != MAGIC or version != VERSION:
        raise ValueError(
            f"{shown} is not a token shard: it starts with {magic}, {version} instead of {MAGIC}, {VERSION}; "
            f"`cosmos-lab data prepare {shown}` makes shards of nanoGPT's raw uint16 tokens"
        )
    if count < 1:
        raise ValueError(f"{shown} holds no tokens: its header says {count}")
    return count


def _map(path: Path, shown: Path) -> Tokens:
    with open(path, "rb") as handle:
        count = _count(handle.read(HEADER_BYTES), shown)
    _check_length(shown, count, path.stat().st_size - HEADER_BYTES)
    # As a plain array: np.memmap pays for its own bookkeeping at every slice.
    return np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,)))


def _check_length(shown: Path, count: int, found_bytes: int) -> None:
    if found_bytes != 2 * count:
        kind = "truncated shard" if found_bytes < 2 * count else "damaged shard"
        raise ValueError(
            f"{kind} {shown}: its header says {count} tokens, the file holds {found_bytes // 2}; copy it again"
        )


def _stamp(path: Path) -> str:
    """Return a name for this content of `path`, which changes if the file is replaced or written to."""
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]  # a path may have any bytes


def _facts(path: Path, tokens: Tokens, cache: Path) -> dict[str, Any]:
    """Return SHA-256, largest id and its position, from the cache or by one pass over the file."""
    index = cache / "index" / f"{_stamp(path)}.json"
    known = read_json(index)
    if isinstance(known, dict) and set(known) == {"sha256", "max_id", "max_at"}:
        return known
    digest, max_id, max_at = hashlib.sha256(), -1, -1
    for start in range(0, tokens.size, _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        digest.update(chunk.data)
        if (top := int(chunk.max())) > max_id:
            max_id, max_at = top, start + int(chunk.argmax())
    facts = {"sha256": digest.hexdigest(), "max_id": max_id, "max_at": max_at}
    with contextlib.suppress(OSError):  # The cache only saves time, so errors are ignored.
        write_json(index, facts)
    return facts


def _note(plain: Path) -> Path:
    return plain.with_suffix(".json")


def _unpacked(path: Path, cache: Path) -> Path:
    """Return the path of the unpacked copy of `path`, made on first use by one process while others wait."""
    plain = cache / "shards" / f"{path.name.removesuffix('.bin.xz')}-{_stamp(path)}.bin"
    with lzma.open(path) as packed:  # Outside the try: a file that cannot be read is not a full disk.
        try:
            with locked(plain.with_suffix(".lock")):
                note = read_json(_note(plain)) or {}
                if not plain.is_file() or plain.stat().st_size != note.get("bytes"):
                    _unpack(packed, path, plain)
        except OSError as error:
            with contextlib.suppress(OSError):
                _note(plain).unlink(missing_ok=True)
            raise disk_error(error, plain, CACHE_ADVICE) from error
    return plain


def _unpack(packed: lzma.LZMAFile, path: Path, plain: Path) -> None:
    try:
        start = packed.read(HEADER_BYTES)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"truncated, damaged or foreign shard {path}: not a readable xz file ({error})") from error
    count = _count(start, path)
    size = HEADER_BYTES + 2 * count
    free = shutil.disk_usage(plain.parent).free
    if free < size:
        raise OSError(errno.ENOSPC, f"{size >> 20} MB needed, {free >> 20} MB free")
    digest, found, broken = hashlib.sha256(), 0, None
    with atomic_write(plain) as out:
        out.write(start)
        try:
            while chunk := packed.read1(_CHUNK):  # Not `read`, which drops the data just before a damaged place.
                out.write(chunk)
                digest.update(chunk)
                found += len(chunk)
        except (lzma.LZMAError, EOFError) as error:
            broken = error
        _check_length(path, count, found)
        if broken is not None:
            raise ValueError(f"damaged shard {path}: its checksum does not agree ({broken}); copy it again") from broken
        write_json(_note(plain), {"bytes": size, "sha256": digest.hexdigest()})
