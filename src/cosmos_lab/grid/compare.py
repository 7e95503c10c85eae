"""Compare runs: a grid over optimizers, rates and seeds, resumable, one at a time or one process per GPU.

A finished run is not trained again and an unfinished one continues, so the same call after a kill continues the grid.
SIGTERM and Ctrl-C end all runs after the current step, with checkpoints. Needs neither tyro nor rich.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.display import TableDisplay
from cosmos_lab.grid.budget import Budget
from cosmos_lab.grid.progress import GridProgress
from cosmos_lab.grid.table import format_result, table_of
from cosmos_lab.grid.workers import NumberedRuns, Workers, train_in_processes
from cosmos_lab.io import explained, first_line, write_json
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.report import write_report
from cosmos_lab.results.reading import Status
from cosmos_lab.run import build
from cosmos_lab.run.run_folder import check_unfinished, summary_if_finished
from cosmos_lab.run.stopping import Request, Stopped, watch
from cosmos_lab.run.train import train

RESULT = "compare.json"


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
    grid = GridProgress(TableDisplay(runs, show), budget)
    try:
        _train_missing(runs, summaries, workers, grid)
    except Stopped:
        _conclude(runs, metric, grid.failures, show)
        raise
    result = _conclude(runs, metric, grid.failures, show)
    left = sum(status in (Status.NOT_STARTED, Status.UNFINISHED) for row in result["rows"] for status in row["status"])
    if show and left:
        why = f"would not end within --minutes {minutes:g}" if minutes else "lost their results after they had ended"
        print(f"{left} of {len(runs)} runs {why}: the same command continues")
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


def _workers(runs: Sequence[RunConfig], parallel: int, show: bool) -> Workers:
    """Return as many workers as asked for, but no more than GPUs if runs may use them."""
    gpus = torch.cuda.device_count() if any(run.training.device != "cpu" for run in runs) else 0
    if gpus and parallel > gpus:
        if show:
            print(f"--parallel {parallel} is reduced to {gpus}, the number of GPUs: each run has its own")
        parallel = gpus
    return Workers(parallel, own_gpu=gpus > 0)


def _train_missing(
    runs: Sequence[RunConfig], summaries: Sequence[Mapping[str, Any] | None], workers: Workers, grid: GridProgress
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
            train_in_processes(missing, grid, request, workers)


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
            summaries.append(summary_if_finished(run))
            if summaries[-1] is None:
                check_unfinished(run)
                if (run.model, run.data) not in opened:
                    build.open_text(run)
                    opened.add((run.model, run.data))
        except ValueError as problem:
            problems.setdefault(str(problem), []).append(run.run_name)
    if problems:
        raise ValueError(_list_problems(problems, len(runs)))
    return summaries


def _list_problems(problems: Mapping[str, Sequence[str]], runs: int) -> str:
    """List the problems, each once, with the names of the runs that have it."""
    count = sum(map(len, problems.values()))
    found = "a run is invalid or its folder holds another run"
    if count > 1:
        found = f"{count} of {runs} runs are invalid or their folders hold other runs"
    lines = (f"{_first_of(names)}: {problem}" for problem, names in problems.items())
    return "\n  ".join([f"no run was started because {found}:", *lines])


def _first_of(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _one_by_one(runs: NumberedRuns, grid: GridProgress, request: Request) -> None:
    """Train one run after another in this process."""
    for row, run in runs:
        request.check(f"before {run.run_name}")
        if not grid.may_start(row, run):
            continue
        grid.display.update(row, Status.RUNNING)
        try:
            summary = train(run, progress=partial(grid.display.update, row, Status.RUNNING))
        except (RuntimeError, ValueError, OSError, FloatingPointError) as error:  # for example out of memory
            grid.fail(row, run, first_line(error))
        except Stopped:
            grid.display.update(row, Status.UNFINISHED)
            raise
        else:
            grid.finish(row, run, summary)
