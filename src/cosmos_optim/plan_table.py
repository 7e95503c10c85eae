"""The plan: rule, rank and state of every parameter, computed without allocating state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cosmos_optim import sharding
from cosmos_optim.hyperparameters import check_arguments, choose_rule, complete, require_bool, rule_named
from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.optimizers import OPTIMIZERS
from cosmos_optim.routing.param_groups import routes
from cosmos_optim.rules import RULES
from cosmos_optim.rules.rule import two_sided


@dataclass(frozen=True)
class PlanRow:
    """One parameter in a plan."""

    name: str
    shape: tuple[int, ...]
    rule: str
    why: str
    rank: int | None
    state_elements: int
    state_bytes: int


@dataclass(frozen=True)
class Plan:
    """The rule and state of every parameter of a model. Printing it gives a table."""

    rows: tuple[PlanRow, ...]

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all state."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def state_elements(self) -> int:
        """Return the number of elements of all state."""
        return sum(row.state_elements for row in self.rows)

    @property
    def parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(math.prod(row.shape) for row in self.rows)

    def totals(self) -> dict[str, tuple[int, int, int]]:
        """Return the number of tensors, parameters and state bytes of each rule."""
        totals: dict[str, tuple[int, int, int]] = {}
        for row in self.rows:
            count, size, state = totals.get(row.rule, (0, 0, 0))
            totals[row.rule] = (count + 1, size + math.prod(row.shape), state + row.state_bytes)
        return totals

    def __str__(self) -> str:
        """Return the table, the totals of each rule, and the total."""
        table = [("parameter", "shape", "rule", "because", "rank", "state")]
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            rank = "" if row.rank is None else str(row.rank)
            table.append((row.name, shape, row.rule, row.why, rank, human(row.state_bytes)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<><<>>", widths, strict=True))
        lines = [form.format(*line).rstrip() for line in table]
        rule = "-" * max(map(len, lines))
        sums = [f"{name}: {count} tensors, {size:,} parameters, {human(state)} of state"
                for name, (count, size, state) in self.totals().items()]  # fmt: skip
        total = f"total: {len(self.rows)} tensors, {self.parameters:,} parameters, {human(self.state_bytes)} of state"
        return "\n".join([lines[0], rule, *lines[1:], rule, *sums, total])


def plan(model: nn.Module | MatrixOptimizer, rule: str = "cosmos", **hyper: Any) -> Plan:
    """Return the table of parameters, rules and state, for a model or for an existing optimizer.

    Args:
        model: a model, possibly on the meta device, or an optimizer of this package.
        rule: a name in OPTIMIZERS: a rule, or "cosmos-paper".
        hyper: arguments of that optimizer, and `overrides` and `head` as `param_groups` takes them.

    >>> print(plan(nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32, bias=False)), rank=4))
    parameter     shape  rule    because    rank     state
    ------------------------------------------------------
    0.weight   100 x 16  adam    embedding        12.5 KiB
    1.weight    32 x 16  cosmos  linear        4  2.94 KiB
    ------------------------------------------------------
    adam: 1 tensors, 1,600 parameters, 12.5 KiB of state
    cosmos: 1 tensors, 512 parameters, 2.94 KiB of state
    total: 2 tensors, 2,112 parameters, 15.4 KiB of state
    """
    if isinstance(model, MatrixOptimizer):
        return Plan(tuple(_row(model._layouts[p].name, p, group["rule"], "", group)
                          for group in model.param_groups for p in group["params"]))  # fmt: skip
    routing = {key: hyper.pop(key) for key in ("overrides", "head") if key in hyper}
    kind, options = _optimizer(rule, hyper)
    rows = []
    for parameter, route in routes(model, kind.rule, **routing):
        group = {"rule": route.rule, **route.settings}
        if "block_rows" in group and options.get("head_dim"):
            group["block_rows"] = options["head_dim"]
        name, group = choose_rule(kind.rule, group, options.get("two_sided", False))
        group = complete(group, rule_named(name), options, kind.soap_lr)
        rows.append(_row(parameter.name, parameter.p, name, route.why, group))
    return Plan(tuple(rows))


def _optimizer(name: str, given: Mapping[str, Any]) -> tuple[type[MatrixOptimizer], dict[str, Any]]:
    """Return the optimizer class of that name, and all of its arguments, defaults included."""
    for rule in (rule for rule in RULES if name == two_sided(rule)):
        name, given = rule, {"two_sided": True, **given}
    if name not in OPTIMIZERS:
        rule_named(name)
    kind = OPTIMIZERS[name]
    check_arguments(kind, given)
    parameters = inspect.signature(kind).parameters.values()
    options = {p.name: given.get(p.name, p.default) for p in parameters if p.name != "params"}
    if options["adam_lr"] is None:
        options["adam_lr"] = options["lr"]
    require_bool("two_sided", options.get("two_sided", False))
    return kind, options


def _row(name: str, p: Tensor, rule: str, why: str, group: Mapping[str, Any]) -> PlanRow:
    """Return a parameter's row: its state as the optimizer would allocate it."""
    slots = sharding.layout_of(name, p, RULES[rule], dict(group)).slots(group)
    elements = sum(math.prod(slot.shape) for slot in slots.values())
    size = sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in slots.values() if slot.dtype)
    rank = slots["U"].shape[-1] if "U" in slots and "rank" in group else None
    return PlanRow(name, tuple(p.shape), rule, why, rank, elements, size + 4)


def human(size: int) -> str:
    """Format a number of bytes with three digits.

    >>> human(2887), human(5_900_000_000)
    ('2.82 KiB', '5.49 GiB')
    """
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.3g} {units[0]}"
