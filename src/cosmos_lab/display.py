"""Show the progress of runs: bars and a live table by rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cosmos_lab.formatting import format_clock
from cosmos_lab.results.reading import Status

if TYPE_CHECKING:
    from cosmos_lab.config import RunConfig

_CELLS = (("loss", "loss", ".3f"), ("val ppl", "val_ppl", ".2f"), ("tokens/s", "tokens_per_s", ",.0f"))
_TABLE_EVERY_S = 15.0  # seconds between plain lines of a table of runs
_EVERY_S = 5.0  # seconds between plain lines of training progress; validations are always shown


def has_rich() -> bool:
    """Tell whether rich can draw bars here."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def describe(record: Mapping[str, Any], left: float | None = None) -> str:
    """Format a training record in one line: loss, thousand tokens a second, MFU, memory, skipped steps, time left."""
    parts = [f"loss {record['loss']:.3f}" if record.get("loss") is not None else "loss nan"]
    if record.get("tokens_per_s"):
        parts.append(f"{record['tokens_per_s'] / 1e3:,.1f}k tok/s")
    if record.get("mfu"):
        parts.append(f"MFU {100 * record['mfu']:.0f}%")
    parts.append(f"{record['memory_gb']:.1f} GiB")
    if record.get("skipped_steps"):
        parts.append(f"{record['skipped_steps']} skipped")
    if left is not None:
        parts.append(f"ETA {format_clock(left)}")
    return " ".join(parts)


class TrainDisplay:
    """Progress of one run, called with its log records. Use as a context manager."""

    def __init__(self, config: RunConfig) -> None:
        self.name, self.steps = config.run_name, config.training.steps
        self._shown, self._first = 0.0, (0, 0.0)
        self.began = False  # whether there was a record
        self._bar: Any = None

    def __enter__(self) -> TrainDisplay:
        if has_rich():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            # Short enough for a terminal of 80 columns. A name may have brackets, which are no markup.
            name, state = (TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[state]"))
            self._bar = Progress(name, BarColumn(10), MofNCompleteColumn(), state)
            self._task = self._bar.add_task(self.name, total=self.steps, state="starting")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.live.transient = not self.began  # leaves no bar of a run that was finished earlier
            self._bar.stop()

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.began = True
        if "about" in record:
            self._say(record["about"])
        elif "val_loss" in record:
            loss = record["val_loss"]
            text = f"val loss {loss:.4f}, ppl {record['val_ppl']:.2f}" if loss is not None else "val loss nan"
            self._say(f"{self.name}  step {record['step']}/{self.steps}  {text}")
        elif "loss" in record:
            self._show(describe(record, self._eta(record)), record["step"])

    def _say(self, line: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def _eta(self, record: Mapping[str, Any]) -> float | None:
        """Return the seconds left at the speed since the first record."""
        step, seconds = record["step"], record["time"]
        if not self._first[0]:
            self._first = (step, seconds)
            return None
        done = step - self._first[0]
        return (seconds - self._first[1]) / done * (self.steps - step) if done else None

    def _show(self, state: str, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=state)
        elif time.monotonic() - self._shown > _EVERY_S or step == self.steps:
            self._shown = time.monotonic()
            print(f"{self.name}  step {step}/{self.steps}  {state}", flush=True)


class TableDisplay:
    """A table of runs that changes with their progress. Use as a context manager; ``update`` a row by its number."""

    COLUMNS = ("run", "status", "step", "loss", "val ppl", "tokens/s")

    def __init__(self, runs: Sequence[RunConfig], show: bool = True) -> None:
        self.show = show
        self.rows: list[dict[str, Any]] = [
            {"run": run.run_name, "status": Status.WAITING, "of": run.training.steps, "from": None, "at": 0}
            for run in runs
        ]
        self._live: Any = None
        self._since: float | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> TableDisplay:
        if self.show and has_rich():
            from rich.live import Live

            self._live = Live(self._table(), refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def update(self, row: int, status: Status, record: Mapping[str, Any] | None = None) -> None:
        """Change a row's status, and its numbers if a log record is given."""
        cells, record = self.rows[row], record or {}
        changed = cells["status"] != status
        cells["status"] = status
        if status == Status.RUNNING and self._since is None:
            self._since = time.monotonic()
        if "step" in record:
            cells["step"], cells["at"] = f"{record['step']}/{cells['of']}", record["step"]
            cells["from"] = record["step"] if cells["from"] is None else cells["from"]
        for column, field, form in _CELLS:
            if record.get(field) is not None:
                cells[column] = format(record[field], form)
        if self._live is not None:
            self._live.update(self._table())
        elif changed and self.show:
            numbers = [f"{column} {cells[column]}" for column in self.COLUMNS[2:] if column in cells]
            print("  ".join([f"run {row + 1} of {len(self.rows)}", cells["run"], status, *numbers]), flush=True)
            if self._since is not None and status.ended:
                print(self._progress(), flush=True)
            self._shown = time.monotonic()
        elif self.show and time.monotonic() - self._shown > _TABLE_EVERY_S:
            self._shown = time.monotonic()
            print(f"run {row + 1} of {len(self.rows)}  step {cells.get('step', 0)}; {self._progress()}", flush=True)

    def _progress(self) -> str:
        """Say how many runs have ended, and how long the others will take at the speed of this call's steps so far."""
        left = [cells for cells in self.rows if cells["status"] in (Status.WAITING, Status.RUNNING)]
        ended = sum(cells["status"].ended for cells in self.rows)
        text = f"{ended} of {len(self.rows)} runs ended"
        done = sum(cells["at"] - cells["from"] for cells in self.rows if cells["from"] is not None)
        if not left or not done or self._since is None:
            return text
        seconds_each = (time.monotonic() - self._since) / done
        return f"{text}, about {format_clock(seconds_each * sum(cells['of'] - cells['at'] for cells in left))} left"

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(*self.COLUMNS, caption=self._progress())
        for cells in self.rows:
            table.add_row(*(Text(str(cells.get(column, ""))) for column in self.COLUMNS))
        return table
