"""A process of the queue: it trains the runs that it gets, one after the other."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from benchmarks import trials
from benchmarks.comparison import Comparison, Run
from benchmarks.kept_runs import Result
from benchmarks.sweep_options import Options
from benchmarks.sweep_training import train
from cosmos_lab.run.stopping import Stopped


def serve(pipe: Connection, comparison: Comparison, options: Options) -> None:
    """Train what the queue sends, one run after the other; end after a failure, because the GPU's state is unknown."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_cpu(options)
    trials.register()
    with pipe:
        while True:
            try:
                run = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(train(comparison, options, run))
            except Stopped:  # by the queue, at the deadline
                return
            except Exception:
                pipe.send(traceback.format_exc())
                return


def share_cpu(options: Options) -> None:
    """Give this process its share of the cores if it trains on them: more threads than cores are much slower."""
    if options.device == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.at_a_time))


def _end_with_parent() -> None:
    """End this process as soon as the queue's process has ended: nobody would read the result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Worker:
    """A process that trains, and the run that it trains now."""

    def __init__(self, comparison: Comparison, options: Options) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, comparison, options))
        self.process.start()
        theirs.close()
        self.run: Run | None = None

    def begin(self, run: Run) -> None:
        """Begin a run; if the process has died, `answer` says so."""
        self.run = run
        with suppress(BrokenPipeError):
            self.pipe.send(run)

    def answer(self) -> Result | str:
        """Return the result, or why there is none."""
        self.run = None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with {self.process.exitcode}"

    def end(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
