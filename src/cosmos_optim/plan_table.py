"""The plan: rule, rank, rate, decay and state of every parameter, computed without allocating state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cosmos_optim import sharding
from cosmos_optim.hyperparameters import (
    ROUTING,
    adam_rate,
    check_arguments,
    check_options,
    choose_rule,
    complete,
    rule_named,
)
from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.optimizers import OPTIMIZERS
from cosmos_optim.routing.attention_heads import declared_queries
from cosmos_optim.routing.fused_weights import fused_hint, fused_sizes
from cosmos_optim.routing.output_head import Head, find_output_heads
from cosmos_optim.routing.param_groups import routes
from cosmos_optim.routing.route import ModelParameter, Route
from cosmos_optim.routing.words import ADAPTER, words
from cosmos_optim.rules import RULES
from cosmos_optim.rules.rule import TWO_SIDED_SUFFIX

MEASURED_GAMMAS = 0.1, 1.0  # docs/results/ablations.md


@dataclass(frozen=True)
class PlanRow:
    """One parameter in a plan; `tied` are its other names."""

    name: str
    shape: tuple[int, ...]
    rule: str
    why: str
    rank: int | None
    lr: float
    weight_decay: float
    state_elements: int
    state_bytes: int
    tied: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class Plan:
    """The rule, rate, decay and state of every parameter of a model. Printing it gives a table.

    `frozen` are the numbers of frozen tensors and of their elements. They have no rows, and an optimizer has none.
    """

    rows: tuple[PlanRow, ...]
    hints: tuple[str, ...] = ()
    frozen: tuple[int, int] = (0, 0)

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
        """Return the table with one line for equal layers, the totals, what is frozen, and hints."""
        if not self.rows:
            return "nothing to train: every parameter is frozen"
        table = [("parameter", "shape", "rule", "because", "rank", "lr", "decay", "state")]
        for name, row, count in collapse(self.rows):
            shape = " x ".join(map(str, row.shape)) or "scalar"
            rank = "" if row.rank is None else str(row.rank)
            why = f"{row.why}, tied to {', '.join(row.tied)}" if row.tied else row.why
            size = human(count * row.state_bytes)
            table.append((name, shape, row.rule, why, rank, f"{row.lr:g}", f"{row.weight_decay:g}", size))
        # An optimizer does not know why its parameters have their rules: that column is left out.
        columns = [(side, column) for side, column in zip("<><<>>>>", zip(*table, strict=True), strict=True)
                   if any(column[1:])]  # fmt: skip
        form = "  ".join(f"{{:{side}{max(map(len, column))}}}" for side, column in columns)
        texts = [form.format(*cells).rstrip() for cells in zip(*(column for _, column in columns), strict=True)]
        line = "-" * max(map(len, texts))
        sums = [f"{name}: {_tensors(count)}, {size:,} parameters, {human(state)} of state"
                for name, (count, size, state) in self.totals().items()]  # fmt: skip
        total = f"total: {_tensors(len(self.rows))}, {self.parameters:,} parameters, {human(self.state_bytes)} of state"
        tensors, elements = self.frozen
        advice = "left out; after unfreezing, add them with param_groups(model, beside=opt)"
        frozen = [f"frozen: {_tensors(tensors)}, {elements:,} parameters, {advice}"] if tensors else []
        hints = dict.fromkeys(f"hint: {hint}" for hint in (*self.hints, *(row.hint for row in self.rows)) if hint)
        return "\n".join([texts[0], line, *texts[1:], line, *sums, total, *frozen, *hints])

    __repr__ = __str__  # a notebook shows it


def _tensors(count: int) -> str:
    return f"{count} tensor" if count == 1 else f"{count} tensors"


def plan(model: nn.Module | MatrixOptimizer, rule: str = "cosmos", **hyper: Any) -> Plan:
    """Return the table of parameters, rules and state, for a model or for an existing optimizer.

    Args:
        model: a model, possibly on the meta device, or an optimizer of this package.
        rule: a name in OPTIMIZERS: a rule, or "cosmos-paper".
        hyper: arguments of that optimizer, and `overrides`, `head`, `decay` and `split_heads` of `param_groups`.

    >>> layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
    >>> model = nn.ModuleDict({"embed": nn.Embedding(100, 16), "layers": layers, "head": nn.Linear(16, 100)})
    >>> print(plan(model, rank=4, weight_decay=0.1))
    parameter                shape  rule    because      rank      lr  decay     state
    ----------------------------------------------------------------------------------
    embed.weight          100 x 16  adam    embedding           0.002      0  12.5 KiB
    layers.0-2.weight x3   16 x 16  cosmos  linear          4  0.0005    0.1  4.89 KiB
    head.weight           100 x 16  adam    output head         0.002      0  12.5 KiB
    head.bias                  100  adam    vector              0.002      0     804 B
    ----------------------------------------------------------------------------------
    adam: 3 tensors, 3,300 parameters, 25.8 KiB of state
    cosmos: 3 tensors, 768 parameters, 4.89 KiB of state
    total: 6 tensors, 4,068 parameters, 30.7 KiB of state
    hint: adam_lr was not given, so it is 4 times lr. To train from scratch, use rates(model, steps, tokens_per_step)
    """
    if isinstance(model, Optimizer) and not isinstance(model, MatrixOptimizer):
        model = getattr(model, "optimizer", model)  # accelerate's wrapper
    if isinstance(model, MatrixOptimizer):
        model._match_layouts()
        return Plan(tuple(_row(model._layouts[p].name, p, "", group)
                          for group in model.param_groups for p in group["params"]))  # fmt: skip
    routing = {key: hyper.pop(key) for key in ROUTING if key in hyper}
    kind, options = _optimizer(rule, hyper)
    rows: list[PlanRow] = []
    gammas: list[float] = []
    rounded = 0
    for parameter, route in routes(model, kind.rule, **routing):
        group = {"rule": route.rule, **route.settings}
        chosen, group = choose_rule(kind.rule, group, options)
        computes_gamma = group.get("gamma", options.get("gamma")) is None
        group = complete(group, chosen, options, kind.soap_lr)
        keeps_bits = group["weight_correction"] or group["stochastic_rounding"]
        rounded += parameter.p.dtype is torch.bfloat16 and not keeps_bits
        if computes_gamma and "gamma" in group:
            gammas.append(group["gamma"])
        row = _row(parameter.name, parameter.p, route.why, group)
        rows.append(replace(row, tied=parameter.aliases, hint=_fused_hint(model, parameter, route, group)))
    hints = [_head_hint(model, kind.rule, routing.get("head"), rows), _rate_hint(kind, hyper, rows)]
    hints += [_gamma_hint(gammas), _rounding_hint(rounded)]
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    return Plan(tuple(rows), tuple(filter(None, hints)), (len(frozen), sum(frozen)))


def _fused_hint(model: nn.Module, parameter: ModelParameter, route: Route, group: dict[str, Any]) -> str:
    """Return advice to cut a fused weight, or "" if it is not one or its rule refuses these blocks."""
    sizes = fused_sizes(parameter, route, declared_queries(model, parameter.module_path))
    if not sizes:
        return ""
    try:
        _row(parameter.name, parameter.p, "", {**group, "split_sizes": sizes})
    except ValueError:
        return ""
    return fused_hint(parameter, sizes)


def _head_hint(model: nn.Module, rule: str, head: Head | None, rows: Sequence[PlanRow]) -> str:
    """Return advice if no output head was found, which may be right: a backbone has none."""
    matrices = [row for row in rows if row.rule not in ("adam", "adam-mini") and len(row.shape) > 1
                and ADAPTER.isdisjoint(words(row.name))]  # fmt: skip
    if len(matrices) < 2 or find_output_heads(model, head) or any(row.tied for row in rows):
        return ""
    last = matrices[-1].name.rpartition(".")[0]
    if any(part.isdigit() for part in last.split(".")):  # a part of a block, most likely
        last = "NAME"
    own = "" if rule == "cosmos" else f"{rule!r}, "
    return f"no output head was found. If the model has one, name it: param_groups(model, {own}head={last!r})"


def _rate_hint(kind: type[MatrixOptimizer], given: Mapping[str, Any], rows: Sequence[PlanRow]) -> str:
    """Return advice if an embedding would be trained at a multiple of lr, which is low for training from scratch."""
    chosen = given.get("adam_lr", inspect.signature(kind).parameters["adam_lr"].default)
    if chosen is not None or kind.adam_ratio == 1 or all(row.why != "embedding" for row in rows):
        return ""
    measured = kind.rule == "cosmos"  # the rule of `rates` is for COSMOS
    advice = "use rates(model, steps, tokens_per_step)" if measured else "try 1.6e-2 (measured at 60M parameters)"
    return f"adam_lr was not given, so it is {kind.adam_ratio:g} times lr. To train from scratch, {advice}"


def _gamma_hint(gammas: Sequence[float]) -> str:
    """Return advice if a gamma that follows from the two rates is outside of what was measured."""
    low, high = MEASURED_GAMMAS
    outside = [gamma for gamma in gammas if not low <= gamma <= high]
    if not outside:
        return ""
    return (
        f"gamma, the weight of the Muon half, follows from the two rates and is {outside[0]:.2g}. "
        f"Measured were {low:g} to {high:g}, and 0.25 was best: give gamma"
    )


def _rounding_hint(count: int) -> str:
    """Return advice if so many parameters are bfloat16 and nothing keeps what rounding takes away."""
    if not count:
        return ""
    return (
        f"{_tensors(count)} in bfloat16 lose updates below their last place: weight_correction=True keeps 8 more bits, "
        "stochastic_rounding=True needs no memory"
    )


def _optimizer(name: str, given: Mapping[str, Any]) -> tuple[type[MatrixOptimizer], dict[str, Any]]:
    """Return the optimizer class of that name, and all of its arguments, defaults included."""
    if name in RULES and name.endswith(TWO_SIDED_SUFFIX):
        name, given = name.removesuffix(TWO_SIDED_SUFFIX), {"two_sided": True, **given}
    if name not in OPTIMIZERS:
        rule_named(name)
    kind = OPTIMIZERS[name]
    check_arguments(kind, given)
    parameters = inspect.signature(kind).parameters.values()
    options = {p.name: given.get(p.name, p.default) for p in parameters if p.name != "params"}
    options["adam_lr"] = adam_rate(options["lr"], options["adam_lr"], kind.adam_ratio)
    check_options(options)
    return kind, options


def _row(name: str, p: Tensor, why: str, group: dict[str, Any]) -> PlanRow:
    """Return a parameter's row: its state as the optimizer would allocate it."""
    slots = sharding.layout_of(name, p, RULES[group["rule"]], group).slots(group)
    elements = sum(math.prod(slot.shape) for slot in slots.values())
    size = sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in slots.values() if slot.dtype)
    basis = slots.get("U") or slots.get("Q")  # Q is GaLore's
    rank = basis.shape[-1] if basis and "rank" in group else None
    rates = float(group["lr"]), float(group["weight_decay"])
    return PlanRow(name, tuple(p.shape), group["rule"], why, rank, *rates, elements, size + 4)


# -- the printed form --------------------------------------------------------------------------------------------------


def collapse(rows: Sequence[PlanRow]) -> list[tuple[str, PlanRow, int]]:
    """Return (name, row, count) for each line of the table: rows that differ only in numbers of layers become one.

    One number at a time: first rows that differ in the last number of their names, then in the one before it. Names may
    repeat: an optimizer keeps a layer that the model has replaced.
    """
    lines = [(row.name.split("."), row, 1) for row in rows]
    for place in reversed(range(max((len(parts) for parts, _, _ in lines), default=0))):
        found: dict[object, list[tuple[list[str], PlanRow, int]]] = {}
        for parts, row, count in lines:
            numbered = place < len(parts) and parts[place].isdigit()
            others = (*parts[:place], "#", *parts[place + 1 :]) if numbered else len(found)
            found.setdefault((others, replace(row, name="", tied=(), hint=""), count), []).append((parts, row, count))
        lines = [_merged(alike, place) for alike in found.values()]
    return [(".".join(parts) + (f" x{count}" if count > 1 else ""), row, count) for parts, row, count in lines]


def _merged(alike: list[tuple[list[str], PlanRow, int]], place: int) -> tuple[list[str], PlanRow, int]:
    """Return one line for lines that differ only in the number at this place."""
    parts, row, count = alike[0]
    if len(alike) == 1:
        return alike[0]
    numbers = ranges([int(other[place]) for other, _, _ in alike])
    return [*parts[:place], numbers, *parts[place + 1 :]], row, count * len(alike)


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in order as text, with ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def human(size: int) -> str:
    """Format a number of bytes with three digits, or four if it is close to the next unit.

    >>> human(2887), human(1_073_000_000), human(5_900_000_000)
    ('2.82 KiB', '1023 MiB', '5.49 GiB')
    """
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 999.5 else f"{value:.3g} {units[0]}"
