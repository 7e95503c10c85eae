"""The hashes of a checkpoint's files, which are checked before anything in those files is read.

``meta.json`` lists the size and the hash of every other file, and has the SHA-256 of itself. The hash of a file is the
SHA-256 of the CRC-32 of each 16 MiB, so that threads share a large file; a CRC takes half the time of a SHA-256. This
finds accidents: every flipped bit, every file that was cut or lost, every change of meta.json, and all but one in four
billion of other changes, such as lost pages and exchanged files. It cannot find a change by someone who computes the
hashes again; that is why nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cosmos_lab.io import json_bytes
from cosmos_lab.run.distributed import Shared

META = "meta.json"
_PART, _READ = 2**24, 2**20  # bytes that one thread hashes, and that it reads at a time
_THREADS = min(8, os.cpu_count() or 1)
# What meta.json has without hashes, in checkpoints of earlier versions: always the first ones.
_NEEDED = {"step", "identity", "processes", "sharded"}
_KNOWN = _NEEDED | {"seconds", "loss_sum", "logged", "bad_losses", "passing"}


class Damaged(Shared):
    """A file of a checkpoint is missing, or not as it was written."""


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the size and the hash of each file."""
    with ThreadPoolExecutor(_THREADS) as pool:
        sizes = {name: (folder / name).stat().st_size for name in names}
        parts = {
            name: [pool.submit(_hash_part, folder / name, start) for start in range(0, size, _PART)]
            for name, size in sizes.items()
        }
        return {
            name: [sizes[name], hashlib.sha256(b"".join(part.result() for part in of_file)).hexdigest()]
            for name, of_file in parts.items()
        }


def _hash_part(path: Path, start: int) -> bytes:
    # Read, not mapped: a bad sector is an OSError then, and not the end of the process.
    found, buffer = 0, bytearray(_READ)
    with open(path, "rb") as file:
        file.seek(start)
        for _ in range(_PART // _READ):
            found = zlib.crc32(memoryview(buffer)[: file.readinto(buffer)], found)
    return found.to_bytes(4, "little")


def seal(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the content of meta.json with its own hash."""
    plain = json.loads(json_bytes(meta))  # as it will be read: a tuple is a list
    return {**plain, "hash": hashlib.sha256(json_bytes(plain)).hexdigest()}


def check(folder: Path, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return the content of meta.json, or raise ``Damaged`` for it or for a file; ``size`` processes share the files.

    A checkpoint without "files" was written before there were hashes: only its meta.json is checked.
    """
    meta = _read_meta(folder)
    listed = dict(sorted(meta.get("files", {}).items())[rank::size])
    try:
        for name, (length, _) in listed.items():
            found = (folder / name).stat().st_size
            if found != length:
                raise Damaged(f"{folder / name} is damaged: it has {found:,} bytes instead of {length:,}")
        for name, found in hash_files(folder, listed).items():
            if found != listed[name]:
                raise Damaged(f"{folder / name} is damaged: its hash is not the one in {META}")
    except OSError as error:
        raise Damaged(f"a file of {folder} cannot be read: {error}") from error
    return meta


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        raw = path.read_bytes()
        meta = json.loads(raw)
        own = meta.pop("hash", None)
    except OSError as error:
        raise Damaged(f"a file of {folder} cannot be read: {error}") from error
    except (ValueError, AttributeError, TypeError):
        raise Damaged(f"{path} is damaged: it is not a JSON object") from None
    if own is None and not _NEEDED <= set(meta) <= _KNOWN:
        raise Damaged(f"{path} is damaged: it has no hash")
    if own is not None and raw != json_bytes(seal(meta)):
        raise Damaged(f"{path} is damaged: its text and its hash differ")
    if folder.name != f"step_{str(meta['step']).zfill(6)}":
        raise Damaged(f"{path} is of step {meta['step']}, which is not the step of its folder")
    return meta
