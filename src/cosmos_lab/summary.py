"""A run's result, computed from its log alone, so that a resumed run has the same one."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from cosmos_lab import runlog
from cosmos_lab.config import RunConfig

_FINAL_SHARE = 0.05  # the final training loss is the mean over this share of the steps: single batches are noisy


def summarize(folder: Path, status: str, config: RunConfig) -> dict[str, Any]:
    """A run's result, from its log: rates are medians over log lines, final_train_loss a mean over the last 5 %."""
    records = list(runlog.read_metrics(folder))
    losses = [r for r in records if "loss" in r]
    values = [r for r in records if "val_loss" in r]
    last = losses[-1]
    late = [r["loss"] for r in losses if r["step"] > last["step"] - max(1, _FINAL_SHARE * config.training.steps)]
    finite = [r["val_loss"] for r in values if r["val_loss"] is not None]
    speed = _median([r["tokens_per_s"] for r in losses])
    return {
        "status": status,
        "final_val_loss": values[-1]["val_loss"],
        "final_val_ppl": values[-1]["val_ppl"],
        "best_val_loss": min(finite, default=None),
        "final_train_loss": None if None in late else sum(late) / len(late),
        "tokens": last["tokens"],
        "steps": last["step"],
        "time": last["time"],
        "tokens_per_s": speed,
        "step_ms": 1e3 * config.training.batch * config.data.seq_len / speed if speed else None,
        "optimizer_ms": _median([r["optimizer_ms"] for r in losses]),
        "mfu": _median([r["mfu"] for r in losses]),
    }


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
