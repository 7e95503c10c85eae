"""Run the comparison of docs/protocol.md as a queue: several runs at a time, until a deadline.

    python -m benchmarks.sweep --data data/wiki_t5 --out sweep --seconds 3600 --parallel 2
    python -m benchmarks.sweep --table results/protocol-*.json

On a machine that is lent for a short time, add `--checkpoints FOLDER`: the same command again then continues the runs
that the deadline, SIGTERM or Ctrl-C has cut off.

Needs torch and numpy, and Triton on a GPU. The parts:

    comparison.py       what is compared: optimizers, regimes, and the settings of a run
    protocol.py         which run comes next
    sweep_options.py    what the flags ask for
    sweep_queue.py      the queue, its deadline and its files
    sweep_worker.py     a process that trains
    sweep_training.py   one run
    sweep_gpu.py        what the processes share on a GPU
    sweep_table.py      the table at the end
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import BEGAN, rate_runs, trials
from benchmarks.best_rows import protocols
from benchmarks.kept_runs import read_results
from benchmarks.protocol import STAGES, Protocol
from benchmarks.sweep_gpu import compile_cache, shared_gpu
from benchmarks.sweep_options import check_names, chosen_phases, queue_options
from benchmarks.sweep_queue import Queue
from benchmarks.sweep_table import table
from benchmarks.sweep_training import check_texts


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--table", nargs="+", type=Path, metavar="RESULTS", help="print the bundles or folders, by model")
    p.add_argument("--plan", action="store_true", help="print the runs that can begin now, and stop")
    p.add_argument("--data", help="folder or prefix of the shards: for training, and one for validation")
    p.add_argument("--out", type=Path, help="folder for results; each queue needs its own")
    p.add_argument("--known", nargs="*", type=Path, default=[], help="bundles of earlier results")
    p.add_argument("--seconds", type=float, default=math.inf, help="end after this time, imports included")
    p.add_argument("--parallel", type=int, default=1, help="runs at a time on one GPU")
    p.add_argument("--beside", type=int, default=0, help="runs of another queue on the same GPU, for the records")
    p.add_argument("--mps", action="store_true", help="share the GPU through NVIDIA's MPS daemon")
    p.add_argument("--model", default=Protocol.model, help="model of the runs (default: %(default)s)")
    p.add_argument("--tuned-on", default="", metavar="MODEL", help="take settings from the search of this model")
    p.add_argument("--regimes", nargs="*", help="only these regimes")
    p.add_argument("--only", nargs="*", help="only these rows of the comparison")
    p.add_argument("--variants", nargs="*", default=[], help='only these changes; "none" is a run without a change')
    p.add_argument("--seeds", nargs="*", type=int, default=[], help="only these seeds")
    p.add_argument("--at", nargs="+", metavar="NAME=VALUE", help="single runs at this setting, such as lr=1e-3 "
                   "adam_lr=1.6e-2 beta2=0.95, for --only, --regimes and --seeds (if not given, 0)")  # fmt: skip
    p.add_argument("--stages", nargs="*", default=[], choices=STAGES, help="only these stages of the comparison")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--compile", default="auto", help="auto (on a GPU), on, blocks or off")
    p.add_argument("--cache", help="folder for unpacked shards")
    p.add_argument("--compiled", type=Path, help="archive (.tar.gz) of compiled code: read if it exists, then written")
    p.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="runs that the deadline cuts off are kept here "
                   "and continued by the next command; without it they begin again")  # fmt: skip
    p.add_argument("--rates", choices=list(rate_runs.SIZES), help="run the list of benchmarks/rate_runs.py for a size")
    p.add_argument("--commit", help="commit of the code, if this folder is not a repository")
    return p


def main(arguments: list[str] | None = None, began: float | None = None) -> int:
    """Do what the command line says; `began` is when --seconds begin to count, usually now."""
    p = parser()
    a = p.parse_args(arguments)
    trials.register()
    protocol = rate_runs.protocol(a.rates) if a.rates else Protocol(model=a.model, tuned_on=a.tuned_on)
    try:
        check_names(a, protocol)
        if a.table:
            print_tables(a.table)
            return 0
        if not a.out or not (a.data or a.plan):
            raise ValueError("--out and --data are needed, or --table")
        protocol = dataclasses.replace(protocol, phases=chosen_phases(a, protocol))
        options = queue_options(protocol.model, a)
        queue = Queue(protocol, options, began)
        if not a.plan:
            # Here, because a process takes long to start and to fail.
            check_texts(protocol, options, queue.next(), queue.results.values())
    except (ValueError, OSError) as error:
        p.error(str(error))
    if a.plan:
        print(queue.plan())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the workers too
    with compile_cache(a.compiled, options.out / "compiled"), shared_gpu(options.mps) as restart:
        good = queue.work(restart)
    print(table(protocol, queue.results))
    return 0 if good else 1


def print_tables(paths: Sequence[Path]) -> None:
    """Print the table of each model in the results."""
    results = read_results(paths)
    for protocol in protocols(results):
        print(table(protocol, results), end="\n\n")


if __name__ == "__main__":
    sys.exit(main(began=BEGAN))
