"""Fine-tune a model that AdamW pre-trained with AdamW, Muon and COSMOS, and tell whether the mismatch costs something.

Muon is reported to fine-tune such a model worse than AdamW does. Does COSMOS, too? This script pre-trains LLaMA-60M on
English Wikipedia (regime B of docs/protocol.md, 52M tokens) and continues on the sources of Python's library, in full
and by LoRA, with three optimizers at three rates each. On a machine with the package `tokenizers`, once:

    python -m benchmarks.finetune --prepare data/tokenizers/t5.json --data tune/python_t5

On the GPU (torch, numpy and Triton suffice):

    python -m benchmarks.finetune --base-data 'data/wiki_t5_*[01l].bin*' --data tune/python_t5 --out tune/out \\
        --seconds 540

Every finished run is a file in OUT/runs. OUT/finetune.json has all of them, with all settings. The same command again
skips what is finished; it needs the bases in OUT. On an H200 a base took 70 to 122 s, full runs 4 to 7 s and LoRA 5 to
12 s (`results/finetune-60m*.json`): 4 minutes. With `--bases adamw muon cosmos`, which also shows whether an optimizer
does better on its own base: 54 runs and 3 bases, 12 minutes, in two calls. `--toy` is for a CPU: a tiny model, on any
shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import BEGAN
from benchmarks.finetune_table import read, table
from benchmarks.finetune_training import METHODS, OPTIMIZER_NAMES, TOY, Bench, Run, Scale
from cosmos_lab.data import write_shard
from cosmos_lab.data.embedded import in_validation, library_documents
from cosmos_lab.data.encode import load_encoder
from cosmos_lab.io import write_json


def prepare(tokenizer: str, data: str, limit: int = 40_000_000) -> None:
    """Write the sources of Python's library as shards DATA_train.bin and DATA_val.bin."""
    encoder = load_encoder(tokenizer)
    parts: dict[str, list[Any]] = {"train": [], "val": []}
    for name, text in library_documents(Path(sysconfig.get_paths()["stdlib"]), limit):
        parts["val" if in_validation(name) else "train"] += encoder.encode([text])
    Path(data).parent.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        tokens = np.concatenate(rows)
        write_shard(Path(f"{data}_{part}.bin"), tokens)
        print(f"{data}_{part}.bin: {len(rows)} files, {tokens.size:,} tokens")


def work(bench: Bench, runs: Sequence[Run], seconds: float, began: float | None = None) -> bool:
    """Do what is not finished and fits into the time; return whether everything is finished.

    A run is expected to take as long as the longest one so far of its kind: with its base, or without.
    """
    began = time.monotonic() if began is None else began
    longest = {True: 0.0, False: 0.0}  # by whether the base had to be trained
    for run in runs:
        if run.id in read(bench.out):
            continue
        with_base = not (bench.out / f"base-{run.base}.pt").exists()
        start = time.monotonic()
        if start - began + longest[with_base] > seconds:
            print("no time for another run: give the same command again")
            return False
        result = bench.run(run)
        print(f"[{time.monotonic() - began:6.1f}] {run.id}: {result['val_loss']}", flush=True)
        longest[with_base] = max(longest[with_base], time.monotonic() - start)
    return True


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--prepare", metavar="TOKENIZER", help="write the shards of --data by this tokenizer.json")
    p.add_argument("--base-data", help="shards to pre-train on")
    p.add_argument("--data", help="shards to fine-tune on")
    p.add_argument("--out", type=Path, help="folder for results")
    p.add_argument("--table", type=Path, metavar="OUT", help="print the table of this folder and stop")
    p.add_argument("--bases", nargs="+", default=["adamw"], choices=OPTIMIZER_NAMES, help="who pre-trains")
    p.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    p.add_argument("--optimizers", nargs="+", default=OPTIMIZER_NAMES, choices=OPTIMIZER_NAMES)
    p.add_argument("--rates", nargs="+", type=float, help="instead of the three rates of each optimizer")
    p.add_argument("--outer-times", nargs="+", type=float, default=[None], metavar="FACTOR",
                   help="rates of embedding, head and norms as multiples of lr, instead of one for all lr")  # fmt: skip
    p.add_argument("--seeds", nargs="+", type=int, default=[0])
    p.add_argument("--seconds", type=float, default=math.inf, help="begin no run that may end after this time")
    p.add_argument("--toy", action="store_true", help="a tiny model and few steps")
    p.add_argument("--steps", type=int, help="instead of the usual number")
    p.add_argument("--pretrain-steps", type=int, help="instead of the usual number")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--cache", help="folder for unpacked shards")
    return p


def main(arguments: list[str] | None = None, began: float | None = None) -> int:
    """Do what the command line says; `began` is when --seconds begin to count, usually now."""
    p = parser()
    a = p.parse_args(arguments)
    if a.table:
        print(table(read(a.table)))
        return 0
    if not a.data or not (a.prepare or (a.base_data and a.out)):
        p.error("--base-data, --data and --out are needed, or --prepare and --data, or --table")
    if a.prepare:
        prepare(a.prepare, a.data)
        return 0
    scale, given = TOY if a.toy else Scale(), {"steps": a.steps, "pretrain_steps": a.pretrain_steps}
    scale = dataclasses.replace(scale, **{key: value for key, value in given.items() if value is not None})
    runs = [
        Run(base, method, name, lr, seed, outer_times)
        for base in a.bases for seed in a.seeds for method in a.methods for name in a.optimizers
        for lr in a.rates or scale.rates[method][name] for outer_times in a.outer_times
    ]  # fmt: skip
    bench = Bench(scale, a.base_data, a.data, a.out, a.device, a.cache)
    done = work(bench, runs, a.seconds, began)
    results = read(a.out)
    write_json(a.out / "finetune.json", {"runs": results})
    print(table(results))
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main(began=BEGAN))
