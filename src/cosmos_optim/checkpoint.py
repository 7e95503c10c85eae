"""Loading optimizer state: in the dtypes this optimizer keeps, shapes checked, a wrong rank named."""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_optim.rules.cosmos import PAPER

if TYPE_CHECKING:
    from cosmos_optim.optimizer import MatrixOptimizer


# Hyper-parameters that decide what the state means: a checkpoint with others cannot be continued.
STRUCTURE = ("rule", "rank", "side", "split_sizes", "layout", "block_rows", "row_beta2")


def as_default_dict(state: Any) -> defaultdict[Tensor, Any]:
    """The container torch's Optimizer expects its state in."""
    return defaultdict(dict, state)


def started(optimizer: MatrixOptimizer) -> set[Tensor]:
    """Parameters that have had a non-zero gradient: their step count is not 0."""
    held = [(p, s["step"]) for p, s in optimizer.state.items() if s and not s["step"].is_meta]
    if not held:
        return set()
    counts = torch.stack([optimizer._layouts[p].local(step).cpu() for p, step in held]).tolist()
    return {p for (p, _), count in zip(held, counts, strict=True) if count > 0}


def with_names(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups whose dtypes are written as "torch.float32"."""
    return [{k: str(v) if isinstance(v, torch.dtype) else v for k, v in group.items()} for group in groups]


def with_dtypes(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The opposite of `with_names`; tuples are tuples again, which torch's gathering of sharded state makes lists."""
    names = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}

    def restored(key: str, value: Any) -> Any:
        if isinstance(value, list) and key not in ("params", "param_names"):
            return tuple(value)
        return names.get(value, value) if isinstance(value, str) else value

    return [{k: restored(k, v) for k, v in group.items()} for group in groups]


def load(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> None:
    """What torch's load_state_dict does, but state has its slot's dtype: torch would cast it to the parameter's."""
    state_dict = state_dict.copy()  # hooks may change it, and it is the caller's
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    saved = with_dtypes(copy.deepcopy(state_dict["param_groups"]))
    optimizer._meet()
    _check_groups(optimizer, saved)
    saved = [_in_order(new, group) for group, new in zip(optimizer.param_groups, saved, strict=True)]
    ids = chain.from_iterable(group["params"] for group in saved)
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    hyper = {p: {**a, **b} for a, b in zip(optimizer.param_groups, saved, strict=True) for p in a["params"]}
    loaded: dict[Tensor, dict[str, Any]] = {}
    unsaved = []
    for key, p in zip(ids, params, strict=True):
        if key in state_dict["state"]:
            loaded[p] = _place(optimizer, p, hyper[p], state_dict["state"][key])
        else:
            unsaved.append(p)
    for group, new in zip(optimizer.param_groups, saved, strict=True):
        names = group.get("param_names")
        group.update({k: v for k, v in new.items() if k not in ("params", "param_names")})
        if names is not None:
            group["param_names"] = names
    optimizer.state.update(loaded)
    for p in unsaved:  # it had taken no step when the checkpoint was written
        if not p.is_meta:
            optimizer._allocate(p, hyper[p])
    optimizer._started = started(optimizer)
    for post in optimizer._optimizer_load_state_dict_post_hooks.values():
        post(optimizer)


def _in_order(saved: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A saved group with its parameters in our order, where both have the same names; others are told by position.

    torch.distributed.checkpoint has names in `params`, and may have put them in another order than `param_names`.
    """
    names, theirs = ours.get("param_names"), saved.get("param_names")
    if not all(isinstance(key, int) for key in saved["params"]):
        theirs = saved["params"]
    if not names or not theirs or len(set(names)) < len(names) or set(names) != set(theirs):
        return saved
    ids = dict(zip(theirs, saved["params"], strict=True))
    return saved | {"params": [ids[name] for name in names], "param_names": list(names)}


def _check_groups(optimizer: MatrixOptimizer, saved: list[dict[str, Any]]) -> None:
    ours = optimizer.param_groups
    if len(saved) != len(ours):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, this optimizer {len(ours)}: build it from the same "
            "model, with the same overrides and groups"
        )
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        if len(a["params"]) != len(b["params"]):
            raise ValueError(
                f"group {i} has {len(b['params'])} parameters in the checkpoint, {len(a['params'])} here: build the "
                "optimizer from the same model, with the same parameters frozen"
            )
        both = [key for key in STRUCTURE if key in a and key in b]
        differ = {key: b[key] for key in both if _structure(key, a[key]) != _structure(key, b[key])}
        if differ:
            saw, have = (", ".join(f"{key}={group[key]!r}" for key in differ) for group in (b, a))
            raise ValueError(f"group {i} was saved with {saw}, here it has {have}: {_advice(differ, b)}")


def _structure(key: str, value: Any) -> Any:
    """What of a hyper-parameter decides the state: of an average whether there is one."""
    return value is None if key == "row_beta2" else value


def _advice(differ: dict[str, Any], saved: dict[str, Any]) -> str:
    """How to build an optimizer that can continue a checkpoint's group with these other values."""
    if "rule" in differ:
        two_sided = ", two_sided=True" if str(differ["rule"]).endswith("-two-sided") else ""
        return f"build the optimizer of rule {differ['rule']!r} that wrote it{two_sided}"
    wanted = ", ".join(f"{key}={value!r}" for key, value in differ.items())
    paper = saved["rule"].startswith("cosmos") and all(saved[key] == PAPER[key] for key in ("rank", "row_beta2"))
    hint = ", or a CosmosPaper, which has that" if paper else ""
    return f"build the optimizer with {wanted} to continue this checkpoint{hint}"


def _place(optimizer: MatrixOptimizer, p: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Copies of one parameter's saved tensors on its device, each of the shape this optimizer keeps."""
    layout = optimizer._layouts[p]
    if p.is_meta:
        raise ValueError(f"parameter {layout.name!r} is on the meta device: materialize the model (to_empty) first")
    slots = layout.slots(group)
    wide = torch.promote_types(p.dtype, torch.float32)
    shapes = {"step": (), **{name: slot.shape for name, slot in slots.items()}}
    if set(saved) != set(shapes):
        raise ValueError(
            f"parameter {layout.name!r}: the checkpoint has state {sorted(saved)}, this optimizer keeps "
            f"{sorted(shapes)}: load it into the optimizer class and options that wrote it"
        )
    placed = {}
    for name, shape in shapes.items():
        value = saved[name]
        value = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"parameter {layout.name!r}: state {name!r} has shape {tuple(value.shape)} in the checkpoint, "
                f"{tuple(shape)} here: load it into the same model and options that wrote it"
            )
        slot = slots.get(name)
        dtype = torch.float32 if slot is None else slot.dtype or wide
        placed[name] = layout.adopt(value.detach().to(dtype), p, slot)
    return placed
