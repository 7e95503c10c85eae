"""The runs from which a rule for learning rates is fitted: 17 cells of size, steps and batch, in two parts.

    python -m benchmarks.rate_runs [RESULTS...]              # the cells, expected seconds, and the commands
    python -m benchmarks.sweep --rates llama-10m --parallel 4 --mps --data DATA --out rates \\
        --known results/protocol-*.json --seconds 580        # one size; all sizes into the same folder
    python -m benchmarks.rate_fit results/protocol-*.json rates/runs                             # the rule

Why these cells: a log-linear rule has four numbers for each rate, so a full grid (4 sizes x 8) is not needed. Every
size has 400 and 1,600 steps of 8 sequences, and one batch that is larger. The cheap sizes and 60M also have 6,400
steps, the length that costs most. 60M has both regimes of docs/protocol.md (A: 800 x 64, B: 3,200 x 16), and their
finished runs count. So all three exponents are still determined if any one size or any one length is left out.
Not covered: 130M with more than 1,600 steps, and with it whether the exponent of steps changes with size up there.
The first part has eleven cells that determine the rule by themselves: all sizes, 400 to 3,200 steps, 8 to 64 sequences.
`rate_fit` reads it alone. The second part adds 6,400 steps, and other batches at 30M and 130M.

Why few runs: a cell tries three values of `lr` by factors of 2 at once, then two more of `adam_lr` at the best one, and
moves by a factor of 2 only if the best is at an end. It starts at rates predicted from all finished cells, of all
sizes. Small models share the GPU, and every batch is made of forward passes with 8 sequences, so that a model compiles
once.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import rate_fit
from benchmarks.comparison import BETA2, Entry, Regime, Run
from benchmarks.kept_runs import Losses, losses, read_results
from benchmarks.protocol import RATES, Protocol
from cosmos_lab.config import RunConfig

BATCH = 8  # Sequences of 1,024 tokens in a forward pass; 6,400 steps of 8 see 52M tokens, and the shards have 70.3M.
COMPARISON = Protocol().regimes  # A and B, with the settings of the comparison
SIZES: Mapping[str, dict[str, Any]] = {  # Instead of the preset's; all with 32,100 T5 tokens.
    "llama-10m": {"vocab_size": 32_100},
    "llama-30m": {"vocab_size": 32_100, "width": rate_fit.WIDTHS["llama-30m"], "mlp": 1024},
    "llama-60m": {"vocab_size": 32_100},
    "llama-130m": {"vocab_size": 32_100},
}
PRESETS = {"llama-30m": "llama-10m"}
FIRST = {"lr": 1e-3, "adam_lr": 4e-3}  # All rates are these times powers of 2.
POWERS = range(-8, 9)
MOST = 6  # values of a rate in a cell
# Guess before any cell is finished, log2 of the factor to FIRST at 1,600 steps and the exponent of steps. From older
# sweeps (docs/rates.md): lr 1e-3 at 480 steps, 5e-4 at 3,200; adam_lr 8e-3 or more at 800 steps, 1.6e-2 at 3,200.
GUESS = {"lr": (-0.67, -0.4), "adam_lr": (1.75, 0.0)}
# How far the constant and the exponents of width, steps and batch may be from the guess, and a cell from the rule.
TRUST, SCATTER = np.array([0.7, 0.4, 0.3, 0.3]), 0.25


@dataclass(frozen=True)
class Call:
    """One command: some cells of a size, this many runs at a time."""

    part: int
    model: str
    parallel: int
    regimes: tuple[str, ...]

    @property
    def command(self) -> str:
        """Return the command; all need --data, --out and --known as well."""
        cells = " ".join(self.regimes)
        return f"python -m benchmarks.sweep --rates {self.model} --regimes {cells} --parallel {self.parallel}"


# In this order. A cell offers three runs, then two: three at a time keep the GPU busy, and long cells begin early. Each
# command is expected to take less than ten minutes; given again, it continues.
CALLS = (
    Call(1, "llama-10m", 4, ("1600x32", "400x64", "1600x8", "400x8")),
    Call(1, "llama-60m", 3, ("A", "B")),
    Call(1, "llama-60m", 3, ("1600x8", "400x8")),
    Call(1, "llama-30m", 3, ("1600x8", "400x8")),
    Call(1, "llama-130m", 3, ("400x8",)),
    Call(2, "llama-10m", 4, ("6400x8",)),
    Call(2, "llama-30m", 3, ("6400x8", "400x64")),
    Call(2, "llama-130m", 3, ("1600x8", "400x32")),
    Call(2, "llama-60m", 3, ("6400x8",)),
)
Key = tuple[str, str]  # model, name of a regime
CELLS: tuple[Key, ...] = tuple((call.model, name) for call in CALLS for name in call.regimes)


def regime(name: str) -> Regime:
    """Return the regime of a name such as 400x8, A or B."""
    if name in COMPARISON:
        return COMPARISON[name]
    steps, batch = name.split("x")
    return Regime(int(steps), int(batch))


# -- the search -------------------------------------------------------------------------------------------------------


def run_at(cell: Key, point: Mapping[str, int]) -> Run:
    """Return the run at a point: the power of 2 of each rate."""
    model, name = cell
    lr, adam_lr = (FIRST[rate] * 2.0 ** point[rate] for rate in RATES)
    return Run(model, name, "cosmos", lr, adam_lr)


@functools.cache
def ids(cell: Key) -> dict[tuple[int, int], str]:
    """Return the names of a cell's runs by the powers of its two rates."""
    return {(i, j): run_at(cell, {"lr": i, "adam_lr": j}).id for i in POWERS for j in POWERS}


def known(cell: Key, loss: Losses) -> dict[tuple[int, int], float]:
    """Return the losses of a cell by the powers of its two rates."""
    return {powers: loss[name] for powers, name in ids(cell).items() if name in loss}


def climb(cell: Key, start: Mapping[str, int], loss: Losses) -> tuple[dict[str, int], list[str], list[Run]]:
    """Follow the search from a start: return the best point so far, rates without a bracket, and runs it waits for."""
    point = dict(start)
    open_ends: list[str] = []
    found = known(cell, loss)
    for index, name in enumerate(RATES):
        other = point[RATES[1 - index]]
        line = {powers[index]: value for powers, value in found.items() if powers[1 - index] == other}
        best = min(line, key=lambda power: line[power], default=point[name])
        middle = best if len(line) >= 3 else point[name]  # the first three run at the same time: wait for all
        around = [power for d in (0, 1, -1) if (power := middle + d) in POWERS]
        missing = [run_at(cell, {**point, name: power}) for power in around if power not in line]
        point[name] = best
        if missing and len(line) < MOST:
            return point, [*open_ends, *RATES[index:]], missing
        if not {best - 1, best + 1} <= set(line):
            open_ends.append(name)
    return point, open_ends, []


def predict(cell: Key, loss: Losses) -> dict[str, int]:
    """Return where a search should start: a rule fitted to the finished cells, near the guess if there are few."""
    width, spent = rate_fit.WIDTHS[cell[0]], regime(cell[1])

    def terms(width: int, spent: Regime) -> list[float]:
        return [1.0, *(math.log2(x) for x in (width / 512, spent.steps / 1600, spent.batch / BATCH))]

    found: dict[str, list[tuple[list[float], float]]] = {name: [] for name in RATES}
    for other in CELLS:
        row = terms(rate_fit.WIDTHS[other[0]], regime(other[1]))
        points = {(FIRST["lr"] * 2.0**i, FIRST["adam_lr"] * 2.0**j): v for (i, j), v in known(other, loss).items()}
        for name, optimum in zip(RATES, rate_fit.optima(points), strict=True):
            if optimum:
                found[name].append((row, optimum.at - math.log2(FIRST[name])))
    start = {}
    for name, (constant, exponent) in GUESS.items():
        guess = np.array([constant, 0.0, exponent, 0.0])
        x = np.array([row for row, _ in found[name]]).reshape(-1, 4)
        rest = np.array([at for _, at in found[name]]) - x @ guess
        change = np.linalg.solve(x.T @ x + np.diag((SCATTER / TRUST) ** 2), x.T @ rest)
        power = round(float(np.dot(terms(width, spent), guess + change)))
        start[name] = min(max(power, -3), 3)
    return start


class Search(Protocol):
    """The search of one size, cell after cell.

    It remembers where the search of each cell started, because predictions change while other cells finish. A search
    that is continued by another process takes the start from the cell's finished runs.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.starts: dict[str, dict[str, int]] = {}  # of cells that have begun, by regime

    def config(self, run: Run) -> RunConfig:
        """Return the lab's configuration; cells that are not of the comparison have small passes and short curves."""
        config = super().config(run)
        if run.regime in COMPARISON:
            return config
        return config.replace(micro_batch=BATCH, val_every=max(1, config.training.steps // 5))

    def start(self, name: str, loss: Losses, pending: Collection[str] = ()) -> dict[str, int]:
        """Return where a cell's search starts; it stays there once the cell has begun."""
        cell = (self.model, name)
        finished = known(cell, loss)
        if not finished and not known(cell, dict.fromkeys(pending, 0.0)):
            self.starts[name] = predict(cell, loss)
        elif name not in self.starts:  # continued: the best lr of the adam_lr with most runs
            rows = [j for _, j in finished]
            row = max(rows, key=lambda j: (rows.count(j), -min(v for (_, k), v in finished.items() if k == j)))
            best = min((i for i, j in finished if j == row), key=lambda i: finished[i, row])
            self.starts[name] = {"lr": best, "adam_lr": row}
        return self.starts[name]

    def candidates(self, loss: Losses, pending: Collection[str] = ()) -> list[Run]:
        """Return the runs that can begin now, those of earlier cells first."""
        names = [name for name, _, _ in self.phases]
        offers = [run for n in names for run in climb((self.model, n), self.start(n, loss, pending), loss)[2]]
        return [run for run in offers if run.id not in pending]

    def best(self, regime: str, entry: str, loss: Losses) -> tuple[dict[str, float], list[str], list[str]]:
        """Return the best point so far, the rates still to tune, and those ended without a bracket."""
        point, open_ends, missing = climb((self.model, regime), self.start(regime, loss), loss)
        tuned: dict[str, float] = {**point, "beta2": BETA2}
        return (tuned, open_ends, []) if missing else (tuned, [], open_ends)


def protocol(model: str) -> Search:
    """Return the search of one size."""
    names = [name for other, name in CELLS if other == model]
    first = (FIRST["lr"], FIRST["adam_lr"])
    return Search(
        model=model, preset=PRESETS.get(model, model), sizes=SIZES[model], regimes={n: regime(n) for n in names},
        entries={"cosmos": Entry("cosmos", dict.fromkeys(names, first))},
        phases=[(n, ("cosmos",), RATES) for n in names],
    )  # fmt: skip


# -- how long it takes ------------------------------------------------------------------------------------------------

RUNS = 6  # of a cell, if its start is off by a factor of 2 in one of the rates
SETUP = 50.0  # seconds to start processes and compile for one size of a forward pass: measured without a cache
OVERHEAD = 8.0  # seconds of a run outside of training; 5 were measured at 60M
# GPU seconds for a million tokens, and ms for the optimizer's step, on an H200: measured at 60M and 130M, guessed from
# these at the other two.
COST = {"llama-10m": (0.38, 1.0), "llama-30m": (0.54, 1.5), "llama-60m": (0.73, 2.0), "llama-130m": (1.96, 5.0)}
LAUNCH = 12.0  # ms that a step takes at least, by a guess, and 5 more for each further forward pass


def seconds(cell: Key, parallel: int) -> float:
    """Return the expected seconds of one run with this many at a time."""
    spent, (tokens, step) = regime(cell[1]), COST[cell[0]]
    passes = 1 if cell[1] in COMPARISON else spent.batch // BATCH
    busy = tokens * spent.batch * spent.seq_len / 1e3 + step
    return OVERHEAD + spent.steps * max(LAUNCH + 5 * (passes - 1), parallel * busy) / 1e3


def left(cell: Key, loss: Losses) -> int:
    """Return how many runs a cell is expected to need still."""
    search = protocol(cell[0])
    missing = climb(cell, search.start(cell[1], loss), loss)[2]
    return max(len(missing), RUNS - len(known(cell, loss))) if missing else 0


def plan(loss: Losses) -> Iterator[tuple[Call, list[tuple[str, int, float]], float]]:
    """Yield each command, its cells with the runs left and their seconds each, and its seconds in all."""
    for call in CALLS:
        rows = [(n, left((call.model, n), loss), seconds((call.model, n), call.parallel)) for n in call.regimes]
        work = sum(runs * each for _, runs, each in rows) / call.parallel
        shapes = {regime(n).batch if n in COMPARISON else BATCH for n, runs, _ in rows if runs}
        yield call, rows, work + SETUP * len(shapes)


def table(loss: Losses) -> str:
    """Return the cells with the runs left and seconds of the GPU, and the commands."""
    lines = [f"{'part':6}{'model':12}{'cell':>8}{'tokens':>8}{'runs':>6}{'s a run':>9}{'GPU s':>8}"]
    total: dict[int, float] = {}
    for call, rows, cost in plan(loss):
        for name, runs, each in rows:
            tokens = regime(name).steps * regime(name).batch * regime(name).seq_len / 1e6
            lines.append(f"{call.part:<6}{call.model:12}{name:>8}{tokens:7.1f}M{runs:6}{each:9.0f}"
                         f"{runs * each / call.parallel:8.0f}")  # fmt: skip
        lines.append(f"  {cost:.0f} s with compiling: {call.command}")
        total[call.part] = total.get(call.part, 0.0) + cost
    parts = ", ".join(f"part {part}: {cost / 60:.1f}" for part, cost in total.items())
    lines.append(f"in all {sum(total.values()) / 60:.1f} minutes ({parts}), without the start of machines")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the list, less the runs that the named results have."""
    paths = sys.argv[1:] if arguments is None else arguments
    default = (Path(__file__).resolve().parents[1] / "results").glob("protocol-*.json")
    print(table(losses(read_results([Path(path) for path in paths] or default))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
