"""The report on one or more runs: a self-contained page, and its figures as PNG and SVG."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cosmos_lab.io import atomic_write, disk_error
from cosmos_lab.report.page import render
from cosmos_lab.report.words import reason, summary, unreadable
from cosmos_lab.results.ranking import Task, arrange
from cosmos_lab.results.reading import find_runs, read_run

__all__ = ["describe_runs", "write_report"]

_log = logging.getLogger("cosmos_lab.report")


def write_report(runs: Sequence[Path], out: Path, *, title: str = "Pre-training report") -> Path:
    """Writes ``out``/index.html and ``out``/figures/ about run folders, or folders of them; returns the page's path.

    Unfinished, diverged, empty and broken runs are shown as what they are, and a warning counts the folders that hold
    no run to show. Without matplotlib the page is written all the same, and a warning says how to get the figures.

    Raises:
        ValueError: no folder is given, or one does not exist.
        OSError: the page cannot be written; an older one stays as it was.
    """
    tasks, misfits = arrange(read_run(folder) for folder in find_runs([Path(run) for run in runs]))
    page = Path(out) / "index.html"
    try:
        figures, remark = _figures(tasks, page.parent / "figures")
        text = render(title, tasks, misfits, figures, remark)
        with atomic_write(page) as file:
            file.write(text.encode())
    except OSError as error:
        raise disk_error(error, page, "free some space or choose another folder with -o") from error
    if misfits:
        first = misfits[0]
        _log.warning("%s %s: %s", unreadable(misfits), first.folder, reason(first))
    return page


def describe_runs(runs: Sequence[Path]) -> str:
    """Say what the runs showed, in the page's sentence, one for each model and recipe."""
    tasks, _ = arrange(read_run(folder) for folder in find_runs([Path(run) for run in runs]))
    return " ".join(f"{task.title}: {summary(task)}" if len(tasks) > 1 else summary(task) for task in tasks)


def _figures(tasks: Sequence[Task], folder: Path) -> tuple[dict[str, str], str]:
    """The figures' names and paths relative to the page, and a remark where there are none."""
    if not tasks:
        return {}, ""
    try:
        from cosmos_lab.report.figures import draw_all
    except ImportError as error:
        remark = f"No PNG and SVG figures: {error}; pip install 'cosmos-optim[lab]' brings matplotlib."
        _log.warning(remark)
        return {}, remark
    return {name: f"{folder.name}/{file}" for name, file in draw_all(tasks, folder).items()}, ""
