"""What a grid of runs has shown: one row a variant, mean and spread over its seeds, the best of each optimizer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.display import format_table
from cosmos_lab.io import read_json
from cosmos_lab.run import checkpoint, run_log

NOT_STARTED, UNFINISHED = "not started", "unfinished"
# What a run is called by in the table, beside optimizer and rate, where the runs differ in it.
_QUIET = {"optimizer", "lr", "seed", "name", "out", "recipe"}


def rank(runs: Sequence[RunConfig], metric: str, failures: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Rows of the runs' variants with mean and spread over seeds, the best of each optimizer marked.

    Args:
        runs: as they were asked for; their numbers are read from their folders.
        metric: the number of the summary that ranks them; less is better.
        failures: why runs failed, by name; any other run without a summary was not started, or left with a checkpoint.
    """
    differing = _differing(runs)
    groups: dict[tuple[Any, ...], list[RunConfig]] = {}
    for run in runs:
        key = (run.optimizer.optimizer, run.optimizer.lr, *(run.get(name) for name in differing))
        groups.setdefault(key, []).append(run)
    rows = [_row(members, metric, differing, failures or {}) for members in groups.values()]
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = best.get(row["optimizer"])
        if row["mean"] is not None and (known is None or row["mean"] < known["mean"]):
            best[row["optimizer"]] = row
    for row in best.values():
        row["best"] = True
    return {
        "recipe": runs[0].logging.recipe,
        "metric": metric,
        **_made_with(runs),
        "rows": rows,
        "best": {name: row["label"] for name, row in best.items()},
    }


def _made_with(runs: Sequence[RunConfig]) -> dict[str, Any]:
    """Data, date, commit and versions as the run folders have them, maybe older than this call; lists if several."""
    made = [read_json(run_log.run_folder(run) / run_log.CONFIG) or {} for run in runs]
    texts = [about["data"] for about in made if isinstance(about.get("data"), dict)]
    if not all("val_fingerprint" in text for text in texts):  # older runs do not say
        for text in texts:
            text.pop("val_fingerprint", None)
    found: dict[str, Any] = {}
    for name in ("data", "date", "commit", "versions"):
        values: list[Any] = []
        for about in made:
            if about.get(name) is not None and about[name] not in values:
                values.append(about[name])
        found[name] = values[0] if len(values) == 1 else values or None
    return found


def _differing(runs: Sequence[RunConfig]) -> list[str]:
    """Fields in which runs of the same optimizer differ, beside rate and seed; adam_lr where it does not follow lr."""

    def differ(name: str) -> bool:
        values: dict[Any, set[Any]] = {}
        for run in runs:
            alike = (run.optimizer.optimizer, run.optimizer.lr if name == "adam_lr" else None)
            values.setdefault(alike, set()).add(run.get(name))
        return any(len(found) > 1 for found in values.values())

    return [name for name in runs[0].flat() if name not in _QUIET and differ(name)]


def _row(
    members: Sequence[RunConfig], metric: str, differing: Sequence[str], failures: Mapping[str, str]
) -> dict[str, Any]:
    first = members[0]
    summaries = [run_log.read_summary(run_log.run_folder(run)) or _missing(run, failures) for run in members]
    values = [summary.get(metric) for summary in summaries]
    known = [value for value in values if value is not None]
    whole = len(known) == len(values)
    extras = {name: list(v) if isinstance(v := first.get(name), tuple) else v for name in differing}
    own = (_named(name, value) for name, value in extras.items() if name != "options" and value is not None)
    options = first.optimizer.options if "options" in differing else ()
    label = " ".join([first.optimizer.optimizer, f"lr {first.optimizer.lr:g}", *own, *options])
    return {
        "label": label,
        "optimizer": first.optimizer.optimizer,
        "lr": first.optimizer.lr,
        "adam_lr": first.optimizer.adam_lr,
        "rank": first.optimizer.rank,
        "gamma": first.optimizer.gamma,
        "options": list(first.optimizer.options),
        **extras,
        "seeds": [run.training.seed for run in members],
        "runs": [run.run_name for run in members],
        "status": [summary["status"] for summary in summaries],
        "values": values,
        "mean": statistics.fmean(known) if known and whole else None,
        "spread": statistics.stdev(known) if len(known) > 1 and whole else None,
        "final_val_ppl": [summary.get("final_val_ppl") for summary in summaries],
        "step_ms": [summary.get("step_ms") for summary in summaries],
        "optimizer_ms": [summary.get("optimizer_ms") for summary in summaries],
        "state_bytes": [summary.get("state_bytes") for summary in summaries],
        "val_losses": [_curve(run) for run in members],
        "failures": [failures[run.run_name] for run in members if run.run_name in failures],
        "best": False,
    }


def _named(name: str, value: Any) -> str:
    """gamma 0.36, not 0.36000000000000004."""
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _curve(run: RunConfig) -> list[list[Any]]:
    """[step, validation loss] of all validations."""
    records = run_log.read_metrics(run_log.run_folder(run))
    return [[record["step"], record["val_loss"]] for record in records if "val_loss" in record]


def _missing(run: RunConfig, failures: Mapping[str, str]) -> dict[str, Any]:
    """In place of the summary that a run has not written."""
    if run.run_name in failures:
        return {"status": "failed"}
    begun = checkpoint.latest(run_log.run_folder(run) / "checkpoints") is not None
    return {"status": UNFINISHED if begun else NOT_STARTED}


def format_result(result: Mapping[str, Any]) -> str:
    """The table that ends a comparison; ``*`` marks the best variant of each optimizer."""
    lines = []
    for row in result["rows"]:
        mean = "-" if row["mean"] is None else f"{row['mean']:.4f}"
        mean += "" if row["spread"] is None else f" ± {row['spread']:.4f}"
        ppl = [value for value in row["final_val_ppl"] if value is not None and row["mean"] is not None]
        state = [value for value in row["state_bytes"] if value]
        lines.append(
            (
                row["label"],
                "*" if row["best"] else "",
                mean,
                f"{statistics.fmean(ppl):.2f}" if ppl else "-",
                _average(row["step_ms"]),
                _average(row["optimizer_ms"]),
                f"{state[0] / 2**20:,.1f}" if state else "-",
                ", ".join([*sorted(set(row["status"]) - {"done"}), *row["failures"]]),
            )
        )
    head = ("run", "best", result["metric"], "val ppl", "step ms", "optimizer ms", "state MiB", "")
    table = format_table(head, lines, left=(0, 7))
    texts = result.get("data")
    if isinstance(texts, list):
        sizes = " and ".join(_text(about) for about in texts)
        table += f"\nThese runs do not compare: they were trained on different data, {sizes}"
    return table


def _text(about: Mapping[str, Any]) -> str:
    """A text by its size and hash, and that of what it was validated on."""
    val = f", validated on {about['val_fingerprint']}" if "val_fingerprint" in about else ""
    return f"{about['tokens']:,} tokens (hash {about['fingerprint']}{val})"


def _average(values: Sequence[float | None]) -> str:
    known = [value for value in values if value]
    return f"{statistics.fmean(known):,.1f}" if known else "-"
