"""Run ``cosmos-lab demo``: the paper's comparison in miniature, on any machine, in a few minutes.

A tiny LLaMA learns the source text of Python's standard library with AdamW, Muon, SOAP and COSMOS. Each optimizer runs
at its best rate from a sweep of the same size for each, made with ``python -m cosmos_lab.demo`` and shown in
docs/lab.md.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.grid.compare import compare
from cosmos_lab.recipes.variants import label
from cosmos_lab.results.reading import CONFIG, METRICS, SUMMARY

# Rate of the hidden matrices found by the sweep, and the six rates it tried for each: the paper's, extended upwards.
RATES = {"adam": 2e-3, "muon": 1e-3, "soap": 4e-3, "cosmos": 1e-3}
SWEEP = {
    "adam": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "muon": (2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "soap": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "cosmos": (2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}
ADAM_LR = 2e-3  # embedding and head of Muon and COSMOS: AdamW's best rate, as in the paper


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does."""

    out: str = "runs/demo"  # Folder of the runs and the report.
    steps: int = 300  # Optimizer steps of each run.
    data: str = "embedded"  # The text: that of this machine's Python, or token shards as for ``cosmos-lab train``.
    seed: int = 0  # Seed of weights and data order.
    fresh: bool = True  # Train again instead of showing the runs of an earlier demo.


def demo_run(optimizer: str, lr: float, config: DemoConfig) -> RunConfig:
    """Return one run of the demo: 128 wide, 2 blocks, 8 sequences of 128 tokens a step."""
    one_rate = optimizer in ("adam", "soap")
    return RunConfig().replace(
        model="tiny", data=config.data, seq_len=128, batch=8, steps=config.steps, seed=config.seed,
        optimizer=optimizer, lr=lr, adam_lr=lr if one_rate else ADAM_LR,
        log_every=5, val_every=150, val_tokens=65_536, diagnostics_every=25, checkpoint_every=0, device="cpu",
        out=config.out, recipe="demo", name=f"{label({'optimizer': optimizer, 'lr': lr})}-s{config.seed}",
    )  # fmt: skip


def demo(config: DemoConfig | None = None) -> dict[str, Any]:
    """Compare the four optimizers, and return what ``compare`` returns."""
    config = config or DemoConfig()
    start = time.perf_counter()
    print("A tiny LLaMA on the text of Python's standard library, trained with AdamW, Muon, SOAP and COSMOS,")
    print("each at its best rate of a sweep. The first run prepares the text and its tokenizer.", flush=True)
    runs = [demo_run(name, lr, config) for name, lr in RATES.items()]
    if config.fresh:
        for run in runs:  # remove the files of an earlier demo, and only those
            for name in (CONFIG, METRICS, SUMMARY):
                (run.folder / name).unlink(missing_ok=True)
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    result = compare(runs)
    if any(row["failures"] for row in result["rows"]):
        raise ValueError("a run of the demo failed (see the table)")
    print(f"One seed of a tiny model, {time.perf_counter() - start:.0f} s.")
    return result


def sweep(out: str = "runs/demo-sweep", seeds: Sequence[int] = (0,), steps: int = DemoConfig.steps) -> dict[str, Any]:
    """Make the sweep behind ``RATES``: six rates for each optimizer with the demo's number of steps."""
    configs = [DemoConfig(out=out, seed=seed, steps=steps) for seed in seeds]
    return compare([demo_run(name, lr, c) for name, lrs in SWEEP.items() for lr in lrs for c in configs])


if __name__ == "__main__":
    sweep(sys.argv[1] if len(sys.argv) > 1 else "runs/demo-sweep")
