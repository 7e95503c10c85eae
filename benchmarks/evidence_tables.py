"""Tables of the protocol's results in Markdown: seeds and differences, the search, shorter runs, settings, changes.

Each function returns the lines of one table. A search that has not finished is called "open".
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.best_rows import Row, changed_pairs, gaps_between, shorter_runs
from benchmarks.comparison import BETA2, Run
from benchmarks.kept_runs import Result, losses, run_of
from benchmarks.protocol import BETA2S, RATES, Protocol
from benchmarks.rate_fit import lowest
from benchmarks.student import half_width
from benchmarks.variants import VARIANTS
from cosmos_lab.formatting import format_rate

NAMES = {
    "adamw": "AdamW", "soap-f10": "SOAP, frequency 10", "soap-f1": "SOAP, frequency 1", "muon": "Muon",
    "normuon": "NorMuon", "cosmos": "COSMOS", "cosmos-paper": "COSMOS as in the paper",
    "muon-eq": "Muon, rows of equal norm", "soap-polar": "two-sided SOAP and Newton-Schulz (trial)",
}  # fmt: skip


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table, with an empty line after it."""
    cells = [head, ["---"] * len(head), *rows]
    return [*("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in cells), ""]


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph or of one point of a list."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, 130, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def perplexity(result: Result, text: str = "test") -> str:
    """Return the perplexity of a run on one text."""
    found = result[f"{text}_ppl"]
    return "diverged" if found is None else f"{found:.2f}"


def setting(run: Run | Result) -> str:
    """Return hidden rate, outer rate and beta2."""
    run = run if isinstance(run, Run) else run_of(run)
    return f"{format_rate(run.lr)}, {format_rate(run.adam_lr)}, {run.beta2:g}"


def plain(results: Mapping[str, Result], model: str, regime: str) -> list[Result]:
    """Return the runs of a model and regime without variants."""
    return [r for r in results.values() if (r["model"], r["regime"]) == (model, regime) and not r.get("variant")]


# -- seeds and differences --------------------------------------------------------------------------------------------


def seeds_table(protocol: Protocol, regime: str, rows: Mapping[str, Row], results: Mapping[str, Result]) -> list[str]:
    """Return the best setting of each optimizer with the test perplexity of each seed, the best mean in bold."""
    means = {entry: statistics.fmean(r["test_ppl"] for r in row.seeds) for entry, row in rows.items()}
    least = min((mean for entry, mean in means.items() if len(rows[entry].seeds) > 1), default=None)
    lines = []
    for entry, row in rows.items():
        mean = "one seed"
        if len(row.seeds) > 1:
            mean = f"**{means[entry]:.2f}**" if means[entry] == least else f"{means[entry]:.2f}"
            mean += f" ({statistics.stdev(r['test_ppl'] for r in row.seeds):.2f})"
        seeds = ", ".join(perplexity(r) for r in row.seeds)
        state = search_state(protocol, regime, entry, results)
        tuned = "none" if protocol.source(regime) else str(row.tuned)
        lines.append([NAMES[entry], setting(row.run), tuned, state, seeds, mean])
    others = dict.fromkeys(r["entry"] for r in plain(results, protocol.model, regime) if r["entry"] not in rows)
    for entry in others:
        lines.append([NAMES[entry], "open", "", search_state(protocol, regime, entry, results), "", ""])
    head = ["optimizer", "hidden rate, outer rate, beta2", "runs of the search", "search", "test perplexity by seed"]
    return markdown([*head, "mean (sd)"], lines)


def search_state(protocol: Protocol, regime: str, entry: str, results: Mapping[str, Result]) -> str:
    """Return "done", or the coordinates that are open, or the model and regime from which the setting comes."""
    before = ""
    if source := protocol.source(regime):
        protocol, like = source
        before = f"of {protocol.model}, regime {like}: "
        regime = like
    _, unfinished, at_the_end = protocol.best(regime, entry, losses(results))
    names = {"lr": "hidden rate", "adam_lr": "outer rate", "beta2": "beta2"}
    state = f"open: {', '.join(names[name] for name in unfinished)}" if unfinished else "done"
    if at_the_end:
        state += f"; best at the end of its range: {', '.join(names[name] for name in at_the_end)}"
    return before + state


def differences(rows: Mapping[str, Row], number: int) -> dict[str, list[str]]:
    """Return the cells of each optimizer's difference to COSMOS: 95 % interval, corrected interval, without seed 0.

    The second interval is corrected for this number of comparisons.
    """
    if "cosmos" not in rows:
        return {}
    gaps = {entry: gaps_between(row, rows["cosmos"]) for entry, row in rows.items() if entry != "cosmos"}
    found = {}
    for entry, values in gaps.items():
        if len(values) < 2:
            found[entry] = [f"{values[0]:+.3f}, one seed" if values else "open", "", ""]
            continue
        mean = f"{statistics.fmean(values):+.3f}"
        wide, without = half_width(values, number), statistics.fmean(values[1:])
        found[entry] = [f"{mean} +- {half_width(values):.3f}", f"+- {wide:.3f}", f"{without:+.3f}"]
    return found


def comparisons(rows: Mapping[str, Row]) -> int:
    """Return how many optimizers have an interval of their difference to COSMOS."""
    if not (ours := rows.get("cosmos")):
        return 0
    return sum(len(gaps_between(row, ours)) > 1 for entry, row in rows.items() if entry != "cosmos")


# -- the search -------------------------------------------------------------------------------------------------------


def search_tables(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> list[str]:
    """Return validation perplexities by hidden rate, by outer rate, around the best hidden rate, and by beta2."""
    loss = losses(results)
    ran = {r["entry"] for r in plain(results, protocol.model, regime)}
    entries = [entry for entry in NAMES if entry in ran and entry in protocol.entries]
    start = {"lr": 0.0, "adam_lr": 0.0, "beta2": BETA2}
    first: dict[str, list[Result]] = {}
    outer: dict[str, list[Result]] = {}
    around: dict[str, list[Result]] = {}
    beta2: dict[str, list[Result]] = {}
    begin: dict[str, Run] = {}
    last: dict[str, Run] = {}
    found = {}
    for entry in entries:
        found[entry] = list(protocol.search(regime, entry, loss))
        end = {**found[entry][-1].point, "beta2": BETA2}
        points = (("lr", start), ("adam_lr", found[entry][0].point), ("lr", end), ("beta2", end))
        for (name, point), into in zip(points, (first, outer, around, beta2), strict=True):
            into[entry] = [results[run.id] for run in protocol.tried(regime, entry, name, point, loss).values()]
        begin[entry], last[entry] = protocol.at(regime, entry, start), protocol.at(regime, entry, end)
    lines = ["Hidden rate, at the first outer rate and beta2 0.98:", ""]
    lines += _by("lr", first, {e: f"outer {format_rate(run.adam_lr)}" for e, run in begin.items()},
                 {e: found[e][0].following is None for e in entries})  # fmt: skip
    lines += ["Outer rate, at the best of these hidden rates:", ""]
    hidden = {e: protocol.at(regime, e, found[e][0].point) for e in entries}
    lines += _by("adam_lr", outer, {e: f"hidden {format_rate(run.lr)}" for e, run in hidden.items()},
                 {e: found[e][1].following is None for e in entries})  # fmt: skip
    lines += ["Hidden rate again, at the best outer rate:", ""]
    rows = []
    for entry in entries:
        best = last[entry]
        by_rate = {r["lr"]: r for r in around[entry]}  # times 2 is exact
        cells = _bold([by_rate.get(factor * best.lr) for factor in (0.5, 1.0, 2.0)])
        done = all(one.following is None for one in found[entry][:-1])
        if any(cells):
            same = f"{format_rate(best.lr)}, outer {format_rate(best.adam_lr)}"
            rows.append([NAMES[entry], same, *cells, "done" if done else "open"])
    lines += markdown(["optimizer", "same is", "half", "same", "twice", "search"], rows)
    lines += ["beta2, at the best rates:", ""]
    both = {e: f"{format_rate(run.lr)}, {format_rate(run.adam_lr)}" for e, run in last.items()}
    return lines + _by("beta2", beta2, both, {e: not any(one.following for one in found[e]) for e in entries}, BETA2S)


def _by(
    name: str, runs: Mapping[str, list[Result]], at: Mapping[str, str], done: Mapping[str, bool],
    values: Sequence[float] = (),
) -> list[str]:  # fmt: skip
    """Return one table of the search: a row for each optimizer with a run, a column for each value."""
    values = values or sorted({r[name] for some in runs.values() for r in some})
    rows = []
    for entry, some in runs.items():
        by_value = {r[name]: r for r in some}
        if some:
            cells = _bold([by_value.get(value) for value in values])
            rows.append([NAMES[entry], at[entry], *cells, "done" if done[entry] else "open"])
    titles = [f"{value:g}" if name == "beta2" else format_rate(value) for value in values]
    return markdown(["optimizer", "at", *titles, "search"], rows)


def _bold(runs: Sequence[Result | None]) -> list[str]:
    """Return validation perplexities, the best in bold and empty where nothing ran."""
    known = [r["val_ppl"] for r in runs if r and r["val_ppl"] is not None]
    best = min(known, default=None)
    cells = ["" if r is None else perplexity(r, "val") for r in runs]
    return [f"**{cell}**" if r and best is not None and r["val_ppl"] == best else cell
            for cell, r in zip(cells, runs, strict=True)]  # fmt: skip


def finer_steps(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> list[str]:
    """Return what rates between those that ran could gain, by parabolas, for every optimizer with a finished search."""
    loss = losses(results)
    found = []
    for entry in (entry for entry in NAMES if entry in protocol.entries):
        point, unfinished, _ = protocol.best(regime, entry, loss)
        if unfinished:
            continue
        gain = 0.0
        for name in RATES:
            runs = protocol.tried(regime, entry, name, {**point, "beta2": BETA2}, loss).values()
            line = {getattr(run, name): loss[run.id] for run in runs}
            if least := lowest(line):
                gain += least.curvature * (math.log2(min(line, key=lambda rate: line[rate])) - least.at) ** 2
        found.append(f"{NAMES[entry]} {100 * math.expm1(gain):.1f} %")
    if not found:
        return []
    how = "By parabolas through the best three values of each rate, finer steps could lower the perplexity by"
    return [*wrapped(f"{how}: {', '.join(found)}."), ""]


# -- shorter runs and other settings ----------------------------------------------------------------------------------


def short_table(protocol: Protocol, regime: str, rows: Mapping[str, Row], results: Mapping[str, Result]) -> list[str]:
    """Return the test perplexity of shorter runs with complete schedules; empty if there is none."""
    lines = []
    for entry, row in rows.items():
        by_share = {r["share"]: r for r in shorter_runs(protocol, regime, entry, results)}
        if by_share:
            cells = [perplexity(by_share[share]) if share in by_share else "open" for share in protocol.shares]
            lines.append([NAMES[entry], *cells, perplexity(row.run)])
    if not lines:
        return []
    head = ["optimizer", *(f"{share:g} of the steps" for share in protocol.shares), "all"]
    return ["Shorter runs with complete schedules, test perplexity, seed 0:", "", *markdown(head, lines)]


def settings_table(runs: Iterable[Result], least_seeds: int = 1) -> list[str]:
    """Return the test perplexity of every setting with at least so many seeds; empty if there is none."""
    by_setting: dict[Run, dict[int, Result]] = {}
    for r in runs:
        by_setting.setdefault(replace(run_of(r), seed=0), {})[r["seed"]] = r
    rows = [
        [NAMES.get(run.entry, run.entry), setting(run), ", ".join(map(str, sorted(seeds))),
         *(", ".join(perplexity(seeds[s], text) for s in sorted(seeds)) for text in ("val", "test"))]
        for run, seeds in sorted(by_setting.items(), key=lambda item: (item[0].entry, item[0].lr, item[0].adam_lr))
        if len(seeds) >= least_seeds
    ]  # fmt: skip
    head = ["optimizer", "hidden rate, outer rate, beta2", "seeds", "validation perplexity", "test perplexity"]
    return markdown(head, rows) if rows else []


def changes_table(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> list[str]:
    """Return what each change of one thing did, compared with the unchanged runs; empty if there is none."""
    rows = []
    for run, pairs in changed_pairs(protocol, regime, results).items():
        gaps = [changed["test_loss"] - plain["test_loss"] for changed, plain in pairs]
        spread = f" +- {half_width(gaps):.4f}" if len(gaps) > 1 else ", one seed"
        shown = (", ".join(perplexity(pair[i]) for pair in pairs) for i in (0, 1))
        formula = VARIANTS[run.variant].formula
        rows.append([formula, NAMES[run.entry], setting(run), *shown, f"{statistics.fmean(gaps):+.4f}{spread}"])
    head = ["change", "optimizer", "hidden rate, outer rate, beta2", "test perplexity by seed", "unchanged"]
    return markdown([*head, "difference, nats"], rows) if rows else []
