"""From the kept results to what people compare: settings, seeds, differences, and tokens to AdamW's loss.

    python -m benchmarks.evidence      # writes docs/results/evidence.md and three pictures in docs/figures

Tokens to AdamW's loss come from shorter runs with complete schedules (`best_rows.token_shares`). An optimizer without
such runs has an upper bound, read from the curves of its full runs: the point at which a curve first falls below
AdamW's last value, on the same test tokens. The rate of these runs decays until the very end, so a run that was planned
to end at the crossing would be lower there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks import evidence_tables as tables
from benchmarks.best_rows import Row, best_rows, curve_shares, protocols, token_shares
from benchmarks.evidence_costs import costs, described, small_step, step_ratio, step_times
from benchmarks.evidence_pictures import draw_curves, draw_ends, draw_outer_rates
from benchmarks.evidence_tables import NAMES
from benchmarks.kept_runs import Result, read_results
from benchmarks.protocol import Protocol

ROOT = Path(__file__).resolve().parents[1]
COMPARISON = Protocol()

INTRODUCTION = (
    "The rules are in [the protocol](../protocol.md), and what the tables show is in [the findings](findings.md). The "
    "hidden rate is `lr`, the outer rate `adam_lr`. How to read the tables: [below](#notes)."
)
NOTES = (
    "- **Bold**: in the tables of a search, the best value of each row.",
    "- **Runs of the search**: all runs with seed 0 at the full length, of any setting.",
    "- **Difference**: test loss minus that of COSMOS, the mean over pairs of runs with the same seed, with its 95 % "
    "interval by Student's t. The corrected interval (Bonferroni) counts every difference of this model that has an "
    "interval in these tables, in all regimes. Seed 0 was also used to choose the settings, so the mean without it is "
    "printed.",
    "- **Tokens**: the share of AdamW's tokens with which an optimizer reaches AdamW's final test loss. It comes from "
    "shorter runs with complete schedules (0.45, 0.6 and 0.75 of the steps, seed 0), by interpolation. Their rates are "
    "those tuned for the full length.",
    "- **Interval**: 95 %, from the differences to AdamW at the full length over seeds. AdamW's own spread is part of "
    "every interval and moves all shares together, so compare two optimizers by their losses. The noise of the shorter "
    "runs is not in it: a standard deviation of about 0.01.",
    "- **At most**: there are no shorter runs, so the share is where the curve of the full run falls to AdamW's loss. "
    "Rates decay until the end of a run, so a run planned to end there should be lower{by_curves}.",
    "- **Changes of one thing**: test loss minus that of the same run without the change, with the same seeds. These "
    "intervals are not corrected.",
    "- **Open**: not finished, so an optimizer may still improve.",
)
COMPOSED = (
    "A training step is computed as AdamW's forward and backward time plus each optimizer's own time, because the "
    "first varies by about 1 % between measurements (`results/h200-profile-llama-1b*.json`). Measured as a whole, a "
    "step with the paper's settings took 0.6 and 1.3 % longer than AdamW's, and one with the defaults, on another "
    "machine, 2.7 %."
)
SMALL_STEPS = (
    "Small steps cost more: one of {tokens:,} tokens took {at_1b:.2f} times as long with COSMOS as with AdamW (one "
    "timed step, `results/h200-profile-llama-1b-forms.json`). A step of LLaMA-60M with 16,384 tokens, in the runs of "
    "regime B, took {at_60m:.2f} times as long (medians, two runs on the GPU)."
)


def _lower_than_curves(results: Mapping[str, Result]) -> str:
    """Return by how much the shares of shorter runs are below those of curves, for optimizers that have both."""
    rows = best_rows(COMPARISON, "B", results)
    measured, bounds = token_shares(COMPARISON, "B", rows, results), curve_shares(rows)
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
    if len(rows) > 1 and ("cosmos" in rows or "adamw" in rows):
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
        if r["regime"] not in COMPARISON.regimes and not r.get("variant"):
            cells.setdefault((r["model"], r["steps"], r["batch"]), []).append(r)
    lines = []
    for (model, steps, batch), runs in sorted(cells.items()):
        lines += [f"{model}, {steps:,} steps of {batch} x {runs[0]['seq_len']}:", "", *tables.settings_table(runs)]
    return ["## Runs for a rule of rates", "", *lines] if lines else []


def report(results: Mapping[str, Result]) -> str:
    """Return the page: results of each model and regime, how to read them, and step times."""
    lines = ["# Results of the protocol", "", "Written by `python -m benchmarks.evidence`; do not edit.", ""]
    lines += [*tables.wrapped(INTRODUCTION), ""]
    for protocol in protocols(results):
        for regime in protocol.regimes:
            lines += regime_part(protocol, regime, results)
    lines += rate_runs_part(results)
    by_curves = _lower_than_curves(results)
    notes = (tables.wrapped(note.format(by_curves=by_curves)) for note in NOTES)
    lines += ["## Notes", "", *(line for note in notes for line in note), ""]
    return "\n".join(lines + costs_part(results)) + "\n"


def costs_part(results: Mapping[str, Result]) -> list[str]:
    """Return what optimizers cost at LLaMA-1B: a step in training, the state, and a step alone."""
    cost, alone, (tokens, at_1b) = costs(), step_times(), small_step()
    head = ["optimizer", "its step in training, ms", "over AdamW's training step", "state GiB"]
    rows = []
    for entry, one in cost.items():
        name = f"{NAMES[entry]} ({one.note})" if one.note else NAMES[entry]
        over = 100 * (one.step_s / cost["adamw"].step_s - 1)
        rows.append([name, f"{1000 * one.optimizer_s:.0f}", f"{over:+.1f} %", f"{one.state_gib:.2f}"])
    at_60m = step_ratio(results, COMPARISON.model, "B")
    lines = ["## Step and state at LLaMA-1B", "", *tables.markdown(head, rows), *tables.wrapped(COMPOSED), ""]
    lines += [*tables.wrapped(SMALL_STEPS.format(tokens=tokens, at_1b=at_1b, at_60m=at_60m)), ""]
    lines += ["The step alone (`benchmarks.step`), median over the recorded runs of several commits:", ""]
    shown = ("cosmos", "cosmos-paper", "muon", "muon-torch", "adamw")
    return lines + tables.markdown(["row", "ms"], [[name, described(alone[name])] for name in shown])[:-1]


def main(arguments: list[str] | None = None) -> int:
    """Write the page and the pictures."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--results", nargs="+", type=Path, default=sorted((ROOT / "results").glob("protocol-*.json")))
    p.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "evidence.md")
    p.add_argument("--pictures", type=Path, default=ROOT / "docs" / "figures", help="their folder")
    a = p.parse_args(arguments)
    results = read_results(a.results)
    draw_ends(results, a.pictures / "evidence.svg")
    draw_outer_rates(results, "B", a.pictures / "outer-rates.svg")
    draw_curves(results, "long", a.pictures / "long-run.svg")
    text = report(results)
    a.page.parent.mkdir(parents=True, exist_ok=True)
    a.page.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
