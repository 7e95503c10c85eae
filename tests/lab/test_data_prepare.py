"""Preparation of shards from text: what is written, and that a kill at any moment changes none of it."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cosmos_lab.data import prepare as module
from cosmos_lab.data.embedded import train_tokenizer
from cosmos_lab.data.encode import load_encoder
from cosmos_lab.data.prepare import Progress, Settings, prepare
from cosmos_lab.data.shards import open_shard
from cosmos_lab.data.source import open_data
from cosmos_lab.data.text import articles

tokenizers = pytest.importorskip("tokenizers", reason="preparing data needs the package `tokenizers`")

DOCUMENTS = [f"Document {number} says " + "again and again " * (number % 17) + f"{number}." for number in range(400)]
SETTINGS = Settings(val_fraction=0.1, shard_tokens=2000)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.json"
    train_tokenizer(DOCUMENTS, vocab_size=400).save(str(path))
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in DOCUMENTS))
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def decoded(spec: str, split: str, tokenizer: str, cache: Path) -> list[str]:
    source = open_data(spec, split, cache_dir=cache)  # type: ignore[arg-type]
    decode = tokenizers.Tokenizer.from_file(tokenizer).decode
    pairs = zip(source.documents[:-1].tolist(), source.documents[1:].tolist())
    return [decode(source.read(start, stop - 1).tolist()) for start, stop in pairs]


def test_every_document_is_in_one_split_once_in_order(tmp_path: Path, texts: str, tokenizer: str) -> None:
    seen: list[Progress] = []
    made = prepare(texts, tmp_path / "out", tokenizer, SETTINGS, progress=seen.append)
    assert made.spec == str(tmp_path / "out" / "docs_small")
    train, val = (decoded(made.spec, split, tokenizer, tmp_path / "cache") for split in ("train", "val"))
    assert 15 < len(val) < 70  # 40 of 400 expected.
    held_out = set(val)
    assert train == [text for text in DOCUMENTS if text not in held_out]
    assert val == [text for text in DOCUMENTS if text in held_out]
    assert made.documents == {"train": len(train), "val": len(val)}
    assert seen[-1].documents == 400 and seen[-1].train_tokens == made.tokens["train"] and seen[-1].fraction == 1.0
    shards = [open_shard(path, tmp_path / "cache") for path in (tmp_path / "out").glob("docs_small_train_*.bin")]
    assert len(shards) == made.shards["train"] > 2
    assert all(shard.tokens.size <= 2000 and shard.tokens[-1] == 0 for shard in shards)
    source = open_data(made.spec, "train", cache_dir=tmp_path / "cache")
    assert (source.vocab_size, source.vocabulary.name) == (400, "small")


def test_equal_documents_are_put_into_the_same_split(tmp_path: Path, texts: str, tokenizer: str) -> None:
    made = prepare([texts, texts], tmp_path / "out", tokenizer, SETTINGS)
    train, val = (decoded(made.spec, split, tokenizer, tmp_path / "cache") for split in ("train", "val"))
    assert not set(train) & set(val) and len(train) + len(val) == 800


def in_child(call: Callable[[], object]) -> int:
    """Run `call` in a forked process; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os._exit(9)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize("save_every", [1, 3])
def test_a_killed_and_resumed_preparation_writes_the_same_bytes(
    tmp_path: Path, texts: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch, save_every: int
) -> None:
    """Kill with -9 after 1, 2, ... batches of every attempt; save at every batch or at every third."""
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 30)
    prepare(texts, tmp_path / "straight", tokenizer, SETTINGS)
    clock = iter(range(10**6))
    monkeypatch.setattr(module, "SAVE_SECONDS", float(save_every))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    read = []

    def killer(after: int) -> Callable[[Progress], None]:
        left = [after]

        def progress(_: Progress) -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        return progress

    for attempt in range(1, 5):
        run = lambda n=attempt: prepare(texts, tmp_path / "out", tokenizer, SETTINGS, progress=killer(n + 1))  # noqa: E731
        assert in_child(run) == signal.SIGKILL
        read.append(json.loads((tmp_path / "out" / "docs_small.state.json").read_text())["documents"])
    assert read[-1] > read[0]  # It continued instead of starting again.
    prepare(texts, tmp_path / "out", tokenizer, SETTINGS)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_shard_completed_after_the_last_save_is_cut_back(
    tmp_path: Path, texts: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it after one early save and several shards completed since."""
    monkeypatch.setattr(module, "BATCH_DOCUMENTS", 20)
    prepare(texts, tmp_path / "straight", tokenizer, SETTINGS)
    folder = tmp_path / "out"

    def progress(so_far: Progress) -> None:
        if so_far.documents >= 40:
            module.SAVE_SECONDS = 1e9
        if so_far.documents >= 300:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    assert in_child(lambda: prepare(texts, folder, tokenizer, SETTINGS, progress=progress)) == signal.SIGKILL
    saved = json.loads((folder / "docs_small.state.json").read_text())["writers"]["train"]["shards"]
    assert len(list(folder.glob("docs_small_train_*.bin"))) > saved
    prepare(texts, folder, tokenizer, SETTINGS)
    assert contents(folder) == contents(tmp_path / "straight")


def test_a_full_disk_is_explained_and_continued_once_there_is_room(tmp_path: Path, texts: str, tokenizer: str) -> None:
    prepare(texts, tmp_path / "straight", tokenizer, SETTINGS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # The kernel refuses to let a file grow further.
    try:
        with pytest.raises(OSError, match=r"^cannot write .*: File too large; choose another --out$"):
            prepare(texts, tmp_path / "out", tokenizer, SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "out").glob("*.tmp")) and not (tmp_path / "out" / "docs_small.json").exists()
    prepare(texts, tmp_path / "out", tokenizer, SETTINGS)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_finished_preparation_is_not_repeated(tmp_path: Path, texts: str, tokenizer: str) -> None:
    made = prepare(texts, tmp_path / "out", tokenizer, SETTINGS)
    before = contents(tmp_path / "out")
    assert prepare(texts, tmp_path / "out", tokenizer, SETTINGS) == made
    with pytest.raises(ValueError, match=r"docs_small\.json belongs to .* val_fraction 0\.1, this one has 0\.2"):
        prepare(texts, tmp_path / "out", tokenizer, Settings(val_fraction=0.2, shard_tokens=2000))
    (tmp_path / "out" / "docs_small.json").unlink()
    with pytest.raises(ValueError, match=r"already has docs_small_train_000000\.bin"):
        prepare(texts, tmp_path / "out", tokenizer, SETTINGS)
    assert contents(tmp_path / "out") == {name: before[name] for name in before if name != "docs_small.json"}


def test_limits_on_tokens_are_kept(tmp_path: Path, texts: str, tokenizer: str) -> None:
    settings = Settings(val_fraction=0.1, max_tokens=1500, max_val_tokens=100)
    made = prepare(texts, tmp_path / "out", tokenizer, settings)
    longest = max(len(row) for row in load_encoder(tokenizer).encode(DOCUMENTS))
    assert 1500 <= made.tokens["train"] < 1500 + longest
    assert 100 <= made.tokens["val"] < 100 + longest


WIKITEXT = " \n = First = \n \n Text of it . \n = = Section = = \n \n More . \n \n = Second one = \n \n Other text . \n"


def test_wikitext_articles_start_at_their_titles() -> None:
    found = list(articles(WIKITEXT.splitlines(keepends=True)))
    assert [article.split("\n")[0].strip() for article in found] == ["= First =", "= Second one ="]
    assert "Section" in found[0] and "More ." in found[0]


@pytest.mark.parametrize("suffix", [".txt", ".txt.xz", ".txt.gz"])
def test_text_files_of_every_kind_give_their_documents(tmp_path: Path, tokenizer: str, suffix: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(Path(suffix).suffix, bytes)
    (folder / f"a{suffix}").write_bytes(pack("\n\n".join(DOCUMENTS[:200]).encode()))
    (folder / f"b{suffix}").write_bytes(pack("\n \n\n".join(DOCUMENTS[200:]).encode()))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    made = prepare(str(folder), tmp_path / "out", tokenizer, Settings(val_fraction=0.1, unit="blank-lines"))
    both = [t for split in ("train", "val") for t in decoded(made.spec, split, tokenizer, tmp_path / "cache")]
    assert sorted(both) == sorted(DOCUMENTS)
    whole = prepare(str(folder / f"*{suffix}"), tmp_path / "out", tokenizer, prefix="whole")
    assert whole.documents == {"train": 2, "val": 1}  # The end of the second one is held out.


@pytest.mark.parametrize(
    ("glob", "name"),
    [("d0[0-9][0-9].jsonl", "d0"), ("d???.*", "d"), ("d[!a.]*.jsonl", "d"), ("[a-z]*", "text"), ("d0*.jsonl", "d0")],
)
def test_a_glob_is_not_part_of_the_prefix(tmp_path: Path, texts: str, tokenizer: str, glob: str, name: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    Path(texts).rename(folder / "d012.jsonl")
    made = prepare(str(folder / glob), tmp_path / "out", tokenizer, SETTINGS)
    assert made.spec == str(tmp_path / "out" / f"{name}_small")
    assert len(open_data(made.spec, "val", cache_dir=tmp_path / "cache")) == made.tokens["val"]


def test_the_tokenizer_of_other_data_is_named_after_that_data(tmp_path: Path, texts: str, tokenizer: str) -> None:
    first = prepare(texts, tmp_path, tokenizer, SETTINGS, prefix="mine")
    second = prepare(texts, tmp_path, f"{first.spec}.tokenizer.json", SETTINGS)
    assert second.spec == str(tmp_path / "docs_mine")
    assert Path(f"{second.spec}.tokenizer.json").read_bytes() == Path(f"{first.spec}.tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "fine"}\n{"txt": 1, "id": 2}\n',
            r"a\.jsonl, line 2: no key 'text'; its keys are txt, id: choose one with --field",
        ),
        ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl, line 1: 'text' is int, not text; --field names another key"),
        ("a.jsonl", b"not json\n", r"a\.jsonl, line 1: not JSON"),
        ("a.jsonl", b"5\n", r"a\.jsonl, line 1: int instead of an object"),
        ("a.json", b'[{"text": "fine"},\n {"body": "b"}]', r"a\.json, object 2: no key 'text'; its keys are body"),
        (
            "a.json.gz",
            gzip.compress(b'{"text": "fine"}' * 999, mtime=0)[:20] + b"x" * 40,  # part of the test's name
            r"a\.json\.gz is truncated or damaged",
        ),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet is not a readable Parquet file"),
        ("a.txt", b"\xff\xfe\xfa", r"a\.txt is not UTF-8"),
        ("a.txt.xz", lzma.compress(b"text " * 5000)[:-20], r"a\.txt\.xz is truncated"),
        ("a.doc", b"x", r"a\.doc: cannot tell what it holds"),
        (None, b"", r"no text at .*c4, fineweb, wikitext-103"),
    ],
)
def test_the_error_for_unreadable_text_names_the_file(
    tmp_path: Path, tokenizer: str, name: str | None, content: bytes, message: str
) -> None:
    if name is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(str(tmp_path / (name or "nothing")), tmp_path / "out", tokenizer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"val_fraction": 0}, "val_fraction is 0"),
        ({"shard_tokens": 2**31}, "shard_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values).check()  # type: ignore[arg-type]


def test_bad_tokenizers_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json is not a tokenizer\.json"):
        load_encoder(str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match="no tokenizer file"):
        load_encoder(str(tmp_path / "nowhere.json"))
    with pytest.raises(
        ValueError, match=r"cannot fetch the tokenizer 'google-t5/t5-base'.*path of its tokenizer\.json"
    ):
        load_encoder("t5")  # Tests run in the hub's offline mode.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(65537)}, "0"))
    words.save(str(tmp_path / "large.json"))
    with pytest.raises(ValueError, match="large has 65537 ids.*65536"):
        load_encoder(str(tmp_path / "large.json"))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    words.save(str(tmp_path / "endless.json"))
    with pytest.raises(ValueError, match="no end-of-document token"):
        load_encoder(str(tmp_path / "endless.json"))


@pytest.mark.parametrize(("name", "end"), [("t5", 1), ("gpt2", 50256)])
def test_real_tokenizers_agree_with_the_real_shards(shared: Path, tmp_path: Path, name: str, end: int) -> None:
    """The reference shards' first documents, decoded and encoded again; the end-of-document id is nowhere else."""
    encoder = load_encoder(str(shared / "data" / "tokenizers" / f"{name}.json"))
    source = open_data(str(shared / "data" / f"wiki_{name}"), "val", cache_dir=tmp_path)
    rows = [source.read(int(a), int(b)) for a, b in zip(source.documents[:50], source.documents[1:51])]
    texts = [encoder.tokenizer.decode(row[:-1].tolist(), skip_special_tokens=False) for row in rows]
    for row, again in zip(rows, encoder.encode(texts)):
        np.testing.assert_array_equal(again, row)
    (tricky,) = encoder.encode(["one </s> two <|endoftext|> three"])
    assert np.flatnonzero(tricky == end).tolist() == [tricky.size - 1]
