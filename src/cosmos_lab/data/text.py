"""Documents of text to make tokens from: files on this machine, or data sets of the Hugging Face hub.

A stream can be opened again after any number of documents, so that a killed preparation can continue.
"""

from __future__ import annotations

import glob
import gzip
import io
import itertools
import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_lab.io import require

Unit = Literal["file", "blank-lines", "articles"]

_TEXT = (".txt", ".text", ".md", ".tokens")
_LINES = (".jsonl", ".ndjson")
_PACKED = (".xz", ".gz")
# WikiText marks an article by " = Title = " and its sections by two or more signs on each side.
_TITLE = re.compile(r"^ ?= [^=].* = ?$")


@dataclass
class Stream:
    """Texts of one part of a data set, in a fixed order.

    `open(documents, position)` gives the texts after the first `documents` ones. `position`, if not None, is what
    `where` returned there, and saves reading them again.
    """

    split: Literal["train", "val"] | None  # None: each document's hash decides
    open: Callable[[int, Any], Iterator[str]]
    where: Callable[[], Any] = lambda: None  # the reader's position as JSON, None if only documents can be counted
    done: Callable[[], float | None] = lambda: None  # the fraction read so far, if known


@dataclass(frozen=True)
class HubData:
    """A data set of the hub: its name there, configuration, own validation split, and what a row is."""

    name: str
    config: str | None = None
    val: str | None = None
    rows: Literal["documents", "lines of articles"] = "documents"


HUB: dict[str, HubData] = {
    "c4": HubData("allenai/c4", "en", val="validation"),
    "fineweb": HubData("HuggingFaceFW/fineweb", "sample-10BT"),
    "wikitext-103": HubData("Salesforce/wikitext", "wikitext-103-raw-v1", val="validation", rows="lines of articles"),
}


def hub_streams(data: HubData) -> list[Stream]:
    """Return the streams of a data set: its validation split first, if it has one, then the training split."""
    splits: list[tuple[str, Literal["train", "val"] | None]] = [("train", None)]
    if data.val is not None:
        splits = [(data.val, "val"), ("train", "train")]
    return [_hub_stream(data, name, split) for name, split in splits]


def local_files(paths: Sequence[str]) -> list[Path]:
    """Return the text files that `paths` (files, folders, globs) name, in that order, a folder's sorted by path."""
    found: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) is not None)
        elif path.is_file():
            if _kind(path) is None:
                raise ValueError(f"{path}: cannot tell what it holds; give {', '.join(_TEXT + _LINES)}, packed or not")
            inside = [path]
        else:
            inside = sorted(Path(match) for match in glob.glob(str(path)) if _kind(Path(match)) is not None)
        if not inside:
            raise ValueError(
                f"no text at {name!r}: neither one of {', '.join(HUB)} nor a file, folder or glob with "
                f"{', '.join(_TEXT + _LINES)} files (.xz and .gz too)"
            )
        found += inside
    return found


def local_stream(files: Sequence[Path], unit: Unit, field: str = "text") -> Stream:
    """Return the documents of `.txt`-like or `.jsonl` files, perhaps `.xz` or `.gz`, as a stream.

    A document is what `unit` says in a text file, and the text under the key `field` of a line in a `.jsonl` file.
    """
    if unit not in ("file", "blank-lines", "articles"):
        raise ValueError(f'unit is {unit!r}; give "file", "blank-lines" or "articles"')
    total = sum(path.stat().st_size for path in files) or 1
    finished = [0]

    def texts() -> Iterator[str]:
        for path in files:
            yield from _read(path, unit, field)
            finished[0] += path.stat().st_size

    return Stream(None, lambda skip, _: itertools.islice(texts(), skip, None), done=lambda: finished[0] / total)


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Join WikiText's lines to articles, which start at a title line."""
    held: list[str] = []
    for line in lines:
        if _TITLE.match(line.rstrip("\n")) and any(part.strip() for part in held):
            yield "".join(held).strip()
            held = []
        held.append(line)
    yield "".join(held).strip()


def _kind(path: Path) -> str | None:
    name = path.name
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    if name.endswith(_TEXT):
        return "text"
    return "lines" if name.endswith(_LINES) else None


def _read(path: Path, unit: Unit, field: str) -> Iterator[str]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            if _kind(path) == "lines":
                yield from _json_texts(path, lines, field)
            elif unit == "articles":
                yield from articles(lines)
            elif unit == "blank-lines":
                for blank, group in itertools.groupby(lines, key=lambda line: not line.strip()):
                    if not blank:
                        yield "".join(group).strip()
            else:
                yield lines.read().strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it first") from error
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); copy it again") from error


def _json_texts(path: Path, lines: io.TextIOBase, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a JSON object with the key {field!r} ({error!r})") from error
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: {field!r} is {type(text).__name__}, not text")
        yield text.encode("utf-8", "replace").decode()  # JSON may spell half a character out; tokenizers refuse it.


def _hub_stream(data: HubData, name: str, split: Literal["train", "val"] | None) -> Stream:
    opened: list[Any] = []

    def start(skip: int, position: Any) -> Iterator[str]:
        rows = _load(data, name)
        if data.rows != "documents":
            return itertools.islice(articles(row["text"] for row in rows), skip, None)
        if position is not None:
            rows.load_state_dict(position)
        elif skip:
            rows = rows.skip(skip)
        if hasattr(rows, "state_dict"):
            opened[:] = [rows]
        return (row["text"] for row in rows)

    return Stream(split, start, where=lambda: opened[0].state_dict() if opened else None)


def _load(data: HubData, split: str) -> Any:
    install = "pip install 'cosmos-optim[lab,data]', or prepare local text files"
    datasets = require("datasets", f"{data.name} comes through the package `datasets`: {install}")
    try:
        return datasets.load_dataset(data.name, data.config, split=split, streaming=True)
    except Exception as error:  # The package raises a dozen kinds, its own and those of three network libraries.
        hint = "offline mode is set (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "is the network up?"
        raise ValueError(f"cannot open {data.name} ({data.config}, {split}) on the hub: {error}; {hint}") from error
