"""Train several runs of a comparison at a time, each in its own process.

A worker is this file run as a module, with the path of the run's config. It writes what it prints into the run folder.
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
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cosmos_lab.config import RunConfig
from cosmos_lab.grid.progress import GridProgress
from cosmos_lab.io import explained, first_line
from cosmos_lab.results.reading import Status, read_metrics, read_summary
from cosmos_lab.run import checkpoint
from cosmos_lab.run.stopping import SIGNALS, Request, Stopped
from cosmos_lab.run.train import train

_POLL_S = 0.5
_CHECKPOINT_S = 120.0  # seconds that a process has for its current step and its checkpoint before it is killed
_SHOWN = 2**16  # bytes at the end of a log that are read for the table: a log may have many megabytes
_PREFIX = "cosmos-lab: "  # of an error
NumberedRuns = Sequence[tuple[int, RunConfig]]  # with their rows of the table


class Workers(NamedTuple):
    """How many runs to train at a time, and whether each has its own GPU."""

    number: int
    own_gpu: bool


@dataclass
class _Job:
    """A run in its own process."""

    row: int
    run: RunConfig
    process: subprocess.Popen[bytes]
    output: BinaryIO  # a file of the run folder, to which every process that trains the run appends
    earlier: int  # bytes that were in this file before the process began
    slot: int  # the number of its GPU, if there are any


def train_in_processes(runs: NumberedRuns, grid: GridProgress, request: Request, workers: Workers) -> None:
    """Train several runs at a time, each in its own process."""
    waiting = list(runs)
    jobs: list[_Job] = []
    signalled: list[_Job] = []
    try:
        while jobs or (waiting and not request.signum):
            while waiting and not request.signum and len(jobs) < workers.number:
                job = _start_if_possible(*waiting.pop(0), grid, _free_slot(jobs), workers.own_gpu)
                jobs += [job] if job else []
            time.sleep(_POLL_S)
            if request.signum and not signalled:
                signalled = list(jobs)
                for job in signalled:
                    job.process.send_signal(request.signum)
            for job in list(jobs):
                if job.process.poll() is None:
                    _show_progress(job, grid)
                else:
                    jobs.remove(job)
                    _conclude(job, grid, request.signum)
    finally:
        _terminate(jobs)  # an error here, or a second signal: the runs resume from their checkpoints next time
    request.check(f"in {_count_stopped(signalled, len(runs))}")


def _free_slot(jobs: Sequence[_Job]) -> int:
    """Return the lowest number that no job has."""
    taken = {job.slot for job in jobs}
    return next(slot for slot in itertools.count() if slot not in taken)


def _start_if_possible(row: int, run: RunConfig, grid: GridProgress, slot: int, own_gpu: bool) -> _Job | None:
    """Start a run if there is time for it and its folder can be written; return its job, or None."""
    if not grid.may_start(row, run):
        return None
    try:
        job = _start(row, run, slot, own_gpu)
    except OSError as error:  # the folders of other runs may be writable
        grid.fail(row, run, str(error))
        return None
    grid.display.update(row, Status.RUNNING)
    return job


def _start(row: int, run: RunConfig, slot: int, own_gpu: bool) -> _Job:
    """Start a process that trains a run, with ``own_gpu`` on the GPU of its slot."""
    folder = run.folder
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "asked.json").write_text(json.dumps(run.flat()))
        output = (folder / "output.txt").open("a+b")
    earlier = output.tell()  # before the process writes: it shares this position
    # The workers import what this process imported, installed or not.
    places = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    if own_gpu:
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot] if visible else str(slot)
    command = [sys.executable, "-m", "cosmos_lab.grid.workers", str(folder / "asked.json"), str(os.getpid())]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return _Job(row, run, process, output, earlier, slot)


def _show_progress(job: _Job, grid: GridProgress) -> None:
    """Show the newest numbers of a job's log; the table keeps those that are older."""
    newest = {key: value for record in read_metrics(job.run.folder, last=_SHOWN) for key, value in record.items()}
    if newest:
        grid.display.update(job.row, Status.RUNNING, newest)


def _conclude(job: _Job, grid: GridProgress, signum: int) -> None:
    """Show how a job has ended; ``signum`` is the signal that asked all to stop, or 0."""
    summary, code = read_summary(job.run.folder), job.process.returncode
    # Ended by a signal, ours or one to the whole process group: in training (128 + number), or before and after it.
    stopped = bool(signum) and any(code in (128 + known, -known) for known in SIGNALS)
    if stopped and summary is None:
        grid.display.update(job.row, Status.UNFINISHED)
    elif summary is None or (code and not stopped):
        grid.fail(job.row, job.run, _reason(job))
    else:
        grid.finish(job.row, job.run, summary)
    job.output.close()


def _reason(job: _Job) -> str:
    """Say why a job failed: the last line that its process printed, or how it ended."""
    code = job.process.returncode
    if code < 0:  # what it printed is older than the signal
        advice = "; memory may have run out" if -code == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{advice}"
    job.output.seek(job.earlier)
    lines = job.output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix(_PREFIX) if lines else f"its process ended with exit code {code}"


def _terminate(jobs: Sequence[_Job]) -> None:
    """End the processes of jobs that still run: SIGTERM lets them write checkpoints, SIGKILL ends those that hang."""
    for job in jobs:
        job.process.terminate()
    deadline = time.monotonic() + _CHECKPOINT_S
    try:
        for job in jobs:
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # also if Ctrl-C ends the wait
        for job in jobs:
            job.process.kill()
            job.process.wait()
            job.output.close()


def _count_stopped(jobs: Sequence[_Job], runs: int) -> str:
    """Say how many of all runs a signal stopped, and how many of them have a checkpoint."""
    left = [folder for job in jobs if read_summary(folder := job.run.folder) is None]
    kept = sum(checkpoint.exists(folder) for folder in left)
    how = "with checkpoints" if kept == len(left) else f"{kept} of them with a checkpoint"
    return f"{len(left)} of {runs} runs, {how}"


def _work(asked: Path, comparison: int) -> int:
    """Train the run of a file in this process, which the process ``comparison`` started; return the exit code."""
    if sys.platform == "linux":  # SIGTERM if the comparison is killed: nothing else would end this run
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG
    try:
        if os.getppid() != comparison:  # killed while this process imported torch, which takes seconds
            raise ValueError("this run was not started, because the comparison has ended")
        train(RunConfig.from_flat(json.loads(asked.read_text())))
    except (Stopped, ValueError, OSError, FloatingPointError) as error:
        print(f"{_PREFIX}{error}", file=sys.stderr)
        return error.code if isinstance(error, Stopped) else 2
    except RuntimeError as error:  # the last line is the reason: a message of torch.compile ends with general advice
        traceback.print_exc()
        print(f"{_PREFIX}{first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1]), int(sys.argv[2])))
