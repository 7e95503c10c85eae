"""The table of fine-tuning runs: the best rate of each optimizer, and what the base of another optimizer costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.finetune_training import METHODS, OPTIMIZER_NAMES, Result


def read(out: Path) -> dict[str, Result]:
    """Return the finished runs by id."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))}


def table(results: Mapping[str, Result]) -> str:
    """Return the best run of each optimizer by base and method, chosen on the validation half of the text."""
    lines = [f"{'base':8}{'method':8}{'optimizer':11}{'best lr':>9}{'loss':>8}{'- AdamW':>9}{'old text':>10}  by rate"]
    for base in dict.fromkeys(r["base"] for r in results.values()):
        if start := results.get(f"base-{base}"):
            lines.append(f"{base:8}{'none':8}{'':11}{'':9}{start['test_loss']:8.4f}{'':9}{start['base_loss']:10.4f}")
        for method in METHODS:
            own = [r for r in results.values() if (r["base"], r.get("method")) == (base, method)]
            for times in dict.fromkeys(r.get("outer_times") for r in own):
                lines += [f"embedding, head and norms at {times:g} times lr:"] if times is not None else []
                lines += _rows([r for r in own if r.get("outer_times") == times])
        if len({r["weights"] for r in results.values() if r["base"] == base and "weights" in r}) > 1:
            lines.append(f"! the runs on base {base} started from different weights: remove OUT and begin again")
    lines += ["", "loss: test half of the new text at the rate that is best on its validation half; old text: loss on",
              "the held-out base text, which shows forgetting; by rate: validation losses; *: best rate at an end",
              "", verdict(results)]  # fmt: skip
    return "\n".join(lines)


def best_of(runs: Sequence[Result]) -> Result | None:
    """Return the run with the lowest validation loss, None if all diverged."""
    finite = [r for r in runs if r["val_loss"] is not None]
    return min(finite, key=lambda r: r["val_loss"]) if finite else None


def _rows(runs: Sequence[Result]) -> list[str]:
    """Return the lines of one base and method."""
    lines, adamw = [], best_of([r for r in runs if r["optimizer"] == "adamw"])
    for name in OPTIMIZER_NAMES:
        own = sorted((r for r in runs if r["optimizer"] == name), key=lambda r: r["lr"])
        best = best_of(own)
        if best is None:
            continue
        gap = f"{best['test_loss'] - adamw['test_loss']:+9.4f}" if adamw else f"{'':9}"
        rate = f"{best['lr']:g}" + ("*" if best in (own[0], own[-1]) else "")
        shown = " ".join("diverged" if r["val_loss"] is None else f"{r['val_loss']:.4f}" for r in own)
        head = f"{best['base']:8}{best['method']:8}{name:11}{rate:>9}"
        lines.append(f"{head}{best['test_loss']:8.4f}{gap}{best['base_loss']:10.4f}  {shown}")
    return lines


def verdict(results: Mapping[str, Result]) -> str:
    """Say by how much Muon and COSMOS differ from AdamW on AdamW's base, and on their own base if there is one."""
    lines = []
    for method in METHODS:
        for name in OPTIMIZER_NAMES[1:]:
            gaps = {}
            for base in ("adamw", name):
                runs = [r for r in results.values() if (r["base"], r.get("method")) == (base, method)]
                runs = [r for r in runs if r.get("outer_times") is None]
                mine, theirs = (best_of([r for r in runs if r["optimizer"] == o]) for o in (name, "adamw"))
                if mine and theirs:
                    gaps[base] = mine["test_loss"] - theirs["test_loss"]
            if "adamw" in gaps:
                line = f"{method}: {name} minus AdamW is {gaps['adamw']:+.4f} on AdamW's base"
                if name in gaps:
                    line += f", {gaps[name]:+.4f} on its own; mismatch {gaps['adamw'] - gaps[name]:+.4f}"
                lines.append(line)
    return "\n".join(lines)
