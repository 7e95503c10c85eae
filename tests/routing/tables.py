"""Tables of (model, parameters, route): how they are written, and the command that writes them again.

    python -m tests.routing.tables transformers
    python -m tests.routing.tables timm

A table has one block for each set of models with equal routes. A line is a route and the names of its parameters, with
`*` for numbers. Vectors and scalars are left out: AdamW gets them all. Read the difference before you commit it.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from pathlib import Path

from torch import nn

from cosmos_optim.routing.param_groups import routes

HERE = Path(__file__).resolve().parent
NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])|(?<=[a-z_])\d+(?=[._]|$)")
STACK = re.compile(r"^\d+ stacked")


def table(model: nn.Module, overrides: dict[str, str] | None = None) -> list[str]:
    """Return the lines of a model: its routes, and the names of the parameters of each."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for parameter, route in routes(model, overrides=overrides):
        if parameter.p.dim() > 1:
            why = STACK.sub("stacked", route.why).removesuffix(", stored (in, out)")
            why += ", stored (in, out)" if route.settings.get("layout") == "in_out" else ""
            found[route.rule, why].add(NUMBER.sub("*", parameter.name))
    return [f"{rule}: {why}: {' '.join(_braced(names))}" for (rule, why), names in sorted(found.items())]


def _braced(names: set[str]) -> list[str]:
    """Return the names, with those that differ only in their module as one: `a.{b,c}.weight`."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(names):
        path, _, attribute = name.rpartition(".")
        place, _, module = path.rpartition(".")
        groups[place, attribute].append(module)
    found = []
    for (place, attribute), modules in sorted(groups.items()):
        middle = modules[0] if len(modules) == 1 else "{" + ",".join(modules) + "}"
        found.append(".".join(part for part in (place, middle, attribute) if part))
    return found


def read(library: str) -> dict[str, list[str]]:
    """Return the committed lines of each model."""
    found = {}
    for block in (HERE / f"{library}.txt").read_text().strip().split("\n\n"):
        models, *lines = block.splitlines()
        found.update(dict.fromkeys(models.split(), [line.strip() for line in lines]))
    return found


def write(library: str) -> None:
    """Write the table of all models of a library."""
    models = importlib.import_module(f"tests.routing.{library}_models")
    blocks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in models.NAMES:
        blocks[tuple(table(models.build(name), models.UNCLAIMED.get(name)))].append(name)
    text = "\n\n".join("\n    ".join([" ".join(names), *lines]) for lines, names in blocks.items())
    (HERE / f"{library}.txt").write_text(text + "\n")


if __name__ == "__main__":
    write(sys.argv[1])
