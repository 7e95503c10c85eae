"""Run the comparison of docs/protocol.md as a queue: several runs at a time, until a deadline.

    python -m benchmarks.sweep --data data/wiki_t5 --out sweep --seconds 3600 --parallel 2
    python -m benchmarks.sweep --table results/protocol-*.json

On a machine that is lent for a short time, add `--checkpoints FOLDER`: the same command again then continues the runs
that the deadline has cut off.

Needs torch and numpy, and Triton on a GPU. The parts:

    comparison.py       what is compared: optimizers, regimes, and the settings of a run
    protocol.py         which run comes next
    sweep_flags.py      the flags
    sweep_queue.py      the queue, its deadline and its files
    sweep_worker.py     a process that trains
    sweep_training.py   one run
    sweep_gpu.py        what the processes share on a GPU
    sweep_table.py      the table at the end
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BEGAN, rate_runs, trials
from benchmarks.kept_runs import read_results
from benchmarks.protocol import Protocol
from benchmarks.sweep_flags import check_names, chosen_phases, parser, queue_options
from benchmarks.sweep_gpu import compile_cache, shared_gpu
from benchmarks.sweep_queue import Queue
from benchmarks.sweep_table import table
from benchmarks.sweep_training import check_texts


def main(arguments: list[str] | None = None, began: float | None = None) -> int:
    """Do what the command line says; `began` is when --seconds begin to count, usually now."""
    p = parser(description=(__doc__ or "").partition("\n")[0])
    a = p.parse_args(arguments)
    trials.register()
    protocol = rate_runs.protocol(a.rates) if a.rates else Protocol(model=a.model, tuned_on=a.tuned_on)
    try:
        check_names(a, protocol)
        if a.table:
            print_tables(protocol, a.table)
            return 0
        if not a.out or not (a.data or a.plan):
            raise ValueError("--out and --data are needed, or --table")
        protocol = dataclasses.replace(protocol, phases=chosen_phases(a, protocol))
        options = queue_options(protocol.model, a)
        queue = Queue(protocol, options, began)
        if not a.plan:
            check_texts(protocol, options, queue.next())  # here, because a process takes long to start and to fail
    except (ValueError, OSError) as error:
        p.error(str(error))
    if a.plan:
        print(queue.plan())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the workers too
    with compile_cache(a.compiled, options.out / "compiled"), shared_gpu(options.mps):
        good = queue.work()
    print(table(protocol, queue.results))
    return 0 if good else 1


def print_tables(protocol: Protocol, paths: Sequence[Path]) -> None:
    """Print the table of each model in the results."""
    results = read_results(paths)
    for model in sorted({result["model"] for result in results.values()}):
        print(table(dataclasses.replace(protocol, model=model), results), end="\n\n")


if __name__ == "__main__":
    sys.exit(main(began=BEGAN))
