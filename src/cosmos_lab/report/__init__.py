"""Write the report on one or more runs: a self-contained page, and its figures as PNG and SVG."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cosmos_lab.io import atomic_write, explained, valid_text
from cosmos_lab.report.charts import Section, specify
from cosmos_lab.report.heat import HeatSection
from cosmos_lab.report.page import render
from cosmos_lab.report.words import reason, summary, unreadable
from cosmos_lab.results.ranking import Task, arrange
from cosmos_lab.results.reading import Status, find_runs, read_run

__all__ = ["Report", "write_report"]

_log = logging.getLogger("cosmos_lab.report")


class Report(NamedTuple):
    """A written report: its page, and the page's sentences on what the runs showed."""

    page: Path
    summary: str


def write_report(
    runs: Sequence[Path], out: Path, *, title: str = "Pre-training report", noise: float | None = None
) -> Report:
    """Write ``out``/index.html and ``out``/figures/ about run folders, or folders of them.

    ``noise``, the standard deviation of the final loss over seeds, lets the headline judge runs of one seed each.
    A warning counts the folders that hold no run, or says how to get figures if matplotlib is missing. If no folder
    holds anything of a run, a ValueError says so, and an older report stays as it is.
    """
    tasks, not_shown = arrange(map(read_run, find_runs(runs)))
    if not tasks and all(run.status == Status.EMPTY for run in not_shown):
        raise ValueError(f"no run to report on: {not_shown[0].folder}: {reason(not_shown[0])}")
    specs = specify(tasks)
    page = Path(out) / "index.html"
    with explained(page, "choose another folder with -o"):
        remark = _figures(specs, page.parent / "figures")
        text = render(title, tasks, specs, not_shown, remark, noise)
        with atomic_write(page) as file:
            file.write(valid_text(text).encode())
    if not_shown:
        _log.warning("%s %s: %s", unreadable(not_shown), valid_text(not_shown[0].folder), reason(not_shown[0]))
    return Report(page, _summaries(tasks, noise))


def _summaries(tasks: Sequence[Task], noise: float | None) -> str:
    """Say what the runs showed, one sentence for each model and recipe, named if there are several."""
    return " ".join(f"{task.title}: " * (len(tasks) > 1) + summary(task, noise) for task in tasks)


def _figures(specs: Sequence[Sequence[Section | HeatSection]], folder: Path) -> str | None:
    """Draw the figures; return None, or a remark if they cannot be drawn."""
    if not specs:
        return None
    try:
        from cosmos_lab.report.figures import draw_all
    except ImportError as error:
        remark = f"No PNG and SVG figures: {error}; pip install matplotlib, or '.[lab]' in the source folder."
        _log.warning(remark)
        return remark
    draw_all([spec for task in specs for spec in task if isinstance(spec, Section)], folder)
    return None
