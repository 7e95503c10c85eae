"""Fit a rule for both learning rates of COSMOS to finished runs, and say whether it costs less than 1 % of perplexity.

    python -m benchmarks.rate_fit results/protocol-*.json rates/runs

A cell is one size, number of steps and batch. In each cell the best `lr` is the lowest point of a parabola in log lr
through the lowest loss and its two neighbours, all with the same `adam_lr`; then the best `adam_lr` likewise, at the
best `lr` that ran. Without a neighbour on both sides there is no bracket, and the cell is named and left out. What
other rates cost is read from the same two parabolas, so an effect of the two rates on each other is not seen.

A rule is log rate = constant + exponents times log width, log steps, log batch, or fewer terms, down to a constant.
`tokens` is steps times batch: one exponent for both. A rule is fitted by least squares with each cell's curvature as
its weight: so it minimizes the summed loss. Uncertainties are those of the jackknife over cells. Width stands for
size: four sizes cannot tell it from the parameters. `cosmos_optim.rates` has the rule with rounded numbers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.comparison import BETA2
from benchmarks.kept_runs import Result, losses, read_results
from benchmarks.protocol import RATES
from cosmos_lab.models import PRESETS
from cosmos_optim import rates

Array = NDArray[np.float64]
Points = Mapping[tuple[float, float], float]  # Validation loss by (lr, adam_lr); inf: diverged.

BAR = 1.0  # Percent of perplexity that a rule may cost.
CENTER = {"width": 512, "steps": 1600, "batch": 8192}  # Where a rule's constant is the rate; batch in tokens.
TERMS = tuple(CENTER)
RULES = (
    *(terms for n in range(len(TERMS) + 1) for terms in itertools.combinations(TERMS, n)), ("tokens",),
    ("width", "tokens"),
)  # fmt: skip
WIDTHS = {name: PRESETS[name].width for name in ("llama-10m", "llama-60m", "llama-130m")} | {"llama-30m": 384}
JUDGED = ("", "size", "length")  # The bar must hold for three fits: to all cells, without a cell's size, its length.
LEAST = len(TERMS) + 2  # cells


@dataclass(frozen=True)
class Optimum:
    """The lowest point of a parabola in log2 of a rate, its curvature in nats, and the range of the three points."""

    at: float
    curvature: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """One size, length and batch (tokens in a step), and the losses of its runs."""

    model: str
    width: int
    steps: int
    batch: int
    points: Points

    @property
    def name(self) -> str:
        """Return how the tables call it."""
        return f"{self.model} {self.steps} x {self.batch}"


# -- cells ------------------------------------------------------------------------------------------------------------


def cells(results: Iterable[Result]) -> list[Cell]:
    """Return the cells of the plain runs of COSMOS with seed 0, smallest first."""
    found: dict[tuple[str, int, int, int], dict[tuple[float, float], float]] = {}
    for r in results:
        plain = r["entry"] == "cosmos" and not r.get("variant") and r["share"] == 1
        if plain and r["seed"] == 0 and r["beta2"] == BETA2:
            width = r["config"]["width"] or WIDTHS[r["model"]]
            points = found.setdefault((r["model"], width, r["steps"], r["batch"] * r["seq_len"]), {})
            points[r["lr"], r["adam_lr"]] = losses({"": r})[""]
    return sorted((Cell(*key, points) for key, points in found.items()), key=lambda c: (c.width, c.batch, c.steps))


def lowest(line: Mapping[float, float]) -> Optimum | None:
    """Return the lowest point of losses by rate; None without a finite, worse loss on both sides of the best."""
    rates = sorted(line)
    best = min(range(len(rates)), key=lambda i: line[rates[i]], default=0)
    around = rates[max(0, best - 1) : best + 2]
    if best == 0 or len(around) < 3 or not all(math.isfinite(line[rate]) for rate in around):
        return None
    x = np.log2(around)
    a, b, _ = np.polyfit(x - x[1], [line[rate] for rate in around], 2)
    return Optimum(x[1] - b / (2 * a), a, x[0], x[2]) if a > 1e-9 else None


def optima(points: Points) -> tuple[Optimum | None, Optimum | None]:
    """Return the best lr at the adam_lr with most runs, and the best adam_lr at the best of these lr."""
    if not points:
        return None, None
    counts = Counter(adam_lr for _, adam_lr in points)
    row = max(counts, key=lambda adam_lr: (counts[adam_lr], -min(v for (_, a), v in points.items() if a == adam_lr)))
    line = {lr: loss for (lr, adam_lr), loss in points.items() if adam_lr == row}
    best = min(line, key=lambda lr: line[lr])
    return lowest(line), lowest({adam_lr: loss for (lr, adam_lr), loss in points.items() if lr == best})


# -- rules ------------------------------------------------------------------------------------------------------------


class Fit:
    """The rules for one rate, fitted to cells and to cells without some."""

    def __init__(self, found: Sequence[Cell], best: Sequence[Optimum]) -> None:
        self.best = best
        self.at, self.weight = np.array([o.at for o in best]), np.array([o.curvature for o in best])
        self.columns = {name: np.log2([getattr(c, name) / CENTER[name] for c in found]) for name in TERMS}
        self.columns["tokens"] = self.columns["steps"] + self.columns["batch"]
        # By what is left out of the fit that predicts a cell: the cell's group.
        self.groups = {"cell": np.arange(len(found)), "size": np.array([c.width for c in found]),
                       "length": np.array([c.steps for c in found])}  # fmt: skip

    def design(self, terms: Sequence[str]) -> Array:
        """Return the matrix of the least squares."""
        return np.stack([np.ones(len(self.best)), *(self.columns[name] for name in terms)], axis=1)

    def solve(self, terms: Sequence[str], keep: Any = slice(None)) -> Array:
        """Return log2 of the constant, and the exponents; nan if the kept cells do not determine them."""
        x, root = self.design(terms)[keep], np.sqrt(self.weight[keep])
        solution, _, rank, _ = np.linalg.lstsq(x * root[:, None], self.at[keep] * root, rcond=1e-9)
        return solution if rank == x.shape[1] else np.full(x.shape[1], np.nan)

    def predict(self, terms: Sequence[str], left_out: str = "") -> Array:
        """Return log2 of the rate in each cell, by the fit to all cells or to those of other groups."""
        if not left_out:
            return self.design(terms) @ self.solve(terms)
        others = [group != self.groups[left_out] for group in self.groups[left_out]]
        return np.array([row @ self.solve(terms, keep) for row, keep in zip(self.design(terms), others)])

    def cost(self, terms: Sequence[str], left_out: str = "") -> Array:
        """Return the nats that the rule's rate costs in each cell; inf if the other cells do not determine it."""
        return np.nan_to_num(self.weight * (self.predict(terms, left_out) - self.at) ** 2, nan=math.inf)

    def errors(self, terms: Sequence[str]) -> Array:
        """Return the standard errors of log2 of the constant and of the exponents, by the jackknife over cells."""
        n = len(self.best)
        without = np.array([self.solve(terms, np.arange(n) != i) for i in range(n)])
        return np.sqrt((n - 1) / n * ((without - without.mean(0)) ** 2).sum(0))


@dataclass(frozen=True, eq=False)
class Rule:
    """Terms for both rates, and what their fits cost: percent of perplexity by cell and by what was left out."""

    terms: tuple[tuple[str, ...], tuple[str, ...]]
    percent: Mapping[str, Array]

    @property
    def exponents(self) -> int:
        """Return the number of exponents."""
        return sum(map(len, self.terms))

    @property
    def worst(self) -> float:
        """Return the largest cost in a cell, with all cells in the fit or without its size or its length."""
        return max(float(self.percent[name].max()) for name in JUDGED)

    @property
    def label(self) -> str:
        """Return the terms of both rates in words."""
        return ", ".join(f"{rate} by {', '.join(t) or 'a constant'}" for rate, t in zip(RATES, self.terms))


def compare(fits: Sequence[Fit]) -> list[Rule]:
    """Return every rule, those with fewer terms first, then by what they cost in cells left out one at a time."""
    schemes = (*JUDGED, "cell")
    costs = [{(terms, name): fit.cost(terms, name) for terms in RULES for name in schemes} for fit in fits]
    rules = [
        Rule(pair, {name: 100 * np.expm1(costs[0][pair[0], name] + costs[1][pair[1], name]) for name in schemes})
        for pair in itertools.product(RULES, RULES)
    ]
    return sorted(rules, key=lambda r: (r.exponents, float(r.percent["cell"].mean())))


def choose(rules: Sequence[Rule], bar: float = BAR) -> Rule:
    """Return the simplest rule that costs less than the bar everywhere; if none does, the best in cells left out."""
    return next((r for r in rules if r.worst <= bar), min(rules, key=lambda r: float(r.percent["cell"].mean())))


# -- the report -------------------------------------------------------------------------------------------------------


def report(found: Sequence[Cell], bar: float = BAR) -> str:
    """Return the comparison of rules, the chosen one with its table and as code, and whether the bar holds."""
    pairs = [(cell, optima(cell.points)) for cell in found]
    lines = []
    for cell, pair in pairs:
        if missing := [name for name, optimum in zip(RATES, pair) if not optimum]:
            lines.append(f"no bracket, left out: {cell.name}: {' and '.join(missing)} ({len(cell.points)} runs)")
    full = [(cell, lr, adam_lr) for cell, (lr, adam_lr) in pairs if lr and adam_lr]
    if len(full) < LEAST:
        return "\n".join([*lines, f"cells with a bracket of both rates: {len(full)}; a rule needs at least {LEAST}"])
    kept = [cell for cell, _, _ in full]
    fits = [Fit(kept, [lr for _, lr, _ in full]), Fit(kept, [adam_lr for _, _, adam_lr in full])]
    rules = compare(fits)
    rule = choose(rules, bar)
    lines += [*_comparison(rules, bar), "", *_table(kept, fits, rule), "", *_exponents(fits, rule)]
    lines += ["", code(fits, rule), "", *_package_rule(kept, fits)]
    return "\n".join([*lines, "", verdict(kept, rule, bar)])


def package_costs(kept: Sequence[Cell], fits: Sequence[Fit]) -> Array:
    """Return what the rates of `cosmos_optim.rates` cost in each cell, in percent of perplexity."""
    pairs = np.log2([rates(cell.width, cell.steps, cell.batch) for cell in kept])
    nats = sum(fit.weight * (pairs[:, i] - fit.at) ** 2 for i, fit in enumerate(fits))
    return 100 * np.expm1(nats)


def _package_rule(kept: Sequence[Cell], fits: Sequence[Fit]) -> Iterator[str]:
    """Yield the rates of `cosmos_optim.rates` in each cell, and what they cost."""
    yield "Cost in % of perplexity of cosmos_optim.rates, with the constants in the package"
    for cell, percent in zip(kept, package_costs(kept, fits)):
        lr, adam_lr = rates(cell.width, cell.steps, cell.batch)
        yield f"{cell.model:12}{cell.steps:6}{cell.batch:8}{lr:10.1e}{adam_lr:10.1e}{percent:8.2f}"


def _comparison(rules: Sequence[Rule], bar: float) -> Iterator[str]:
    """Yield the best rules of each number of terms, and their costs."""
    yield f"{len(rules[0].percent['cell'])} cells. Largest cost in % of perplexity; inf: the others do not tell"
    yield f"{'terms':>5}{'all in':>8}{'size out':>10}{'length out':>12}{'cell out':>10}{'its mean':>10}  rule"
    for size, group in itertools.groupby(rules, key=lambda r: r.exponents):
        mine = list(group)
        for rule in dict.fromkeys((mine[0], choose(mine, bar))):
            p = rule.percent
            worst = f"{p[''].max():8.2f}{p['size'].max():10.2f}{p['length'].max():12.2f}{p['cell'].max():10.2f}"
            yield f"{size:5}{worst}{p['cell'].mean():10.2f}  {rule.label}{' (holds)' if rule.worst <= bar else ''}"


def _table(kept: Sequence[Cell], fits: Sequence[Fit], rule: Rule) -> Iterator[str]:
    """Yield each cell's best rates, the rule's rates, and what these cost."""
    at = [fit.predict(terms) for fit, terms in zip(fits, rule.terms)]
    yield f"Cost in % of perplexity of {rule.label}"
    yield (f"{'model':12}{'steps':>6}{'tokens':>8}{'best lr':>10}{'adam_lr':>10}{'rule: lr':>10}{'adam_lr':>10}"
           f"{'cost':>8}{'size out':>10}{'length out':>12}")  # fmt: skip
    for i, cell in enumerate(kept):
        rates = "".join(f"{2.0 ** x[i]:10.2e}" for x in (fits[0].at, fits[1].at, *at))
        costs = "".join(f"{rule.percent[name][i]:{width}.2f}" for name, width in zip(JUDGED, (8, 10, 12)))
        inside = all(fit.best[i].low <= x[i] <= fit.best[i].high for fit, x in zip(fits, at))
        note = "" if inside else "  outside the rates that ran"
        yield f"{cell.model:12}{cell.steps:6}{cell.batch:8}{rates}{costs}{note}"


def _exponents(fits: Sequence[Fit], rule: Rule) -> Iterator[str]:
    """Yield the exponents of the chosen rule and of all terms, with their standard errors."""
    for rate, fit, terms in zip(RATES, fits, rule.terms):
        for names in dict.fromkeys((terms, TERMS)):
            (constant, *values), (factor, *errors) = fit.solve(names), fit.errors(names)
            parts = [f"{name} {v:+.3f} +- {e:.3f}" for name, v, e in zip(names, values, errors)]
            yield ", ".join([f"{rate}: {2.0**constant:.3g} (times or divided by {2.0**factor:.2f})", *parts])


def code(fits: Sequence[Fit], rule: Rule) -> str:
    """Return a rule as Python."""
    lines = ["def rates(width, steps, tokens_per_step):"]
    names = dict(zip(TERMS, ("width", "steps", "tokens_per_step"))) | {"tokens": "steps * tokens_per_step"}
    centers = CENTER | {"tokens": CENTER["steps"] * CENTER["batch"]}
    for rate, fit, terms in zip(RATES, fits, rule.terms):
        constant, *exponents = fit.solve(terms)
        factors = [f"({names[t]} / {centers[t]}) ** {e:.3f}" for t, e in zip(terms, exponents)]
        lines.append(f"    {rate} = {' * '.join([f'{2.0**constant:.3g}', *factors])}")
    return "\n".join([*lines, "    return lr, adam_lr"])


def verdict(kept: Sequence[Cell], rule: Rule, bar: float = BAR) -> str:
    """Say whether the bar holds, by which rule, and if not, where it fails."""
    counts = f"{len({c.width for c in kept})} sizes, {len({c.steps for c in kept})} lengths"
    where = f"at each of {len(kept)} cells ({counts}), with each size and each length left out"
    if rule.worst <= bar:
        return f"The bar of {bar:g} % holds {where}. Simplest rule: {rule.label} (worst {rule.worst:.2f} %)"
    failed = []
    for name, how in zip(JUDGED, ("all in the fit", "size left out", "length left out")):
        if bad := [cell.name for cell, percent in zip(kept, rule.percent[name]) if percent > bar]:
            failed.append(f"{how}: {', '.join(bad)}")
    return f"The bar of {bar:g} % does not hold {where}. Nearest rule: {rule.label}; it fails with {'; '.join(failed)}"


def main(arguments: list[str] | None = None) -> int:
    """Print the report of the named results."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("results", nargs="+", type=Path, help="bundles, or folders with one file per run")
    p.add_argument("--bar", type=float, default=BAR, help="percent of perplexity that a rule may cost")
    a = p.parse_args(arguments)
    print(report(cells(read_results(a.results).values()), a.bar))
    return 0


if __name__ == "__main__":
    sys.exit(main())
