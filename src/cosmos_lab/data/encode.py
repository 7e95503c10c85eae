"""Text to token ids with the `tokenizers` package, each document closed by the tokenizer's end-of-document id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cosmos_lab.data.shards import MAX_VOCAB, Tokens
from cosmos_lab.io import require

NAMES = {"t5": "google-t5/t5-base", "gpt2": "openai-community/gpt2"}
_LINE = 4096  # Tokens: how far back a line break is looked for.
END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer ready to encode documents: its short name, a hash of all its rules, and what shards need to know."""

    name: str
    sha256: str
    vocab_size: int
    end_of_document: int | None
    tokenizer: Any  # None for raw tokens of an unknown one

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, with the end-of-document id last and nowhere else."""
        rows, end = [], self.end_of_document
        assert end is not None  # Only raw tokens, which need no encoding, have none.
        for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            row = np.array(encoding.ids, dtype=np.uint16)
            # T5's model knows "</s>" as a word; a text that spells it out must not end there.
            rows.append(np.append(row[row != end], np.uint16(end)))
        return rows

    def ends(self, row: Tokens) -> npt.NDArray[np.int64]:
        """Return the positions just after each end-of-document id."""
        return np.flatnonzero(row == (-1 if self.end_of_document is None else self.end_of_document)) + 1

    def cut(self, row: Tokens, at: int) -> int:
        """Return the last place up to `at` where a document ends; else a near one where a line does; else `at`."""
        if (ends := self.ends(row[:at])).size:
            return int(ends[-1])
        near = range(at, max(0, at - _LINE), -1) if self.tokenizer is not None else ()
        return next((i for i in near if self.tokenizer.decode([int(row[i - 1])]).endswith("\n")), at)


def load_encoder(name: str) -> Encoder:
    """Load "t5", "gpt2", the path of a tokenizer.json, or a tokenizer by its name on the hub."""
    message = "preparing data needs the package `tokenizers`: pip install tokenizers"
    Tokenizer = require("tokenizers", message).Tokenizer
    path = Path(name).expanduser()
    if path.is_file():
        try:
            return encoder_of(path.stem.removesuffix(".tokenizer"), Tokenizer.from_file(str(path)))
        except Exception as error:  # The Rust side raises a bare Exception.
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"{path} is not a tokenizer.json of the `tokenizers` package: {error}") from error
    if name not in NAMES and (path.suffix == ".json" or name.count("/") > 1):
        raise ValueError(f"no tokenizer file {path}; give {', '.join(NAMES)}, a tokenizer.json, or a name on the hub")
    try:
        tokenizer = Tokenizer.from_pretrained(NAMES.get(name, name))
    except Exception as error:
        raise ValueError(
            f"cannot fetch the tokenizer {NAMES.get(name, name)!r} from the hub ({error}); without a network, give the "
            "path of its tokenizer.json, or train one on the text (--tokenizer train:4096)"
        ) from error
    return encoder_of(name.rsplit("/", 1)[-1], tokenizer)


def encoder_of(name: str, tokenizer: Any) -> Encoder:
    """Wrap a tokenizer that is already loaded."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values()) + 1
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"tokenizer {name} has {vocab_size} ids; shards hold uint16, so at most {MAX_VOCAB}")
    end = next((ids[token] for token in END_TOKENS if token in ids), None)
    if end is None:
        raise ValueError(f"tokenizer {name} has no end-of-document token; add one of {', '.join(END_TOKENS)} to it")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # Text that spells a special token out is still text.
    sha256 = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return Encoder(name, sha256, vocab_size, end, tokenizer)
