"""``cosmos-lab demo``: the paper's comparison in miniature, on any machine, in a few minutes.

A tiny LLaMA learns the source text of Python's standard library with Adam, MUON, SOAP and COSMOS. Each optimizer has
its best rate from a sweep of the same size for each, made with ``python -m cosmos_lab.demo`` and shown in docs/lab.md.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.display import TrainDisplay, format_table
from cosmos_lab.grid.compare import compare
from cosmos_lab.recipes.variants import label
from cosmos_lab.report import write_report
from cosmos_lab.run.train import train

# Rate of the hidden matrices found by the sweep, and the six rates it tried for each: the paper's, extended upwards.
RATES = {"adam": 2e-3, "muon": 1e-3, "soap": 4e-3, "cosmos": 1e-3}
SWEEP = {
    "adam": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "muon": (2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "soap": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "cosmos": (2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}
ADAM_LR = 2e-3  # embedding and head of MUON and COSMOS: Adam's best rate, as in the paper
NAMES = {"adam": "Adam", "muon": "MUON", "soap": "SOAP", "cosmos": "COSMOS"}


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does."""

    out: str = "runs/demo"
    """Folder of the runs and the report."""
    steps: int = 300
    """Optimizer steps of each run."""
    data: str = "embedded"
    """The text: that of this machine's Python, or token shards as for ``cosmos-lab train``."""
    seed: int = 0
    """Seed of weights and data order."""
    fresh: bool = True
    """Start over rather than show the runs that are there."""


def demo_run(optimizer: str, lr: float, config: DemoConfig) -> RunConfig:
    """One run of the demo: 128 wide, 2 blocks, 8 sequences of 128 tokens a step."""
    one_rate = optimizer in ("adam", "soap")
    return RunConfig().replace(
        model="tiny", data=config.data, seq_len=128, batch=8, steps=config.steps, seed=config.seed,
        optimizer=optimizer, lr=lr, adam_lr=lr if one_rate else ADAM_LR,
        log_every=5, val_every=150, val_tokens=65_536, diagnostics_every=25, checkpoint_every=0, device="cpu",
        out=config.out, recipe="demo", name=f"{label({'optimizer': optimizer, 'lr': lr})}-s{config.seed}",
    )  # fmt: skip


def demo(config: DemoConfig | None = None) -> dict[str, Any]:
    """Train the four, print the table, write the report and say in one sentence what was seen."""
    config = config or DemoConfig()
    start = time.perf_counter()
    print("A tiny LLaMA on the text of Python's standard library, four optimizers, each at its best rate of a sweep.")
    print("The first run prepares the text and its tokenizer.", flush=True)
    summaries: dict[str, dict[str, Any]] = {}
    folders = []
    for optimizer, lr in RATES.items():
        run = demo_run(optimizer, lr, config)
        folder = Path(config.out) / run.run_name
        if config.fresh:
            _forget(folder)
        with TrainDisplay(run) as display:
            summaries[optimizer] = train(run, progress=display)
        folders.append(folder)
    page = write_report(folders, Path(config.out) / "report", title="cosmos-lab demo")
    head = ("", "lr", "val loss", "val ppl", "step ms", "optimizer ms", "state MiB")
    print("\n" + format_table(head, _lines(summaries)))
    print(f"\n{sentence(summaries)}")
    print(f"Report: {page}   ({time.perf_counter() - start:.0f} s)")
    return {"summaries": summaries, "report": str(page), "sentence": sentence(summaries)}


def _forget(folder: Path) -> None:
    """Remove an earlier demo's files, and only those."""
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _lines(summaries: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            NAMES[name],
            f"{RATES[name]:g}",
            _number(s["final_val_loss"], ".4f"),
            _number(s["final_val_ppl"], ".2f"),
            _number(s["step_ms"], ".1f"),
            _number(s["optimizer_ms"], ".1f"),
            f"{s['state_bytes'] / 2**20:.1f}",
        )
        for name, s in summaries.items()
    ]


def _number(value: float | None, form: str) -> str:
    """A dash for what was not measured: the first step warms up and is not timed, a diverged run has no loss."""
    return "-" if value is None else format(value, form)


def sentence(summaries: dict[str, dict[str, Any]]) -> str:
    """What was seen, whatever it is."""
    ended = [name for name, summary in summaries.items() if summary["final_val_ppl"] is not None]
    if not ended:
        return "No run ended with a finite validation loss."
    order = sorted(ended, key=lambda name: summaries[name]["final_val_loss"])
    first, last = order[0], order[-1]
    gap = summaries[first]["final_val_ppl"] / summaries[last]["final_val_ppl"] - 1
    tokens = summaries[first]["tokens"]
    ranked = ", ".join(f"{NAMES[name]} {summaries[name]['final_val_ppl']:.2f}" for name in order)
    return (
        f"After {tokens:,} tokens {NAMES[first]} has the lowest validation perplexity, {-100 * gap:.1f} % below "
        f"{NAMES[last]}'s ({ranked}); one seed of a tiny model."
    )


def sweep(out: str = "runs/demo-sweep", seeds: Sequence[int] = (0,), steps: int = DemoConfig.steps) -> dict[str, Any]:
    """The sweep behind ``RATES``: six rates for each optimizer at the demo's own length."""
    configs = [DemoConfig(out=out, seed=seed, steps=steps) for seed in seeds]
    runs = [demo_run(name, lr, c) for name, lrs in SWEEP.items() for lr in lrs for c in configs]
    return compare(runs, out=out)


if __name__ == "__main__":
    sweep(sys.argv[1] if len(sys.argv) > 1 else "runs/demo-sweep")
