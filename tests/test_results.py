"""Perplexities, seconds and GiB in the tables of results are numbers of the data files that the page names.

A row that names files takes its numbers from these, any other row from all files that its page names. Left out are
columns with "paper" or "mean" in their title, and rows that say "not run here".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(f"results/{name}" for name in ("ablations", "beyond-the-paper", "llama-60m", "llama-130m", "memory-and-time")),
    "results/other-models",
    "rates",
]
FILE = re.compile(r"`(results/[\w-]+\.json)`")
TWO_DECIMALS = re.compile(r"(?<![\d.])\d{2,3}\.\d{2}(?!\d)")
NOT_FROM_FILES = re.compile(r"paper|mean")  # in the title of a column
NOT_RUN = "not run here"


def numbers(data: Any, key: str = "") -> Iterator[float]:
    """Yield all numbers of a data file. Losses are also given as perplexities."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from numbers(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from numbers(value, key)
    elif isinstance(data, float):
        yield data
        if "loss" in key:
            yield math.exp(data)


@cache
def shown_as(file: str) -> frozenset[str]:
    """Return the numbers of a data file with two decimals."""
    return frozenset(f"{x:.2f}" for x in numbers(json.loads((ROOT / file).read_text())))


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a page's tables, each with its cells that come from data files."""
    for table in re.findall(r"(?:^ *\|.*\n)+", page, re.MULTILINE):
        title, _, *lines = [line.strip().strip("|").split("|") for line in table.splitlines()]
        for cells in lines:
            row = "|".join(cells)
            if NOT_RUN not in row:
                yield row, [cell for name, cell in zip(title, cells, strict=True) if not NOT_FROM_FILES.search(name)]


@pytest.mark.parametrize("name", PAGES)
def test_numbers_with_two_decimals_in_tables_are_in_the_data_files(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    checked = 0
    for row, cells in rows(page):
        files = FILE.findall(row) or FILE.findall(page)
        known = frozenset[str]().union(*map(shown_as, files))
        found = [number for cell in cells for number in TWO_DECIMALS.findall(cell)]
        assert set(found) <= known, f"{name}: {sorted(set(found) - known)} of this row is in none of {files}: {row}"
        checked += len(found)
    assert checked > 5, f"{name}: its tables were not read"


@pytest.mark.parametrize(
    ("title", "file", "left_out"),
    [
        ("Hints from a small model", "small-model", lambda run: not run["variant"] and run["seed"] == 0),
        ("The rate of norms on the small model", "small-model-norms", lambda run: False),
        ("Optimizers at any memory on the small model", "small-model-rows", lambda run: False),
        ("Rows of equal norm on the small model", "small-model-equal-rows", lambda run: False),
    ],
)
def test_the_hints_of_the_journal_are_validation_perplexities_of_the_small_model(
    title: str, file: str, left_out: Callable[[dict[str, Any]], bool]
) -> None:
    page = (ROOT / "docs/results/journal.md").read_text()
    section = page.partition(f"### {title}\n")[2].partition("\n##")[0]
    runs = json.loads((ROOT / f"results/{file}.json").read_text())["runs"].values()
    found = {number for _, cells in rows(section) for cell in cells for number in TWO_DECIMALS.findall(cell)}
    assert found == {f"{run['val_ppl']:.2f}" for run in runs if not left_out(run)}
