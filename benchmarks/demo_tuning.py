"""Find the rates of `cosmos-lab demo`: `python -m benchmarks.demo_tuning FOLDER results/demo-tuning.json`.

Every optimizer tries the same pairs, at the demo's own size and length: a rate for the hidden matrices and a rate for
embedding, head and norms. They begin with a square grid. As long as the best pair of one optimizer has a neighbour that
was not tried (half or twice one of its rates), all four try that neighbour. The best pair of each then runs with two
more seeds: how far the losses of one setting differ is the noise below which the demo does not tell optimizers apart.

The same call continues after a stop. Runs that the file has already are not trained again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.demo import DemoConfig, demo_run
from cosmos_lab.io import write_json
from cosmos_lab.results.reading import read_run
from cosmos_lab.run.train import train

OPTIMIZERS = ("adam", "muon", "soap", "cosmos")
START = tuple(itertools.product((1e-3, 2e-3, 4e-3), (2e-3, 4e-3, 8e-3)))  # rates of hidden matrices, of the rest
MORE_SEEDS = (1, 2)
_HEAD = ("date", "versions", "data", "parameters")

Row = Mapping[str, Any]
Pair = tuple[float, float]
Setting = tuple[str, float, float, int]


class Tuning:
    """The runs so far: those of the file, and those trained since."""

    def __init__(self, folder: str, target: Path) -> None:
        kept = json.loads(target.read_text()) if target.exists() else {"grid": [], "seeds": []}
        self.folder, self.target = folder, target
        self.head = {key: kept[key] for key in _HEAD if key in kept}
        rows = [*kept["grid"], *kept["seeds"], *kept.get("partial", [])]  # partial: pairs that not all four have tried
        self.rows: dict[Setting, Row] = {_setting(row): row for row in rows}

    def of(self, settings: Iterable[Setting]) -> list[Row]:
        """Return the rows of some settings; train those that are missing."""
        return [self.rows.get(setting) or self._trained(setting) for setting in settings]

    def tried_by_all(self) -> list[Pair]:
        """Return the pairs that every optimizer has tried with the first seed."""
        pairs = dict.fromkeys(_pair(row) for row in self.rows.values())
        return [pair for pair in pairs if all((name, *pair, 0) in self.rows for name in OPTIMIZERS)]

    def _trained(self, setting: Setting) -> Row:
        name, hidden_lr, embedding_lr, seed = setting
        run = demo_run(name, hidden_lr, embedding_lr, DemoConfig(out=self.folder, seed=seed))
        row, about = _row(run)
        self.head = self.head or {key: about[key] for key in _HEAD}
        if about["data"] != self.head["data"]:
            raise ValueError(f"{self.target} has runs on another text than this machine's Python: name a new file")
        self.rows[setting] = row
        return row

    def write(self, grid: Sequence[Row]) -> None:
        """Write all runs as one file."""
        seeds = [row for row in self.rows.values() if row["seed"]]
        whole = {_setting(row) for row in [*grid, *seeds]}
        partial = [row for setting, row in self.rows.items() if setting not in whole]
        write_json(self.target, {
            **self.head, "grid": grid, "seeds": seeds, "partial": partial, "best": best_of(grid),
            "noise": noise([*grid, *seeds]),
        })  # fmt: skip


def tune(folder: str, target: Path) -> None:
    """Train pairs until the best of each optimizer has all its neighbours, then the best with more seeds."""
    tuning = Tuning(folder, target)
    pairs = dict.fromkeys([*START, *tuning.tried_by_all()])
    while True:
        grid = tuning.of((name, *pair, 0) for name in OPTIMIZERS for pair in pairs)
        best = best_of(grid)
        more = [pair for row in best.values() for pair in untried(row, pairs)]
        if not more:
            break
        pairs |= dict.fromkeys(more)
    tuning.of((name, *_pair(row), seed) for name, row in best.items() for seed in MORE_SEEDS)
    tuning.write(grid)


def best_of(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the row with the lowest validation loss of each optimizer; a run that diverged has none."""
    own = {o: [row for row in rows if row["optimizer"] == o] for o in dict.fromkeys(row["optimizer"] for row in rows)}
    return {name: min(found, key=_loss) for name, found in own.items()}


def untried(row: Row, pairs: Collection[Pair]) -> list[Pair]:
    """Return the neighbours of a row's pair, half or twice one of its rates, that are not among the pairs."""
    hidden, embedding = _pair(row)
    beside = [(hidden / 2, embedding), (2 * hidden, embedding), (hidden, embedding / 2), (hidden, 2 * embedding)]
    return [pair for pair in beside if pair not in pairs]


def noise(rows: Sequence[Row]) -> float:
    """Return the standard deviation of the final loss over seeds, pooled over the settings that ran with several."""
    losses: dict[tuple[str, Pair], list[float]] = {}
    for row in rows:
        losses.setdefault((row["optimizer"], _pair(row)), []).append(row["final_val_loss"])
    return statistics.fmean(statistics.variance(own) for own in losses.values() if len(own) > 1) ** 0.5


def _loss(row: Row) -> float:
    return math.inf if row["final_val_loss"] is None else float(row["final_val_loss"])


def _pair(row: Row) -> Pair:
    return row["hidden_lr"], row["embedding_lr"]


def _setting(row: Row) -> Setting:
    return row["optimizer"], *_pair(row), row["seed"]


def _row(run: RunConfig) -> tuple[Row, Mapping[str, Any]]:
    """Train a run, unless it is finished; return its settings and result, and its config.json."""
    run = run.replace(val_every=0, diagnostics_every=0, checkpoint_every=0)
    summary = train(run)
    found = read_run(run.folder).config
    row = {
        "name": run.run_name, "optimizer": run.optimizer.optimizer, "hidden_lr": run.optimizer.lr,
        "embedding_lr": run.optimizer.adam_lr, "seed": run.training.seed, "status": summary["status"],
        "final_val_loss": summary["final_val_loss"], "final_val_ppl": summary["final_val_ppl"],
        "seconds": summary["time"], "commit": found["commit"], "settings": found["settings"],
        "config": {key: value for key, value in found["config"].items() if key != "out"},
    }  # fmt: skip
    print(json.dumps({key: row[key] for key in list(row)[:8]}), flush=True)
    return row, found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the rates of cosmos-lab demo.")
    parser.add_argument("runs", help="folder for the runs")
    parser.add_argument("target", type=Path, help="file of the results")
    asked = parser.parse_args()
    tune(asked.runs, asked.target)
