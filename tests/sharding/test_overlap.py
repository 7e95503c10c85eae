"""Two lanes: turns that depend on the jobs alone, and the same numbers."""

import pytest
import torch

from cosmos_optim.sharding import overlap as lanes
from tests.sharding.cases import Case, Pair, distance, together
from tests.sharding.ranks import run_ranks

CPU = torch.device("cpu")


def jobs_of(seen: list[str], parts: dict[str, int]) -> list[lanes.Job]:
    """Jobs that note each of their parts and rest between them, as after starting a message."""

    def job(name: str, count: int) -> None:
        for i in range(count):
            if i:
                lanes.let_others_run()
            seen.append(f"{name}{i}")

    return [lambda name=name, count=count: job(name, count) for name, count in parts.items()]


def test_turns() -> None:
    """While one job waits for its message the other runs; a free lane takes the next job."""
    for _ in range(20):
        seen: list[str] = []
        lanes.run(jobs_of(seen, {"a": 3, "b": 2, "c": 3}), CPU)
        assert seen == ["a0", "b0", "a1", "b1", "c0", "a2", "c1", "c2"]


def test_one_lane_is_no_lane() -> None:
    """In order, in the caller's thread; resting does nothing."""
    seen: list[str] = []
    lanes.run(jobs_of(seen, {"a": 2, "b": 2}), CPU, width=1)
    assert seen == ["a0", "a1", "b0", "b1"]


def test_errors_end_all_lanes() -> None:
    """The first error is raised by the caller, and no thread is left behind."""

    def fail() -> None:
        raise ZeroDivisionError("in a lane")

    seen: list[str] = []
    first, second = jobs_of(seen, {"a": 5, "b": 1})
    with pytest.raises(ZeroDivisionError, match="in a lane"):
        lanes.run([first, second, fail], CPU)
    assert seen == ["a0", "b0"]


def in_lanes(rank: int, case: Case) -> object:
    """A sharded run that always uses two lanes, and how often they changed."""
    run, rest, turns = lanes.run, lanes.let_others_run, [0]

    def count() -> None:
        turns[0] += 1
        rest()

    lanes.run = lambda jobs, device, width: run(jobs, device, width=2)  # type: ignore[assignment]
    lanes.let_others_run = count
    return turns, together(rank, "fsdp", [case])


def test_same_numbers_in_lanes() -> None:
    """COSMOS with two shapes, messages of one between those of the other."""
    case = Case(Pair)
    turns, found = run_ranks(2, in_lanes, case)[0]
    assert turns[0] > 100
    assert distance(found[0], case.alone())[0] < 1e-9
