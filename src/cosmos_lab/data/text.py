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
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_lab.data.locate import split_name
from cosmos_lab.data.shards import is_shard
from cosmos_lab.io import require

Unit = Literal["file", "blank-lines", "articles"]

_KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".tokens"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
_PACKED = (".xz", ".gz")
_TAKEN = f"{', '.join(_KINDS)} (all but .parquet also .gz or .xz), or nanoGPT's .bin"
_PART = 1 << 20  # Characters: a longer text file becomes several documents, so that memory and progress allow any size.
# WikiText marks an article by " = Title = " and its sections by two or more signs on each side.
_TITLE = re.compile(r"^ ?= [^=].* = ?$")


@dataclass
class Stream:
    """Texts of one part of a data set, in a fixed order.

    `open(documents, position)` gives the texts after the first `documents` ones. `position`, if not None, is what
    `where` returned there, and saves reading them again.
    """

    split: Literal["train", "val"] | None  # None: each document's hash decides
    open: Callable[[int, Any], Iterator[Any]]  # of text, or of rows of tokens that are ready
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
    """Return the files of text or raw tokens that `paths` (files, folders, globs) name, a folder's sorted by path."""
    found: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(inner for inner in path.rglob("*") if inner.is_file() and _wanted(inner, path))
        elif path.is_file():
            if _kind(path) is None:
                raise ValueError(f"{path}: cannot tell what it holds; give {_TAKEN}")
            if path.suffix == ".bin" and is_shard(path):
                raise ValueError(f"{path} is a token shard already: use it with --data {path}")
            inside = [path]
        else:
            inside = sorted(Path(match) for match in glob.glob(str(path)) if _kind(Path(match)) is not None)
        if not inside:
            raise ValueError(
                f"no text at {name!r}: neither one of {', '.join(HUB)} nor a file, folder or glob with {_TAKEN}"
            )
        found += inside
    if 0 < sum(path.suffix == ".bin" for path in found) < len(found):
        tokens = next(path for path in found if path.suffix == ".bin")
        raise ValueError(f"{tokens} holds tokens, but there is text too; name {tokens.parent / '*.bin'}, or the text")
    return found


def local_stream(files: Sequence[Path], unit: Unit, field: str = "text") -> Stream:
    """Return the documents of text, JSON or Parquet files as a stream.

    A document is what `unit` says in a text file, and else the text under the key `field` of an object or row.
    """
    if unit not in ("file", "blank-lines", "articles"):
        raise ValueError(f'unit is {unit!r}; give "file", "blank-lines" or "articles"')
    sizes = [path.stat().st_size for path in files]
    read = [0]

    def texts() -> Iterator[str]:
        before = 0
        for path, size in zip(files, sizes):
            for text, place in _parquet(path, field) if _kind(path) == "parquet" else _read(path, unit, field):
                read[0] = before + place
                yield text
            read[0] = before = before + size

    return Stream(None, lambda skip, _: itertools.islice(texts(), skip, None), done=lambda: read[0] / (sum(sizes) or 1))


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
    name = path.name.lower()
    if name.endswith(".bin"):
        return "tokens"
    for suffix in _PACKED:
        name = name.removesuffix(suffix)
    return next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)


def _wanted(path: Path, folder: Path) -> bool:
    """Tell whether a folder's file is data: not hidden, not a program's settings (.json), not a shard of ours."""
    if any(part.startswith(".") for part in path.relative_to(folder).parts) or path.suffix.lower() == ".json":
        return False
    if path.suffix == ".bin":
        return split_name(path).split is not None and not is_shard(path)
    return _kind(path) is not None


def _read(path: Path, unit: Unit, field: str) -> Iterator[tuple[str, int]]:
    """Yield the documents of a file of text or JSON, each with the number of bytes read so far."""
    unpack: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix.lower(), lambda raw: raw)
    try:
        with open(path, "rb") as raw:
            lines = io.TextIOWrapper(unpack(raw), encoding="utf-8-sig")
            if _kind(path) == "json":
                texts = _json_texts(path, lines, field)
            elif unit == "articles":
                texts = articles(lines)
            elif unit == "blank-lines":
                groups = itertools.groupby(lines, key=lambda line: not line.strip())
                texts = ("".join(group).strip() for blank, group in groups if not blank)
            else:
                texts = ("".join(part).strip() for part in iter(lambda: lines.readlines(_PART), []))
            for text in texts:
                yield text, raw.tell()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); convert it first") from error
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); copy it again") from error


def _json_texts(path: Path, lines: io.TextIOWrapper, field: str) -> Iterator[str]:
    """Yield the texts of a file with an object on each line, or with one list of objects."""
    first = lines.readline()
    whole = first.lstrip().startswith("[")
    for number, line in enumerate([first + lines.read()] if whole else itertools.chain([first], lines), 1):
        if not line.strip():
            continue
        try:
            rows = json.loads(line) if whole else [json.loads(line)]
        except ValueError as error:
            advice = "give an object on each line, or one list of objects"
            raise ValueError(f"{path}, line {number}: not JSON ({error}); {advice}") from error
        for index, row in enumerate(rows, 1):
            yield _text(f"{path}, object {index}" if whole else f"{path}, line {number}", field, row)


def _parquet(path: Path, field: str) -> Iterator[tuple[str, int]]:
    """Yield the texts of one column, each with its share of the file's bytes."""
    message = f"{path.name} needs the package `pyarrow`: pip install pyarrow, or give .jsonl"
    arrow, parquet = require("pyarrow", message), require("pyarrow.parquet", message)
    try:
        with parquet.ParquetFile(path) as table:
            _text(str(path), field, dict.fromkeys(table.schema_arrow.names, ""))  # Is there such a column?
            number, size = 0, path.stat().st_size
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    row = {field: "" if text is None else text}
                    yield _text(f"{path}, row {number}", field, row), size * number // table.metadata.num_rows
    except (arrow.lib.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error}); copy it again") from error


def _text(place: str, field: str, row: Any) -> str:
    """Return the text of a row, or raise a ValueError that names the keys it has."""
    if not isinstance(row, dict):
        raise ValueError(f"{place}: {type(row).__name__} instead of an object with the key {field!r}")
    if field not in row:
        names = ", ".join(itertools.islice(row, 20)) or "none"
        raise ValueError(f"{place}: no key {field!r}; its keys are {names}: choose one with --field")
    if not isinstance(text := row[field], str):
        raise ValueError(f"{place}: {field!r} is {type(text).__name__}, not text; --field names another key")
    return text.encode("utf-8", "replace").decode()  # JSON may have half a character, which tokenizers refuse.


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
    install = "pip install datasets, or prepare local text files"
    datasets = require("datasets", f"{data.name} comes through the package `datasets`: {install}")
    try:
        return datasets.load_dataset(data.name, data.config, split=split, streaming=True)
    except Exception as error:  # The package raises a dozen kinds, its own and those of three network libraries.
        hint = "offline mode is set (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "is the network up?"
        raise ValueError(f"cannot open {data.name} ({data.config}, {split}) on the hub: {error}; {hint}") from error
