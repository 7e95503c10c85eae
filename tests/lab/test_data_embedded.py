"""The embedded text: made once, the same every time, split by document, and readable back."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cosmos_lab.data import embedded
from cosmos_lab.data.source import open_data

pytest.importorskip("tokenizers", reason="the embedded data needs the package `tokenizers`")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the embedded data, really made."""
    folder = tmp_path_factory.mktemp("cache")
    embedded.embedded_shards(folder)
    return folder


def test_embedded_data_is_made_once_and_then_only_opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening trains no tokenizer and encodes nothing; how much text there is sets the time of the first use."""
    calls: list[str] = []
    for name in ("_make", "train_tokenizer", "encoder_of", "write_shard"):
        monkeypatch.setattr(embedded, name, lambda *args, name=name: calls.append(name))
    train, val = (open_data("embedded", split, vocab_size=4096, cache_dir=cache) for split in ("train", "val"))
    assert calls == []
    assert train.vocab_size == val.vocab_size == 4096
    assert len(train) > 1_000_000 and len(val) > 50_000
    assert len(train) + len(val) < embedded.TEXT_BYTES / 2  # a token is 2 bytes and more
    assert train.fingerprint != val.fingerprint and train.fingerprint in repr(train)


def test_decoded_documents_are_the_modules_of_the_standard_library(cache: Path) -> None:
    """Decoded tokens are the texts, each in the split that its name's hash says."""
    from tokenizers import Tokenizer

    folder = embedded.embedded_shards(cache)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = embedded.library_documents(Path(embedded.sysconfig.get_paths()["stdlib"]))
    for split in ("train", "val"):
        source = open_data("embedded", split, cache_dir=cache)
        texts = [text for name, text in documents if embedded.in_validation(name) == (split == "val")]
        assert len(source.documents) - 1 == len(texts)
        for number in (0, len(texts) // 2, len(texts) - 1):
            ids = source.read(int(source.documents[number]), int(source.documents[number + 1]))
            assert ids[-1] == source.vocabulary.end_of_document == 0
            assert tokenizer.decode(ids[:-1].tolist()) == texts[number]


def library(root: Path, modules: int = 40) -> Path:
    words = np.random.default_rng(0).integers(0, 300, (modules, 400))
    for number, row in enumerate(words):
        path = root / f"package{number % 3}" / f"module{number:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(f"word{word}" for word in row))
    return root


def test_the_same_library_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for name in ("one", "two"):
        root = library(tmp_path / name)
        monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda root=root: {"stdlib": str(root)})
        folder = embedded.embedded_shards(tmp_path / f"cache-{name}")
        contents.append(
            {path.name: path.read_bytes() for path in sorted(folder.iterdir())} | {"": folder.name.encode()}
        )
    assert contents[0] == contents[1]
    (tmp_path / "two" / "package0" / "module00.py").write_text("another text")
    embedded._library_hash.cache_clear()  # a new process
    assert embedded.embedded_shards(tmp_path / "cache-two").name != folder.name


def test_documents_are_library_text_in_path_order_up_to_the_limit(tmp_path: Path) -> None:
    root = library(tmp_path)
    for name in ("site-packages/x.py", "test/y.py", "package0/_sysconfigdata_linux.py", "package0/notes.txt"):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("not part of the library's text")
    (root / "package1" / "empty.py").write_text("\n")
    documents = embedded.library_documents(root)
    names = [name for name, _ in documents]
    assert names == sorted(f"package{number % 3}/module{number:02d}.py" for number in range(40))
    size = sum(len(text) for _, text in documents[:30])
    assert [name for name, _ in embedded.library_documents(root, limit=size)] == names[:30]
    with pytest.raises(ValueError, match="has 5 of them"):
        embedded.library_documents(root, limit=sum(len(text) for _, text in documents[:5]))


def test_the_error_without_the_tokenizers_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install tokenizers"):
        embedded.train_tokenizer(["text"])


def test_an_interrupted_preparation_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = library(tmp_path / "library")
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    whole = embedded.write_shard

    def broken(path: Path, tokens: np.ndarray) -> None:
        if "val" in path.name:
            raise OSError(28, "No space left on device")
        whole(path, tokens)

    monkeypatch.setattr(embedded, "write_shard", broken)
    with pytest.raises(OSError, match=r"no space left.*COSMOS_LAB_CACHE"):
        embedded.embedded_shards(tmp_path / "cache")
    monkeypatch.setattr(embedded, "write_shard", whole)
    assert len(open_data("embedded", "val", cache_dir=tmp_path / "cache")) > 0
