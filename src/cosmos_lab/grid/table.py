"""Tabulate a grid of runs: one row per variant, mean and spread over its seeds, the best of each optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.formatting import format_rate, format_table
from cosmos_lab.results.ranking import Group, at_edge, best_of, group_runs
from cosmos_lab.results.reading import Run, Status, read_run


def table_of(runs: Sequence[RunConfig], metric: str, failures: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read the runs' folders; return a row per variant with mean and spread over seeds, each optimizer's best marked.

    ``failures`` says why runs failed, by name; any other run without a summary is unfinished or was not started.
    """
    found = [_read(run, failures or {}) for run in runs]
    groups = group_runs(found)
    best = best_of(groups, metric, lambda group: group.optimizer)
    rows = [
        _row(group, metric, failures or {})
        | {"best": group in best.values(), "edge": _edge(group, groups) if group in best.values() else None}
        for group in groups
    ]
    return {
        "recipe": runs[0].logging.recipe,
        "metric": metric,
        "set_up": _common([run.identity() for run in runs]),
        **_made_with(found),
        "rows": rows,
        "best": {optimizer: _label(group) for optimizer, group in best.items()},
    }


def _read(asked: RunConfig, failures: Mapping[str, str]) -> Run:
    """Read a run's folder; names, rates and settings are those asked for, also if the run was not started yet."""
    run, o = read_run(asked.folder), asked.optimizer
    status = Status.NOT_STARTED if run.status == Status.EMPTY else run.status
    if asked.run_name in failures and not run.finished:  # another comparison may have finished it meanwhile
        status = Status.FAILED
    about = {**run.about, "config": asked.flat()}
    setting = {"optimizer": o.optimizer, "lr": o.lr, "adam_lr": o.adam_lr, "seed": str(asked.training.seed)}
    return replace(run, name=asked.run_name, status=status, about=about, **setting)  # type: ignore[arg-type]


def _common(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that all runs share: length, batch, schedule and more."""
    return {name: value for name, value in settings[0].items() if all(one[name] == value for one in settings)}


def _made_with(runs: Sequence[Run]) -> dict[str, Any]:
    """Return data, date, commit and versions from the run folders, maybe older than this call; lists if several."""
    abouts = [{**run.about, "data": data} for run, data in zip(runs, _data_of(runs), strict=True)]
    found: dict[str, Any] = {}
    for name in ("data", "date", "commit", "versions"):
        values: list[Any] = []
        for about in abouts:
            if about.get(name) is not None and about[name] not in values:
                values.append(about[name])
        found[name] = values[0] if len(values) == 1 else values or None
    return found


def _data_of(runs: Sequence[Run]) -> list[Any]:
    """Return the data of each run, without the hash of the validation text if older runs do not have it."""
    data = [run.about.get("data") for run in runs]
    if all("val_fingerprint" in own for own in data if isinstance(own, Mapping)):
        return data
    return [
        {key: value for key, value in own.items() if key != "val_fingerprint"} if isinstance(own, Mapping) else own
        for own in data
    ]


def _edge(group: Group, groups: Sequence[Group]) -> str | None:
    """Say if a group's rate is at the edge of those tried, once all runs of its method have ended."""
    tried = [run for other in groups if other.method == group.method for run in other.runs]
    return at_edge(group, groups) if all(run.status in (Status.DONE, Status.DIVERGED) for run in tried) else None


def _label(group: Group) -> str:
    """Name a row: optimizer, rate, the fields in which it differs from others, and its options if they differ."""
    config = group.runs[0].config
    differing = [(name, config[name]) for name in group.differs if name in config]
    fields = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in differing]
    options = config["options"] if any(name not in config for name in group.differs) else ()
    repeated = [f"#{group.repetition + 1}"] if group.repetition else []
    return " ".join([group.optimizer, f"lr {group.lr:g}", *fields, *options, *repeated])


def _row(group: Group, metric: str, failures: Mapping[str, str]) -> dict[str, Any]:
    """Return one variant's row of compare.json; lists have one entry per seed, and the mean needs all of them."""
    runs, config = group.runs, group.runs[0].config
    finished = [run.stats if run.finished else {} for run in runs]
    values = [stats.get(metric) for stats in finished]
    spread = group.stat(metric)
    if None in values or (spread and spread.n < len(values)):
        spread = None
    fields = {name: config[name] for name in group.differs if name in config}
    return {
        "label": _label(group),
        **{name: config[name] for name in ("optimizer", "lr", "adam_lr", "rank", "gamma")},
        **fields,
        "options": list(config["options"]),
        "seeds": [int(run.seed) for run in runs],
        "runs": [run.name for run in runs],
        "status": [run.status for run in runs],
        "values": values,
        "mean": spread.mean if spread else None,
        "spread": spread.deviation if spread and spread.n > 1 else None,
        **{
            key: [stats.get(key) for stats in finished]
            for key in ("final_val_ppl", "step_ms", "optimizer_ms", "state_bytes")
        },
        "val_losses": [[[p.step, p.value if math.isfinite(p.value) else None] for p in run.validation] for run in runs],
        "failures": [failures[run.name] for run in runs if run.name in failures and not run.finished],
    }


def format_result(result: Mapping[str, Any]) -> str:
    """Format the table that ends a comparison; ``*`` marks the best variant of each optimizer. Remarks follow it."""
    rows = result["rows"]
    head = ("run", "best", result["metric"], "val ppl", "step ms", "optimizer ms", "state MiB", "")
    lines = [format_table(head, [_cells(row) for row in rows], left=(0, len(head) - 1))]
    statuses = [status for row in rows for status in row["status"]]
    lines.append(f"{statuses.count(Status.DONE)} of {len(statuses)} runs done")
    if edges := [f"{row['optimizer']} ({row['edge']}, {format_rate(row['lr'])})" for row in rows if row["edge"]]:
        advice = "one beyond it may be better (--lrs)"
        lines.append(f"The best rate is at the edge of the rates tried for {', '.join(edges)}: {advice}")
    texts = result.get("data")
    if isinstance(texts, list):
        sizes = " and ".join(_text(data) for data in texts)
        lines.append(f"These runs cannot be compared: they were trained on different data, {sizes}")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Format one row; the last cell has the states other than done, and the reasons of failures."""
    has_mean = row["mean"] is not None
    mean = f"{row['mean']:.4f}" if has_mean else "-"
    mean += "" if row["spread"] is None else f" ± {row['spread']:.4f}"
    state = [value / 2**20 for value in row["state_bytes"] if value]
    return [
        row["label"],
        "*" if row["best"] else "",
        mean,
        _average(row["final_val_ppl"] if has_mean else (), ".2f"),
        _average(row["step_ms"]),
        _average(row["optimizer_ms"]),
        _average(state[:1]),
        ", ".join([*sorted(set(row["status"]) - {Status.DONE}), *row["failures"]]),
    ]


def _text(data: Mapping[str, Any]) -> str:
    """Describe a text by its size and hash, and the hash of its validation part."""
    val = f", validated on {data['val_fingerprint']}" if "val_fingerprint" in data else ""
    return f"{data['tokens']:,} tokens (hash {data['fingerprint']}{val})"


def _average(values: Sequence[float | None], form: str = ",.1f") -> str:
    known = [value for value in values if value]
    return format(statistics.fmean(known), form) if known else "-"
