"""What optimizers cost at LLaMA-1B: seconds of a step and bytes of state, from the kept measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import Result

ROOT = Path(__file__).resolve().parents[1]
# In benchmarks/results: measurements of the step in float32 that count, of several commits.
STEP_FILES = ("h200-llama-1b", "h200-llama-1b-defaults", "h200-llama-1b-defaults-later", "h200-llama-1b-int8",
              "h200-llama-1b-memory", "h200-llama-1b-memory-later", "h200-redesign")  # fmt: skip


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


def step_ratio(results: Mapping[str, Result], model: str, regime: str) -> float:
    """Return the median time of a training step with COSMOS over AdamW's, in a model's full runs of a regime."""

    def median(entry: str) -> float:
        names = ("regime", "entry", "share", "model")
        wanted = (regime, entry, 1, model)
        mine = (r for r in results.values() if tuple(r[name] for name in names) == wanted and not r.get("variant"))
        return statistics.median(r["step_ms"] for r in mine)

    return median("cosmos") / median("adamw")
