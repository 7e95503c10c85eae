"""Data that needs no download: the source text of this machine's Python standard library.

Text and tokenizer are made on first use (about ten seconds) and kept in the cache folder. They depend only on the
library's files and on the constants below, so the same Python gives the same tokens and the same fingerprint; another
Python version gives other text, which the fingerprint shows.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_lab.data.encode import encoder_of
from cosmos_lab.data.shards import CACHE_ADVICE, write_shard
from cosmos_lab.io import cache_folder, explained, locked, read_json, require, write_json

VOCAB_SIZE = 4096
END_OF_DOCUMENT = "<|endoftext|>"
TEXT_BYTES = 6_000_000  # About 1.6 million tokens: enough for a tiny model, ready in ten seconds on two cores.
VAL_PERCENT = 10

_RECIPE = 1  # Raise it if the text or the tokenizer is made in another way: old caches are then not used.
# Third-party code; tests, which some distributions leave out; tables of character codes, which are hardly text.
_NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "ensurepip", "encodings"}


def embedded_shards(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder with `embedded_train.bin`, `embedded_val.bin` and `tokenizer.json`, made on first use."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folder = cache_folder(cache_dir) / f"embedded-{_library_hash(root)}"
    with explained(folder, CACHE_ADVICE), locked(folder / ".lock"):
        if read_json(folder / "embedded.json") is None:  # Written last, so the folder is complete.
            _make(folder, library_documents(root))
    return folder


@cache
def _library_hash(root: Path) -> str:
    """Return 16 hex digits of a SHA-256 over the text and how it is made; a comparison asks once for each run."""
    digest = hashlib.sha256(f"{_RECIPE} {VOCAB_SIZE} {VAL_PERCENT}".encode())
    for name, text in library_documents(root):
        digest.update(f"\0{name}\0{text}".encode())
    return digest.hexdigest()[:16]


def library_documents(root: Path, limit: int = TEXT_BYTES) -> list[tuple[str, str]]:
    """Return names and texts of the library's modules in the order of their paths, up to `limit` bytes in all."""
    documents, total = [], 0
    for path in _modules(root):
        content = path.read_bytes()
        if not content.strip():
            continue
        total += len(content)
        if total > limit:
            break
        text = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
        documents.append((path.relative_to(root).as_posix(), text))
    if len(documents) < 20:
        raise ValueError(
            f"the embedded data is made from the Python library's sources, but {root} has {len(documents)} of them; "
            "name token shards instead (see `cosmos-lab data prepare`)"
        )
    return documents


def in_validation(name: str) -> bool:
    """Tell whether a document is for validation. Only the hash of its name decides, not the other documents."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100 < VAL_PERCENT


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """Train a byte-level BPE of `vocab_size` ids with id 0 for the end of a document."""
    message = "training a tokenizer needs the package `tokenizers`: pip install tokenizers"
    library = require("tokenizers", message)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _modules(root: Path) -> list[Path]:
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_TEXT and not name.startswith("config-")]
        # _sysconfigdata describes the build, sitecustomize the installation: not part of the library's text.
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecustomize"))
        ]
    return sorted((path for path in found if not path.is_symlink()), key=lambda path: path.relative_to(root).as_posix())


def _make(folder: Path, documents: list[tuple[str, str]]) -> None:
    tokenizer = train_tokenizer([text for name, text in documents if not in_validation(name)])
    encoder, counts = encoder_of("embedded", tokenizer), {}
    for split in ("train", "val"):
        texts = [text for name, text in documents if in_validation(name) == (split == "val")]
        tokens = np.concatenate(encoder.encode(texts))
        write_shard(folder / f"embedded_{split}.bin", tokens)
        counts[split] = {"documents": len(texts), "tokens": int(tokens.size)}
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"vocab_size": encoder.vocab_size, "end_of_document": encoder.end_of_document, "splits": counts}
    write_json(folder / "embedded.json", {"tokenizer": encoder.name, **facts})
