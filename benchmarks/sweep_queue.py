"""The queue of a sweep: it hands runs to processes until nothing is left to do or no run fits into the time.

Every finished run is one file, OUT/runs/ID.json. OUT/bundle.json has all of this model, those of --known included. A
run that is finished in either place is not trained again. One that the deadline, SIGTERM or Ctrl-C cuts off begins
again in the next queue, or continues there if there is a folder for checkpoints.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import wait

from benchmarks.comparison import Run
from benchmarks.kept_runs import losses, read_results, write_bundle
from benchmarks.protocol import Protocol
from benchmarks.sweep_options import Options
from benchmarks.sweep_worker import Worker
from cosmos_lab.io import atomic_write
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.provenance import commit
from cosmos_lab.run import checkpoint

CLOSING = 2.0  # seconds of --seconds that are kept for ending processes, the archive and the table
SAVING = 15.0  # seconds before that in which runs that are cut off can write a checkpoint
MOST_FAILURES = 4  # failed runs after which the queue ends: something is wrong with the machine or the code
# Failures that may come from another process on the GPU.
LOST_GPU = re.compile("CUDA (driver )?error|CUDA initialization|CUDA does not start|its process ended with")


class Queue:
    """Hands runs to workers until nothing is left to do or no run fits into the time."""

    def __init__(self, protocol: Protocol, options: Options, began: float | None = None) -> None:
        self.protocol = protocol
        # Now, because processes load the code when they start, and it may be edited while they train.
        self.options = replace(options, commit=options.commit or commit())
        self.began = time.monotonic() if began is None else began
        self.folder = options.out / "runs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = read_results([*options.known, self.folder])
        self.failed: dict[str, str] = {}
        self.begun_again: set[str] = set()
        self.possible: dict[tuple[str, str], bool] = {}  # by row and variant
        self.finished: list[str] = []
        self.run_seconds = 0.0  # of all runs together, so far
        self.started: dict[str, tuple[float, float]] = {}  # time and run_seconds when a run began
        if protocol.tuned_on and not options.runs:
            rows = dict.fromkeys((regime, entry) for regime, entries, _ in protocol.phases for entry in entries)
            missing = [f"{e} in {r}" for r, e in rows if not protocol.has_source(r, e, losses(self.results))]
            if missing:
                self._say(f"skipped, because --known has no search of {protocol.tuned_on}: {', '.join(missing)}")

    def work(self, restart_gpu: Callable[[], None] | None = None) -> bool:
        """Run the queue; return whether every run that began and was not cut off has finished.

        An error of one process may be an error of all that share the GPU. If there is a function to start the GPU's
        daemon again, all processes end then, and their runs begin again; each run can cause this once.
        """
        self._bundle()
        self.options.unfinished.mkdir(parents=True, exist_ok=True)  # now, because a process takes long to fail
        workers: list[Worker] = []
        try:
            while True:
                self._begin_runs(workers)
                running = [worker for worker in workers if worker.run]
                if not running:
                    break
                left, since = self._left(), time.monotonic()
                ready = wait([worker.pipe for worker in running], None if math.isinf(left) else max(0.0, left))
                self.run_seconds += len(running) * (time.monotonic() - since)
                if not ready:
                    self._cut_off(running)
                    break
                again = len(self.begun_again)
                for worker in running:
                    if worker.pipe in ready and not self._receive(worker, once_more=restart_gpu is not None):
                        workers.remove(worker)
                        worker.end()
                if restart_gpu and len(self.begun_again) > again:
                    self._end(workers)
                    restart_gpu()
        except (SystemExit, KeyboardInterrupt):  # by SIGTERM or Ctrl-C
            self._cut_off([worker for worker in workers if worker.run])
            raise
        finally:
            self._end(workers)
            if not self.options.checkpoints:
                shutil.rmtree(self.options.unfinished, ignore_errors=True)
        self._say(f"{len(self.finished)} runs finished, {len(self.failed)} failed, {self._rest()}")
        return not self.failed

    def _end(self, workers: list[Worker]) -> None:
        """End all processes, and empty the list."""
        for worker in workers:
            worker.process.kill()  # all of them before waiting for one: a process with a GPU ends slowly
        while workers:
            workers.pop().end()

    def _cut_off(self, workers: list[Worker]) -> None:
        """End runs that cannot finish; those that write a checkpoint in time can be continued."""
        if self.options.checkpoints:
            for worker in workers:
                worker.process.terminate()
            until = time.monotonic() + SAVING
            for worker in workers:
                worker.process.join(max(0.0, until - time.monotonic()))
        for worker in workers:
            if worker.run:
                later = "; the next command continues it" if self._has_checkpoint(worker.run) else ""
                self._say(f"cut off: {worker.run.id}{later}")

    def _has_checkpoint(self, run: Run) -> bool:
        """Return whether there is a checkpoint of a run."""
        return checkpoint.exists(self.options.unfinished / run.id)

    def _rest(self) -> str:
        """Return how many runs can begin now, and the expected seconds of the first."""
        runs = self.next()
        if not runs:
            return "none left that can begin"
        return f"{len(runs)} can begin now; the first, {runs[0].id}, takes about {self.estimate(runs[0]):.0f} s"

    def _begin_runs(self, workers: list[Worker]) -> None:
        """Give runs to idle workers, and start further workers if more runs can begin."""
        for worker in workers:
            if worker.run is None and (run := self._first_fitting(workers, cold=False)):
                self._begin(worker, run)
        while len(workers) < self.options.parallel and len(self.failed) < MOST_FAILURES:
            if (run := self._first_fitting(workers, cold=True)) is None:
                return
            workers.append(Worker(self.protocol, self.options))
            self._begin(workers[-1], run)

    def _begin(self, worker: Worker, run: Run) -> None:
        self.started[run.id] = time.monotonic(), self.run_seconds
        worker.begin(run)

    def _runs_at_a_time(self, name: str) -> int:
        """Return how many runs trained at a time, on average, since this one began: at the end it may be alone."""
        began, before = self.started[name]
        mean = (self.run_seconds - before) / max(time.monotonic() - began, 1e-9)
        return self.options.beside + max(1, round(mean))

    def _first_fitting(self, workers: list[Worker], cold: bool) -> Run | None:
        """Return the next run that no worker has and that is expected to end in time.

        With a folder for checkpoints, runs that have begun come first, and one that will not end in time comes last.
        """
        busy = [worker.run.id for worker in workers if worker.run]
        runs, left = self.next(busy), self._left()
        if not self.options.checkpoints:
            return next((run for run in runs if self.estimate(run, cold) < left), None)
        late = {run: (not self._has_checkpoint(run), self.estimate(run, cold) >= left) for run in runs}
        return min(runs, key=late.__getitem__, default=None) if left > SAVING else None

    def plan(self) -> str:
        """Return the runs that can begin now, one a line, with expected seconds on a started process and in all."""
        lines = [f"{'s':>5}{'sum':>7}  run ({self.options.parallel} at a time; the first of a process takes longer)"]
        total = 0.0
        for run in self.next():
            seconds = self.estimate(run, cold=False)
            total += seconds / self.options.parallel
            lines.append(f"{seconds:5.0f}{total:7.0f}  {run.id}")
        return "\n".join(lines)

    def _left(self) -> float:
        """Return the seconds until the workers must end."""
        closing = CLOSING + SAVING if self.options.checkpoints else CLOSING
        return self.began + self.options.seconds - closing - time.monotonic()

    def next(self, busy: Iterable[str] = ()) -> list[Run]:
        """Return the runs that can begin now, in order; skip those with options that do not exist here, and say so."""
        pending = {*busy, *self.failed}
        if self.options.runs:
            runs = [r for r in self.options.runs if r.id not in pending and r.id not in self.results]
        else:
            runs = [r for r in self.protocol.candidates(losses(self.results), pending) if self.options.keep.allow(r)]
        return [run for run in runs if not run.variant or self._can_run(run)]

    def _can_run(self, run: Run) -> bool:
        """Return whether this version has the options of a variant; say so once if it does not."""
        kind = (run.entry, run.variant)
        if kind not in self.possible:
            try:
                hyperparameters(self.protocol.config(run))
                self.possible[kind] = True
            except ValueError as error:
                self.possible[kind] = False
                self._say(f"skipped {run.entry} with {run.variant}: this version cannot run it: {error}")
        return self.possible[kind]

    def estimate(self, run: Run, cold: bool = True) -> float:
        """Return the expected seconds of a run: the usual training of its kind, and the start of a process if cold.

        An entry without runs in the regime takes its time of another regime, else the usual one of all times its cost,
        for the same number of tokens. Only runs without a variant count, if there are any: some variants double the
        time. Those of the same model count before others, then those of the same entry with at most as many runs at a
        time as now, and then those with about as many; they take longer if there are more now. Without any result the
        answer is 0, so that one run is tried.
        """
        mine = [r for r in self.results.values() if r["val_loss"] is not None]  # a diverged run has few, slow steps
        if not mine:
            return 0.0
        mine = [r for r in mine if not r.get("variant")] or mine
        mine = [r for r in mine if r["model"] == run.model] or mine
        now = self.options.at_a_time
        numbers = [r["at_a_time"] for r in mine if r["entry"] == run.entry and r["at_a_time"] <= now]
        numbers = numbers or [r["at_a_time"] for r in mine]
        then = min(numbers, key=lambda number: (abs(number - now), number))
        mine = [r for r in mine if r["at_a_time"] == then]
        same = [r for r in mine if r["entry"] == run.entry]
        cost = 1.0 if same else self.protocol.entries[run.entry].cost
        alike = [r for r in same if r["regime"] == run.regime] or same or mine
        starts = [r["wall_s"] - r["train_s"] for r in mine]
        start = max(starts) if cold else statistics.median(starts)
        pace = statistics.median(r["train_s"] / r["tokens"] for r in alike)
        return start + cost * max(1.0, now / then) * pace * self.protocol.tokens(run)

    def _receive(self, worker: Worker, once_more: bool) -> bool:
        """Keep a worker's result; return False if there is none.

        once_more: whether a run that may have lost the GPU begins again, if it has not done so before.
        """
        assert worker.run is not None
        name, answer = worker.run.id, worker.answer()
        if isinstance(answer, str) and once_more and name not in self.begun_again and LOST_GPU.search(answer):
            self.begun_again.add(name)
            self._say(f"all runs begin again, because {name} may have lost the GPU: {answer}")
            return False
        if isinstance(answer, str):
            self.failed[name] = answer
            self._say(f"FAILED {name}: {answer}")
            return False
        text = json.dumps(answer | {"at_a_time": self._runs_at_a_time(name)})
        self.results[name] = json.loads(text)  # as a later queue reads it
        self.finished.append(name)
        with atomic_write(self.folder / f"{name}.json") as out:
            out.write(text.encode() + b"\n")
        self._bundle()
        shutil.rmtree(self.options.unfinished / name, ignore_errors=True)
        shown = "diverged" if answer["val_loss"] is None else f"validation perplexity {answer['val_ppl']:.3f}"
        self._say(f"{name}: {shown}, {answer['wall_s']:.0f} s")
        return True

    def _bundle(self) -> None:
        mine = {name: r for name, r in self.results.items() if r["model"] == self.protocol.model}
        write_bundle(self.options.out / "bundle.json", mine)

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f}] {line}", flush=True)
