"""How far a comparison has come: its live table, the time left, and why runs failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.display import TableDisplay
from cosmos_lab.grid.budget import Budget
from cosmos_lab.results.reading import Status, status_of


@dataclass
class GridProgress:
    """The state of a grid while it is trained: the live table, the time left, and by name why runs failed."""

    display: TableDisplay
    budget: Budget
    failures: dict[str, str] = field(default_factory=dict)

    def may_start(self, row: int, run: RunConfig) -> bool:
        """Tell whether there is time for the run, and show it if there is not."""
        allowed = self.budget.start(run)
        if not allowed:
            self.display.update(row, Status.NOT_STARTED)
        return allowed

    def finish(self, row: int, run: RunConfig, summary: Mapping[str, Any]) -> None:
        self.budget.finish(run)
        self.show_summary(row, summary)

    def fail(self, row: int, run: RunConfig, reason: str) -> None:
        self.failures[run.run_name] = reason
        self.display.update(row, Status.FAILED)

    def show_summary(self, row: int, summary: Mapping[str, Any]) -> None:
        names = {"step": "steps", "loss": "final_train_loss", "val_ppl": "final_val_ppl"}
        record = {name: summary.get(key) for name, key in names.items()}
        self.display.update(row, status_of(summary), {**record, "tokens_per_s": summary.get("tokens_per_s")})
