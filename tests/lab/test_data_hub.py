"""Data sets of the hub without a network: a local folder replaces one, and errors say what to do without any."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cosmos_lab.data import prepare as module
from cosmos_lab.data import text as text_module
from cosmos_lab.data.embedded import train_tokenizer
from cosmos_lab.data.prepare import Progress, Settings, prepare
from cosmos_lab.data.source import open_data
from cosmos_lab.data.text import HubData

tokenizers = pytest.importorskip("tokenizers", reason="preparing data needs the package `tokenizers`")

DOCUMENTS = [f"Document {number} says " + "again and again " * (number % 17) + f"{number}." for number in range(400)]
SETTINGS = Settings(val_fraction=0.1, shard_tokens=2000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.json"
    train_tokenizer(DOCUMENTS, vocab_size=400).save(str(path))
    return str(path)


def decoded(spec: str, split: str, tokenizer: str, cache: Path) -> list[str]:
    source = open_data(spec, split, cache_dir=cache)  # type: ignore[arg-type]
    decode = tokenizers.Tokenizer.from_file(tokenizer).decode
    pairs = zip(source.documents[:-1].tolist(), source.documents[1:].tolist())
    return [decode(source.read(start, stop - 1).tolist()) for start, stop in pairs]


def test_hub_data_is_prepared_through_datasets(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder in place of a hub name: own validation split, streaming, and resume at the reader's position."""
    pytest.importorskip("datasets", reason="the hub's data needs the package `datasets`")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    home = tmp_path / "hub"
    home.mkdir()
    for name, rows in (("validation", DOCUMENTS[:50]), ("train", DOCUMENTS[50:])):
        (home / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    monkeypatch.setitem(text_module.HUB, "somewhere", HubData(str(home), val="validation"))
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 30)
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)

    class Stop(Exception):
        pass

    def progress(so_far: Progress) -> None:
        if so_far.documents == 140:
            raise Stop

    with pytest.raises(Stop):
        prepare("somewhere", tmp_path / "out", tokenizer, SETTINGS, progress=progress)
    state = json.loads((tmp_path / "out" / "somewhere_small.state.json").read_text())
    assert (state["stream"], state["documents"]) == (1, 60) and state["position"] is not None
    made = prepare("somewhere", tmp_path / "out", tokenizer, SETTINGS)
    assert decoded(made.spec, "val", tokenizer, tmp_path / "cache") == DOCUMENTS[:50]
    assert decoded(made.spec, "train", tokenizer, tmp_path / "cache") == DOCUMENTS[50:]


def test_hub_data_without_its_package_or_network_says_what_to_do(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"allenai/c4 comes through the package `datasets`: pip install"):
        prepare("c4", tmp_path / "out", tokenizer)
    monkeypatch.undo()
    pytest.importorskip("datasets", reason="the hub's data needs the package `datasets`")
    with pytest.raises(ValueError, match=r"cannot open HuggingFaceFW/fineweb \(sample-10BT, train\).*offline mode"):
        prepare("fineweb", tmp_path / "out", tokenizer)
