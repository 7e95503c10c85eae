"""Leave each parameter's route on the parameter, for code that passes `model.parameters()` to an optimizer.

A mark is a plain dict: the parameter's name, its rule, and its group settings. Copies, `fully_shard` and tensor
parallelism make new parameters. So a marked module also keeps its marks, and gives them to every parameter that it
hands out or is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from cosmos_optim.routing.output_head import is_head_name
from cosmos_optim.routing.words import BIAS, NORM, holds_table, words

ATTRIBUTE = "_cosmos_mark"
Mark = dict[str, Any]


class _MarkedParameters(dict[str, Any]):
    """The parameters of a marked module: what `module._parameters` is then.

    `module.parameters()` and all of its relatives read `items()`; code that replaces a parameter sets an item.
    """

    marks: Mapping[str, Mark] = {}  # before unpickling has restored the marks

    def __setitem__(self, name: str, p: Any) -> None:
        super().__setitem__(name, p)
        self._leave(name, p)

    def items(self) -> Any:
        for name in self.marks:
            self._leave(name, self.get(name))
        return super().items()

    def _leave(self, name: str, p: Any) -> None:
        if name in self.marks and isinstance(p, nn.Parameter):
            setattr(p, ATTRIBUTE, self.marks[name])


def leave_mark(module: nn.Module, attribute: str, mark: Mark) -> None:
    """Mark the module's parameter of this name, and any parameter that replaces it."""
    held = module._parameters
    if not isinstance(held, _MarkedParameters):
        module._parameters = held = _MarkedParameters(held)
    held.marks = {**held.marks, attribute: mark}
    held[attribute] = held[attribute]


def mark_of(p: Any) -> Mark | None:
    """Return the mark of a parameter, or None."""
    return getattr(p, ATTRIBUTE, None)


def apply_marks(groups: list[dict[str, Any]], rule: str) -> list[dict[str, Any]]:
    """Split the groups without a rule by the marks of their parameters, and name the parameters.

    Groups without marks stay as they are, and so do the groups of `Adam`, which has one rule for everything.
    """
    free = [_tensor(item) for group in groups if "rule" not in group for item in group["params"]]
    if rule == "adam" or not any(mark_of(p) for p in free):
        return groups
    if missing := [p for p in free if p.requires_grad and not mark_of(p)]:
        raise ValueError(
            f"{len(missing)} of {len(free)} parameters have no mark, the first of shape {tuple(missing[0].shape)}: "
            "call mark(model) again after layers were added or replaced, or put these in a group with a 'rule'"
        )
    found: list[dict[str, Any]] = []
    for i, group in enumerate(groups):
        found += [_named(group, i)] if "rule" in group else _split(group)
    return found


def warn_marked_otherwise(groups: list[dict[str, Any]], stacklevel: int) -> None:
    """Warn if the groups of a model, which do not follow its marks, differ from these."""
    differ = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for name, p in group["params"]:
            marked = mark_of(p)  # its name may lack what a wrapper adds
            differ += [name] if marked and {**marked, "name": ""} != {**settings, "name": ""} else []
    if differ:
        warnings.warn(
            f"{len(differ)} parameters, such as {differ[0]!r}, were marked with another rule or other settings than "
            "they get from the model alone: give the optimizer model.parameters() to follow the marks",
            stacklevel=stacklevel,
        )


def _tensor(item: Any) -> Any:
    """Return the tensor of a (name, tensor) pair or of a bare tensor."""
    return item[1] if isinstance(item, tuple) else item


def _split(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a group's parameters in one group for each route. The group's own keys win over those of the mark.

    Frozen parameters are left out, as in `param_groups`.
    """
    parts: dict[str, dict[str, Any]] = {}
    for item in group["params"]:
        p = _tensor(item)
        if not p.requires_grad:
            continue
        mark = dict(mark_of(p) or {})
        name = mark.pop("name")
        part = parts.setdefault(repr(sorted(mark.items())), {**mark, **group, "params": []})
        part["params"].append(item if isinstance(item, tuple) else (name, p))
    return sorted(parts.values(), key=lambda part: part["rule"] == "adam")


def _named(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the group with names: torch wants names in all groups or in none."""
    params = []
    for i, item in enumerate(group["params"]):
        name = (mark_of(item) or {}).get("name", f"group {index}, parameter {i}")
        params.append(item if isinstance(item, tuple) else (name, item))
    return {**group, "params": params}


def warn_unrouted(groups: list[dict[str, Any]], stacklevel: int) -> None:
    """Warn if groups without a rule have unnamed matrices, or matrices named as embeddings, heads, norms or biases."""
    items = [item for group in groups if "rule" not in group for item in group["params"]]
    unnamed = [item for item in items if isinstance(item, Tensor)]
    names = [item[0] for item in items if isinstance(item, tuple)]
    outer = [name for name in names if _is_for_adam(name)]
    if unnamed:
        largest = max(unnamed, key=lambda p: p.numel())
        what = f"unnamed matrices ({len(unnamed)}, the largest of shape {tuple(largest.shape)}) all get the optimizer's"
        what += " rule: embeddings and output heads among them cannot be recognized"
    elif outer:
        what = "embeddings, output heads, norms or biases, by their names, get the optimizer's rule instead of AdamW: "
        what += ", ".join([*map(repr, outer[:3]), *(["..."] if outer[3:] else [])])
    else:
        return
    remedy = "Call mark(model) first, or give param_groups(model). A group with a 'rule' does not warn"
    warnings.warn(f"{what}. {remedy}", stacklevel=stacklevel)


def _is_for_adam(name: str) -> bool:
    """Return whether a parameter's name alone says that AdamW should train it."""
    path, _, own = name.rpartition(".")
    is_norm_or_bias = not NORM.isdisjoint(words(path)[-1:]) or not BIAS.isdisjoint(words(own))
    return holds_table(path) or is_head_name(path) or is_norm_or_bias
