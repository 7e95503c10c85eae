"""Loading optimizer state: dtypes as saved, shapes checked, a wrong rank named."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cosmos_optim.optim.base import MatrixOptimizer


def as_default_dict(state: Any) -> defaultdict[Tensor, Any]:
    """The container torch's Optimizer expects its state in."""
    return defaultdict(dict, state)


def started(optimizer: MatrixOptimizer) -> set[Tensor]:
    """Parameters that have had a non-zero gradient: their step count is not 0."""
    held = [(p, s["step"]) for p, s in optimizer.state.items() if "step" in s]
    if not held:
        return set()
    counts = torch.stack([optimizer._layouts[p].local(step).cpu() for p, step in held]).tolist()
    return {p for (p, _), count in zip(held, counts, strict=True) if count > 0}


def load(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> None:
    """What torch's load_state_dict does, but state keeps its own dtype: torch would cast it to the parameter's."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    saved = state_dict["param_groups"]
    _check_groups(optimizer, saved)
    ids = chain.from_iterable(group["params"] for group in saved)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    owner = {p: group for group in optimizer.param_groups for p in group["params"]}
    loaded: dict[Tensor, dict[str, Any]] = {}
    for key, p in zip(ids, params, strict=True):
        if key in state_dict["state"]:
            loaded[p] = _place(optimizer, p, owner[p], state_dict["state"][key])
    for group, new in zip(optimizer.param_groups, saved, strict=True):
        names = group.get("param_names")
        group.update({k: v for k, v in new.items() if k not in ("params", "param_names")})
        if names is not None:
            group["param_names"] = names
    optimizer.state.update(loaded)
    optimizer._started = started(optimizer)
    for post in optimizer._optimizer_load_state_dict_post_hooks.values():
        post(optimizer)


def _check_groups(optimizer: MatrixOptimizer, saved: list[dict[str, Any]]) -> None:
    ours = optimizer.param_groups
    if len(saved) != len(ours):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this optimizer {len(ours)}")
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        if len(a["params"]) != len(b["params"]):
            raise ValueError(f"group {i} has {len(b['params'])} parameters in the checkpoint, {len(a['params'])} here")
        if "rule" in b and a["rule"] != b["rule"]:
            raise ValueError(f"group {i} was saved by rule {b['rule']!r}, here it has {a['rule']!r}")
        if "rank" in b and "rank" in a and a["rank"] != b["rank"]:
            raise ValueError(
                f"group {i} was saved with rank={b['rank']}, here it has rank={a['rank']}: "
                f"build the optimizer with rank={b['rank']} to continue this checkpoint"
            )


def _place(optimizer: MatrixOptimizer, p: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Copies of one parameter's saved tensors on its device, each of the shape this optimizer keeps."""
    layout = optimizer._layouts[p]
    slots = layout.slots(group)
    shapes = {"step": (), **{name: slot.shape for name, slot in slots.items()}}
    if set(saved) != set(shapes):
        raise ValueError(
            f"parameter {layout.name!r}: the checkpoint has {sorted(saved)}, this optimizer {sorted(shapes)}"
        )
    placed = {}
    for name, shape in shapes.items():
        value = saved[name]
        value = value if isinstance(value, Tensor) else torch.tensor(float(value))
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"parameter {layout.name!r}: state {name!r} has shape {tuple(value.shape)} in the checkpoint, "
                f"{tuple(shape)} here"
            )
        placed[name] = layout.adopt(value.detach(), p, slots.get(name))
    return placed
