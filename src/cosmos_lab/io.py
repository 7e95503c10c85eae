"""Files that are either whole or absent: the cache folder, atomic writes, locks between processes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows: no locks, so two processes may do the same work twice; renames stay atomic.
    fcntl = None  # type: ignore[assignment]

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def require(module: str, message: str) -> Any:
    """Import an optional package, or raise a ValueError with the message that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(message) from error


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder for unpacked shards and indices: `cache_dir`, $COSMOS_LAB_CACHE or ~/.cache/cosmos-lab."""
    chosen = cache_dir or os.environ.get("COSMOS_LAB_CACHE") or Path.home() / ".cache" / "cosmos-lab"
    return Path(chosen).expanduser()


@contextlib.contextmanager
def explained(path: Path, instead: str = "choose another --out") -> Iterator[None]:
    """Turn any `OSError` that is raised inside into that of `disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, instead) from error


def disk_error(error: OSError, path: Path, instead: str = "choose another --out") -> OSError:
    """Return the same kind of `OSError` with a message that names the file, says what happened and what to do.

    If the disk is full, the advice is to free some space, or to do `instead`.
    """
    full = error.errno in NO_SPACE
    what = "no space left on the disk" if full else (error.strerror or str(error))
    advice = f"free some space and run the same command again, or {instead}" if full else instead
    found = type(error)(f"cannot write {path}: {what}; {advice}")
    found.errno = error.errno or errno.EIO  # not as an argument, which would begin the message with [Errno 28]
    return found


def valid_text(text: object) -> str:
    """Return a text that UTF-8 can write: a path in another encoding has half characters, which become "?"."""
    return str(text).encode(errors="replace").decode()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; on success it replaces `path`, on any failure it is removed.

    An `OSError` names `path`: a full disk names no file, and others would name the temporary one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def json_bytes(value: Any) -> bytes:
    """Return the text that `write_json` writes for a value without nan and inf."""
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically, with null for nan and inf."""
    with atomic_write(path) as out:
        out.write(json_bytes(nan_to_none(value)))


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`, or None if there is no such file or it does not parse."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def nan_to_none(value: Any) -> Any:
    """Return the value with nan and inf replaced by None, because JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(item) for item in value]
    return value


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if missing); the system frees it if the process is killed.

    Wait for another process that holds it, or raise a BlockingIOError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as handle:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError:  # Some network file systems have no locks.
                pass
        yield
