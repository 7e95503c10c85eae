"""Which run of the comparison comes next: the search of docs/protocol.md.

The search tunes one coordinate after the other, by the same rule for every optimizer: the rate of the hidden matrices,
the rate of embedding, head and norms, the first one again if the second has moved far, and beta2. Then come further
seeds and shorter runs at the best setting, and the changes of benchmarks/variants.py there. All choices read the
validation loss of finished runs, so a search continues from its results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.comparison import BETA2, Comparison, Run, id_prefix
from benchmarks.kept_runs import Losses
from benchmarks.variants import MEMORY, QUALITY

BETA2S = (0.95, 0.98, 0.999)
MOST = {"lr": 6, "adam_lr": 8}  # most values tried for each rate, including the starting value
POWERS = range(-12, 13)  # Rates are the starting ones times 2 to these powers.
RATES = ("lr", "adam_lr")
TUNING = (*RATES, "lr", "beta2")  # The second "lr" is left out if the outer rate has not moved far.
FAR = 1  # powers of 2 that the outer rate may move without tuning the hidden rate again
SEARCH = (*RATES, "beta2", "seeds")  # the search of a row, and three seeds at its best setting
STAGES = (*SEARCH, "more-seeds", "short", "quality", "memory")

Phase = tuple[str, tuple[str, ...], tuple[str, ...]]  # regime, entries, stages
_MAIN = ("adamw", "cosmos", "muon", "normuon")


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


@dataclass(frozen=True)
class Protocol(Comparison):
    """The comparison with its search; tests make a small one."""

    tuned_on: str = ""  # Take the best settings found for this model instead of a search.
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
        ("B", ("cosmos",), ("quality",)),
        ("B", (*_MAIN, "soap-f10"), ("quality",)),
        ("A", _MAIN, ("quality",)),
        ("B", ("soap-f1", "muon-eq", "soap-polar"), SEARCH),
        ("A", ("cosmos-paper", "soap-f10", "muon-eq", "soap-polar"), SEARCH),
        ("B", ("cosmos",), ("memory",)),
        ("A", ("cosmos",), ("memory",)),
        ("long", _MAIN, ("seeds",)),
    )
    seeds: tuple[int, ...] = (0, 1, 2)
    more_seeds: tuple[int, ...] = (3, 4)
    shares: tuple[float, ...] = (0.45, 0.6, 0.75)  # Lengths of the shorter runs.

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
        if "quality" in stages or "memory" in stages:
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

        Changes for quality have one seed. Those that save memory have all seeds, because they must lose nothing.
        """
        best = self.at(regime, entry, self.best(regime, entry, loss)[0])
        if best.id not in loss:
            return [best]
        quality = [(v, best.seed) for v in QUALITY if "quality" in stages]
        memory = [(v, seed) for v in MEMORY for seed in self.seeds if "memory" in stages]
        runs = [replace(best, seed=seed, variant=v.name) for v, seed in (*quality, *memory) if entry in v.rows]
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
                begin = id_prefix(self.model, regime, entry)
                done = sum(name.startswith(begin) for name in (*loss, *pending))
                runs = [run for run in self.wanted(regime, entry, stages, loss) if run.id not in pending]
                offers += [(done + i, run) for i, run in enumerate(runs)]
            for _, run in sorted(offers, key=lambda offer: offer[0]):
                found.setdefault(run.id, run)
        return list(found.values())
