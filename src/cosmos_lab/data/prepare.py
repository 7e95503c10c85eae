"""Make token shards from text, with progress, and with resume after a kill: the files come out the same.

Tokens are appended to `PREFIX_train_000000.bin.part` and so on; a full shard gets its header and loses the `.part`.
Every 20 seconds the files are synced and `PREFIX.state.json` records how far they and the reader have come; a later
call cuts the files back to that state and continues. `PREFIX.json` (tokenizer, counts, settings) is written last.

The hash of a document decides what it is for. If that leaves less than one sequence to validate with (few documents,
or one), the end of the text is held out instead, as large a share as asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_lab.config import DataOptions
from cosmos_lab.data.embedded import train_tokenizer
from cosmos_lab.data.encode import Encoder, encoder_of, load_encoder
from cosmos_lab.data.locate import Split, split_name
from cosmos_lab.data.raw import raw_encoder, raw_files, raw_streams
from cosmos_lab.data.shards import MAX_VOCAB, Tokens
from cosmos_lab.data.text import HUB, Stream, Unit, hub_streams, local_files, local_stream
from cosmos_lab.data.writer import ShardWriter
from cosmos_lab.io import atomic_write, explained, locked, read_json, write_json

SPLITS: tuple[Split, Split] = ("train", "val")

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 4_000_000  # Bounds the memory of a batch of long documents.
SAVE_SECONDS = 20.0  # A kill loses at most this much work.
TOKENIZER_CHARACTERS = 50_000_000  # A tokenizer is trained on this much text at most, from the start of the source.
SEQUENCE = DataOptions.seq_len  # Each part has at least one sequence of the default length.
FEW, LONG = 64, 8192  # If there are fewer documents, and longer ones (in tokens), pieces of them are shuffled instead.

_GLOB = re.compile(r"\[!?\]?[^]]*\]|[][*?]")  # Wildcards: [...] with its content, and single characters.


@dataclass(frozen=True)
class Settings:
    """How text becomes shards; with the text and the tokenizer it determines every byte."""

    val_fraction: float = 0.01  # Share of documents to validate with, by their hash, if the source has no such split.
    shard_tokens: int = 100_000_000  # Most tokens in a shard; documents are never cut, so it may have fewer.
    max_tokens: int | None = None  # Stop after this many training tokens, at the end of that document (None: take all).
    max_val_tokens: int = 10_000_000  # Most validation tokens; further validation documents are left out.
    unit: Unit = "file"  # A document in a text file: the whole file, lines between blank ones, or a WikiText article.
    field: str = "text"  # Key of the text in JSON objects, column of a Parquet file.
    vocab_size: int | None = None  # Number of ids of nanoGPT's .bin files (None: the largest token + 1).

    def check(self) -> None:
        """Raise a ValueError naming the field if a value makes no sense."""
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}; it must be between 0 and 1")
        if not 1 <= self.shard_tokens < 2**31:
            raise ValueError(f"shard_tokens is {self.shard_tokens}; a shard's header counts 1 to 2**31 - 1")
        for name in ("max_tokens", "max_val_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Progress:
    """What the progress callback gets: totals so far, and the fraction of the work done if it is known."""

    documents: int
    train_tokens: int
    val_tokens: int
    fraction: float | None
    task: str = "tokenizing"


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made. `spec` is what `open_data` and `cosmos-lab train --data` take."""

    spec: str
    documents: dict[str, int]
    tokens: dict[str, int]
    shards: dict[str, int]
    tokenizer: str
    vocab_size: int


def prepare(
    source: str | Sequence[str], out_dir: str | os.PathLike[str], tokenizer: str | None = None,
    settings: Settings | None = None, *, prefix: str | None = None, progress: Callable[[Progress], None] | None = None,
) -> Prepared:  # fmt: skip
    """Tokenize text into shards in `out_dir`; after an interruption the same call continues.

    Args:
        source: "c4", "fineweb", "wikitext-103", or paths of files with text or nanoGPT's tokens, folders or globs.
        tokenizer: "t5", "gpt2", the path of a tokenizer.json, a tokenizer's name on the hub, or "train:4096" to train
            one with so many ids on the text; default "t5" for C4, none for nanoGPT's tokens, else "gpt2".
        prefix: start of the files' names; default `SOURCE_TOKENIZER`.
    """
    settings, folder = settings or Settings(), Path(out_dir).expanduser()
    settings.check()
    names = [source] if isinstance(source, str) else list(source)
    streams, origin, raw = _streams(names, settings)  # First: a misspelt path is found without a network.
    tokenizer = tokenizer or ("t5" if names == ["c4"] else None if raw else "gpt2")
    trained = tokenizer is not None and tokenizer.startswith("train:")
    if trained if raw else settings.vocab_size is not None:
        raise ValueError("--tokenizer train:N is for text, and --vocab-size for nanoGPT's .bin files; leave it out")
    if tokenizer is None or raw:
        encoder = raw_encoder(raw, tokenizer, settings.vocab_size)
    else:
        encoder = _train_encoder(tokenizer, streams, progress) if trained else load_encoder(tokenizer)
    prefix = prefix or f"{origin[0]}_{encoder.name}"
    plan = {"source": origin, "tokenizer": encoder.sha256, **asdict(settings)}
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{prefix}.lock"):
            facts = _Preparation(folder, prefix, encoder, settings, plan).run(streams, progress)
    known = {name: facts[name] for name in ("documents", "tokens", "shards", "tokenizer", "vocab_size")}
    return Prepared(str(folder / prefix), **known)


def _streams(names: list[str], settings: Settings) -> tuple[list[Stream], list[str], list[Path]]:
    """Return the streams to read, what identifies them (the first word is a short name), and files of raw tokens."""
    if len(names) == 1 and names[0] in HUB:
        return hub_streams(HUB[names[0]]), [names[0]], []
    if not names:
        raise ValueError(f"nothing to prepare: name one of {', '.join(HUB)}, or text files")
    files = local_files(names)
    raw = raw_files(files) if files[0].suffix == ".bin" else []
    short = _GLOB.sub("", Path(names[0]).name).split(".")[0] or "text"
    if raw:
        short = split_name(files[0]).prefix or files[0].resolve().parent.name
    streams = raw_streams(raw) if raw else [local_stream(files, settings.unit, settings.field)]
    return streams, [short, *(f"{p} {p.stat().st_size}" for p in raw or files)], raw


def _train_encoder(name: str, streams: list[Stream], progress: Callable[[Progress], None] | None) -> Encoder:
    """Train the tokenizer that `name`, such as "train:4096", asks for; the same text gives the same tokenizer."""
    count = name.removeprefix("train:")
    if not count.isdecimal() or not 257 <= int(count) <= MAX_VOCAB:
        raise ValueError(f"--tokenizer {name}: give a number of ids from 257 (256 bytes, end of text) to {MAX_VOCAB}")

    def texts() -> Iterator[str]:
        documents = characters = 0
        for stream in streams:
            for batch in _batches(stream, 0, None) if stream.split != "val" else ():
                yield from batch
                documents, characters = documents + len(batch), characters + sum(map(len, batch))
                if progress is not None:
                    progress(Progress(documents, 0, 0, stream.done(), "training the tokenizer"))
                if characters >= TOKENIZER_CHARACTERS:
                    return

    return encoder_of(f"bpe{count}", train_tokenizer(texts(), int(count)))


class _Preparation:
    """One preparation: its files, how far it has come, and the loop over documents."""

    def __init__(self, folder: Path, prefix: str, encoder: Encoder, settings: Settings, plan: dict[str, Any]) -> None:
        self.folder, self.prefix, self.encoder, self.settings, self.plan = folder, prefix, encoder, settings, plan
        self.record, self.state = folder / f"{prefix}.json", folder / f"{prefix}.state.json"
        self.writers: dict[str, ShardWriter] = {}

    def run(self, streams: Sequence[Stream], progress: Callable[[Progress], None] | None) -> dict[str, Any]:
        """Do what is left to do and return the record of the finished shards."""
        done: dict[str, Any] | None = read_json(self.record)
        if done is not None:
            self._check_plan(self.record, done)
            return done
        state = self._begin()
        try:
            for number in range(state["stream"], len(streams)):
                self._consume(streams[number], number, state["documents"], state["position"], progress)
                state = self._save(number + 1, 0, None)
            if all(stream.split != "val" for stream in streams):
                self._hold_out(len(streams))
            return self._finish()
        finally:
            for writer in self.writers.values():
                writer.close()

    def _begin(self) -> dict[str, Any]:
        """Return the state to start from, with the files cut back to it."""
        state: dict[str, Any] | None = read_json(self.state)
        if state is None:
            if foreign := sorted(
                path.name for split in SPLITS for path in self.folder.glob(f"{self.prefix}_{split}_*")
            ):
                raise ValueError(
                    f"{self.folder} already has {foreign[0]}, which no unfinished preparation accounts for; choose "
                    "another --out or --prefix, or delete it"
                )
        elif state["stream"] or state["documents"]:
            self._check_plan(self.state, state)
        else:
            state = None  # Stopped before anything was saved: nothing to continue, and nothing to protect.
        if state is None:
            state = {"plan": self.plan, "stream": 0, "documents": 0, "position": None, "writers": {}}
            write_json(self.state, state)
        for split in SPLITS:
            start, saved = f"{self.prefix}_{split}", state["writers"].get(split)
            self.writers[split] = ShardWriter(self.folder, start, self.settings.shard_tokens, saved)
        return state

    def _check_plan(self, path: Path, found: dict[str, Any]) -> None:
        theirs = found.get("plan", {})
        if changed := [key for key in self.plan if theirs.get(key) != self.plan[key]]:
            key = changed[0]
            was, now = theirs.get(key), self.plan[key]
            if key == "source" and isinstance(was, list):  # Name the first file that differs.
                was, now = next((a, b) for a, b in itertools.zip_longest(was, now) if a != b)
            raise ValueError(
                f"{path} belongs to a preparation with {key} {was!r:.200}, this one has {now!r:.200}; "
                f"choose another --out or --prefix, or delete {self.prefix}* there"
            )

    def _consume(
        self, stream: Stream, number: int, read: int, position: Any, progress: Callable[[Progress], None] | None
    ) -> None:
        saved = time.monotonic()
        for texts in _batches(stream, read, position):
            full = self._add(texts, stream.split)
            read += len(texts)
            if progress is not None:
                train, val, most = self.writers["train"], self.writers["val"], self.settings.max_tokens
                fraction = stream.done()
                if most is not None:
                    fraction = max(fraction or 0.0, min(1.0, train.tokens / most))
                progress(Progress(train.documents + val.documents, train.tokens, val.tokens, fraction))
            if full:
                return
            if time.monotonic() - saved >= SAVE_SECONDS:
                self._save(number, read, stream.where())
                saved = time.monotonic()

    def _add(self, texts: Sequence[str], split: Split | None) -> bool:
        """Encode and write; return True if no more of the stream is wanted."""
        texts = [text for text in texts if not isinstance(text, str) or text.strip()]
        for text, tokens in zip(texts, self.encoder.encode(texts)):
            home = split or ("val" if _share(text) < self.settings.val_fraction else "train")
            limit = self.settings.max_tokens if home == "train" else self.settings.max_val_tokens
            if limit is None or self.writers[home].tokens < limit:
                self.writers[home].add(tokens, self.encoder.ends(tokens).size)
            elif home == (split or "train"):
                return True
        return False

    def _save(self, stream: int, documents: int, position: Any, **cut: dict[str, int]) -> dict[str, Any]:
        """Flush the work so far to the disk; return the state that a later call starts from.

        `cut` has earlier states of writers, to which they are cut back next.
        """
        writers = {split: writer.sync() for split, writer in self.writers.items()} | cut
        reader = {"stream": stream, "documents": documents, "position": position}
        state = {"plan": self.plan, "writers": writers, **reader}
        write_json(self.state, state)
        return state

    def _needed(self) -> dict[Split, int]:
        """Return the fewest tokens of each part: one sequence and its last target, unless less was asked for."""
        limits = {"train": self.settings.max_tokens, "val": self.settings.max_val_tokens}
        return {split: min(SEQUENCE + 1, limits[split] or SEQUENCE + 1) for split in SPLITS}

    def _hold_out(self, streams: int) -> None:
        """If few documents leave a part too short for a sequence, hold out the end of the text instead."""
        need, train, val = self._needed(), self.writers["train"], self.writers["val"]
        total = train.tokens + val.tokens
        if total < need["train"] + need["val"]:
            return
        if train.tokens < need["train"]:
            self._move("val", "train", val.tail(val.tokens), streams)
        train, val = self.writers["train"], self.writers["val"]
        if val.tokens < need["val"]:
            most = min(total - need["train"], self.settings.max_val_tokens)
            amount = min(max(round(self.settings.val_fraction * total), need["val"]), most) - val.tokens
            # At least `amount` tokens, and up to twice as many for the sake of whole documents.
            tail = train.tail(min(2 * amount, train.tokens - need["train"]))
            cut = self.encoder.cut(tail, tail.size - amount)
            whole = cut in self.encoder.ends(tail)
            self._move("train", "val", tail[cut:], streams, kept=0 if whole else 1)

    def _move(self, source: Split, target: Split, tail: Tokens, streams: int, kept: int = 0) -> None:
        """Move the last tokens of one part to the other; `kept` documents of them stay in part."""
        ends = self.encoder.ends(tail)
        for row in np.split(tail, ends):
            if row.size:
                self.writers[target].add(row, self.encoder.ends(row).size)
        state = self.writers[source].without_tail(tail.size, max(0, ends.size - kept))
        self._save(streams, 0, None, **{source: state})
        self.writers[source].close()
        self.writers[source] = ShardWriter(self.folder, f"{self.prefix}_{source}", self.settings.shard_tokens, state)

    def _check_sizes(self) -> None:
        """Raise a ValueError, and remove the files, if a part is too short for one sequence."""
        need, have = self._needed(), {split: writer.tokens for split, writer in self.writers.items()}
        short = [split for split in SPLITS if have[split] < need[split]]
        if not short:
            return
        for split in SPLITS:  # A writer without a state removes its files.
            self.writers[split].close()
            ShardWriter(self.folder, f"{self.prefix}_{split}", 1)
        self.state.unlink()
        total, least = sum(have.values()), sum(need.values())
        advice = f"give more of it to {short[0]}"
        if total < least:
            advice = f"give {math.ceil(10 * least / total) / 10} times as much" if total else "the source has no text"
        raise ValueError(
            f"too little text: {have['train']:,} tokens to train on and {have['val']:,} to validate with, but one "
            f"sequence of {SEQUENCE:,} tokens in each part needs {need['train']:,} and {need['val']:,}; {advice}"
        )

    def _finish(self) -> dict[str, Any]:
        self._check_sizes()
        for writer in self.writers.values():
            writer.finish()
        train = self.writers["train"]
        pieces = train.documents < FEW and train.tokens > LONG * train.documents
        end = None if pieces else self.encoder.end_of_document
        facts: dict[str, Any] = {
            "tokenizer": self.encoder.name, "vocab_size": self.encoder.vocab_size, "end_of_document": end,
            "plan": self.plan,
        }  # fmt: skip
        for name in ("documents", "tokens", "shards"):
            facts[name] = {split: getattr(writer, name) for split, writer in self.writers.items()}
        if self.encoder.tokenizer is not None:
            with atomic_write(self.folder / f"{self.prefix}.tokenizer.json") as out:
                out.write(self.encoder.tokenizer.to_str().encode())
        write_json(self.record, facts)
        self.state.unlink()
        return facts


def _batches(stream: Stream, read: int, position: Any) -> Iterator[list[str]]:
    """Yield lists of documents of bounded length, without reading further, so that `where` stays true."""
    held: list[str] = []
    size = 0
    try:
        for text in stream.open(read, position):
            held.append(text)
            size += len(text)
            if len(held) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
                yield held
                read, held, size = read + len(held), [], 0
    except OSError as error:
        raise ValueError(
            f"reading the text failed after {read} documents ({error}); run the same command again: it continues"
        ) from error
    if held:
        yield held


def _share(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text, so that equal texts get the same split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56
