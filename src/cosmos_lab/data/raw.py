"""Tokens that nanoGPT's scripts prepared: `train.bin` and `val.bin`, uint16 without a header."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_lab.data.encode import Encoder, load_encoder
from cosmos_lab.data.locate import find_shards, split_name
from cosmos_lab.data.shards import HEADER_BYTES, MAX_VOCAB, Tokens, is_shard
from cosmos_lab.data.source import GPT2
from cosmos_lab.data.text import Stream

UNKNOWN = "raw"  # the name of a tokenizer of which only the ids are known

_ROW = 1 << 20  # Tokens handled at a time.


class ReadyTokens(Encoder):
    """The vocabulary of tokens that need no encoding."""

    def encode(self, texts: Sequence[Any]) -> list[Tokens]:
        """Return the rows as they are."""
        return list(texts)


def raw_files(named: Sequence[Path]) -> list[Path]:
    """Return the files, and if none is for validation, the `val.bin` beside the first."""
    files = list(named)
    splits = {split_name(path).split for path in files}
    if splits == {"val"}:
        raise ValueError(f"{files[0]} is for validation, and there is no training part: give train.bin too")
    if "val" not in splits:
        with contextlib.suppress(ValueError):  # There is none: the end of the training part is held out.
            files += find_shards(str(files[0]), "val")
    return files


def raw_streams(files: Sequence[Path]) -> list[Stream]:
    """Return a stream for each file; `val` in its name makes it a part to validate with."""
    rows = [_open(path) for path in files]
    read = [0] * len(rows)

    def stream(number: int) -> Stream:
        row = rows[number]

        def pieces(skip: int, _: Any) -> Iterator[Tokens]:
            for start in range(skip * _ROW, row.size, _ROW):
                read[number] = min(start + _ROW, row.size)
                yield row[start : start + _ROW]

        done = lambda: sum(read) / sum(row.size for row in rows)  # noqa: E731
        return Stream(split_name(files[number]).split or "train", pieces, done=done)

    return [stream(number) for number in range(len(rows))]


def raw_encoder(files: Sequence[Path], tokenizer: str | None, vocab_size: int | None) -> Encoder:
    """Return the vocabulary: that of `tokenizer`, of GPT-2 if the largest token is its last, or largest token + 1."""
    tops = {path: int(_open(path).max()) for path in files}
    top = max(tops.values())
    if tokenizer is not None:
        known = load_encoder(tokenizer)
    elif top == GPT2.end_of_document:
        known = Encoder(GPT2.name, "", GPT2.size, GPT2.end_of_document, None)
    else:
        known = Encoder(UNKNOWN, "", top + 1, None, None)
    size = vocab_size or known.vocab_size
    if not top < size <= MAX_VOCAB:
        where = next(path for path, most in tops.items() if most == top)
        raise ValueError(
            f"{where} has token {top}, but there are {size} ids; --vocab-size takes {top + 1} to {MAX_VOCAB}"
        )
    return ReadyTokens(known.name, known.sha256, size, known.end_of_document, known.tokenizer)


def _open(path: Path) -> Tokens:
    size = path.stat().st_size
    if path.suffix != ".bin" or not size or size % 2:
        raise ValueError(
            f"{path} ({size} bytes) does not hold raw uint16 tokens; give nanoGPT's .bin files, not packed"
        )
    if is_shard(path):
        raise ValueError(f"{path} is a token shard already: use it with --data {path}")
    row: Tokens = np.asarray(np.memmap(path, dtype="<u2", mode="r"))
    if row.size > HEADER_BYTES // 2 and not row[16 : HEADER_BYTES // 2].any():
        raise ValueError(f"{path} starts with a header of another format, not with uint16 tokens; convert it first")
    return row
