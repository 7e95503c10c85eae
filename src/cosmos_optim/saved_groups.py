"""Read the parameter groups of a checkpoint, also of older versions, and match them with the groups of an optimizer.

"Ours" is what the optimizer has, "saved" is what the checkpoint has. The state of the parameters is in `checkpoint`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.rules import RULES
from cosmos_optim.rules.cosmos import PAPER
from cosmos_optim.rules.rule import TWO_SIDED_SUFFIX, Settings

if TYPE_CHECKING:
    from cosmos_optim.optimizer import MatrixOptimizer


# Hyper-parameters that decide what the state means: a checkpoint with different values cannot be loaded.
STRUCTURE = ("rule", "rank", "side", "split_sizes", "split_side", "layout", "block_rows", "row_beta2", "normalize")
LATE = "If you add layers, load first, and then add them with param_groups(model, beside=optimizer)"
# Dtypes of the state, and what a warning says of each. A checkpoint's values replace ours if our shards can hold them.
_ROUNDED = "(torch.distributed.checkpoint may have rounded {} to this optimizer's dtype before)"
DTYPES = {
    "momentum_dtype": f"the momentum keeps the saved dtype {_ROUNDED.format('it')}",
    "adam_dtype": f"both moments keep the saved dtype {_ROUNDED.format('them')}",
}


def differing(a: Settings, b: Settings, keys: Iterable[str]) -> list[str]:
    """Return the keys with values that need different state. Groups of older versions may lack some keys."""

    def needed(key: str, value: Any) -> Any:
        if key == "row_beta2":  # any two decay rates use the same state
            return value is None
        return tuple(value) if isinstance(value, list) else value

    return [key for key in keys if key in a and key in b and needed(key, a[key]) != needed(key, b[key])]


def in_plain_types(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with dtypes as text, such as "torch.float32", and numbers of numpy as Python's.

    torch cannot gather dtypes with sharded state, and `torch.load(weights_only=True)` refuses numpy's numbers, which
    sweeps and schedules with np.cos write into the groups.
    """

    def plain(value: Any) -> Any:
        if type(value) in (tuple, list):  # betas
            return type(value)(map(plain, value))
        if getattr(value, "shape", None) == () and not isinstance(value, Tensor):
            return value.item()
        return str(value) if isinstance(value, torch.dtype) else value

    return [{key: plain(value) for key, value in group.items()} for group in groups]


def read(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the groups of a checkpoint, in the types and terms of this version."""
    return [_translate(i, group) for i, group in enumerate(_dtypes_from_text(copy.deepcopy(groups)))]


def _dtypes_from_text(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Restore dtypes from text, and restore our tuples, which torch turns into lists when it gathers sharded state."""
    dtypes = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}

    def restored(key: str, value: Any) -> Any:
        if isinstance(value, list) and key in ("betas", "split_sizes"):
            return tuple(value)
        return dtypes.get(value, value) if isinstance(value, str) else value

    return [{k: restored(k, v) for k, v in group.items()} for group in groups]


def _translate(index: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return a saved group in the terms of this version.

    Rule "muon-norm" is now rule "muon" with `normalize=True`; older "muon" groups lack that key. Older "adam" groups
    lack `adam_dtype`, because their moments are in float32, and older groups of matrices lack `equal_rows`. `nesterov`
    used to be the number of steps to look ahead, with 1 for Nesterov's momentum.
    """
    group = dict(group)
    if group.get("rule") == "muon-norm":
        group |= {"rule": "muon", "normalize": True}
    elif group.get("rule") == "muon":
        group.setdefault("normalize", False)
    elif group.get("rule") == "adam":
        group.setdefault("adam_dtype", None)
    if group.get("rule") in RULES and "equal_rows" in RULES[group["rule"]].defaults:
        group.setdefault("equal_rows", False)
    steps = group.get("nesterov", False)
    if not isinstance(steps, bool):
        if steps not in (0, 1):
            raise ValueError(
                f"group {index} was saved with nesterov={steps!r}, a number of steps to look ahead. Only True (one "
                "step) and False are supported, because more steps performed worse: set nesterov to True in the "
                "checkpoint's param_groups to continue with one step"
            )
        group["nesterov"] = bool(steps)
    return group


class Match(NamedTuple):
    """One of our groups, and the saved group that is loaded into it.

    `ours["params"]` has our parameters, `saved["params"]` the keys of their saved state, numbers or names.
    """

    ours: dict[str, Any]
    saved: dict[str, Any]


def match_with(optimizer: MatrixOptimizer, saved_groups: list[dict[str, Any]]) -> list[Match]:
    """Return each of our groups with its saved group, their parameters in the same order.

    Raise a ValueError if they do not fit in number, parameters or structure.
    """
    _warn_of_regrouped(saved_groups)
    saved_groups = _split_by_dtype(optimizer, saved_groups)
    our_groups = _regrouped(optimizer, saved_groups)
    if len(saved_groups) != len(our_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has {len(our_groups)}: build it "
            f"from the same model, with the same overrides and groups. {LATE}. State of another optimizer, such as "
            "AdamW, cannot be loaded"
        )
    matches = [Match(ours, saved) for ours, saved in zip(our_groups, saved_groups, strict=True)]
    for i, match in enumerate(matches):
        _check_group(optimizer, i, match)
    matches = [_in_our_order(match) for match in matches]
    _check_names(matches)
    return matches


def _warn_of_regrouped(saved_groups: list[dict[str, Any]]) -> None:
    """Warn of groups that torch.distributed.checkpoint has fitted into ours: it keeps one value for each of ours."""
    for i, group in enumerate(saved_groups):
        keys, names = group["params"], group.get("param_names") or ()
        if not all(isinstance(key, str) for key in keys):
            continue
        what = ""
        if "lr" not in group:
            what = f"has no settings in the checkpoint and keeps its own, because another group got those of {keys[:1]}"
        elif names and len(keys) > len(names):
            what = f"has settings that were saved for {len(names)} of its {len(keys)} parameters, lr={group['lr']}"
        if what:
            warnings.warn(
                f"group {i} {what}: torch.distributed.checkpoint cannot split or join groups. Build the optimizer with "
                "the groups that were saved, or set lr and weight_decay of each group after loading",
                stacklevel=5,
            )


def _split_by_dtype(optimizer: MatrixOptimizer, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups; one with 8-bit state is split if our dtypes differ within it, because a group has one.

    An override such as {"*norm*": {"adam_dtype": torch.float32}} asks for this.
    """
    ours = {name: tuple(map(group.get, DTYPES)) for group in optimizer.param_groups for name in _names(group)}
    found: list[dict[str, Any]] = []
    for group in saved_groups:
        names = _names(group)
        parts: dict[Any, dict[str, list[Any]]] = defaultdict(lambda: {"param_names": [], "params": []})
        is_named = len(names) == len(group["params"]) and ours.keys() >= set(names)
        if is_named and torch.int8 in map(group.get, DTYPES):
            for name, key in zip(names, group["params"], strict=True):
                part = parts[ours[name]]
                part["param_names"].append(name)
                part["params"].append(key)
        found += [group | part for part in parts.values()] if len(parts) > 1 else [group]
    return found


def _regrouped(optimizer: MatrixOptimizer, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return our groups, or our parameters in the groups of the checkpoint if both name the same parameters.

    Older checkpoints have one or two groups for AdamW, some of them first. Our groups change, not the saved ones,
    because schedulers save their rates by position.
    """
    our_groups = optimizer.param_groups
    saved_names = [_names(group) for group in saved_groups]
    held = {name: (p, group) for group in our_groups for name, p in zip(_names(group), group["params"], strict=False)}
    are_same = [set(names) for names in saved_names] == [set(_names(group)) for group in our_groups]
    if are_same or not all(saved_names) or sorted(itertools.chain(*saved_names)) != sorted(held):
        return our_groups
    found = []
    for names in saved_names:
        first = held[names[0]][1]
        if any(differing(first, held[name][1], (*STRUCTURE, "weight_correction")) for name in names):
            return our_groups
        found.append({**first, "params": [held[name][0] for name in names], "param_names": list(names)})
    return found


def _names(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; torch.distributed.checkpoint keeps them in `params`."""
    if all(isinstance(key, str) for key in group["params"]):
        return list(group["params"])
    return list(group.get("param_names") or ())


def _check_group(optimizer: MatrixOptimizer, index: int, match: Match) -> None:
    """Raise a ValueError if a saved group has another number of parameters than ours, or another structure."""
    ours, saved = match
    if len(ours["params"]) != len(saved["params"]):
        if "rule" not in saved:
            raise ValueError(written_by_another(index))
        raise ValueError(
            f"group {index} has {len(saved['params'])} parameters in the checkpoint and {len(ours['params'])} here: "
            f"build the optimizer from the same model, with the same parameters frozen. {LATE}"
        )
    keys = differing(ours, saved, STRUCTURE)
    layouts = [optimizer._layouts[p] for p in ours["params"]]
    if "side" in keys and all(layout.flips(ours | saved) == layout.flipped for layout in layouts):
        keys.remove("side")  # another word for the same side
    if keys:
        theirs, here = (", ".join(f"{key}={group[key]!r}" for key in keys) for group in (saved, ours))
        raise ValueError(f"group {index} was saved with {theirs}, here it has {here}: {_advice(keys, saved)}")


def written_by_another(index: int) -> str:
    """Return the error for a saved group that no optimizer of this package wrote."""
    return (
        f"group {index} of the checkpoint has no 'rule', so another optimizer wrote it, such as one of torch: its "
        "state cannot be loaded. Load the model only, and start with a new optimizer"
    )


def _advice(keys: list[str], saved: dict[str, Any]) -> str:
    """Return advice on how to build an optimizer that matches the saved group, which differs in these keys."""
    if "rule" in keys:
        form = ", two_sided=True" if str(saved["rule"]).endswith(TWO_SIDED_SUFFIX) else ""
        return f"build the optimizer of rule {saved['rule']!r} that wrote it{form}"
    wanted = ", ".join(f"{key}={saved[key]!r}" for key in keys)
    paper = saved["rule"].startswith("cosmos") and all(saved[key] == PAPER[key] for key in ("rank", "row_beta2"))
    hint = ", or a CosmosPaper, which has these defaults" if paper else ""
    return f"build the optimizer with {wanted} to continue this checkpoint{hint}"


def _in_our_order(match: Match) -> Match:
    """Return a match with the saved parameters in our order if both have the same names, else unchanged.

    torch.distributed.checkpoint stores names in `params`, possibly in a different order than `param_names`.
    """
    ours, saved = match
    names, saved_names = _names(ours), _names(saved)
    if not names or not saved_names or len(set(names)) < len(names) or set(names) != set(saved_names):
        return match
    keys = dict(zip(saved_names, saved["params"], strict=True))
    return Match(ours, saved | {"params": [keys[name] for name in names], "param_names": list(names)})


def _check_names(matches: list[Match]) -> None:
    """Raise a ValueError if a saved parameter is one of ours, but in another place: its state would go to another.

    Names that we do not have are allowed: wrappers of modules change names, and state is then loaded by position. If it
    is not a wrapper that changed them, a warning names the first pair.
    """
    known = {name for match in matches for name in _names(match.ours)}
    renamed = None
    for i, match in enumerate(matches):
        for here, there in zip(_names(match.ours), _names(match.saved), strict=False):
            if here != there and there in known:
                raise ValueError(
                    f"group {i} has {there!r} in the checkpoint where it has {here!r} here, and {there!r} has another "
                    "place here: build the optimizer with the same overrides and groups, and the same parameters "
                    "frozen. If the model was renamed, write the new names into param_names of the checkpoint's groups"
                )
            if renamed is None and not _is_wrapped(here, there):
                renamed = here, there
    if renamed:
        warnings.warn(
            f"the checkpoint has {renamed[1]!r} where this optimizer has {renamed[0]!r}: its state is loaded by "
            "position. That is right only if the model was renamed",
            stacklevel=5,
        )


def _is_wrapped(a: str, b: str) -> bool:
    """Return whether one name is the other with parts added, as wrappers of modules add them."""
    fewer, more = sorted((a.split("."), b.split(".")), key=len)
    rest = iter(more)
    return all(part in rest for part in fewer)
