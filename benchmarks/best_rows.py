"""What finished runs say: the best setting of each optimizer, differences by seed, and shares of the tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.comparison import Run, id_prefix
from benchmarks.kept_runs import Result, losses, run_of
from benchmarks.protocol import Protocol
from benchmarks.student import half_width
from benchmarks.variants import VARIANTS

LEAST_POINTS = 20  # of a curve; a coarser one is refused


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


def protocols(results: Mapping[str, Result]) -> Iterator[Protocol]:
    """Yield the comparison for each model that has runs of its regimes, first the model that was tuned."""
    tuned = Protocol()
    ran = {r["model"] for r in results.values() if r["regime"] in tuned.regimes}
    if tuned.model in ran:
        yield tuned
    for model in sorted(ran - {tuned.model}):
        yield Protocol(model=model, tuned_on=tuned.model)


def best_rows(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> dict[str, Row]:
    """Return the row of each entry that has a finished run at its best point."""
    return {entry: row for entry in protocol.entries if (row := _row(protocol, regime, entry, results))}


def _row(protocol: Protocol, regime: str, entry: str, results: Mapping[str, Result]) -> Row | None:
    """Return the best point of an entry's search, or None without a finished run there."""
    point, unfinished, at_the_end = protocol.best(regime, entry, losses(results))
    begin = id_prefix(protocol.model, regime, entry)
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


def paired(row: Row, other: Row) -> list[tuple[Result, Result]]:
    """Return the runs of two rows that have the same seed, in pairs."""
    theirs = {r["seed"]: r for r in other.seeds}
    return [(r, theirs[r["seed"]]) for r in row.seeds if r["seed"] in theirs]


def gaps_between(row: Row, other: Row) -> list[float]:
    """Return the test loss of a row minus that of another one, by seed."""
    return [mine["test_loss"] - theirs["test_loss"] for mine, theirs in paired(row, other)]


def changed_pairs(
    protocol: Protocol, regime: str, results: Mapping[str, Result]
) -> dict[Run, list[tuple[Result, Result]]]:
    """Return the runs of each variant with the same runs without it, in pairs, in the order of variants and entries.

    The key is the changed run with seed 0.
    """
    found: dict[Run, list[tuple[Result, Result]]] = {}
    for _, r in sorted(results.items()):
        run = run_of(r)
        plain = results.get(run.plain.id)
        here = (run.model, run.regime) == (protocol.model, regime)
        known = run.variant in VARIANTS and run.entry in protocol.entries
        if here and known and plain and None not in (r["test_loss"], plain["test_loss"]):
            found.setdefault(replace(run, seed=0), []).append((r, plain))
    variants, entries = list(VARIANTS), list(protocol.entries)
    return dict(sorted(found.items(), key=lambda item: (variants.index(item[0].variant), entries.index(item[0].entry))))


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


def curve_on_test_text(result: Result) -> list[tuple[int, float]]:
    """Return (tokens, test loss) of a run; a ValueError says what the next run must store."""
    columns = result["curve_columns"]
    tokens, loss = columns.index("tokens"), columns.index("test_loss")
    points = [(int(p[tokens]), float(p[loss])) for p in result["curve"] if p[loss] is not None]
    if len(points) < LEAST_POINTS:
        raise ValueError(
            f"{result['id']}: its curve has {len(points)} points of test loss, {LEAST_POINTS} are needed: run it again "
            "with POINTS of benchmarks/comparison.py at that number or more"
        )
    return points


def curve_shares(rows: Mapping[str, Row]) -> dict[str, float]:
    """Return the share of AdamW's tokens at which each optimizer's curves fall to AdamW's last test loss, by entry.

    It is the mean over seeds. Optimizers of which a run never falls that low are left out.
    """
    if "adamw" not in rows:
        return {}
    ends = [curve_on_test_text(r)[-1] for r in rows["adamw"].seeds]
    goal, tokens = statistics.fmean(loss for _, loss in ends), ends[0][0]
    found = {}
    for entry, row in rows.items():
        at = [crossing(curve_on_test_text(r), goal) for r in row.seeds]
        if entry != "adamw" and None not in at:
            found[entry] = statistics.fmean(one[0] / tokens for one in at if one is not None)
    return found
