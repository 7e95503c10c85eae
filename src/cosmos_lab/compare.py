"""Several runs side by side: a grid over optimizers, rates and seeds, resumable, one at a time or one process per GPU.

    result = compare(get_recipe("llama-60m").runs(optimizers=["adam", "cosmos"], seeds=(0, 1, 2)), out="runs")

A finished run is not trained again and a half-finished one continues, so the same call after a kill goes on where it
was. Needs neither tyro nor rich.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from cosmos_lab import runlog
from cosmos_lab.config import RunConfig
from cosmos_lab.data.files import write_json
from cosmos_lab.display import TableDisplay, format_table
from cosmos_lab.train import train

RESULT = "compare.json"
_POLL_S = 0.5
# What a run is called by in the table, beside optimizer and rate, where the runs differ in it.
_QUIET = {"optimizer", "lr", "adam_lr", "seed", "name", "out", "recipe"}


class Display(Protocol):
    """Told of every change of a run."""

    def update(self, row: int, status: str, record: Mapping[str, Any] | None = None) -> None: ...


class Silent:
    """A display that shows nothing."""

    def update(self, row: int, status: str, record: Mapping[str, Any] | None = None) -> None:
        """Nothing."""


def compare(
    runs: Sequence[RunConfig],
    *,
    out: str | Path | None = None,
    metric: str = "final_val_loss",
    parallel: int = 1,
    show: bool = True,
) -> dict[str, Any]:
    """Make the runs that are not made yet, and compare all.

    Args:
        runs: the runs, each with a name of its own.
        out: folder of the run folders and of compare.json (None: the runs' own ``out``).
        metric: the number of the summary that ranks them; less is better.
        parallel: processes at a time; with GPUs, each has one of its own.
        show: print the live table and the result.

    Returns what compare.json holds: {"metric", "rows": [...], "best": {optimizer: label}}; a row is one variant with
    its seeds, mean and spread.
    """
    if not runs:
        raise ValueError("nothing to compare: no run is left of the grid")
    if out is not None:
        runs = [run.replace(out=str(out)) for run in runs]
    names = [run.run_name for run in runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two runs are called {twice!r}; give them names of their own")
    for run in runs:
        run.check()
    table = TableDisplay(runs) if show else None
    context: AbstractContextManager[Any] = table or nullcontext()
    with context:
        display: Display = table or Silent()
        failures = _one_by_one(runs, display) if parallel <= 1 else _in_processes(runs, parallel, display)
    result = rank(runs, metric, failures)
    write_json(Path(runs[0].logging.out) / RESULT, runlog.finite(result))
    if show:
        print(format_result(result))
    return result


def _one_by_one(runs: Sequence[RunConfig], display: Display) -> dict[str, str]:
    """Run after run in this process; returns why some failed."""
    failures: dict[str, str] = {}
    for row, run in enumerate(runs):
        finished = runlog.read_summary(runlog.run_folder(run))
        if finished is None:
            display.update(row, "running")
        try:
            summary = train(run, progress=lambda record, row=row: display.update(row, "running", record))  # type: ignore[misc]
        except RuntimeError as error:  # out of memory, say: the other runs may still fit
            failures[run.run_name] = str(error).splitlines()[0]
            display.update(row, "failed")
            continue
        display.update(row, summary["status"], _as_record(summary))
    return failures


def _as_record(summary: Mapping[str, Any]) -> dict[str, Any]:
    names = {"step": "steps", "loss": "final_train_loss", "val_ppl": "final_val_ppl", "tokens_per_s": "tokens_per_s"}
    return {name: summary.get(field) for name, field in names.items()}


@dataclass
class _Job:
    """A run in a process of its own."""

    row: int
    run: RunConfig
    process: subprocess.Popen[bytes]
    log: TextIO
    seat: int


def _in_processes(runs: Sequence[RunConfig], parallel: int, display: Display) -> dict[str, str]:
    """Up to ``parallel`` runs at a time, each in its own process and on its own GPU."""
    gpus = torch.cuda.device_count()
    seats = list(range(min(parallel, gpus) if gpus else parallel))
    waiting = list(enumerate(runs))
    jobs: list[_Job] = []
    failures: dict[str, str] = {}
    try:
        while waiting or jobs:
            while waiting and len(jobs) < len(seats):
                row, run = waiting.pop(0)
                seat = next(s for s in seats if s not in {job.seat for job in jobs})
                jobs.append(_start(row, run, seat, gpus > 0))
                display.update(row, "running")
            time.sleep(_POLL_S)
            for job in list(jobs):
                if _report(job, display, failures):
                    jobs.remove(job)
    finally:
        for job in jobs:  # an interrupt: the runs resume from their checkpoints next time
            job.process.terminate()
            job.process.wait()
            job.log.close()
    return failures


def _start(row: int, run: RunConfig, seat: int, gpu: bool) -> _Job:
    folder = runlog.run_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.json").write_text(json.dumps(run.flat()))
    # The workers import what this process imported, installed or not.
    places = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    if gpu:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[seat] if visible else str(seat)
    log = (folder / "output.txt").open("a")
    command = [sys.executable, "-m", "cosmos_lab.worker", str(folder / "asked.json")]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return _Job(row, run, process, log, seat)


def _report(job: _Job, display: Display, failures: dict[str, str]) -> bool:
    """Tell the display how a job stands; True when it has ended."""
    folder = runlog.run_folder(job.run)
    code = job.process.poll()
    if code is None:
        records = list(runlog.read_metrics(folder))
        if records:
            display.update(job.row, "running", {k: v for record in records[-20:] for k, v in record.items()})
        return False
    job.log.close()
    summary = runlog.read_summary(folder)
    if code or summary is None:
        lines = (folder / "output.txt").read_text().strip().splitlines()
        failures[job.run.run_name] = lines[-1] if lines else f"exit code {code}"
        display.update(job.row, "failed")
    else:
        display.update(job.row, summary["status"], _as_record(summary))
    return True


# -- the result -------------------------------------------------------------------------------------------------------


def rank(runs: Sequence[RunConfig], metric: str, failures: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Rows of the runs' variants with mean and spread over seeds, the best of each optimizer marked."""
    differing = _differing(runs)
    groups: dict[tuple[Any, ...], list[RunConfig]] = {}
    for run in runs:
        key = (run.optimizer.optimizer, run.optimizer.lr, *(run.get(name) for name in differing))
        groups.setdefault(key, []).append(run)
    rows = [_row(members, metric, differing, failures or {}) for members in groups.values()]
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = best.get(row["optimizer"])
        if row["mean"] is not None and (known is None or row["mean"] < known["mean"]):
            best[row["optimizer"]] = row
    for row in best.values():
        row["best"] = True
    return {
        "recipe": runs[0].logging.recipe,
        "metric": metric,
        "commit": runlog.commit(),
        "versions": runlog.versions(),
        "rows": rows,
        "best": {name: row["label"] for name, row in best.items()},
    }


def _differing(runs: Sequence[RunConfig]) -> list[str]:
    """Fields in which runs of the same optimizer differ, beside rate and seed."""
    found = []
    for name in runs[0].flat():
        values = {(run.optimizer.optimizer, run.get(name)) for run in runs}
        if name not in _QUIET and len(values) > len({optimizer for optimizer, _ in values}):
            found.append(name)
    return found


def _row(
    members: Sequence[RunConfig], metric: str, differing: Sequence[str], failures: Mapping[str, str]
) -> dict[str, Any]:
    first = members[0]
    summaries = [runlog.read_summary(runlog.run_folder(run)) or {"status": "failed"} for run in members]
    values = [summary.get(metric) for summary in summaries]
    known = [value for value in values if value is not None]
    whole = len(known) == len(values)
    extras = {name: first.get(name) for name in differing}
    own = (f"{name} {value}" for name, value in extras.items())
    label = " ".join([first.optimizer.optimizer, f"lr {first.optimizer.lr:g}", *own])
    return {
        "label": label,
        "optimizer": first.optimizer.optimizer,
        "lr": first.optimizer.lr,
        "adam_lr": first.optimizer.adam_lr,
        **extras,
        "seeds": [run.training.seed for run in members],
        "runs": [run.run_name for run in members],
        "status": [summary["status"] for summary in summaries],
        "values": values,
        "mean": statistics.fmean(known) if known and whole else None,
        "spread": statistics.stdev(known) if len(known) > 1 and whole else None,
        "final_val_ppl": [summary.get("final_val_ppl") for summary in summaries],
        "step_ms": [summary.get("step_ms") for summary in summaries],
        "optimizer_ms": [summary.get("optimizer_ms") for summary in summaries],
        "state_bytes": [summary.get("state_bytes") for summary in summaries],
        "failures": [failures[run.run_name] for run in members if run.run_name in failures],
        "best": False,
    }


def format_result(result: Mapping[str, Any]) -> str:
    """The table that ends a comparison; ``*`` marks the best variant of each optimizer."""
    lines = []
    for row in result["rows"]:
        mean = "-" if row["mean"] is None else f"{row['mean']:.4f}"
        mean += "" if row["spread"] is None else f" ± {row['spread']:.4f}"
        ppl = [value for value in row["final_val_ppl"] if value is not None]
        state = [value for value in row["state_bytes"] if value]
        lines.append(
            (
                row["label"],
                "*" if row["best"] else "",
                mean,
                f"{statistics.fmean(ppl):.2f}" if ppl else "-",
                _average(row["step_ms"]),
                _average(row["optimizer_ms"]),
                f"{state[0] / 2**20:,.1f}" if state else "-",
                ", ".join([*sorted(set(row["status"]) - {"done"}), *row["failures"]]),
            )
        )
    head = ("run", "best", result["metric"], "val ppl", "step ms", "optimizer ms", "state MiB", "")
    return format_table(head, lines, left=(0, 7))


def _average(values: Sequence[float | None]) -> str:
    known = [value for value in values if value]
    return f"{statistics.fmean(known):,.1f}" if known else "-"
