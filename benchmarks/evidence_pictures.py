"""The pictures of the protocol's results: ends of runs with bars of costs, outer rates, and curves of the long runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.best_rows import best_rows, curve_on_test_text, shorter_runs, token_shares
from benchmarks.evidence_costs import costs
from benchmarks.evidence_tables import NAMES
from benchmarks.kept_runs import Result, losses
from benchmarks.protocol import Protocol
from cosmos_lab.report.style import KNOWN, THEMES

COMPARISON = Protocol()
DRAWN = ("adamw", "soap-f10", "muon", "normuon", "cosmos")
WITH_BARS = ("adamw", "soap-f10", "muon", "cosmos")  # NorMuon's step and state were not measured
LOOKS = {entry: KNOWN[COMPARISON.entries[entry].optimizer] for entry in DRAWN}
TEXT, GROUND = THEMES["light"]["soft"], THEMES["light"]["card"]


@contextmanager
def picture(target: Path, **layout: Any) -> Iterator[Any]:
    """Yield axes in the colours of the lab's reports, and save them as an SVG file."""
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


def draw_ends(results: Mapping[str, Result], target: Path) -> None:
    """Draw the last test perplexity of complete runs of regime B by their tokens, and bars of step time and state.

    An optimizer is drawn if its search has finished. The points of full runs are means over seeds. Between points the
    loss is linear in log tokens, so a line crosses AdamW's last perplexity at the share that the page has.
    """
    protocol, regime, cost = COMPARISON, "B", costs()
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
    best = best_rows(COMPARISON, regime, results)[entry].run
    same = ("model", "regime", "entry", "lr", "beta2", "seed", "share")
    found = [r for r in results.values() if not r.get("variant") and all(r[name] == best[name] for name in same)]
    return sorted((r["adam_lr"], r["val_ppl"]) for r in found if r["val_ppl"] is not None)


def draw_outer_rates(results: Mapping[str, Result], regime: str, target: Path) -> None:
    """Draw perplexity against the rate of embedding, head and norms, at each optimizer's best hidden rate and beta2."""
    lines = {entry: outer_rates(results, regime, entry) for entry in DRAWN}
    ticks = sorted({rate for points in lines.values() for rate, _ in points})
    steps = COMPARISON.regimes[regime].steps
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
    rows = best_rows(COMPARISON, regime, results)
    curves = {entry: curve_on_test_text(rows[entry].run) for entry in DRAWN if entry in rows}
    ours = dict(curves["cosmos"])
    how = COMPARISON.regimes[regime]
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
