"""Make run folders for the report's tests, small and exact: losses are given, the rest follows. Read its pages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from cosmos_lab.results.ranking import Task, arrange
from cosmos_lab.results.reading import read_run

TOKENS_PER_STEP = 1000
KINDS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def make_run(
    folder: Path,
    optimizer: str,
    losses: Sequence[float | None],
    *,
    lr: float = 1e-3,
    seed: int = 0,
    name: str | None = None,
    model: str = "tiny",
    validated: bool = True,
    finished: bool = True,
    layers: int = 0,
    seconds: float = 0.5,
    **config: Any,
) -> Path:
    """Make a run with a validation every 10 steps and the given losses (None for nan, as the trainer logs it)."""
    folder.mkdir(parents=True)
    full = {"model": model, "optimizer": optimizer, "lr": lr, "seed": seed, "out": str(folder.parent), "name": name}
    full |= config
    head = {"name": name or folder.name, "recipe": "test", "model": model, "optimizer": optimizer, "lr": lr}
    write(folder, "config.json", {**head, "adam_lr": None, "seed": seed, "config": full, "parameters": 5000})
    lines = []
    for index, loss in enumerate(losses):
        at = {"step": 10 * (index + 1), "tokens": 10 * (index + 1) * TOKENS_PER_STEP, "time": seconds * (index + 1)}
        lines.append({**at, "loss": None if loss is None else loss + 0.1, "tokens_per_s": 2e4, "optimizer_ms": 3.5})
        if validated:
            lines.append({**at, "val_loss": loss, "val_ppl": None if loss is None else math.exp(loss)})
        if layers:
            lines.append({"step": at["step"], "tokens": at["tokens"], "diagnostics": diagnostics(layers, index)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        last = losses[-1]
        perplexity = None if last is None else math.exp(last)
        result = {"final_val_loss": last, "final_val_ppl": perplexity} if validated else {}
        status = "diverged" if last is None else "done"
        costs = {"tokens": 10 * len(losses) * TOKENS_PER_STEP, "peak_memory_gb": 1.5, "state_bytes": 2**21}
        write(folder, "summary.json", {"status": status, **result, **costs})
    return folder


def write(folder: Path, name: str, value: Any) -> None:
    """Write one JSON file."""
    (folder / name).write_text(json.dumps(value))


def diagnostics(layers: int, index: int) -> dict[str, dict[str, float]]:
    """Return four numbers per matrix, each metric with its own pattern."""
    return {
        f"blocks.{layer}.{kind}.weight": {
            "energy": 0.5 + 0.01 * layer + 0.02 * index,
            "drift": 10.0 ** -(1 + index % 4),
            "update_rms": 0.2 + 0.03 * place,
            "ratio": 1.0 + layer * place,
        }
        for layer in range(layers)
        for place, kind in enumerate(KINDS)
    }


def falling(end: float, points: int = 6) -> list[float]:
    """Return losses that fall to ``end``."""
    return [end + 2.0 * 0.5**index - 2.0 * 0.5 ** (points - 1) for index in range(points)]


def task_of(*folders: Path) -> Task:
    """Return the one task that the folders make."""
    tasks, not_shown = arrange(map(read_run, folders))
    assert len(tasks) == 1 and not not_shown
    return tasks[0]


def data_of(page: Path) -> Any:
    """Return the specifications that the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found.group(1))


class Tags(HTMLParser):
    """Start tags, with a check that every element that must be closed is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
