"""Tokens to train on: one or more shards seen as one long row, with its documents, vocabulary and fingerprint."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cosmos_lab.data.embedded import embedded_shards
from cosmos_lab.data.locate import Split, find_shards, split_name
from cosmos_lab.data.shards import Shard, Tokens, document_ends, open_shard
from cosmos_lab.io import read_json

Positions = npt.NDArray[np.int64]

_PIECE = 2048  # Tokens per piece if nothing marks the end of a document: pieces are shuffled instead of documents.


@dataclass(frozen=True)
class Vocabulary:
    """What training needs to know of a tokenizer: its name, its number of ids, and the id that ends a document."""

    name: str
    size: int
    end_of_document: int | None

    @property
    def known(self) -> bool:
        """Tell whether it is a tokenizer's, not just one more than the largest id that was found."""
        return self.name != _UNKNOWN


_UNKNOWN = "unknown tokenizer"
T5 = Vocabulary("t5", 32100, 1)  # </s>
GPT2 = Vocabulary("gpt2", 50257, 50256)  # <|endoftext|>

_KNOWN = ((re.compile(r"(?<![a-z0-9])t5(?![a-z0-9])"), T5), (re.compile(r"(?<![a-z0-9])gpt-?2(?![a-z0-9])"), GPT2))


class TokenSource:
    """Shards as one row of tokens; the basis of `Batches`. Made by `open_data`.

    Attributes:
        name: what the user asked for, for logs.
        vocab_size: number of token ids: as the tokenizer has, or the largest id found plus one.
        documents: int64 bounds; document i is tokens `documents[i]` to `documents[i + 1]`. Shards do not share one.
        fingerprint: 16 hex digits of a SHA-256 over all tokens and the end-of-document id; the same packed or not.
    """

    def __init__(
        self, shards: Sequence[Shard], vocabulary: Vocabulary, name: str = "tokens",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.shards = tuple(shards)
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.size
        self._offsets: Positions = np.cumsum([0] + [shard.tokens.size for shard in shards], dtype=np.int64)
        self._cache_dir = cache_dir
        parts = [f"end-of-document {vocabulary.end_of_document}", *(shard.sha256 for shard in shards)]
        self.fingerprint = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @cached_property
    def documents(self) -> Positions:
        """Return the bounds; found on first use, because validation needs none."""
        ends = [
            _ends(shard, self.vocabulary.end_of_document, self._cache_dir) + o
            for shard, o in zip(self.shards, self._offsets[:-1], strict=True)
        ]
        return np.concatenate([np.zeros(1, np.int64), *ends])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __repr__(self) -> str:
        return f"{self.name}: {len(self):,} tokens, hash {self.fingerprint}"

    def describe(self) -> str:
        """Return the numbers of tokens, documents and ids, the tokenizer and the hash; finds the documents."""
        return (
            f"{self.name}: {len(self):,} tokens, {len(self.documents) - 1:,} documents, "
            f"{self.vocab_size:,} ids ({self.vocabulary.name}), hash {self.fingerprint}"
        )

    def read(self, start: int, stop: int) -> Tokens:
        """Read tokens `start` to `stop` of the row, as uint16."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"{self.name}: tokens {start} to {stop} asked for, there are {len(self)}")
        pieces = [
            shard.tokens[max(start - offset, 0) : max(stop - offset, 0)]
            for shard, offset in zip(self.shards, self._offsets[:-1].tolist(), strict=True)
        ]
        return np.concatenate(pieces)

    def gather(self, starts: Positions, lengths: Positions) -> Positions:
        """Read the pieces `starts[i]` to `starts[i] + lengths[i]`, one after the other; none may cross two shards.

        One slice per piece: for documents of 100 tokens and more this beats any indexing by token, which moves five
        64-bit numbers for every 16-bit token.
        """
        home = np.searchsorted(self._offsets, starts, side="right") - 1
        local = starts - self._offsets[home]
        rows = [shard.tokens for shard in self.shards]
        out = np.empty(int(lengths.sum()), dtype=np.int64)
        put = 0
        for shard, start, length in zip(home.tolist(), local.tolist(), lengths.tolist(), strict=True):
            out[put : put + length] = rows[shard][start : start + length]
            put += length
        return out


def open_data(
    spec: str, split: Split, *, vocab_size: int | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> TokenSource:
    """Open the tokens that `spec` names: "embedded" (text of this machine's Python), or what `find_shards` takes.

    A token beyond the model's `vocab_size` is an error that names the file, the position and the id.
    """
    paths = find_shards(str(embedded_shards(cache_dir)) if spec == "embedded" else spec, split)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(paths))) as pool:
        shards = list(pool.map(lambda path: open_shard(path, cache_dir), paths))
    vocabulary = _vocabulary(spec, shards)
    for shard in shards:
        shard.check_vocabulary(vocabulary.size if vocab_size is None else vocab_size)
    return TokenSource(shards, vocabulary, f"{spec} ({split})", cache_dir)


def _ends(shard: Shard, end_of_document: int | None, cache_dir: str | os.PathLike[str] | None) -> Positions:
    if end_of_document is not None:
        return document_ends(shard, end_of_document, cache_dir)
    size = shard.tokens.size
    return np.append(np.arange(_PIECE, size, _PIECE, dtype=np.int64), size)


def _vocabulary(spec: str, shards: Sequence[Shard]) -> Vocabulary:
    """Return the one tokenizer of all shards, as far as it can be known."""
    found = {_recognize(shard) for shard in shards}
    if len(found) > 1:
        names = ", ".join(sorted("unknown" if t is None else t.name for t in found))
        raise ValueError(f"data {spec!r} mixes shards of several tokenizers ({names}); name those of one")
    return found.pop() or Vocabulary(_UNKNOWN, max(shard.max_id for shard in shards) + 1, None)


def _recognize(shard: Shard) -> Vocabulary | None:
    """Find the tokenizer by `PREFIX.json` beside the shard, by its name or by GPT-2's last id; else None."""
    facts = read_json(shard.path.with_name(f"{split_name(shard.path).prefix}.json"))
    if isinstance(facts, dict) and {"tokenizer", "vocab_size", "end_of_document"} <= set(facts):
        vocabulary = Vocabulary(facts["tokenizer"], facts["vocab_size"], facts["end_of_document"])
        shard.check_vocabulary(vocabulary.size)
        return vocabulary
    name = shard.path.name.lower().removesuffix(".xz").removesuffix(".bin")
    for pattern, known in _KNOWN:
        if pattern.search(name) and shard.max_id < known.size:
            return known
    return GPT2 if shard.max_id == GPT2.end_of_document else None
