"""A run's result, computed from its log only, so that a resumed run has the same one."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.run.run_folder import read_metrics

_FINAL_SHARE = 0.05  # the final training loss is the mean over this share of the steps: single batches are noisy


def begin_of_final(steps: int) -> int:
    """Return the last step that does not count for the final training loss."""
    return math.floor(steps - max(1, _FINAL_SHARE * steps))


def summarize(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Compute a run's result from its log: rates are medians over log lines, final_train_loss is over the last 5 %."""
    records = list(read_metrics(folder))
    losses = [r for r in records if "loss" in r]
    values = [r for r in records if "val_loss" in r]
    last = losses[-1]
    begin = last["step"] - config.training.steps + begin_of_final(config.training.steps)
    # A line is the mean of the steps since the one before it.
    before = [0, *(r["step"] for r in losses)]
    late = [(r["loss"], r["step"] - b) for r, b in zip(losses, before, strict=False) if r["step"] > begin]
    finite = [r["val_loss"] for r in values if r["val_loss"] is not None]
    speed = _median([r["tokens_per_s"] for r in losses])
    return {
        "final_val_loss": values[-1]["val_loss"],
        "final_val_ppl": values[-1]["val_ppl"],
        "best_val_loss": min(finite, default=None),
        "final_train_loss": _mean(late),
        "tokens": last["tokens"],
        "steps": last["step"],
        "time": last["time"],
        "tokens_per_s": speed,
        "step_ms": 1e3 * config.training.batch * config.data.seq_len / speed if speed else None,
        "optimizer_ms": _median([r["optimizer_ms"] for r in losses]),
        "mfu": _median([r["mfu"] for r in losses]),
    }


def _mean(lines: list[tuple[float | None, int]]) -> float | None:
    """Average losses, weighted by the number of steps of each; None if one is not finite."""
    known = [(loss, count) for loss, count in lines if loss is not None]
    if len(known) < len(lines):
        return None
    return sum(loss * count for loss, count in known) / sum(count for _, count in known)


def _median(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None
