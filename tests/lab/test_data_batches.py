"""Batches: every document once an epoch, the same windows however they are split, exact resume, and little work."""

from __future__ import annotations

import hashlib
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cosmos_lab.data.batches import Batches, permutation, validation_batches, validation_windows
from cosmos_lab.data.shards import Shard
from cosmos_lab.data.source import TokenSource, Vocabulary

END = 1
# Python lines that a batch may run: some for each document (a slice), and a few for the batch. Documents have at least
# ten tokens, so a loop over tokens exceeds this.
LINES_PER_DOCUMENT, LINES_PER_BATCH = 5, 200


def shard_of(tokens: np.ndarray, name: str = "a.bin") -> Shard:
    row = tokens.astype(np.uint16)
    return Shard(Path(name), row, hashlib.sha256(row.tobytes()).hexdigest(), int(row.max()), int(row.argmax()))


def source_of(shards: list[list[list[int]]], cache: Path, end: int | None = END) -> TokenSource:
    """Shards of documents; each document is closed by END."""
    rows = [np.concatenate([[*document, END] for document in documents]) for documents in shards]
    vocabulary = Vocabulary("test", 65536, end)
    return TokenSource([shard_of(row) for row in rows], vocabulary, "test", cache)


def numbered(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents of the given lengths, every token different (as far as 16 bits go)."""
    counter = iter(range(2, 65536))
    return [[[next(counter) for _ in range(length)] for length in shard] for shard in lengths]


def take(batches: Batches, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [next(batches) for _ in range(count)]
    return torch.cat([tokens for tokens, _ in pairs]), torch.cat([targets for _, targets in pairs])


LENGTHS = [[5, 1, 12, 7, 30], [2, 2, 9], [40, 3, 8, 6, 1, 1, 17]]


@pytest.fixture
def source(tmp_path: Path) -> TokenSource:
    return source_of(numbered(LENGTHS), tmp_path)


def test_targets_are_the_next_tokens(source: TokenSource) -> None:
    tokens, targets = next(Batches(source, 3, 8, seed=0))
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == targets.dtype == torch.int64 and tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens[1:, 0], targets[:-1, -1])  # One stream: a window ends where the next starts.


def test_without_shuffle_windows_follow_the_order_of_the_files(source: TokenSource) -> None:
    row = np.concatenate([shard.tokens for shard in source.shards]).astype(np.int64)
    batches = Batches(source, 2, 8, seed=0, shuffle=False)
    tokens, targets = take(batches, batches.windows // 2)
    assert tokens.flatten().tolist() == row[: tokens.numel()].tolist()
    assert targets.flatten().tolist() == row[1 : tokens.numel() + 1].tolist()


def epoch_stream(batches: Batches) -> list[int]:
    tokens, targets = take(batches, batches.windows // batches.batch)
    return [int(tokens[0, 0]), *targets.flatten().tolist()]


def test_each_epoch_has_every_document_once_in_a_new_order(source: TokenSource) -> None:
    batches = Batches(source, 1, 1, seed=3)  # Windows of one token: the epoch is the whole stream.
    streams = [epoch_stream(batches) for _ in range(3)]
    documents = sorted(tuple(document) for shard in numbered(LENGTHS) for document in shard)
    orders = []
    for stream in streams:
        assert stream[-1] == END
        pieces = " ".join(map(str, stream[:-1])).split(f" {END} ")
        found = [tuple(map(int, piece.split())) for piece in pieces]
        assert sorted(found) == documents
        orders.append(found)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch_stream(Batches(source, 1, 1, seed=3)) == streams[0]
    assert epoch_stream(Batches(source, 1, 1, seed=4)) != streams[0]


def test_only_the_description_of_a_text_looks_for_its_documents(source: TokenSource) -> None:
    assert source.fingerprint in repr(source) and "documents" not in vars(source)
    assert f"{sum(map(len, LENGTHS))} documents" in source.describe()


def test_text_without_document_ends_is_shuffled_in_pieces(tmp_path: Path) -> None:
    row = np.arange(5000)
    source = TokenSource([shard_of(row)], Vocabulary("unknown", 5000, None), "test", tmp_path)
    assert np.diff(source.documents).tolist() == [2048, 2048, 904]
    stream = epoch_stream(Batches(source, 1, 1, seed=1))
    assert sorted(stream) == row.tolist() and stream != row.tolist()


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    lengths = draw(st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=8), min_size=1, max_size=4))
    size = sum(length + 1 for shard in lengths for length in shard)
    seq_len = draw(st.integers(1, 9))
    if size < seq_len + 1:
        lengths[0].append(seq_len)
    return {
        "lengths": lengths,
        "seq_len": seq_len,
        "batch": draw(st.integers(1, 5)),
        "world": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 2**31)),
        "stop": draw(st.integers(0, 7)),
    }


@hypothesis_settings(max_examples=60)
@given(problem=problems())
def test_any_split_and_any_interruption_give_the_same_windows(
    problem: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Read world x batch windows at a time, with stops; compare with one window at a time without a stop."""
    source = source_of(numbered(problem["lengths"]), tmp_path_factory.getbasetemp() / "cache")  # type: ignore[arg-type]
    batch, world, seq_len, seed = (problem[key] for key in ("batch", "world", "seq_len", "seed"))
    steps = 8
    expected, expected_targets = take(Batches(source, 1, seq_len, seed), steps * world * batch)
    parts = []
    for rank in range(world):
        before = Batches(source, batch, seq_len, seed, rank, world)
        pairs = [next(before) for _ in range(problem["stop"])]
        after = Batches(source, batch, seq_len, seed, rank, world)
        after.load_state_dict(before.state_dict())
        pairs += [next(after) for _ in range(steps - problem["stop"])]
        parts.append(pairs)
    tokens = torch.cat([parts[rank][step][0] for step in range(steps) for rank in range(world)])
    targets = torch.cat([parts[rank][step][1] for step in range(steps) for rank in range(world)])
    assert torch.equal(tokens, expected) and torch.equal(targets, expected_targets)


def test_resume_with_another_batch_size_and_world_sees_the_same_windows(source: TokenSource) -> None:
    straight = Batches(source, 1, 4, seed=5)
    take(straight, 2 * 3 * 2)
    first = Batches(source, 3, 4, seed=5, rank=1, world=2)
    take(first, 2)
    second = Batches(source, 5, 4, seed=5)
    second.load_state_dict(first.state_dict())
    assert torch.equal(take(second, 6)[0], take(straight, 30)[0])


def test_state_is_small_plain_and_the_same_on_every_rank(source: TokenSource) -> None:
    states = []
    for rank in range(2):
        batches = Batches(source, 2, 4, seed=5, rank=rank, world=2)
        take(batches, 20)
        states.append(batches.state_dict())
    assert states[0] == states[1]
    assert all(isinstance(value, (int, str)) for value in states[0].values())
    assert states[0]["epoch"] == 20 * 4 // batches.windows and states[0]["position"] == 20 * 4 % batches.windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0" * 16}, "fingerprint '0000000000000000'"),
        ({"seed": 6}, "seed 6"),
        ({"seq_len": 5}, "seq_len 5"),
        ({"shuffle": False}, "shuffle False"),
        ({"position": 10**9}, "position 1000000000"),
    ],
)
def test_resume_refuses_other_data_or_settings(source: TokenSource, change: dict[str, object], message: str) -> None:
    batches = Batches(source, 2, 4, seed=5)
    take(batches, 3)
    before = batches.state_dict()
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict({**before, **change})
    assert batches.state_dict() == before
    with pytest.raises(ValueError, match="lacks fingerprint"):
        batches.load_state_dict({key: value for key, value in before.items() if key != "fingerprint"})


def test_fingerprint_changes_with_tokens_and_documents(tmp_path: Path) -> None:
    documents = numbered(LENGTHS)
    one = source_of(documents, tmp_path).fingerprint
    assert one == source_of(documents, tmp_path / "other").fingerprint
    assert one != source_of(documents, tmp_path, end=2).fingerprint
    assert one != source_of(documents[::-1], tmp_path).fingerprint
    documents[0][0][0] += 1
    assert one != source_of(documents, tmp_path).fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"rank": 2, "world": 2}, "rank is 2 of a world of 2"),
        ({"seq_len": 159}, r"159 tokens; a window of seq_len 159 needs 160"),
    ],
)
def test_bad_arguments_are_refused_by_name(source: TokenSource, arguments: dict[str, int], message: str) -> None:
    assert len(source) == 159
    with pytest.raises(ValueError, match=message):
        Batches(source, **{"batch": 1, "seq_len": 4, "seed": 0, **arguments})


def splitmix64(x: int) -> int:
    """Return the published generator's output for state x, in Python's integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1234, 7), (2**63 + 5, 1), (-1, 2)])
def test_the_order_of_documents_equals_a_computation_without_numpy(seed: int, epoch: int) -> None:
    """The order must not depend on numpy's version: it is recomputed without numpy."""
    mask = 2**64 - 1
    key = splitmix64((splitmix64(seed & mask) + epoch) & mask)
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # The generator's first published value for seed 0.
    expected = sorted(range(100), key=lambda i: splitmix64((key + i) & mask))
    assert permutation(100, seed, epoch).tolist() == expected


def test_every_document_is_equally_often_at_each_place() -> None:
    """Over 4000 seeds each of 8 documents is at each place 500 times, within 6 standard deviations of 21."""
    places = np.stack([permutation(8, seed, 0) for seed in range(4000)])
    counts = np.stack([(places == document).sum(0) for document in range(8)])
    assert np.abs(counts - 500).max() < 6 * 21


def test_validation_windows_are_in_order_and_the_same_every_time(source: TokenSource) -> None:
    row = np.concatenate([shard.tokens for shard in source.shards]).astype(np.int64)
    for _ in range(2):
        batches = list(validation_batches(source, 4, 8))
        assert [count for _, _, count in batches] == [4, 4, 4, 4, 3]  # 19 windows of 8 in 159 tokens.
        targets = torch.cat([targets for _, targets, _ in batches]).flatten().tolist()
        assert targets == row[1:153].tolist()
    assert sum(tokens.numel() for tokens, _, _ in validation_batches(source, 4, 8, max_tokens=50)) == 48
    assert sum(tokens.numel() for tokens, _, _ in validation_batches(source, 4, 8, max_tokens=1)) == 8
    assert [validation_windows(source, 8, limit) for limit in (None, 50, 1, 10_000)] == [19, 6, 1, 19]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 30])
def test_ranks_validate_on_the_same_windows_in_equally_many_batches(source: TokenSource, world: int) -> None:
    whole = list(validation_batches(source, 4, 8))
    shares = [list(validation_batches(source, 4, 8, rank=rank, world=world)) for rank in range(world)]
    (turns,) = {len(share) for share in shares}
    in_turn = [share[turn][0] for turn in range(turns) for share in shares]
    assert all(torch.equal(found, tokens) for found, (tokens, _, _) in zip(in_turn, whole))
    assert all(torch.equal(found, whole[-1][0]) for found in in_turn[len(whole) :]) and turns == -(-len(whole) // world)
    counts = [share[turn][2] for turn in range(turns) for share in shares]
    assert counts == [count for _, _, count in whole] + [0] * (len(counts) - len(whole))


def lines_run(function: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs, those of the functions it calls included."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most memory that a call held at once."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [10, 500])
def test_a_batch_of_a_large_source_takes_work_by_document_and_little_memory(tmp_path: Path, length: int) -> None:
    """Eight million tokens in four shards: no loop over tokens, and an epoch's tables grow with documents alone."""
    rows = [np.random.default_rng(i).integers(2, 1000, 2_000_000).astype(np.uint16) for i in range(4)]
    for row in rows:
        row[length - 1 :: length] = END
    source = TokenSource([shard_of(row) for row in rows], Vocabulary("test", 1000, END), "test", tmp_path)
    batches = Batches(source, 64, 1024, seed=0)
    next(batches)
    assert batches._order is not None
    assert sum(table.nbytes for table in batches._order[1:]) <= 16 * (len(source.documents) + 1)
    documents = 64 * 1024 // length + 2
    assert lines_run(lambda: next(batches)) <= LINES_PER_DOCUMENT * documents + LINES_PER_BATCH
    assert peak_bytes(lambda: next(batches)) < 3 * 8 * 64 * 1024  # the batch in int64, and positions of documents
