"""From the kept results to what people compare: settings, seeds, differences, and tokens to AdamW's loss.

    python -m benchmarks.evidence      # writes docs/results/evidence.md and three pictures in docs/figures

Tokens to AdamW's loss come from shorter runs with complete schedules (`best_rows.token_shares`). An optimizer without
such runs has an upper bound, read from the curves of its full runs: the point at which a curve first falls below
AdamW's last value, on the same test tokens. The rate of these runs decays until the very end, so a run that was planned
to end at the crossing would be lower there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import evidence_tables as tables
from benchmarks.best_rows import Row, best_rows, crossing, protocols, shorter_runs, token_shares
from benchmarks.evidence_tables import NAMES
from benchmarks.kept_runs import Result, losses, read_results
from benchmarks.protocol import Protocol
from cosmos_lab.report.style import KNOWN, THEMES

ROOT = Path(__file__).resolve().parents[1]
DRAWN = ("adamw", "soap-f10", "muon", "normuon", "cosmos")
WITH_BARS = ("adamw", "soap-f10", "muon", "cosmos")  # NorMuon's step and state were not measured
LOOKS = {entry: KNOWN[Protocol().entries[entry].optimizer] for entry in DRAWN}
TEXT, GROUND = THEMES["light"]["soft"], THEMES["light"]["card"]
LEAST_POINTS = 20  # of a curve; a coarser one is refused
# In benchmarks/results: measurements of the step in float32 that count, of several commits.
STEP_FILES = ("h200-llama-1b", "h200-llama-1b-defaults", "h200-llama-1b-defaults-later", "h200-llama-1b-int8",
              "h200-llama-1b-memory", "h200-llama-1b-memory-later", "h200-redesign")  # fmt: skip


def test_curve(result: Result) -> list[tuple[int, float]]:
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
    ends = [test_curve(r)[-1] for r in rows["adamw"].seeds]
    goal, tokens = statistics.fmean(loss for _, loss in ends), ends[0][0]
    found = {}
    for entry, row in rows.items():
        at = [crossing(test_curve(r), goal) for r in row.seeds]
        if entry != "adamw" and None not in at:
            found[entry] = statistics.fmean(one[0] / tokens for one in at if one is not None)
    return found


def step_ratio(results: Mapping[str, Result], regime: str) -> float:
    """Return the median time of a training step with COSMOS over AdamW's, in the runs of a regime at full length."""

    def median(entry: str) -> float:
        names = ("regime", "entry", "share", "model")
        wanted = (regime, entry, 1, Protocol().model)
        mine = (r for r in results.values() if tuple(r[name] for name in names) == wanted and not r.get("variant"))
        return statistics.median(r["step_ms"] for r in mine)

    return median("cosmos") / median("adamw")


# -- time and memory at 1B --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one optimizer costs at LLaMA-1B: seconds of a training step, of the optimizer alone, and bytes of state."""

    step_s: float
    optimizer_s: float
    state_gib: float
    note: str = ""


def costs(folder: Path = ROOT / "results") -> dict[str, Cost]:
    """Return the costs at LLaMA-1B, 256,000 tokens a step, with the forward and backward time of AdamW's row for all.

    That time differs by about 1 % between measurements, more than the optimizers do, so it is taken from one of them.
    """
    found: dict[str, Any] = {}
    for name in ("", "-defaults", "-soap"):
        profile = json.loads((folder / f"h200-profile-llama-1b{name}.json").read_text())
        found |= {row["optimizer"]: row for row in profile["memory"]}  # COSMOS and SOAP of the later files
    passes = found["adam"]["forward_backward_s"]

    def cost(name: str, note: str = "") -> Cost:
        row = found[name]
        return Cost(passes + row["optimizer_s"], row["optimizer_s"], row["state_gb"], note)

    return {
        "adamw": cost("adam"), "muon": cost("muon"), "normuon": cost("muon", "as Muon; not measured"),
        "cosmos": cost("cosmos"), "soap-f10": cost("soap"),
    }  # fmt: skip


def small_step(folder: Path = ROOT / "results") -> tuple[int, float]:
    """Return the tokens of the smallest training step that was measured at LLaMA-1B, and COSMOS's time over AdamW's."""
    profile = json.loads((folder / "h200-profile-llama-1b-forms.json").read_text())
    seconds = {row["optimizer"]: row["seconds"] for row in profile["memory"]}
    config = profile["config"]
    tokens = config["batch"] * config["accumulation"] * config["seq_len"]
    return tokens, seconds["cosmos"] / seconds["adam"]


def step_times(folder: Path = ROOT / "benchmarks" / "results") -> dict[str, list[float]]:
    """Return the medians of a step at LLaMA-1B in ms, by optimizer, of all STEP_FILES."""
    found: dict[str, list[float]] = {}
    for name in STEP_FILES:
        kept = json.loads((folder / f"{name}.json").read_text())
        for run in kept.get("runs", [kept]):  # one file has several runs, of several models
            for row in run["rows"] if run["model"] == "llama-1b" else ():
                found.setdefault(row["name"], []).append(row["median_ms"])
    return {name: sorted(values) for name, values in found.items()}


def described(values: Sequence[float]) -> str:
    """Return the median over runs with the range, such as "78.2 (76.6 to 78.3, 4 runs)"."""
    if len(values) == 1:
        return f"{values[0]:.1f} (one run)"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}, {len(values)} runs)"


# -- what is written --------------------------------------------------------------------------------------------------


def _lower_than_curves(results: Mapping[str, Result]) -> str:
    """Return by how much the shares of shorter runs are below those of curves, for optimizers that have both."""
    protocol = Protocol()
    rows = best_rows(protocol, "B", results)
    measured, bounds = token_shares(protocol, "B", rows, results), curve_shares(rows)
    both = [f"{NAMES[entry]} {bounds[entry]:.2f}" for entry in NAMES if entry in measured and entry in bounds]
    return f" (in regime B the shares by curves would be: {', '.join(both)})" if both else ""


def regime_part(protocol: Protocol, regime: str, results: Mapping[str, Result]) -> list[str]:
    """Return what is known about one model in one regime: seeds, differences, tokens, the search and shorter runs."""
    runs = tables.plain(results, protocol.model, regime)
    if not runs:
        return []
    how = protocol.regimes[regime]
    rows = best_rows(protocol, regime, results)
    rows = dict(sorted(rows.items(), key=lambda item: item[1].test_loss))
    title = f"## {protocol.model}, regime {regime}: {how.steps:,} steps of {how.batch} x {how.seq_len} tokens"
    lines = [title, "", *tables.seeds_table(protocol, regime, rows, results)]
    if source := protocol.source(regime):
        tuned, like = source
        lines += [f"No optimizer was tuned here: the settings are the best of {tuned.model}, regime {like}.", ""]
    if len(rows) > 1:
        lines += _differences_and_tokens(protocol, regime, rows, results)
    lines += tables.short_table(protocol, regime, rows, results)
    if listed := tables.changes_table(protocol, regime, results):
        lines += ["Changes of one thing:", "", *listed]
    shown = {r["id"] for row in rows.values() for r in row.seeds}
    others = [r for r in runs if r["id"] not in shown and r["share"] == 1]
    if protocol.source(regime):
        if listed := tables.settings_table(others):
            lines += ["Runs at other settings:", "", *listed]
        return lines
    if listed := tables.settings_table(others, least_seeds=2):
        lines += ["Other settings with more than one seed:", "", *listed]
    lines += [f"### Search of {protocol.model}, regime {regime}", "", "Validation perplexity, seed 0.", ""]
    return lines + tables.finer_steps(protocol, regime, results) + tables.search_tables(protocol, regime, results)


def _differences_and_tokens(
    protocol: Protocol, regime: str, rows: Mapping[str, Row], results: Mapping[str, Result]
) -> list[str]:
    """Return the table of differences to COSMOS, and of tokens to AdamW's loss."""
    number = sum(tables.comparisons(best_rows(protocol, name, results)) for name in protocol.regimes)
    gaps = tables.differences(rows, max(1, number))
    measured, bounds = token_shares(protocol, regime, rows, results), curve_shares(rows)
    lines = []
    for entry in rows:
        share = "1" if entry == "adamw" else "not reached" if "adamw" in rows else "open"
        if entry in measured:
            share = str(measured[entry])
        elif entry in bounds:
            share = f"at most {bounds[entry]:.2f}"
        lines.append([NAMES[entry], *gaps.get(entry, [""] * 3), share])
    corrected = f"corrected for {number} comparisons" if number > 1 else "corrected"
    head = ["optimizer", "difference to COSMOS, nats", corrected, "without seed 0", "tokens to AdamW's loss"]
    page = tables.markdown(head, lines)
    for target in ("muon", "normuon"):
        if ours := token_shares(protocol, regime, rows, results, target).get("cosmos"):
            page += [f"COSMOS reaches the loss of {NAMES[target]} with {ours} of the tokens.", ""]
    return page


def rate_runs_part(results: Mapping[str, Result]) -> list[str]:
    """Return the runs in other regimes, which look for a rule of rates."""
    cells: dict[tuple[str, int, int], list[Result]] = {}
    for r in results.values():
        if r["regime"] not in Protocol().regimes and not r.get("variant"):
            cells.setdefault((r["model"], r["steps"], r["batch"]), []).append(r)
    lines = []
    for (model, steps, batch), runs in sorted(cells.items()):
        lines += [f"{model}, {steps:,} steps of {batch} x {runs[0]['seq_len']}:", "", *tables.settings_table(runs)]
    return ["## Runs for a rule of rates", "", *lines] if lines else []


def report(results: Mapping[str, Result]) -> str:
    """Return the page: results of each model and regime, how to read them, and step times."""
    cost, (few, longer) = costs(), small_step()
    lines = ["# Results of the protocol", "", "Written by `python -m benchmarks.evidence`; do not edit.", ""]
    lines += tables.wrapped(
        "The rules are in [the protocol](../protocol.md), and what the tables show is in [the findings](findings.md). "
        "How to read them: [below](#notes)."
    )
    lines += [""]
    for protocol in protocols(results):
        for regime in protocol.regimes:
            lines += regime_part(protocol, regime, results)
    lines += rate_runs_part(results)
    notes = [
        "- **Rates**: of the hidden matrices, and of embedding, head and norms (outer rate). In the tables of a "
        "search, the best value of each row is bold.",
        "- **Runs of the search**: all runs with seed 0 at the full length, of any setting.",
        "- **Difference**: test loss minus that of COSMOS, the mean over pairs of runs with the same seed, with its "
        "95 % interval by Student's t. The corrected interval (Bonferroni) counts every difference of this model that "
        "has an interval in these tables, in all regimes. Seed 0 was also used to choose the settings, so the mean "
        "without it is printed.",
        "- **Tokens**: the share of AdamW's tokens with which an optimizer reaches AdamW's final test loss. It comes "
        "from shorter runs with complete schedules (0.45, 0.6 and 0.75 of the steps, seed 0), by interpolation. Their "
        "rates are those tuned for the full length.",
        "- **Interval**: 95 %, from the differences to AdamW at the full length over seeds. AdamW's own spread "
        "is part of every interval and moves all shares together, so compare two optimizers by their losses. The noise "
        "of the shorter runs is not in it: a standard deviation of about 0.01.",
        "- **At most**: there are no shorter runs, so the share is where the curve of the full run falls to AdamW's "
        "loss. Rates decay until the end of a run, so a run planned to end there should be lower"
        f"{_lower_than_curves(results)}.",
        "- **Changes of one thing**: test loss minus that of the same run without the change, with the same seeds. "
        "These intervals are not corrected.",
        "- **Open**: not finished, so an optimizer may still improve.",
    ]  # fmt: skip
    lines += ["## Notes", "", *(line for note in notes for line in tables.wrapped(note))]
    lines += [
        "", "## Step and state at LLaMA-1B", "",
        "| | optimizer step in training, ms | over AdamW's training step | state GiB |", "|---|---|---|---|",
    ]  # fmt: skip
    for entry, one in cost.items():
        note, over = f" ({one.note})" if one.note else "", one.step_s / cost["adamw"].step_s - 1
        times = f"{1000 * one.optimizer_s:.0f} | {100 * over:+.1f} %"
        lines.append(f"| {NAMES[entry]}{note} | {times} | {one.state_gib:.2f} |")
    composed = (
        "A training step is computed as AdamW's forward and backward time plus each optimizer's own time, because the "
        "first varies by about 1 % between measurements (`results/h200-profile-llama-1b*.json`). Measured as a whole, "
        "a step with the paper's settings took 0.6 and 1.3 % longer than AdamW's, and one with the defaults, on "
        "another machine, 2.7 %."
    )
    small = (
        f"Small steps cost more: one of {few:,} tokens took {longer:.2f} times as long with COSMOS as with AdamW (one "
        "timed step, `results/h200-profile-llama-1b-forms.json`). A step of LLaMA-60M with 16,384 tokens, in the runs "
        f"of regime B, took {step_ratio(results, 'B'):.2f} times as long (medians, two runs on the GPU)."
    )
    lines += ["", *tables.wrapped(composed), "", *tables.wrapped(small)]
    lines += ["", "The step alone (`benchmarks.step`), median over the recorded runs of several commits:", ""]
    lines += ["| row | ms |", "|---|---|"]
    shown = ("cosmos", "cosmos-paper", "muon", "muon-torch", "adamw")
    alone = step_times()
    lines += [f"| {name} | {described(alone[name])} |" for name in shown]
    return "\n".join(lines) + "\n"


@contextmanager
def picture(target: Path, **layout: Any) -> Iterator[Any]:
    """Give axes in the colours of the lab's reports, and write them as an SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), TEXT)
    with plt.rc_context(style | {"svg.hashsalt": "evidence", "font.size": 9, "axes.titlesize": 9}):
        figure, axes = plt.subplots(**layout)
        yield axes
        for one in figure.axes:
            one.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, facecolor=GROUND, metadata={"Date": None})
        plt.close(figure)


def look(entry: str) -> dict[str, Any]:
    """Return how an optimizer is drawn: its colour, and a dash and a marker for readers who cannot tell colours."""
    one = LOOKS[entry]
    return {"color": one.light, "marker": one.marker, "linestyle": (0, one.dash) if one.dash else "-", "markersize": 5}


def draw(results: Mapping[str, Result], regime: str, target: Path) -> None:
    """Draw the last test perplexity of complete runs by their tokens, and bars of step time and state.

    An optimizer is drawn if its search has finished. The points of full runs are means over seeds. Between points the
    loss is linear in log tokens, so a line crosses AdamW's last perplexity at the share that the page has.
    """
    protocol, cost = Protocol(), costs()
    rows = best_rows(protocol, regime, results)
    shares = token_shares(protocol, regime, rows, results)
    with picture(target, ncols=3, figsize=(9, 3.1), width_ratios=(2.4, 1, 1)) as (left, middle, right):
        for entry in DRAWN:
            if protocol.best(regime, entry, losses(results))[1]:
                continue
            row = rows[entry]
            points = [(r["tokens"] / 1e6, r["test_ppl"]) for r in shorter_runs(protocol, regime, entry, results)]
            points.append((row.run["tokens"] / 1e6, math.exp(row.test_loss)))
            label = f"{NAMES[entry]}: {points[-1][1]:.1f}"
            if entry in shares:
                label += f" ({100 * shares[entry].share:.0f} % of the tokens)"
            left.plot(*zip(*points, strict=True), **look(entry), label=label)
            if entry == "adamw":
                left.axhline(points[-1][1], color=LOOKS[entry].light, linestyle=":", linewidth=1)
                note = {"xy": points[-1], "xytext": (0, 6), "textcoords": "offset points", "ha": "right"}
                left.annotate("AdamW's last value", **note)
        steps = protocol.regimes[regime].steps
        left.set(xscale="log", yscale="log", title=f"LLaMA-60M, {steps:,} steps, and shorter runs", ylim=(27, 43),
                 xlabel="million tokens of a run", ylabel="test perplexity at its end")  # fmt: skip
        for axis, ticks in ((left.xaxis, (25, 30, 35, 40, 45, 50)), (left.yaxis, (28, 30, 32, 34, 36, 38, 40, 42))):
            axis.set_ticks(ticks, list(map(str, ticks)))
        left.minorticks_off()
        left.legend(frameon=False, loc="lower left")
        for axes, title, values in (
            (middle, "Optimizer step, 1B, ms", {e: 1000 * cost[e].optimizer_s for e in WITH_BARS}),
            (right, "Optimizer state, 1B, GiB", {e: cost[e].state_gib for e in WITH_BARS}),
        ):
            bars = axes.barh([NAMES[e].split(",")[0] for e in values], list(values.values()),
                             color=[LOOKS[e].light for e in values])  # fmt: skip
            axes.bar_label(bars, fmt="%.0f" if axes is middle else "%.1f", padding=2, color=TEXT)
            axes.set(title=title, xticks=[], xlim=(0, 1.25 * max(values.values())))
            axes.invert_yaxis()


def outer_rates(results: Mapping[str, Result], regime: str, entry: str) -> list[tuple[float, float]]:
    """Return (rate, validation perplexity) of the runs that differ from an entry's best in the outer rate alone."""
    best = best_rows(Protocol(), regime, results)[entry].run
    same = ("model", "regime", "entry", "lr", "beta2", "seed", "share")
    found = [r for r in results.values() if not r.get("variant") and all(r[name] == best[name] for name in same)]
    return sorted((r["adam_lr"], r["val_ppl"]) for r in found if r["val_ppl"] is not None)


def draw_outer_rates(results: Mapping[str, Result], regime: str, target: Path) -> None:
    """Draw perplexity against the rate of embedding, head and norms, at each optimizer's best hidden rate and beta2."""
    lines = {entry: outer_rates(results, regime, entry) for entry in DRAWN}
    ticks = sorted({rate for points in lines.values() for rate, _ in points})
    steps = Protocol().regimes[regime].steps
    with picture(target, figsize=(6, 3.2)) as axes:
        for entry, points in lines.items():
            axes.plot(*zip(*points, strict=True), **look(entry), label=NAMES[entry])
        axes.set(xscale="log", title=f"LLaMA-60M, {steps:,} steps, one seed",
                 xlabel="learning rate of embedding, head and norms", ylabel="validation perplexity")  # fmt: skip
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, ncols=2)


def draw_curves(results: Mapping[str, Result], regime: str, target: Path) -> None:
    """Draw the test perplexity during the runs of a regime, and by how much each is above COSMOS's at the same step."""
    rows = best_rows(Protocol(), regime, results)
    curves = {entry: test_curve(rows[entry].run) for entry in DRAWN if entry in rows}
    ours = dict(curves["cosmos"])
    how = Protocol().regimes[regime]
    with picture(target, ncols=2, figsize=(9, 3.1)) as (left, right):
        for entry, points in curves.items():
            tokens = [t / 1e6 for t, _ in points]
            left.plot(tokens, [math.exp(loss) for _, loss in points], **look(entry), label=NAMES[entry])
            above = [100 * math.expm1(loss - ours[t]) for t, loss in points]
            right.plot(tokens, above, **look(entry))
        least = min(math.exp(points[-1][1]) for points in curves.values())
        left.set(title=f"LLaMA-60M, {how.steps:,} steps of {how.batch} x {how.seq_len}, one seed", yscale="log",
                 ylim=(0.95 * least, 4 * least), xlabel="million tokens", ylabel="test perplexity")  # fmt: skip
        left.set_yticks(ticks := (20, 30, 40, 60, 80), list(map(str, ticks)))
        left.minorticks_off()
        left.legend(frameon=False)
        right.set(title="above COSMOS at the same step, %", xlabel="million tokens", ylim=(-3, 25))


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the pictures."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--results", nargs="+", type=Path, default=sorted((ROOT / "results").glob("protocol-*.json")))
    p.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "evidence.md")
    p.add_argument("--picture", type=Path, default=ROOT / "docs" / "figures" / "evidence.svg")
    p.add_argument("--regime", default="B", help="of the picture")
    a = p.parse_args(arguments)
    results = read_results(a.results)
    draw(results, a.regime, a.picture)
    draw_outer_rates(results, a.regime, a.picture.with_name("outer-rates.svg"))
    draw_curves(results, "long", a.picture.with_name("long-run.svg"))
    text = report(results)
    a.page.parent.mkdir(parents=True, exist_ok=True)
    a.page.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
