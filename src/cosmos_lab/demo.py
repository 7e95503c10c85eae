"""Run ``cosmos-lab demo``: the paper's comparison in miniature, on any machine, in a few minutes.

A tiny LLaMA learns the source text of Python's standard library with AdamW, Muon, SOAP and COSMOS. Each optimizer runs
at the best pair of rates of one grid, the same for all four: results/demo-tuning.json, by ``benchmarks.demo_tuning``.
"""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.grid.compare import compare
from cosmos_lab.report import write_report
from cosmos_lab.results.reading import CONFIG, METRICS, SUMMARY
from cosmos_lab.run import build, checkpoint

# Rates of the hidden matrices, and of embedding, head and norms.
RATES = {"adam": (2e-3, 6.4e-2), "muon": (1e-3, 6.4e-2), "soap": (2e-3, 6.4e-2), "cosmos": (1e-3, 6.4e-2)}
NAMES = {"adam": "AdamW", "muon": "Muon", "soap": "SOAP", "cosmos": "COSMOS"}
NOISE = 0.025  # standard deviation of the final loss over seeds, from the same file
VALIDATIONS = 12  # of each run: enough for a curve


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does."""

    out: str = "runs/demo"  # Folder of the runs and the report.
    steps: int = 300  # Optimizer steps of each run.
    data: str = "embedded"  # The text: that of this machine's Python, or token shards as for `cosmos-lab train`.
    seed: int = 0  # Seed of weights and data order.
    fresh: bool = True  # Train again instead of showing the runs of an earlier demo.


def demo_run(optimizer: str, hidden_lr: float, embedding_lr: float, config: DemoConfig) -> RunConfig:
    """Return one run of the demo: 128 wide, 2 blocks, 8 sequences of 128 tokens a step.

    Every optimizer has two rates: one for the hidden matrices, one for embedding, head and norms. The last weights
    are kept, so that ``export`` and ``evaluate`` can follow.
    """
    return RunConfig().replace(
        model="tiny", data=config.data, seq_len=128, batch=8, steps=config.steps, seed=config.seed,
        optimizer=optimizer, lr=hidden_lr, adam_lr=embedding_lr,
        log_every=5, val_every=max(1, config.steps // VALIDATIONS), val_tokens=65_536, diagnostics_every=10,
        checkpoint_every=config.steps, keep=1, device="cpu", out=config.out, recipe="demo",
        name=f"demo-{optimizer}-lr{hidden_lr:g}-adam{embedding_lr:g}-s{config.seed}",
    )  # fmt: skip


def demo(config: DemoConfig | None = None) -> dict[str, Any]:
    """Compare the four optimizers, and return what ``compare`` returns."""
    config = config or DemoConfig()
    start = time.perf_counter()
    runs = {name: demo_run(name, *rates, config) for name, rates in RATES.items()}
    text = "the source text of this machine's Python" if config.data == "embedded" else config.data
    minutes = max(1, round(config.steps / 100))
    print(
        f"Trains a tiny LLaMA on {text}, {len(runs)} times: with {', '.join(NAMES.values())}.\n"
        f"{config.steps} steps each, about {minutes} minute{'s' * (minutes > 1)} in all on two cores.\n"
        f"Writes about 70 MB into {config.out}: logs, weights and a report.",
        flush=True,
    )
    for run in runs.values():  # before anything of an earlier demo is removed
        run.check()
        build.open_text(run)
    if config.fresh:
        for run in runs.values():  # remove the files of an earlier demo, and only those
            for name in (CONFIG, METRICS, SUMMARY):
                (run.folder / name).unlink(missing_ok=True)
            shutil.rmtree(checkpoint.folder_of(run.folder), ignore_errors=True)
    result = compare(list(runs.values()), report=False)
    if any(row["failures"] for row in result["rows"]):
        raise ValueError("a run of the demo failed (see the table)")
    folders = [run.folder for run in runs.values()]
    report = write_report(folders, Path(config.out) / "report", title="Demo", noise=NOISE)
    seconds = time.perf_counter() - start
    print(f"\n{report.summary}\nTook {seconds:.0f} s.\n\n{_next_steps(report.page, runs['cosmos'])}")
    return result


def _next_steps(page: Path, run: RunConfig) -> str:
    """Return a link to the report and three commands to continue with."""
    folder, model = (shlex.quote(str(path)) for path in (run.folder, Path(run.logging.out) / "model"))
    return (
        f"Report: {page.resolve().as_uri()}\n"
        "Next:\n"
        f"  cosmos-lab evaluate {folder}   # loss by position\n"
        f"  cosmos-lab export {folder} -o {model}   # for transformers\n"
        "  cosmos-lab compare tiny --optimizers adam,cosmos --lrs 1e-3,2e-3   # your own rates"
    )
