"""Find the rates of `cosmos-lab demo`: `python -m benchmarks.demo_tuning FOLDER results/demo-tuning.json`.

Every optimizer tries the same grid, at the demo's own size and length: a rate for the hidden matrices and a rate for
embedding, head and norms. The best pair of each then runs with two more seeds: how far the losses of one setting differ
is the noise below which the demo calls two optimizers equal. The same call continues after a stop.

All four were best at the highest rate of the embedding, and all except SOAP at the lowest hidden rate, so a wider grid
may find better pairs for each of them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.demo import DemoConfig, demo_run
from cosmos_lab.io import write_json
from cosmos_lab.results.reading import read_run
from cosmos_lab.run.train import train

OPTIMIZERS = ("adam", "muon", "soap", "cosmos")
HIDDEN = (1e-3, 2e-3, 4e-3)  # rates of the hidden matrices
EMBEDDING = (2e-3, 4e-3, 8e-3)  # rates of embedding, head and norms
MORE_SEEDS = (1, 2)


def tune(folder: str, target: Path) -> None:
    """Train the grid, then the best of each with more seeds; write all of them as one file."""
    pairs = itertools.product(OPTIMIZERS, HIDDEN, EMBEDDING)
    grid = [demo_run(*each, DemoConfig(out=folder)) for each in pairs]
    rows = [_row(run, number, len(grid)) for number, run in enumerate(grid, 1)]
    best = best_of(rows)
    again = [
        demo_run(o, row["hidden_lr"], row["embedding_lr"], DemoConfig(out=folder, seed=seed))
        for o, row in best.items()
        for seed in MORE_SEEDS
    ]
    seeds = [_row(run, number, len(again)) for number, run in enumerate(again, 1)]
    about = read_run(Path(folder) / rows[0]["name"]).config
    made = {key: about[key] for key in ("date", "commit", "versions", "data", "parameters")}
    write_json(target, {**made, "grid": rows, "seeds": seeds, "best": best, "noise": noise(best, seeds)})


def best_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the row with the lowest validation loss of each optimizer."""
    own = {o: [row for row in rows if row["optimizer"] == o] for o in dict.fromkeys(row["optimizer"] for row in rows)}
    return {name: dict(min(found, key=lambda row: row["final_val_loss"])) for name, found in own.items()}


def noise(best: Mapping[str, Mapping[str, Any]], seeds: Sequence[Mapping[str, Any]]) -> float:
    """Return the standard deviation of the final loss over seeds, pooled over the optimizers."""
    variances = []
    for name, row in best.items():
        losses = [row["final_val_loss"], *(s["final_val_loss"] for s in seeds if s["optimizer"] == name)]
        variances.append(statistics.variance(losses))
    return statistics.fmean(variances) ** 0.5


def _row(run: RunConfig, number: int, of: int) -> dict[str, Any]:
    """Train a run, unless it is finished, and return its settings and result."""
    run = run.replace(val_every=0, diagnostics_every=0, checkpoint_every=0)
    summary = train(run)
    found = read_run(run.folder).config
    row = {
        "name": run.run_name, "optimizer": run.optimizer.optimizer, "hidden_lr": run.optimizer.lr,
        "embedding_lr": run.optimizer.adam_lr, "seed": run.training.seed, "status": summary["status"],
        "final_val_loss": summary["final_val_loss"], "final_val_ppl": summary["final_val_ppl"],
        "seconds": summary["time"], "config": {key: value for key, value in found["config"].items() if key != "out"},
        "settings": found["settings"],
    }  # fmt: skip
    print(f"{number} of {of}", json.dumps({key: row[key] for key in list(row)[:8]}), flush=True)
    return row


if __name__ == "__main__":
    tune(sys.argv[1], Path(sys.argv[2]))
