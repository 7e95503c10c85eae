"""What the comparison of docs/protocol.md runs: the optimizers, their starting rates, the next runs, and the table.

The search tunes one coordinate after the other, by the same rule for every optimizer: the rate of the hidden matrices,
the rate of embedding, head and norms, the first one again if the second has moved far, and beta2. Then come further
seeds and shorter runs at the best setting, and the changes of benchmarks/variants.py there. All choices read the
validation loss of finished runs, so a search continues from its results.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.student import quantile
from benchmarks.variants import LEVERS, MEMORY, VARIANTS
from cosmos_lab.config import RunConfig
from cosmos_lab.optimizers import ONE_RATE, outer_rates

Result = dict[str, Any]  # One finished run, as its JSON file has it.
Losses = Mapping[str, float]  # Validation loss by run id; inf: diverged.

BETA2 = 0.98  # The search starts from this value.
BETA2S = (0.95, 0.98, 0.999)
MOST = {"lr": 6, "adam_lr": 8}  # most values tried for each rate, including the starting value
POWERS = range(-12, 13)  # Rates are the starting ones times 2 to these powers.
RATES = ("lr", "adam_lr")
TUNING = (*RATES, "lr", "beta2")  # The second "lr" is left out if the outer rate has not moved far.
FAR = 1  # powers of 2 that the outer rate may move without tuning the hidden rate again
SEARCH = (*RATES, "beta2", "seeds")  # the search of a row, and three seeds at its best setting
STAGES = (*SEARCH, "more-seeds", "short", "levers", "memory")
POINTS = 25  # number of points of each curve


@dataclass(frozen=True)
class Entry:
    """One row of the comparison; ``start`` has (hidden rate, rate of embedding, head and norms) by regime."""

    optimizer: str
    start: Mapping[str, tuple[float, float]]
    options: tuple[str, ...] = ()
    cost: float = 1.0  # Expected time of a step, relative to the slowest row that has run.


@dataclass(frozen=True)
class Regime:
    """How tokens are spent."""

    steps: int
    batch: int  # Sequences in a step, all in one forward pass.
    seq_len: int = 1024
    epochs: int = 1  # How often a token may be seen.
    like: str = ""  # Take the settings of this regime instead of a search.


@dataclass(frozen=True)
class Run:
    """One run of the comparison."""

    model: str
    regime: str
    entry: str
    lr: float
    adam_lr: float
    beta2: float = BETA2
    seed: int = 0
    share: float = 1.0  # Of the regime's steps, with a complete schedule.
    variant: str = ""  # A name in VARIANTS.

    @property
    def id(self) -> str:
        """Return the name of the result file."""
        name = f"{self.model}-{self.regime}-{self.entry}-lr{self.lr:g}-emb{self.adam_lr:g}-b{self.beta2:g}-s{self.seed}"
        name = name if self.share == 1 else f"{name}-share{self.share:g}"
        return f"{name}-{self.variant}" if self.variant else name

    @property
    def plain(self) -> Run:
        """Return the same run without its variant."""
        return replace(self, variant="")


class Tuned(NamedTuple):
    """What the search knows about one coordinate.

    point: the best point so far, with all coordinates.
    following: the point to try next; None if this coordinate is finished.
    bracketed: whether the best value has a worse one on either side.
    """

    name: str
    point: dict[str, float]
    following: dict[str, float] | None
    bracketed: bool


Phase = tuple[str, tuple[str, ...], tuple[str, ...]]  # regime, entries, stages

# The first searches, in regime B, began at an outer rate of 2e-3 and found the best near 1.6e-2. Others begin there.
_FIRST = {"A": (1e-3, 1.6e-2), "B": (5e-4, 2e-3)}
_LATER = {"A": (1e-3, 1.6e-2), "B": (5e-4, 1.6e-2)}
_MAIN = ("adamw", "cosmos", "muon", "normuon")


@dataclass(frozen=True)
class Protocol:
    """The comparison; tests make a small one."""

    model: str = "llama-60m"
    tuned_on: str = ""  # Take the best settings found for this model instead of a search.
    preset: str = ""  # The lab's model, if it has another name.
    sizes: Mapping[str, Any] = field(default_factory=lambda: {"vocab_size": 32_100})  # Instead of the preset's.
    regimes: Mapping[str, Regime] = field(
        default_factory=lambda: {
            "A": Regime(800, 64), "B": Regime(3200, 16), "long": Regime(3200, 64, epochs=2, like="B"),
        }
    )  # fmt: skip
    entries: Mapping[str, Entry] = field(
        default_factory=lambda: {
            "adamw": Entry("adam", {"A": (2e-3, 1.6e-2), "B": (1e-3, 2e-3)}),
            "cosmos": Entry("cosmos", _FIRST),
            "muon": Entry("muon", _FIRST),
            "normuon": Entry("normuon", _FIRST),
            "soap-f10": Entry("soap", {"A": (2e-3, 1.6e-2), "B": (2e-3, 2e-3)}, ("frequency=10",)),
            "soap-f1": Entry("soap", {"A": (4e-3, 1.6e-2), "B": (2e-3, 1.6e-2)}, ("frequency=1",)),
            "cosmos-paper": Entry("cosmos-paper", _LATER),
            "muon-eq": Entry("muon-eq", _LATER),
            "soap-polar": Entry("soap-polar", _LATER, ("frequency=10",), cost=2.0),
        }
    )
    phases: Sequence[Phase] = (  # In this order; in a phase, the entry with the fewest runs goes first.
        ("B", _MAIN, RATES),
        ("B", _MAIN, SEARCH),
        ("A", _MAIN, RATES),
        ("A", _MAIN, SEARCH),
        ("B", ("cosmos-paper", "soap-f10"), SEARCH),
        ("B", _MAIN, ("more-seeds",)),
        ("A", ("soap-f1",), SEARCH),
        ("B", _MAIN[1:], ("short",)),
        ("A", _MAIN[1:], ("short",)),
        ("B", ("muon-eq", "soap-polar"), RATES),
        ("B", ("cosmos",), ("levers",)),
        ("B", (*_MAIN, "soap-f10"), ("levers",)),
        ("A", _MAIN, ("levers",)),
        ("B", ("soap-f1", "muon-eq", "soap-polar"), SEARCH),
        ("A", ("cosmos-paper", "soap-f10", "muon-eq", "soap-polar"), SEARCH),
        ("B", ("cosmos",), ("memory",)),
        ("A", ("cosmos",), ("memory",)),
        ("long", _MAIN, ("seeds",)),
    )
    seeds: tuple[int, ...] = (0, 1, 2)
    more_seeds: tuple[int, ...] = (3, 4)
    shares: tuple[float, ...] = (0.45, 0.6, 0.75)  # Lengths of the shorter runs.
    cut: int = 1_048_577  # The validation text ends with the first document that ends at this token or after it.
    block: int = 65_536  # Final losses are also kept as means over blocks of this many tokens.
    curve_tokens: int = 131_072  # Read from each text at every point of a curve.

    def config(self, run: Run) -> RunConfig:
        """Return the lab's configuration of a run, without its folders."""
        entry, regime = self.entries[run.entry], self.regimes[run.regime]
        steps = round(regime.steps * run.share)
        config = RunConfig().replace(
            model=self.preset or run.model, seq_len=regime.seq_len, optimizer=entry.optimizer, lr=run.lr,
            adam_lr=run.adam_lr, beta1=0.9, beta2=run.beta2, eps=1e-8, weight_decay=0.0, options=entry.options,
            steps=steps, batch=regime.batch, micro_batch=regime.batch, clip=1.0, seed=run.seed, schedule="linear",
            warmup=0.1, recipe="protocol", name=run.id, log_every=max(1, steps // 50),
            val_every=max(1, steps // POINTS), val_tokens=self.curve_tokens, diagnostics_every=0, checkpoint_every=0,
        )  # fmt: skip
        if entry.optimizer in ONE_RATE:  # give it the second rate that the others have
            config = config.replace(**outer_rates(run.adam_lr))
        if run.variant:
            variant = VARIANTS[run.variant]
            rates = {name: factor * run.adam_lr for name, factor in variant.outer.items()}
            config = config.replace(**rates, **variant.fields, options=(*entry.options, *variant.options))
            if variant.trial:
                config = config.replace(optimizer=f"trial-{entry.optimizer}")
        return config.replace(**self.sizes)

    def tokens(self, run: Run) -> int:
        """Return the tokens that a run trains on."""
        regime = self.regimes[run.regime]
        return round(regime.steps * run.share) * regime.batch * regime.seq_len

    # -- the search -----------------------------------------------------------------------------------------------

    def at(self, regime: str, entry: str, point: Mapping[str, float], seed: int = 0, share: float = 1.0) -> Run:
        """Return the run at a point: powers of 2 by which the rates differ from the starting ones, and beta2."""
        lr, adam_lr = self.entries[entry].start[self.regimes[regime].like or regime]
        lr, adam_lr = lr * 2.0 ** point["lr"], adam_lr * 2.0 ** point["adam_lr"]
        return Run(self.model, regime, entry, lr, adam_lr, point["beta2"], seed, share)

    def tried(self, regime: str, entry: str, name: str, point: Mapping[str, float], loss: Losses) -> dict[float, Run]:
        """Return the finished runs that differ from a point in one coordinate at most, by its value."""
        values = BETA2S if name == "beta2" else POWERS
        runs = {value: self.at(regime, entry, {**point, name: value}) for value in values}
        return {value: run for value, run in runs.items() if run.id in loss}

    def tune(self, regime: str, entry: str, name: str, point: Mapping[str, float], loss: Losses) -> Tuned:
        """Tune one coordinate, starting from a point. It may end without a bracket, after MOST values."""

        def moved(value: float) -> dict[str, float]:
            return {**point, name: value}

        known = {value: loss[run.id] for value, run in self.tried(regime, entry, name, point, loss).items()}
        first = point[name]
        if first not in known:
            return Tuned(name, dict(point), moved(first), False)
        best = min(known, key=lambda value: (known[value], abs(value - first)))
        if name == "beta2":
            missing = [value for value in BETA2S if value not in known]
            return Tuned(name, moved(best), moved(missing[0]) if missing else None, not missing)
        missing = [value for value in (best + 1, best - 1) if value not in known]
        more = bool(missing) and len(known) < MOST[name]
        return Tuned(name, moved(best), moved(missing[0]) if more else None, not missing)

    def source(self, regime: str) -> tuple[Protocol, str] | None:
        """Return the comparison and the regime from which the settings come; None if a search finds them here."""
        like = self.regimes[regime].like or regime
        if not self.tuned_on and like == regime:
            return None
        return replace(self, model=self.tuned_on or self.model, tuned_on=""), like

    def has_source(self, regime: str, entry: str, loss: Losses) -> bool:
        """Return whether the best run from which an entry's settings come is finished, if they come from another."""
        if not (source := self.source(regime)):
            return True
        tuned, like = source
        return tuned.at(like, entry, tuned.best(like, entry, loss)[0]).id in loss

    def search(self, regime: str, entry: str, loss: Losses) -> Iterator[Tuned]:
        """Yield the coordinates in the order in which they are tuned, each from the best point of those before it."""
        if source := self.source(regime):
            tuned, like = source
            yield Tuned(TUNING[-1], tuned.best(like, entry, loss)[0], None, True)
            return
        point: dict[str, float] = {"lr": 0, "adam_lr": 0, "beta2": BETA2}
        for i, name in enumerate(TUNING):
            if name in TUNING[:i] and abs(point["adam_lr"]) <= FAR:
                continue
            one = self.tune(regime, entry, name, point, loss)
            point = one.point
            yield one

    def best(self, regime: str, entry: str, loss: Losses) -> tuple[dict[str, float], list[str], list[str]]:
        """Return the best point so far, the coordinates still to tune, and those ended without a bracket."""
        found = list(self.search(regime, entry, loss))
        unfinished = [one.name for one in found if one.following]
        at_the_end = [one.name for one in found if not one.following and not one.bracketed]
        return found[-1].point, list(dict.fromkeys(unfinished)), list(dict.fromkeys(at_the_end))

    def wanted(self, regime: str, entry: str, stages: Collection[str], loss: Losses) -> list[Run]:
        """Return the runs that an entry can begin now; none if these stages are done or must wait."""
        if "levers" in stages or "memory" in stages:
            return self.changed(regime, entry, stages, loss)
        found = list(self.search(regime, entry, loss))
        for one in found:
            if one.following:
                return [self.at(regime, entry, one.following)] if one.name in stages else []
        point = found[-1].point
        seeds = (self.seeds if "seeds" in stages else ()) + (self.more_seeds if "more-seeds" in stages else ())
        shares = self.shares if "short" in stages else ()
        runs = [self.at(regime, entry, point, seed) for seed in seeds]
        runs += [self.at(regime, entry, point, 0, share) for share in shares]
        return [run for run in runs if run.id not in loss]

    def changed(self, regime: str, entry: str, stages: Collection[str], loss: Losses) -> list[Run]:
        """Return the variants of an entry that have not run at its best point so far; before its first run, that one.

        Levers have one seed; what changes memory has all seeds, because there the question is whether nothing is lost.
        """
        best = self.at(regime, entry, self.best(regime, entry, loss)[0])
        if best.id not in loss:
            return [best]
        levers = [(v, best.seed) for v in LEVERS if "levers" in stages]
        memory = [(v, seed) for v in MEMORY for seed in self.seeds if "memory" in stages]
        runs = [replace(best, seed=seed, variant=v.name) for v, seed in (*levers, *memory) if entry in v.rows]
        if "memory" in stages:  # the seeds to compare with
            runs = [replace(best, seed=seed) for seed in self.seeds] + runs
        return [run for run in runs if run.id not in loss]

    def candidates(self, loss: Losses, pending: Collection[str] = ()) -> list[Run]:
        """Return the runs that can begin now, in the order in which they should."""
        found: dict[str, Run] = {}
        for regime, entries, stages in self.phases:
            offers = []
            for entry in entries:
                if not self.has_source(regime, entry, loss):
                    continue
                begin = f"{self.model}-{regime}-{entry}-lr"
                done = sum(name.startswith(begin) for name in (*loss, *pending))
                runs = [run for run in self.wanted(regime, entry, stages, loss) if run.id not in pending]
                offers += [(done + i, run) for i, run in enumerate(runs)]
            for _, run in sorted(offers, key=lambda offer: offer[0]):
                found.setdefault(run.id, run)
        return list(found.values())


def read_results(paths: Iterable[Path]) -> dict[str, Result]:
    """Return the results by id, of bundles and of folders with one file per run; a run must not have two results."""
    found: dict[str, Result] = {}
    places: dict[str, Path] = {}
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            for name, result in _read_file(file, single=path.is_dir()).items():
                if found.setdefault(name, result) != result:
                    raise ValueError(f"{places[name]} and {file} have different results of {name}: remove one of them")
                places.setdefault(name, file)
    return found


def _read_file(file: Path, single: bool) -> dict[str, Result]:
    """Return the results of a bundle or of a single run by id; a ValueError names a file that is not one."""
    try:
        content = json.loads(file.read_text())
        return {content["id"]: content} if single else dict(content["runs"])
    except FileNotFoundError:
        raise ValueError(f"there are no results at {file}") from None
    except (ValueError, KeyError, TypeError) as error:
        what = "the result of a run" if single else "a bundle of results"
        raise ValueError(f"{file} is not {what}, or it is damaged ({error!r}): remove it or copy it again") from error


def losses(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the validation loss by run id, inf for runs that diverged."""
    return {name: math.inf if r["val_loss"] is None else r["val_loss"] for name, r in results.items()}


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The best setting of an entry so far, with its runs over seeds."""

    run: Result
    seeds: list[Result]
    tuned: int  # Runs of the search.
    status: str

    @property
    def test_loss(self) -> float:
        """Return the mean test loss over seeds."""
        return statistics.fmean(r["test_loss"] for r in self.seeds)


def table(protocol: Protocol, results: Mapping[str, Result]) -> str:
    """Return what is known: the best setting of each optimizer, differences, token shares, and every run."""
    mine = {name: r for name, r in results.items() if r["model"] == protocol.model}
    lines = list(_cautions(mine.values()))
    for name, regime in protocol.regimes.items():
        rows = best_rows(protocol, name, results)
        if not any(r["regime"] == name for r in mine.values()):
            continue
        lines += ["", f"{protocol.model}, regime {name}: {regime.steps} steps of {regime.batch} x {regime.seq_len}"]
        lines.append(f"{'':13}{'hidden':>9}{'outer':>9}{'beta2':>7}{'runs':>6}{'val ppl':>9}{'test ppl':>10}  status")
        for entry, row in sorted(rows.items(), key=lambda item: item[1].run["val_loss"]):
            r = row.run
            ppl = statistics.fmean(s["test_ppl"] for s in row.seeds)
            over = f"{len(row.seeds)} seeds" if len(row.seeds) > 1 else "one seed"
            if len(row.seeds) > 1:
                over += f", sd {statistics.stdev(s['test_ppl'] for s in row.seeds):.3f}"
            lines.append(
                f"{entry:13}{r['lr']:9.3g}{r['adam_lr']:9.3g}{r['beta2']:7g}{row.tuned:6d}{r['val_ppl']:9.3f}{ppl:10.3f}"
                f"  {over}; {row.status}"
            )
        shares = token_shares(protocol, name, rows, results)
        lines += [*_differences(rows), *_variants(protocol, name, mine)]
        lines += [f"  {e} reaches AdamW's mean test loss with a share of the tokens of {s}" for e, s in shares.items()]
        lines.append("  all runs: validation and test perplexity")
        for run_id, r in sorted(mine.items()):
            if r["regime"] == name:
                both = "diverged" if r["val_loss"] is None else f"{r['val_ppl']:.3f} {r['test_ppl']:.3f}"
                lines.append(f"    {run_id}  {both}")
    return "\n".join(lines).strip("\n")


def _cautions(results: Collection[Result]) -> Iterator[str]:
    texts = {tuple(r["data"][k] for k in ("fingerprint", "val_fingerprint", "test_fingerprint")) for r in results}
    for what, found in (("texts", texts), ("commits", {r["commit"] for r in results})):
        if len(found) > 1:
            yield f"CAUTION: these are runs of {len(found)} {what}"


def best_rows(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> dict[str, Row]:
    """Return the row of each entry that has a finished run at its best point."""
    return {entry: row for entry in protocol.entries if (row := _row(protocol, regime, entry, results))}


def _row(protocol: Protocol, regime: str, entry: str, results: Mapping[str, Result]) -> Row | None:
    """Return the best point of an entry's search, or None without a finished run there."""
    point, unfinished, at_the_end = protocol.best(regime, entry, losses(results))
    begin = f"{protocol.model}-{regime}-{entry}-lr"
    mine = [r for name, r in results.items() if name.startswith(begin) and not r.get("variant")]
    tuned = sum(r["seed"] == 0 and r["share"] == 1 for r in mine)
    seeds = [results[i] for s in (*protocol.seeds, *protocol.more_seeds)
             if (i := protocol.at(regime, entry, point, s).id) in results]  # fmt: skip
    seeds = [r for r in seeds if r["test_loss"] is not None]
    if not seeds or seeds[0]["seed"] != protocol.seeds[0]:
        return None
    tuned_on = f" on {protocol.tuned_on}" if protocol.tuned_on else ""
    notes = [f"to tune: {', '.join(unfinished)}"] if unfinished else [f"tuned{tuned_on}"]
    if at_the_end:
        notes.append(f"best at the end of its range: {', '.join(at_the_end)}")
    return Row(seeds[0], seeds, tuned, "; ".join(notes))


def half_width(values: Sequence[float], comparisons: int = 1) -> float:
    """Return half of the 95 % interval of the mean, by Student's t, corrected for several comparisons (Bonferroni)."""
    t = quantile(1 - 0.025 / comparisons, len(values) - 1)
    return t * statistics.stdev(values) / math.sqrt(len(values))


def paired(row: Row, other: Row) -> list[tuple[Result, Result]]:
    """Return the runs of two rows that have the same seed, in pairs."""
    theirs = {r["seed"]: r for r in other.seeds}
    return [(r, theirs[r["seed"]]) for r in row.seeds if r["seed"] in theirs]


def gaps_between(row: Row, other: Row) -> list[float]:
    """Return the test loss of a row minus that of another one, by seed."""
    return [mine["test_loss"] - theirs["test_loss"] for mine, theirs in paired(row, other)]


def _differences(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield each optimizer's test loss minus COSMOS's, paired by seed."""
    if "cosmos" not in rows:
        return
    for entry, row in rows.items():
        pairs, gaps = paired(row, rows["cosmos"]), gaps_between(row, rows["cosmos"])
        if entry == "cosmos" or not gaps:
            continue
        blocks = []
        for block in range(len(pairs[0][0]["test_blocks"])):
            over_seeds = [theirs["test_blocks"][block] - own["test_blocks"][block] for theirs, own in pairs]
            blocks.append(statistics.fmean(over_seeds))
        line = f"  {entry} - cosmos: {statistics.fmean(gaps):+.4f} nats"
        if len(gaps) > 1:
            later = statistics.fmean(gaps[1:])
            line += f" +- {half_width(gaps):.4f} ({len(gaps)} seeds; without the first, {later:+.4f})"
        yield f"{line}; blocks of the test text {min(blocks):+.4f} to {max(blocks):+.4f}"


def _variants(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> Iterator[str]:
    """Yield each variant's test loss minus that of the same run without it, paired by seed, for each setting."""
    gaps: dict[Run, list[float]] = {}
    for r in results.values():
        run = run_of(r)
        plain = results.get(run.plain.id)
        if run.regime == regime and run.variant and plain and None not in (r["test_loss"], plain["test_loss"]):
            gaps.setdefault(replace(run, seed=0), []).append(r["test_loss"] - plain["test_loss"])
    order = [(name, entry) for name in VARIANTS for entry in protocol.entries]
    listed = [run for run in gaps if (run.variant, run.entry) in order]
    for run in sorted(listed, key=lambda run: (order.index((run.variant, run.entry)), run.id)):
        found = gaps[run]
        spread = f" +- {half_width(found):.4f} (sd {statistics.stdev(found):.4f})" if len(found) > 1 else ""
        shown = f"{statistics.fmean(found):+.4f} nats{spread}, {len(found)} seed(s)"
        setting = f"at {run.lr:g}, {run.adam_lr:g}, beta2 {run.beta2:g}"
        yield f"  {run.entry} with {run.variant}: {shown} {setting}; {VARIANTS[run.variant].formula}"


def run_of(result: Result) -> Run:
    """Return the run that made a result; earlier results lack newer fields."""
    return Run(**{name: result[name] for name in Run.__dataclass_fields__ if name in result})


@dataclass(frozen=True)
class TokenShare:
    """The share of the tokens with which an optimizer reaches another one's test loss, from runs of several lengths.

    half_width: half of its 95 % interval, from the differences of the full runs, paired by seed; None with one seed.
    outside: "less than" or "more than" if no two lengths enclose the loss.
    """

    share: float
    half_width: float | None = None
    outside: str = ""

    def __str__(self) -> str:
        text = f"{self.outside} {self.share:.2f}".strip()
        return text if self.half_width is None else f"{text} +- {self.half_width:.2f}"


def crossing(points: Sequence[tuple[float, float]], goal: float) -> tuple[float, float] | None:
    """Return where (tokens, loss) points first fall to a loss, and the slope there: nats per unit of log tokens.

    Between points the loss is linear in log tokens. None if they never fall to it, or begin below it.
    """
    for (t0, l0), (t1, l1) in zip(points, points[1:], strict=False):
        if l1 <= goal < l0:
            slope = (l0 - l1) / math.log(t1 / t0)
            return t0 * math.exp((l0 - goal) / slope), slope
    return None


def shorter_runs(protocol: Protocol, regime: str, entry: str, results: Mapping[str, Result]) -> list[Result]:
    """Return the finished shorter runs at the best setting of an entry, shortest first."""
    point, _, _ = protocol.best(regime, entry, losses(results))
    ids = [protocol.at(regime, entry, point, 0, share).id for share in sorted(protocol.shares)]
    return [results[i] for i in ids if i in results and results[i]["test_loss"] is not None]


def token_shares(
    protocol: Protocol, regime: str, rows: Mapping[str, Row], results: Mapping[str, Result], target: str = "adamw"
) -> dict[str, TokenShare]:
    """Return the share of the tokens with which optimizers with shorter runs reach the loss of `target`, by entry."""
    if target not in rows:
        return {}
    goal = rows[target].test_loss
    found = {}
    for entry, row in rows.items():
        shorter = shorter_runs(protocol, regime, entry, results)
        if entry == target or not shorter:
            continue
        points = [*((r["share"], r["test_loss"]) for r in shorter), (1.0, row.test_loss)]
        if points[0][1] <= goal:
            found[entry] = TokenShare(points[0][0], outside="less than")
        elif (at := crossing(points, goal)) is None:
            found[entry] = TokenShare(1.0, outside="more than")
        else:
            share, slope = at
            gaps = gaps_between(rows[target], row)
            found[entry] = TokenShare(share, share * half_width(gaps) / slope if len(gaps) > 1 else None)
    return found
