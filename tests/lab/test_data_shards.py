"""Shards: the format byte by byte, every kind of damage, the cache of unpacked copies, and a disk that is full."""

from __future__ import annotations

import lzma
import resource
import shutil
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cosmos_lab.data.locate import find_shards, split_name
from cosmos_lab.data.shards import open_shard, write_shard
from cosmos_lab.data.source import open_data


def some_tokens(n: int = 5000, top: int = 30000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, top, n).astype(np.uint16)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    """Return what a failed unpacking must not leave: anything except empty lock files."""
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() and p.stat().st_size)


@pytest.mark.parametrize("suffix", [".bin", ".bin.xz"])
def test_a_shard_is_a_header_followed_by_uint16_tokens(tmp_path: Path, cache: Path, suffix: str) -> None:
    tokens = some_tokens()
    path = tmp_path / f"a{suffix}"
    write_shard(path, tokens)
    content = lzma.decompress(path.read_bytes()) if suffix.endswith("xz") else path.read_bytes()
    assert struct.unpack("<256i", content[:1024]) == (20240520, 1, 5000, *[0] * 253)
    assert struct.unpack("<5000H", content[1024:]) == tuple(tokens.tolist())
    shard = open_shard(path, cache)
    np.testing.assert_array_equal(shard.tokens, tokens)
    assert (shard.max_id, tokens[shard.max_at]) == (tokens.max(), tokens.max())
    assert not shard.tokens.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([1, 65536]), r"1\.\.65536.*uint16"),
        (np.array([-1, 5]), r"-1\.\.5"),
        (np.zeros((2, 2), np.int64), r"shape \(2, 2\)"),
        (np.zeros(0, np.int64), "non-empty"),
        (np.array([1.5]), "float64"),
    ],
)
def test_write_refuses_what_the_format_cannot_hold(tmp_path: Path, tokens: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "a.bin", tokens)
    assert list(tmp_path.iterdir()) == []


def test_the_error_for_a_missing_shard_names_it(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"missing shard.*nowhere\.bin"):
        open_shard(tmp_path / "nowhere.bin", cache)


@pytest.mark.parametrize(("keep", "found"), [(1024 + 2 * 1234, 1234), (1024 + 2 * 1234 + 1, 1234), (1024, 0)])
def test_truncated_shard_names_file_and_both_counts(tmp_path: Path, cache: Path, keep: int, found: int) -> None:
    path = tmp_path / "cut.bin"
    write_shard(path, some_tokens())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"truncated shard .*cut\.bin.* 5000 tokens.* {found};"):
        open_shard(path, cache)


def test_a_damaged_header_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"truncated shard .*100 of 1024 bytes"):
        open_shard(path, cache)
    path.write_bytes(struct.pack("<256i", 20240521, 1, 2, *[0] * 253) + b"\0" * 4)
    with pytest.raises(ValueError, match=r"a\.bin is not a token shard.*20240521, 1.*20240520, 1"):
        open_shard(path, cache)
    path.write_bytes(struct.pack("<256i", 20240520, 1, 2, *[0] * 253) + b"\0" * 6)
    with pytest.raises(ValueError, match=r"damaged shard .* 2 tokens.* 3;"):
        open_shard(path, cache)


def truncate(fraction: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * fraction)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate(0.5), r"truncated shard .*p\.bin\.xz.* 5000 tokens.* holds [1-4]\d\d\d;"),
        (truncate(0.01), "^truncated"),
        (lambda content: content[:-4], "damaged shard.*checksum"),
        (lambda content: content[:3000] + bytes([content[3000] ^ 1]) + content[3001:], "truncated|damaged"),
        (lambda content: b"text " * 100, "not a readable xz"),
    ],
)
def test_a_damaged_xz_shard_leaves_no_unpacked_copy(
    tmp_path: Path, cache: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "p.bin.xz"
    write_shard(path, some_tokens())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        open_shard(path, cache)
    assert leftovers(cache) == []


@pytest.mark.parametrize("suffix", [".bin", ".bin.xz"])
def test_a_shard_opens_in_a_folder_with_any_bytes_in_its_name(tmp_path: Path, cache: Path, suffix: str) -> None:
    folder = tmp_path / "caf\udce9"  # as Python reads a name in Latin-1
    folder.mkdir()
    write_shard(folder / f"a{suffix}", some_tokens())
    np.testing.assert_array_equal(open_shard(folder / f"a{suffix}", cache).tokens, some_tokens())


def test_a_shard_is_unpacked_once_and_again_if_its_file_changes(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "p.bin.xz"
    write_shard(path, some_tokens(seed=1))
    first = open_shard(path, cache)
    (copy,) = (cache / "shards").glob("*.bin")
    made = copy.stat().st_mtime_ns, copy.stat().st_ino
    assert open_shard(path, cache).sha256 == first.sha256
    assert (copy.stat().st_mtime_ns, copy.stat().st_ino) == made
    write_shard(path, some_tokens(n=4000, seed=2))
    np.testing.assert_array_equal(open_shard(path, cache).tokens, some_tokens(n=4000, seed=2))


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_damaged_unpacked_copy_is_made_again(tmp_path: Path, cache: Path, harm: str) -> None:
    path = tmp_path / "p.bin.xz"
    write_shard(path, some_tokens())
    open_shard(path, cache)
    (copy,) = (cache / "shards").glob("*.bin")
    content = copy.read_bytes()
    copy.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:] if harm == "flip" else content[:3000])
    np.testing.assert_array_equal(open_shard(path, cache).tokens, some_tokens())


def test_threads_that_open_a_shard_at_once_unpack_it_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "p.bin.xz"
    write_shard(path, some_tokens(200_000))
    with ThreadPoolExecutor(8) as pool:
        shards = list(pool.map(lambda _: open_shard(path, cache), range(8)))
    assert len({shard.sha256 for shard in shards}) == 1
    assert len(list((cache / "shards").glob("*.bin"))) == 1


def test_a_full_disk_is_seen_before_unpacking(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.bin.xz"
    write_shard(path, some_tokens())
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 100))
    with pytest.raises(OSError, match=r"no space left.*COSMOS_LAB_CACHE"):
        open_shard(path, cache)
    assert leftovers(cache) == []


def test_a_write_that_fails_midway_leaves_no_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "p.bin.xz"
    write_shard(path, some_tokens(100_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # The kernel refuses to let a file grow further.
    try:
        with pytest.raises(OSError, match=r"cannot write .*p-.*\.bin: File too large.*COSMOS_LAB_CACHE"):
            open_shard(path, cache)
        with pytest.raises(OSError, match="File too large"):
            write_shard(tmp_path / "q.bin", some_tokens(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert leftovers(cache) == []
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["p.bin.xz"]
    np.testing.assert_array_equal(open_shard(path, cache).tokens, some_tokens(100_000))


def test_a_shard_opens_even_if_the_cache_cannot_be_written(tmp_path: Path) -> None:
    write_shard(tmp_path / "a_train.bin", some_tokens())
    (tmp_path / "file").write_text("a file where the cache folder should be")
    assert len(open_data(str(tmp_path / "a_train.bin"), "train", cache_dir=tmp_path / "file")) == 5000


def test_token_beyond_vocabulary_names_file_position_id(tmp_path: Path, cache: Path) -> None:
    tokens = some_tokens(top=400)
    tokens[4321] = 777
    write_shard(tmp_path / "w_train_000.bin", some_tokens(top=400))
    write_shard(tmp_path / "w_train_001.bin", tokens)
    message = r"w_train_001\.bin: token 777 at position 4321 is beyond the vocabulary of 512 ids"
    for _ in range(2):  # From the file, then from the cache.
        with pytest.raises(ValueError, match=message):
            open_data(str(tmp_path), "train", vocab_size=512, cache_dir=cache)
    source = open_data(str(tmp_path), "train", vocab_size=778, cache_dir=cache)
    assert source.vocab_size == 778


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wiki_t5_train_000.bin.xz", ("wiki_t5", "train")),
        ("wiki_gpt2_val.bin.xz", ("wiki_gpt2", "val")),
        ("fineweb_validation_000001.bin", ("fineweb", "val")),
        ("train.bin", ("", "train")),
        ("val00.bin", ("", "val")),
        ("train_t5_val_000000.bin", ("train_t5", "val")),
        ("interval.bin", ("interval", None)),
        ("constraint_1.bin", ("constraint_1", None)),
    ],
)
def test_a_file_name_gives_prefix_and_split(name: str, expected: tuple[str, str | None]) -> None:
    assert split_name(Path(name)) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "data"
    for number, name in enumerate(["a_t5_train_000.bin", "a_t5_train_001.bin.xz", "a_t5_val.bin", "b_gpt2_train.bin"]):
        write_shard(home / name, some_tokens(100, seed=number))
    write_shard(home / "plain.bin", some_tokens(100))
    return home


@pytest.mark.parametrize(
    ("spec", "split", "names"),
    [
        ("a_t5", "train", ["a_t5_train_000.bin", "a_t5_train_001.bin.xz"]),
        ("a_t5", "val", ["a_t5_val.bin"]),
        ("a_t5*", "val", ["a_t5_val.bin"]),
        ("a_t5_train_001.bin.xz", "train", ["a_t5_train_001.bin.xz"]),
        ("a_t5_train_001.bin.xz", "val", ["a_t5_val.bin"]),
        ("*train*", "train", ["a_t5_train_000.bin", "a_t5_train_001.bin.xz", "b_gpt2_train.bin"]),
        ("plain.bin", "train", ["plain.bin"]),
    ],
)
def test_find_shards_returns_the_files_of_one_split(folder: Path, spec: str, split: str, names: list[str]) -> None:
    assert [path.name for path in find_shards(str(folder / spec), split)] == names  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "split", "message"),
    [
        ("", "train", r"several texts or tokenizers; name one set: .*a_t5, .*b_gpt2, .*plain"),
        ("b_gpt2", "val", r"no val shard.*b_gpt2_train\.bin"),
        ("plain.bin", "val", "no val shard"),
        ("c_t5", "train", r"missing shard.*c_t5.*holds a_t5_train_000\.bin"),
        ("a_t5_train_007.bin", "train", r"missing shard.*a_t5_train_007\.bin"),
        ("../nowhere/x*", "train", "there is no folder"),
        ("empty", "train", "holds no token shard .*`cosmos-lab data prepare .*empty` makes shards of the text in it"),
        ("a_t5", "test", "split is 'test'"),
    ],
)
def test_errors_of_find_shards_say_what_to_do(folder: Path, spec: str, split: str, message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        find_shards(str(folder / spec), split)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a_t5", "a_t5_clean_t5", "d0[0-9]_t5"])
def test_a_set_of_shards_is_found_by_its_exact_name(folder: Path, name: str) -> None:
    for split in ("train", "val"):
        write_shard(folder / f"a_t5_clean_t5_{split}.bin", some_tokens(100))
        write_shard(folder / f"d0[0-9]_t5_{split}.bin", some_tokens(100))
        found = find_shards(str(folder / name), split)  # type: ignore[arg-type]
        assert found and {split_name(path).prefix for path in found} == {name}
    with pytest.raises(ValueError, match="several texts or tokenizers; name one set: .*a_t5, .*a_t5_clean_t5"):
        find_shards(str(folder / "a_t"), "train")


def test_a_shard_that_exists_packed_and_unpacked_is_read_once(folder: Path) -> None:
    write_shard(folder / "a_t5_train_000.bin.xz", some_tokens(100))
    names = [path.name for path in find_shards(str(folder / "a_t5"), "train")]
    assert names == ["a_t5_train_000.bin", "a_t5_train_001.bin.xz"]


def test_shards_of_several_tokenizers_are_refused(folder: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=r"several tokenizers \(gpt2, t5\)"):
        open_data(str(folder / "*train*"), "train", cache_dir=cache)


@pytest.mark.parametrize(("name", "ids", "end"), [("t5", 32100, 1), ("gpt2", 50257, 50256)])
def test_real_shards_need_their_whole_vocabulary(shared: Path, cache: Path, name: str, ids: int, end: int) -> None:
    source = open_data(str(shared / "data" / f"wiki_{name}"), "val", vocab_size=ids, cache_dir=cache)
    assert (source.vocab_size, source.vocabulary.end_of_document) == (ids, end)
    ends = source.documents[1:] - 1
    whole = source.read(0, len(source))
    assert (whole[ends] == end).all() and (whole == end).sum() == ends.size > 3000
    with pytest.raises(ValueError, match=f"beyond the vocabulary of {ids - 1000} ids"):
        open_data(str(shared / "data" / f"wiki_{name}"), "val", vocab_size=ids - 1000, cache_dir=cache)
    with pytest.raises(ValueError, match="several texts or tokenizers.*wiki_gpt2, .*wiki_t5"):
        open_data(str(shared / "data"), "val", cache_dir=cache)
