"""What a new user has (one text, a folder of notes, Parquet, nanoGPT's tokens) becomes shards with both parts."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cosmos_lab.cli.main import main
from cosmos_lab.data import prepare as module
from cosmos_lab.data import text as text_module
from cosmos_lab.data.encode import load_encoder
from cosmos_lab.data.prepare import SEQUENCE, Prepared, Progress, Settings, prepare
from cosmos_lab.data.shards import open_shard, write_shard
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


def test_of_a_folder_of_notes_the_last_whole_ones_are_held_out(tmp_path: Path, notes: Path) -> None:
    made = prepare(str(notes), tmp_path / "out", TOKENIZER)
    assert sum(made.documents.values()) == 60 and made.documents["val"] >= 2
    assert SEQUENCE < made.tokens["val"] <= 2 * (SEQUENCE + 1) < made.tokens["train"]
    found = texts(made, tmp_path)
    assert [found["train"].count(note(n)) + found["val"].count(note(n)) for n in range(60)] == [1] * 60
    again = prepare(str(notes), tmp_path / "again", TOKENIZER)
    for end in (".json", ".tokenizer.json", "_train_000000.bin", "_val_000000.bin"):
        assert Path(made.spec + end).read_bytes() == Path(again.spec + end).read_bytes()


@pytest.mark.parametrize("hash_says", [0.0, 0.5])
@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_of_one_text_the_end_is_held_out_from_a_line_break_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float, hash_says: float
) -> None:
    """Whether the hash gives the only document to training or to validation."""
    monkeypatch.setattr(module, "_share", lambda _: hash_says)
    text = note(7, lines=1000)
    (tmp_path / "book.txt").write_text(text + "\n", encoding="utf-8-sig")
    made = prepare(str(tmp_path / "book.txt"), tmp_path / "out", TOKENIZER, Settings(val_fraction=fraction))
    found = texts(made, tmp_path)
    assert found["train"] + found["val"] == text and found["train"].endswith("\n")
    share = made.tokens["val"] / sum(made.tokens.values())
    assert made.tokens["val"] > SEQUENCE and (fraction == 0.01 or share == pytest.approx(fraction, abs=0.01))


@pytest.mark.parametrize("shard_tokens", [500, 2000, 7000])
def test_a_part_is_held_out_from_several_shards_and_after_a_kill(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, shard_tokens: int
) -> None:
    settings = Settings(val_fraction=0.4, shard_tokens=shard_tokens)
    monkeypatch.setattr(module, "_share", lambda _: 1.0)
    whole = prepare(str(notes), tmp_path / "straight", TOKENIZER, settings)
    tokens = open_data(whole.spec, "val", cache_dir=tmp_path / "cache")
    assert 0.4 * sum(whole.tokens.values()) <= len(tokens) == whole.tokens["val"]
    made = sum(len(open_shard(p).tokens) for p in (tmp_path / "straight").glob("*_train_*.bin"))
    assert made == whole.tokens["train"] and sum(whole.documents.values()) == 60

    for where in ("_save", "_check_sizes"):  # Just before and just after the cut is recorded.
        real = getattr(module._Preparation, where)

        def stop(self: object, *given: object, real: Callable[..., object] = real, **cut: object) -> object:
            if given and not cut:  # An earlier save.
                return real(self, *given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module._Preparation, where, stop)
            with pytest.raises(KeyboardInterrupt):
                prepare(str(notes), tmp_path / where, TOKENIZER, settings)
        prepare(str(notes), tmp_path / where, TOKENIZER, settings)
        for path in (tmp_path / "straight").glob("notes*"):
            assert (tmp_path / where / path.name).read_bytes() == path.read_bytes()


def test_too_little_text_says_how_much_is_needed_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text(note(1, lines=40))
    out = tmp_path / "out"
    assert main(["data", "prepare", str(tmp_path / "short.txt"), "--tokenizer", TOKENIZER, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "too little text: " in error and "needs 1,025 and 1,025; give " in error and error.count("\n") == 1
    assert not [path for path in out.iterdir() if not path.name.startswith(".")]
    times = float(error.split("; give ")[1].split(" times")[0])
    (tmp_path / "short.txt").write_text("\n".join(note(n, lines=40) for n in range(int(times) + 1)))
    assert prepare(str(tmp_path / "short.txt"), out, TOKENIZER).tokens["val"] > SEQUENCE


def test_the_trained_tokenizer_is_recorded_like_any_other(tmp_path: Path, notes: Path) -> None:
    made = prepare(str(notes), tmp_path / "out", "train:330")
    assert (made.spec, made.vocab_size) == (str(tmp_path / "out" / "notes_bpe330"), 330)
    stored = load_encoder(f"{made.spec}.tokenizer.json")
    assert (stored.vocab_size, stored.end_of_document) == (330, 0)
    vocabulary = open_data(made.spec, "val", cache_dir=tmp_path / "cache").vocabulary
    assert (vocabulary.name, vocabulary.size, vocabulary.end_of_document) == ("bpe330", 330, 0)
    for wrong in ("train:12", "train:many", "train:70000"):
        with pytest.raises(ValueError, match=f"--tokenizer {wrong}: give a number of ids from 257"):
            prepare(str(notes), tmp_path / "out", wrong)


def test_progress_moves_within_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 20_000)
    monkeypatch.setattr(text_module, "_PART", 10_000)
    (tmp_path / "book.txt").write_text(note(1, lines=5000))
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress((tmp_path / "book.txt").read_bytes()))
    (tmp_path / "book.jsonl").write_text("".join(json.dumps({"text": note(n)}) + "\n" for n in range(1000)))
    for name in ("book.txt", "book.txt.gz", "book.jsonl"):
        seen: list[Progress] = []
        prepare(str(tmp_path / name), tmp_path / name.replace(".", "-"), TOKENIZER, progress=seen.append)
        for task in ("training the tokenizer", "tokenizing"):
            shares = [now.fraction or 0.0 for now in seen if now.task == task]
            assert shares == sorted(shares) and shares[-1] == 1 and len({s for s in shares if s < 1}) >= 2, (name, task)


@pytest.mark.parametrize("suffix", [".parquet", ".json.gz", ".json", ".ndjson"])
def test_any_key_of_json_and_any_column_of_parquet_is_read(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": n, "body": note(n)} for n in range(100)]
    path = tmp_path / f"mail{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="Parquet needs the package `pyarrow`")
        pytest.importorskip("pyarrow.parquet").write_table(
            arrow.Table.from_pylist([*rows, {"id": 1}]), path, row_group_size=9
        )
    else:
        path.write_bytes(
            {".json.gz": gzip.compress(lines.encode()), ".json": json.dumps(rows).encode()}.get(suffix, lines.encode())
        )
    seen: list[Progress] = []
    made = prepare(str(path), tmp_path / "out", TOKENIZER, Settings(field="body"), progress=seen.append)
    assert sum(made.documents.values()) == 100 and seen[-1].fraction == 1
    found = texts(made, tmp_path)
    assert all(note(n) in found["train"] or note(n) in found["val"] for n in range(100))
    with pytest.raises(ValueError, match=r"no key 'text'; its keys are id, body: choose one with --field$"):
        prepare(str(path), tmp_path / "out", TOKENIZER)
    with pytest.raises(ValueError, match=r"(line|object|row) 1: 'id' is int, not text; --field names another key$"):
        prepare(str(path), tmp_path / "out", TOKENIZER, Settings(field="id"))


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


@pytest.mark.parametrize("named", [["."], ["train.bin"], ["train.bin", "val.bin"], ["*.bin"]])
def test_raw_tokens_of_nanogpt_become_shards(
    tmp_path: Path, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shakespeare_char"
    parts = nanogpt(folder, train=9000, val=2000)
    names = [str(folder / name) for name in named]
    assert main(["data", "prepare", *names, "--out", str(tmp_path / "out")]) == 0
    assert (
        "9,000 tokens to train on, 2,000 to validate with, 65 ids (the largest token + 1; --vocab-size"
        in capsys.readouterr().out
    )
    spec = str(tmp_path / "out" / "shakespeare_char_raw")
    for split, tokens in parts.items():
        np.testing.assert_array_equal(row(spec, split, tmp_path), tokens)
    assert open_data(spec, "train", cache_dir=tmp_path / "cache").vocab_size == 65


def test_the_end_of_raw_tokens_without_a_val_file_is_held_out(tmp_path: Path) -> None:
    tokens = nanogpt(tmp_path / "raw", train=20_000)["train"]
    made = prepare(
        str(tmp_path / "raw" / "train.bin"), tmp_path / "out", settings=Settings(val_fraction=0.1, vocab_size=80)
    )
    both = [row(made.spec, split, tmp_path) for split in ("train", "val")]
    np.testing.assert_array_equal(np.concatenate(both), tokens)
    assert both[1].size == 2000 and made.vocab_size == 80
    with pytest.raises(
        ValueError, match=r"train\.bin has token 64, but there are 60 ids; --vocab-size takes 65 to 65536"
    ):
        prepare(str(tmp_path / "raw"), tmp_path / "other", settings=Settings(vocab_size=60))


def test_raw_tokens_of_gpt2_are_recognized_and_cut_between_documents(tmp_path: Path) -> None:
    tokens = nanogpt(tmp_path / "owt", top=50256, train=20_000)["train"]
    tokens[::100] = 50256
    tokens.tofile(tmp_path / "owt" / "train.bin")
    made = prepare(str(tmp_path / "owt"), tmp_path / "out")
    vocabulary = open_data(made.spec, "train", cache_dir=tmp_path / "cache").vocabulary
    assert (vocabulary.name, vocabulary.size, vocabulary.end_of_document) == ("gpt2", 50257, 50256)
    assert row(made.spec, "train", tmp_path)[-1] == 50256 and made.tokens["val"] > SEQUENCE


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda f: write_shard(f / "train.bin", np.arange(3000)),
            r"train\.bin is a token shard already: use it with --data",
        ),
        (lambda f: (f / "train.bin").write_bytes(b"abc"), r"train\.bin \(3 bytes\) does not hold raw uint16 tokens"),
        (
            lambda f: (f / "train.bin").write_bytes(np.array([20240801, 7] + [0] * 700, "<i4").tobytes()),
            "header of another",
        ),
        (lambda f: nanogpt(f, train=900), r"too little text: .* needs 1,025 and 1,025"),
    ],
)
def test_other_bin_files_are_refused_by_name(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        prepare(str(tmp_path / "train.bin"), tmp_path / "out")


@pytest.mark.parametrize("size", [1500, 9000])
def test_raw_tokens_for_validation_alone_are_told_that_the_training_part_is_missing(tmp_path: Path, size: int) -> None:
    nanogpt(tmp_path, val=size)
    with pytest.raises(ValueError, match=r"val\.bin is for validation, and there is no training part: give train\.bin"):
        prepare(str(tmp_path / "val.bin"), tmp_path / "out")


def test_a_folder_with_text_and_raw_tokens_is_refused_but_own_shards_are_ignored(tmp_path: Path, notes: Path) -> None:
    made = prepare(str(notes), notes, TOKENIZER)
    assert prepare(str(notes), notes, TOKENIZER) == made
    nanogpt(notes, train=3000)
    with pytest.raises(
        ValueError, match=r"train\.bin holds tokens, but there is text too; name .*notes/\*\.bin, or the text"
    ):
        prepare(str(notes), tmp_path / "out", TOKENIZER)
    with pytest.raises(ValueError, match=r"train\.bin is not a token shard.*`cosmos-lab data prepare .*train\.bin`"):
        open_data(str(notes / "train.bin"), "train", cache_dir=tmp_path / "cache")


def test_the_file_that_changed_since_an_earlier_preparation_is_named(tmp_path: Path, notes: Path) -> None:
    prepare(str(notes), tmp_path / "out", TOKENIZER)
    (notes / "30.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"notes/30\.txt \d+', this one has '.*30\.txt 7'; choose another --out"):
        prepare(str(notes), tmp_path / "out", TOKENIZER)


def test_flags_for_the_other_kind_of_source_are_refused(tmp_path: Path, notes: Path) -> None:
    nanogpt(tmp_path / "raw", train=3000)
    for source, settings in ((notes, Settings(vocab_size=300)), (tmp_path / "raw", Settings())):
        with pytest.raises(ValueError, match="--tokenizer train:N is for text, and --vocab-size for nanoGPT's .bin"):
            prepare(str(source), tmp_path / "out", TOKENIZER, settings)


def test_pieces_of_one_long_document_are_shuffled(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(note(7, lines=1000))
    made = prepare(str(tmp_path / "book.txt"), tmp_path / "out", TOKENIZER)
    source = open_data(made.spec, "train", cache_dir=tmp_path / "cache")
    assert made.documents["train"] == 1 and len(source.documents) - 1 == -(-len(source) // 2048) > 2


def test_a_folder_of_notes_is_prepared_trained_on_and_evaluated(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COSMOS_LAB_CACHE", str(tmp_path / "cache"))
    size = [
        "--width",
        "64",
        "--depth",
        "1",
        "--mlp",
        "96",
        "--rank",
        "8",
        "--steps",
        "2",
        "--batch",
        "2",
        "--name",
        "run",
    ]
    assert main(["data", "prepare", "notes", "--tokenizer", TOKENIZER]) == 0
    assert main(["train", "tiny", "--data", "data/notes_bpe300", *size, "--device", "cpu"]) == 0
    assert main(["evaluate", "runs/run", "--out", "loss.json"]) == 0
    assert main(["export", "runs/run", "-o", "exported", "--tokenizer", "data/notes_bpe300.tokenizer.json"]) == 0
    assert json.loads(Path("exported/config.json").read_text())["eos_token_id"] == 0
