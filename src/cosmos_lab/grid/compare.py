"""Compare runs: a grid over optimizers, rates and seeds, resumable, one at a time or one process per GPU.

A finished run is not trained again and an unfinished one continues, so the same call after a kill continues the grid.
SIGTERM and Ctrl-C end all runs after the current step, with checkpoints. Needs neither tyro nor rich.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.display import TableDisplay
from cosmos_lab.grid.budget import Budget
from cosmos_lab.grid.table import FAILED, NOT_STARTED, UNFINISHED, format_result, table_of
from cosmos_lab.io import explained, write_json
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.report import write_report
from cosmos_lab.results.reading import read_metrics, read_summary
from cosmos_lab.run import build, checkpoint
from cosmos_lab.run.run_folder import check_unfinished, finished
from cosmos_lab.run.stopping import SIGNALS, Request, Stopped, watch
from cosmos_lab.run.train import train

RESULT = "compare.json"
_POLL_S = 0.5
NumberedRuns = Sequence[tuple[int, RunConfig]]  # with their rows of the table


def compare(
    runs: Sequence[RunConfig],
    *,
    out: str | Path | None = None,
    metric: str = "final_val_loss",
    parallel: int = 1,
    minutes: float = 0.0,
    show: bool = True,
    report: bool = True,
) -> dict[str, Any]:
    """Train the runs that are not finished, compare all, and write compare.json and the report.

    Args:
        out: folder of the run folders, of compare.json and of report/ (None: the runs' ``out``).
        metric: the number of the summary that ranks them; less is better.
        parallel: processes at a time; with GPUs, each process has its own.
        minutes: start no run that would end later than this after the call (0: no limit); the same call continues.
        show: print the live table, the result and where the report is.

    Returns what compare.json holds: {"metric", "set_up": {field: value that all runs share}, "rows": [...],
    "best": {optimizer: label}, ...}; a row is one variant.
    """
    runs = _in_folder(runs, out)
    if parallel < 1:
        raise ValueError(f"--parallel must be 1 or more; got {parallel}")
    budget = Budget(minutes)
    if show:
        print(f"checking settings and data of {len(runs)} run{'s' * (len(runs) > 1)}", flush=True)  # may take minutes
    summaries = _check_all(runs)
    workers = _workers(runs, parallel, show)
    grid = _Grid(TableDisplay(runs, show), budget)
    try:
        _train_missing(runs, summaries, workers, grid)
    except Stopped:
        _conclude(runs, metric, grid.failures, show)
        raise
    result = _conclude(runs, metric, grid.failures, show)
    left = sum(status in (NOT_STARTED, UNFINISHED) for row in result["rows"] for status in row["status"])
    if show and left:
        print(f"{left} of {len(runs)} runs would not end within --minutes {minutes:g}: the same command continues")
    if report:
        _write_report(runs, show)
    return result


def _in_folder(runs: Sequence[RunConfig], out: str | Path | None) -> Sequence[RunConfig]:
    """Return the runs with ``out`` as their folder, if it is given; raise a ValueError for none or equal names."""
    if not runs:
        raise ValueError("nothing to compare: the grid has no runs")
    if out is not None:
        runs = [run.replace(out=str(out)) for run in runs]
    names = [run.run_name for run in runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two runs are called {twice[0]!r}; give each optimizer, rate and seed once, or other names")
    return runs


class _Workers(NamedTuple):
    """How many runs to train at a time, and whether each has its own GPU."""

    number: int
    own_gpu: bool


def _workers(runs: Sequence[RunConfig], parallel: int, show: bool) -> _Workers:
    """Return as many workers as asked for, but no more than GPUs if runs may use them."""
    gpus = torch.cuda.device_count() if any(run.training.device != "cpu" for run in runs) else 0
    if gpus and parallel > gpus:
        if show:
            print(f"--parallel {parallel} is reduced to {gpus}, the number of GPUs: each run has its own")
        parallel = gpus
    return _Workers(parallel, own_gpu=gpus > 0)


@dataclass
class _Grid:
    """The state of a grid while it is trained: the live table, the time left, and by name why runs failed."""

    display: TableDisplay
    budget: Budget
    failures: dict[str, str] = field(default_factory=dict)

    def may_start(self, row: int, run: RunConfig) -> bool:
        """Tell whether there is time for the run, and show it if there is not."""
        allowed = self.budget.start(run)
        if not allowed:
            self.display.update(row, NOT_STARTED)
        return allowed

    def finish(self, row: int, run: RunConfig, summary: Mapping[str, Any]) -> None:
        self.budget.finish(run)
        self.show_summary(row, summary)

    def fail(self, row: int, run: RunConfig, reason: str) -> None:
        self.failures[run.run_name] = reason
        self.display.update(row, FAILED)

    def show_summary(self, row: int, summary: Mapping[str, Any]) -> None:
        names = {"step": "steps", "loss": "final_train_loss", "val_ppl": "final_val_ppl"}
        record = {name: summary.get(key) for name, key in names.items()}
        self.display.update(row, summary["status"], {**record, "tokens_per_s": summary.get("tokens_per_s")})


def _train_missing(
    runs: Sequence[RunConfig], summaries: Sequence[Mapping[str, Any] | None], workers: _Workers, grid: _Grid
) -> None:
    """Train the runs without a summary, with a live table of all."""
    with grid.display, watch() as request:
        missing = []
        for row, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
            if summary is None:
                missing.append((row, run))
            else:
                grid.show_summary(row, summary)
        if workers.number == 1:
            _one_by_one(missing, grid, request)
        else:
            _in_processes(missing, grid, request, workers)


def _conclude(runs: Sequence[RunConfig], metric: str, failures: Mapping[str, str], show: bool) -> dict[str, Any]:
    """Rank the runs, print the table and write compare.json, in this order: the disk may be full."""
    result = table_of(runs, metric, failures)
    if show:
        print(format_result(result))
    path = Path(runs[0].logging.out) / RESULT
    with explained(path):
        write_json(path, result)
    return result


def _write_report(runs: Sequence[RunConfig], show: bool) -> None:
    """Write the report on all runs that have begun; print what they showed and where the page is."""
    folders = [folder for run in runs if (folder := run.folder).is_dir()]
    if not folders:
        return
    try:
        place = runs[0].logging
        written = write_report(folders, Path(place.out) / "report", title=f"Comparison: {place.recipe}")
    except (OSError, ValueError) as error:  # the runs are worth more than their report
        print(f"cosmos-lab: no report: {error}", file=sys.stderr)
        return
    if show:
        print(f"\n{written.summary}\nReport: {written.page}")


def _check_all(runs: Sequence[RunConfig]) -> list[dict[str, Any] | None]:
    """Check all runs before any is trained; return the summary of each finished one, and None for the others.

    One ValueError names every run with a wrong option, model or text, or with a folder that holds another run.
    """
    summaries: list[dict[str, Any] | None] = []
    problems: dict[str, list[str]] = {}  # the names of the runs that have each
    opened: set[Any] = set()  # most runs share model and text
    for run in runs:
        try:
            hyperparameters(run.check())
            build.model_config(run)  # a wrong size, before any data is unpacked
            summaries.append(finished(run))
            if summaries[-1] is None:
                check_unfinished(run)
                if (run.model, run.data) not in opened:
                    build.open_text(run)
                    opened.add((run.model, run.data))
        except ValueError as problem:
            problems.setdefault(str(problem), []).append(run.run_name)
    if problems:
        raise ValueError(_told(problems, len(runs)))
    return summaries


def _told(problems: Mapping[str, Sequence[str]], runs: int) -> str:
    """List the problems, each once, with the names of the runs that have it."""
    count = sum(map(len, problems.values()))
    found = "a run is invalid or its folder holds another run"
    if count > 1:
        found = f"{count} of {runs} runs are invalid or their folders hold other runs"
    lines = (f"{_some(names)}: {problem}" for problem, names in problems.items())
    return "\n  ".join([f"no run was started because {found}:", *lines])


def _some(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _one_by_one(runs: NumberedRuns, grid: _Grid, request: Request) -> None:
    """Train one run after another in this process."""
    for row, run in runs:
        request.check(f"before {run.run_name}")
        if not grid.may_start(row, run):
            continue
        grid.display.update(row, "running")
        try:
            summary = train(run, progress=partial(grid.display.update, row, "running"))
        except (RuntimeError, ValueError, OSError) as error:  # for example out of memory: the other runs may still fit
            grid.fail(row, run, str(error).splitlines()[0])
        except Stopped:
            grid.display.update(row, UNFINISHED)
            raise
        else:
            grid.finish(row, run, summary)


@dataclass
class _Job:
    """A run in its own process."""

    row: int
    run: RunConfig
    process: subprocess.Popen[bytes]
    log: TextIO
    slot: int  # the number of its GPU, if there are any


def _in_processes(runs: NumberedRuns, grid: _Grid, request: Request, workers: _Workers) -> None:
    """Train several runs at a time, each in its own process."""
    waiting = list(runs)
    jobs: list[_Job] = []
    signalled: list[_Job] = []
    try:
        while jobs or (waiting and not request.signum):
            while waiting and not request.signum and len(jobs) < workers.number:
                jobs += _started(*waiting.pop(0), grid, _free_slot(jobs), workers.own_gpu)
            time.sleep(_POLL_S)
            if request.signum and not signalled:
                signalled = list(jobs)
                for job in signalled:
                    job.process.send_signal(request.signum)
            for job in list(jobs):
                if _poll(job, grid, request.signum):
                    jobs.remove(job)
    finally:
        _terminate(jobs)  # an error here, or a second signal: the runs resume from their checkpoints next time
    request.check(f"in {_unfinished(signalled, len(runs))}")


def _free_slot(jobs: Sequence[_Job]) -> int:
    """Return the lowest number that no job has."""
    taken = {job.slot for job in jobs}
    return next(slot for slot in itertools.count() if slot not in taken)


def _started(row: int, run: RunConfig, grid: _Grid, slot: int, own_gpu: bool) -> list[_Job]:
    """Start a run if there is time for it; return its job, or nothing if it was not started."""
    if not grid.may_start(row, run):
        return []
    try:
        job = _start(row, run, slot, own_gpu)
    except OSError as error:  # its folder cannot be written; those of other runs may be
        grid.fail(row, run, str(error))
        return []
    grid.display.update(row, "running")
    return [job]


def _terminate(jobs: Sequence[_Job]) -> None:
    """End the processes of jobs that still run, and wait for them."""
    for job in jobs:
        job.process.terminate()
    for job in jobs:
        job.process.wait()
        job.log.close()


def _unfinished(jobs: Sequence[_Job], runs: int) -> str:
    """Say how many of all runs a signal stopped, and how many of them have a checkpoint."""
    left = [folder for job in jobs if read_summary(folder := job.run.folder) is None]
    kept = sum(checkpoint.latest(folder / "checkpoints") is not None for folder in left)
    how = "with checkpoints" if kept == len(left) else f"{kept} of them with a checkpoint"
    return f"{len(left)} of {runs} runs, {how}"


def _start(row: int, run: RunConfig, slot: int, own_gpu: bool) -> _Job:
    """Start a process that trains a run, with ``own_gpu`` on the GPU of its slot."""
    folder = run.folder
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "asked.json").write_text(json.dumps(run.flat()))
        log = (folder / "output.txt").open("a")
    # The workers import what this process imported, installed or not.
    places = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    if own_gpu:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot] if visible else str(slot)
    command = [sys.executable, "-m", "cosmos_lab.grid.compare", str(folder / "asked.json")]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return _Job(row, run, process, log, slot)


def _poll(job: _Job, grid: _Grid, signum: int) -> bool:
    """Show a job's progress; return True if it has ended. ``signum`` is the signal that asked all to stop, or 0."""
    folder = job.run.folder
    code = job.process.poll()
    if code is None:
        if records := list(read_metrics(folder)):
            grid.display.update(job.row, "running", {k: v for record in records[-20:] for k, v in record.items()})
        return False
    job.log.close()
    summary = read_summary(folder)
    # Ended by a signal, ours or one to the whole process group: in training (128 + number), or before and after it.
    stopped = bool(signum) and any(code in (128 + known, -known) for known in SIGNALS)
    if stopped and summary is None:
        grid.display.update(job.row, UNFINISHED)
    elif summary is None or (code and not stopped):
        lines = (folder / "output.txt").read_text().strip().splitlines()
        grid.fail(job.row, job.run, lines[-1] if lines else f"exit code {code}")
    else:
        grid.finish(job.row, job.run, summary)
    return True


def _work(asked: Path) -> int:
    """Train the run of a file in this process, which ``_start`` made; return the exit code."""
    if sys.platform == "linux":  # SIGTERM if the comparison is killed: nothing else would end this run
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    try:
        train(RunConfig.from_flat(json.loads(asked.read_text())))
    except (Stopped, ValueError, OSError) as error:
        print(f"cosmos-lab: {error}", file=sys.stderr)
        return error.code if isinstance(error, Stopped) else 2
    return 0


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1])))
