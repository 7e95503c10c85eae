"""Make token shards from text, with progress, and with resume after a kill: the files come out the same.

Tokens are appended to `PREFIX_train_000000.bin.part` and so on; a full shard gets its header and loses the `.part`.
Now and then the files are synced and `PREFIX.state.json` notes how far they and the reader have come; a later call cuts
the files back to the last note and goes on from there. `PREFIX.json` (tokenizer, counts, settings) is written last.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cosmos_lab.data.encode import Encoder, load_encoder
from cosmos_lab.data.locate import Split
from cosmos_lab.data.text import HUB, Stream, Unit, hub_streams, local_files, local_stream
from cosmos_lab.data.writer import ShardWriter, description
from cosmos_lab.io import atomic_write, disk_error, locked, read_json, write_json

SPLITS: tuple[Split, Split] = ("train", "val")

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 4_000_000  # Bounds the memory of a batch of long documents.
NOTE_SECONDS = 20.0  # A kill loses at most so much work.

_GLOB = re.compile(r"\[!?\]?[^]]*\]|[][*?]")  # A class with what it contains, and single signs.


@dataclass(frozen=True)
class Settings:
    """How text becomes shards; with the text and the tokenizer it determines every byte.

    Attributes:
        val_fraction: documents kept for validation, chosen by the hash of their text; not used where the data set has
            its own validation split (C4, WikiText-103).
        shard_tokens: most tokens a shard; a document is never cut, so a shard may be a little shorter.
        max_tokens: stop after so many training tokens (at the end of that document); None for all.
        max_val_tokens: leave out further validation documents after so many tokens.
        unit: what a document is in a text file; see `local_stream`.
        field: the key of the text in `.jsonl` lines.
    """

    val_fraction: float = 0.01
    shard_tokens: int = 100_000_000
    max_tokens: int | None = None
    max_val_tokens: int = 10_000_000
    unit: Unit = "file"
    field: str = "text"

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}; it must lie between 0 and 1")
        if not 1 <= self.shard_tokens < 2**31:
            raise ValueError(f"shard_tokens is {self.shard_tokens}; a shard's header counts 1 to 2**31 - 1")
        for name in ("max_tokens", "max_val_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class Progress:
    """Handed to the progress callback: totals so far, and the fraction of the work done where it is known."""

    documents: int
    train_tokens: int
    val_tokens: int
    seconds: float
    fraction: float | None


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made. `spec` is what `open_data` and `cosmos-lab train --data` take."""

    spec: str
    documents: dict[str, int]
    tokens: dict[str, int]
    shards: dict[str, int]


def prepare(
    source: str | Sequence[str],
    out_dir: str | os.PathLike[str],
    tokenizer: str,
    settings: Settings | None = None,
    *,
    prefix: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Tokenize text into shards in `out_dir`; after an interruption the same call goes on where it stopped.

    Args:
        source: "c4", "fineweb", "wikitext-103", or paths of text files, folders or globs.
        out_dir: where the shards go; made if missing.
        tokenizer: "t5", "gpt2", the path of a tokenizer.json, or a tokenizer's name on the hub.
        settings: see `Settings`.
        prefix: start of the files' names; default `SOURCE_TOKENIZER`.
        progress: called after each batch of documents.
    """
    settings, folder = settings or Settings(), Path(out_dir).expanduser()
    names = [source] if isinstance(source, str) else list(source)
    streams, origin = _streams(names, settings)  # First: a path misspelt is found without a network.
    encoder = load_encoder(tokenizer)
    prefix = prefix or f"{origin[0]}_{encoder.name}"
    plan = {"source": origin, "tokenizer": encoder.sha256, **asdict(settings)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{prefix}.lock"):
            facts = _Work(folder, prefix, encoder, settings, plan).run(streams, progress)
    except OSError as error:
        raise disk_error(error, folder, "make room and run the same command again: it goes on from there") from error
    return Prepared(str(folder / prefix), facts["documents"], facts["tokens"], facts["shards"])


def _streams(names: list[str], settings: Settings) -> tuple[list[Stream], list[str]]:
    """The streams to read, and what identifies them: the first word is a short name."""
    if len(names) == 1 and names[0] in HUB:
        return hub_streams(HUB[names[0]]), [names[0]]
    if not names:
        raise ValueError(f"nothing to prepare: name one of {', '.join(HUB)}, or text files")
    files = local_files(names)
    short = _GLOB.sub("", Path(names[0]).name).split(".")[0] or "text"
    return [local_stream(files, settings.unit, settings.field)], [short, *(f"{p} {p.stat().st_size}" for p in files)]


class _Work:
    """One preparation: the files it owns, how far it has come, and the loop over documents."""

    def __init__(self, folder: Path, prefix: str, encoder: Encoder, settings: Settings, plan: dict[str, Any]) -> None:
        self.folder, self.prefix, self.encoder, self.settings, self.plan = folder, prefix, encoder, settings, plan
        self.record, self.state = folder / f"{prefix}.json", folder / f"{prefix}.state.json"
        self.writers: dict[str, ShardWriter] = {}
        self.began = time.monotonic()

    def run(self, streams: Sequence[Stream], progress: Callable[[Progress], None] | None) -> dict[str, Any]:
        """Do what is left to do; the record of the finished shards."""
        done: dict[str, Any] | None = read_json(self.record)
        if done is not None:
            self._check_plan(self.record, done)
            return done
        state = self._begin()
        try:
            for number in range(state["stream"], len(streams)):
                self._consume(streams[number], number, state["documents"], state["position"], progress)
                state = self._note(number + 1, 0, None)
            return self._finish()
        finally:
            for writer in self.writers.values():
                writer.abandon()

    def _begin(self) -> dict[str, Any]:
        """The state to start from, with the files cut back to it."""
        state: dict[str, Any] | None = read_json(self.state)
        if state is None:
            if foreign := sorted(
                path.name for split in SPLITS for path in self.folder.glob(f"{self.prefix}_{split}_*")
            ):
                raise ValueError(
                    f"{self.folder} already has {foreign[0]}, which no unfinished preparation accounts for; choose "
                    "another folder or prefix, or delete it"
                )
        elif state["stream"] or state["documents"]:
            self._check_plan(self.state, state)
        else:
            state = None  # Stopped before anything was noted: nothing to go on with, and nothing to protect.
        if state is None:
            state = {"plan": self.plan, "stream": 0, "documents": 0, "position": None, "writers": {}}
            write_json(self.state, state)
        for split in SPLITS:
            start, noted = f"{self.prefix}_{split}", state["writers"].get(split)
            self.writers[split] = ShardWriter(self.folder, start, self.settings.shard_tokens, noted)
        return state

    def _check_plan(self, path: Path, found: dict[str, Any]) -> None:
        theirs = found.get("plan", {})
        if changed := [key for key in self.plan if theirs.get(key) != self.plan[key]]:
            key = changed[0]
            raise ValueError(
                f"{path} belongs to a preparation with {key} {_short(theirs.get(key))}, this one has "
                f"{_short(self.plan[key])}; choose another folder or prefix, or delete {self.prefix}* there"
            )

    def _consume(
        self, stream: Stream, number: int, read: int, position: Any, progress: Callable[[Progress], None] | None
    ) -> None:
        noted = time.monotonic()
        for texts in _batches(stream, read, position):
            full = self._add(texts, stream.split)
            read += len(texts)
            if progress is not None:
                progress(self._progress(stream))
            if full:
                return
            if time.monotonic() - noted >= NOTE_SECONDS:
                self._note(number, read, stream.where())
                noted = time.monotonic()

    def _add(self, texts: Sequence[str], split: Split | None) -> bool:
        """Encode and write; True when the stream has given all that is wanted of it."""
        texts = [text for text in texts if text.strip()]
        for text, tokens in zip(texts, self.encoder.encode(texts)):
            home = split or ("val" if _share(text) < self.settings.val_fraction else "train")
            limit = self.settings.max_tokens if home == "train" else self.settings.max_val_tokens
            if limit is None or self.writers[home].tokens < limit:
                self.writers[home].add(tokens)
            elif home == (split or "train"):
                return True
        return False

    def _progress(self, stream: Stream) -> Progress:
        train, val = self.writers["train"], self.writers["val"]
        fraction = stream.done()
        if self.settings.max_tokens is not None:
            fraction = max(fraction or 0.0, min(1.0, train.tokens / self.settings.max_tokens))
        elapsed = time.monotonic() - self.began
        return Progress(train.documents + val.documents, train.tokens, val.tokens, elapsed, fraction)

    def _note(self, stream: int, documents: int, position: Any) -> dict[str, Any]:
        """Make the work so far durable; the state that a later call starts from."""
        writers = {split: writer.note() for split, writer in self.writers.items()}
        place = {"stream": stream, "documents": documents, "position": position}
        state = {"plan": self.plan, "writers": writers, **place}
        write_json(self.state, state)
        return state

    def _finish(self) -> dict[str, Any]:
        empty = [split for split, writer in self.writers.items() if not writer.documents]
        if empty:
            documents = sum(writer.documents for writer in self.writers.values())
            for split in SPLITS:  # A writer with nothing noted removes its files.
                self.writers[split].abandon()
                ShardWriter(self.folder, f"{self.prefix}_{split}", 1)
            self.state.unlink()
            change = "raise" if empty[0] == "val" else "lower"
            raise ValueError(
                f"of {documents} documents none fell to {empty[0]}; {change} --val-fraction "
                f"({self.settings.val_fraction}), give more text, or cut text files into more documents "
                "(--unit blank-lines)"
            )
        for writer in self.writers.values():
            writer.finish()
        tokenizer = {"tokenizer": self.encoder.name, "vocab_size": self.encoder.vocab_size}
        end = {"end_of_document": self.encoder.end_of_document}
        facts = {**tokenizer, **end, **description(self.writers), "plan": self.plan}
        with atomic_write(self.folder / f"{self.prefix}.tokenizer.json") as out:
            out.write(self.encoder.tokenizer.to_str().encode())
        write_json(self.record, facts)
        self.state.unlink()
        return facts


def _batches(stream: Stream, read: int, position: Any) -> Iterator[list[str]]:
    """Documents in lists of bounded length; never reads further than it yields, so that `where` stays true."""
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
            f"reading the text broke off after {read} documents ({error}); run the same command again: it goes on"
        ) from error
    if held:
        yield held


def _share(text: str) -> float:
    """A number in [0, 1) that only the text decides, so that copies of a document fall into the same split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
