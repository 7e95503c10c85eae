"""Compare on a small model on a CPU: hints which rows and which changes deserve time on a GPU.

    python -m benchmarks.small_model changes DATA OUT --seconds 3600
    python -m benchmarks.small_model rows DATA OUT
    python -m benchmarks.small_model muon,soap-f1 DATA OUT --known results/small-model-rows.json

A run trains 1.8M parameters on 1.6M tokens; embedding and head are 57 % of them, as in LLaMA-60M. "changes" are the
changes of benchmarks/variants.py: first come the runs that show that COSMOS's rates are the best of those around them,
then each change with several seeds. "rows" is the search of docs/protocol.md for every optimizer; names of optimizers
are the search for these. The same command continues; OUT/bundle.json has the results, those of --known included. DATA
was made from 19,309 articles of English Wikipedia for results/small-model.json, from another selection of 19,279 for
small-model-norms.json and small-model-rows.json, and from a third one for small-model-equal-rows.json:

    cosmos-lab data prepare wiki.jsonl --tokenizer train:4096 --prefix wiki4k --val-fraction 0.1 --max-val-tokens 700000
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import BEGAN, trials
from benchmarks.comparison import Regime, Run
from benchmarks.protocol import BETA2S, RATES, SEARCH, Protocol
from benchmarks.sweep_options import Options
from benchmarks.sweep_queue import Queue
from benchmarks.sweep_table import table
from benchmarks.sweep_training import check_texts
from benchmarks.variants import QUALITY

REGIME, SEEDS = "800x16", (0, 1, 2)
TRIED_AT_60M = ("heads", "two-sided", "two-sided-half")  # so they need no hint
SIZES = {"width": 128, "depth": 4, "mlp": 344, "vocab_size": 4096}
# Where searches start: the hidden rate, and the rate of embedding, head and norms. "" is every other row.
START = {"": (1e-3, 3.2e-2), "cosmos-paper": (1e-3, 2e-3),
         **dict.fromkeys(("adamw", "soap-f1", "soap-f10"), (2e-3, 3.2e-2))}  # fmt: skip
ROWS = {name: replace(row, start={REGIME: START.get(name, START[""])}) for name, row in Protocol().entries.items()}
PROTOCOL = Protocol(
    model="llama-2m", preset="tiny", sizes={**SIZES, "precision": "bf16"},
    regimes={REGIME: Regime(800, 16, seq_len=128)}, entries=ROWS,
    phases=[(REGIME, tuple(ROWS), stages) for stages in (RATES, SEARCH)], cut=263_000, block=65_536, curve_tokens=4_096,
)  # fmt: skip


def changes() -> tuple[Run, ...]:
    """Return the runs around COSMOS's best setting, and the changes there, seed by seed."""
    best = PROTOCOL.at(REGIME, "cosmos", {"lr": 0, "adam_lr": 0, "beta2": 0.98})
    rates = [replace(best, **{name: getattr(best, name) * factor}) for name in RATES for factor in (2, 0.5)]
    betas = [replace(best, beta2=beta2) for beta2 in BETA2S if beta2 != best.beta2]
    names = [v.name for v in QUALITY if "cosmos" in v.rows and v.name not in TRIED_AT_60M]
    with_changes = [replace(best, seed=seed, variant=name) for seed in SEEDS for name in ("", *names)]
    return *rates, *betas, *with_changes


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, print the table, and return 1 if a run failed."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("what", help='"changes", "rows", or names of optimizers with commas between them')
    p.add_argument("data", help="folder or prefix of the shards")
    p.add_argument("out", type=Path, help="folder for results")
    p.add_argument("--known", nargs="*", type=Path, default=[], help="bundles of earlier results")
    p.add_argument("--seconds", type=float, default=math.inf, help="end after this time")
    p.add_argument("--parallel", type=int, default=2, help="processes that share the CPU")
    a = p.parse_args(arguments)
    trials.register()
    rows = tuple(ROWS) if a.what in ("changes", "rows") else tuple(a.what.split(","))
    if unknown := set(rows) - set(ROWS):
        p.error(f"no such optimizer: {', '.join(sorted(unknown))}; known are {', '.join(ROWS)}")
    protocol = replace(PROTOCOL, phases=[(REGIME, rows, stages) for stages in (RATES, SEARCH)])
    options = Options(
        a.data, a.out, tuple(a.known), a.seconds, a.parallel, device="cpu", compile="off",
        runs=changes() if a.what == "changes" else (),
    )  # fmt: skip
    queue = Queue(protocol, options, BEGAN)
    try:
        check_texts(protocol, options, queue.next(), queue.results.values())
    except (ValueError, OSError) as error:
        p.error(str(error))
    good = queue.work()
    print(table(protocol, queue.results))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
