"""What a new user has (one text, a folder of notes, Parquet, nanoGPT's tokens) becomes shards with both parts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cosmos_lab.data.encode import load_encoder
from cosmos_lab.data.prepare import Prepared, Settings, prepare
from cosmos_lab.data.source import open_data

tokenizers = pytest.importorskip("tokenizers", reason="preparing data needs the package `tokenizers`")

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "how", "seven", "small", "birds", "flew", "over", "house")
TOKENIZER = "train:300"


def note(number: int, lines: int = 6) -> str:
    """Return a text that no other number gives."""
    chosen = np.random.default_rng(number).choice(WORDS, (lines, 8))
    return "\n".join(f"{number}: " + " ".join(line) for line in chosen)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    (folder / "old").mkdir(parents=True)
    (folder / ".obsidian").mkdir()
    for number in range(60):
        (folder / ("old" if number % 2 else "") / f"{number:02d}{'.md' if number % 3 else '.txt'}").write_text(
            note(number)
        )
    (folder / ".obsidian" / "hidden.md").write_text("settings, not a note")
    (folder / "package.json").write_text('{"name": "not data either"}')
    return folder


def texts(made: Prepared, tmp_path: Path) -> dict[str, str]:
    """Return the decoded text of both parts; special tokens are left out."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{made.spec}.tokenizer.json")
    sources = {split: open_data(made.spec, split, cache_dir=tmp_path / "cache") for split in ("train", "val")}  # type: ignore[arg-type]
    return {split: tokenizer.decode(source.read(0, len(source)).tolist()) for split, source in sources.items()}


def test_the_trained_tokenizer_is_recorded_like_any_other(tmp_path: Path, notes: Path) -> None:
    made = prepare(str(notes), tmp_path / "out", "train:330", Settings(val_fraction=0.3))
    assert (made.spec, made.vocab_size) == (str(tmp_path / "out" / "notes_bpe330"), 330)
    stored = load_encoder(f"{made.spec}.tokenizer.json")
    assert (stored.vocab_size, stored.end_of_document) == (330, 0)
    vocabulary = open_data(made.spec, "val", cache_dir=tmp_path / "cache").vocabulary
    assert (vocabulary.name, vocabulary.size, vocabulary.end_of_document) == ("bpe330", 330, 0)
    for wrong in ("train:12", "train:many", "train:70000"):
        with pytest.raises(ValueError, match=f"--tokenizer {wrong}: give a number of ids from 257"):
            prepare(str(notes), tmp_path / "out", wrong)


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"^a\.parquet needs the package `pyarrow`: pip install [^\n]*$"):
        prepare(str(tmp_path / "a.parquet"), tmp_path / "out", TOKENIZER)


def nanogpt(folder: Path, top: int = 64, **sizes: int) -> dict[str, np.ndarray]:
    """Write `NAME.bin` as nanoGPT's scripts do, and the pickle beside them, which must stay closed."""
    folder.mkdir(exist_ok=True)
    parts = {name: np.random.default_rng(size).integers(0, top, size).astype(np.uint16) for name, size in sizes.items()}
    for name, tokens in parts.items():
        tokens[size // 2 if (size := tokens.size) else 0] = top
        tokens.tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(b"cos\nabort\n(tR.")  # It would end the process.
    return parts


def row(spec: str, split: str, tmp_path: Path) -> np.ndarray:
    source = open_data(spec, split, cache_dir=tmp_path / "cache")  # type: ignore[arg-type]
    return source.read(0, len(source))
