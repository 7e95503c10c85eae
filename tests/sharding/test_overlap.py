"""Overlapped jobs: their order depends on the jobs alone, and they give the same numbers."""

import threading

import pytest
import torch

from cosmos_optim.engine.layout import Job
from cosmos_optim.sharding import overlap
from tests.sharding.cases import Case, TallAndWide, distance, run_sharded
from tests.sharding.ranks import run_ranks

CPU = torch.device("cpu")
CLOSE_64 = 1e-9  # double precision: sums in another order


def jobs_of(seen: list[str], parts: dict[str, int]) -> list[Job]:
    """Make jobs that note each of their parts, and let others run between them, as after starting a message."""

    def job(name: str, count: int) -> None:
        for i in range(count):
            if i:
                overlap.let_others_run()
            seen.append(f"{name}{i}")

    return [lambda name=name, count=count: job(name, count) for name, count in parts.items()]


def test_workers_alternate_in_an_order_that_depends_on_the_jobs_alone() -> None:
    """While one job waits for its message the other runs; a free worker takes the next job."""
    for _ in range(20):
        seen: list[str] = []
        overlap.run(jobs_of(seen, {"a": 3, "b": 2, "c": 3}), CPU)
        assert seen == ["a0", "b0", "a1", "b1", "c0", "a2", "c1", "c2"]


def test_width_one_runs_the_jobs_in_order_in_the_callers_thread() -> None:
    seen: list[str] = []
    threads: list[threading.Thread] = []
    jobs = [*jobs_of(seen, {"a": 2, "b": 2}), lambda: threads.append(threading.current_thread())]
    overlap.run(jobs, CPU, width=1)
    assert seen == ["a0", "a1", "b0", "b1"]
    assert threads == [threading.current_thread()]


def test_an_error_in_one_job_stops_all_workers_and_is_raised_by_the_caller() -> None:
    def fail() -> None:
        raise ZeroDivisionError("in a job")

    seen: list[str] = []
    first, second = jobs_of(seen, {"a": 5, "b": 1})
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="in a job"):
        overlap.run([first, second, fail], CPU)
    assert seen == ["a0", "b0"]
    assert threading.active_count() == before


def overlapped(rank: int, case: Case) -> object:
    """Run a sharded case with two workers throughout; return how often they alternated, and the weights."""
    run, let_others_run, switches = overlap.run, overlap.let_others_run, [0]

    def count() -> None:
        switches[0] += 1
        let_others_run()

    overlap.run = lambda jobs, device, width: run(jobs, device, width=2)  # type: ignore[assignment]
    overlap.let_others_run = count
    return switches, run_sharded(rank, "fsdp", [case])


def test_overlapped_stacks_end_with_the_weights_of_one_process() -> None:
    """COSMOS with two shapes: messages of one stack between those of the other."""
    case = Case(TallAndWide)
    switches, found = run_ranks(2, overlapped, case)[0]
    assert switches[0] > 100
    assert distance(found[0], case.on_one_process())[0] < CLOSE_64
