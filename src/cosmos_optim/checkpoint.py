"""Load optimizer state: match groups, check shapes, and keep each rule's dtypes. `_translate` reads older versions."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_optim.engine.layout import CORRECTION, Layout
from cosmos_optim.rules import RULES, adam
from cosmos_optim.rules.cosmos import PAPER
from cosmos_optim.rules.rule import M_SCALE, Settings, Slot, load_momentum, two_sided

if TYPE_CHECKING:
    from cosmos_optim.optimizer import MatrixOptimizer


# Hyper-parameters that decide what the state means: a checkpoint with different values cannot be loaded.
STRUCTURE = ("rule", "rank", "side", "split_sizes", "split_side", "layout", "block_rows", "row_beta2", "normalize")
# Dtypes of the state, and what a warning says of each. A checkpoint's values replace ours if our shards can hold them.
DTYPES = {"momentum_dtype": "the momentum stays as it was saved", "adam_dtype": "both moments stay as they were saved"}
# The names of the state tensors of all rules. Any other name in a parameter's state belongs to other code.
STATE_NAMES = frozenset(("step", M_SCALE, CORRECTION, *adam.SCALES)).union(*(r.State._fields for r in RULES.values()))


def structure(group: Settings) -> dict[str, Any]:
    """Return the settings that decide what state a group has, also its dtype."""
    return {key: group[key] for key in (*STRUCTURE, *DTYPES, "weight_correction") if key in group}


def differing(a: Settings, b: Settings, keys: Iterable[str]) -> list[str]:
    """Return the keys with values that need different state. Groups of older versions may lack some keys."""

    def needed(key: str, value: Any) -> Any:
        if key == "row_beta2":  # any two decay rates use the same state
            return value is None
        return tuple(value) if isinstance(value, list) else value

    return [key for key in keys if key in a and key in b and needed(key, a[key]) != needed(key, b[key])]


def converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of other code's state with all of its tensors converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, dict):
        return {key: converted(x, convert) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(converted(x, convert) for x in value)
    return copy.deepcopy(value)


def started(optimizer: MatrixOptimizer) -> set[Tensor]:
    """Return the parameters that have had a non-zero gradient: those with a step count above 0."""
    states = ((p, optimizer.state.get(p)) for p in optimizer._layouts)
    held = [(p, s["step"]) for p, s in states if s and "step" in s and not s["step"].is_meta]
    if not held:
        return set()
    counts = torch.stack([optimizer._layouts[p].local(step).cpu() for p, step in held]).tolist()
    return {p for (p, _), count in zip(held, counts, strict=True) if count > 0}


def in_plain_types(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with dtypes as text, such as "torch.float32", and numbers of numpy as Python's.

    torch cannot gather dtypes with sharded state, and `torch.load(weights_only=True)` refuses numpy's numbers, which
    sweeps and schedules with np.cos write into the groups.
    """

    def plain(value: Any) -> Any:
        if type(value) is tuple:  # betas
            return tuple(map(plain, value))
        if getattr(value, "shape", None) == () and not isinstance(value, Tensor):
            return value.item()
        return str(value) if isinstance(value, torch.dtype) else value

    return [{key: plain(value) for key, value in group.items()} for group in groups]


def dtypes_from_text(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Restore dtypes from text, and restore our tuples, which torch turns into lists when it gathers sharded state."""
    dtypes = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}

    def restored(key: str, value: Any) -> Any:
        if isinstance(value, list) and key in ("betas", "split_sizes"):
            return tuple(value)
        return dtypes.get(value, value) if isinstance(value, str) else value

    return [{k: restored(k, v) for k, v in group.items()} for group in groups]


def load(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> None:
    """Load a state_dict as torch does, but keep the dtype of each state slot: torch would cast to the parameter's."""
    state_dict = state_dict.copy()  # hooks may change it, but the caller owns the original
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    groups = dtypes_from_text(copy.deepcopy(state_dict["param_groups"]))
    saved = [_translate(i, group) for i, group in enumerate(groups)]
    optimizer._match_layouts()
    saved = _split_by_dtype(optimizer, saved)
    ours_now = _regrouped(optimizer, saved)
    _check_groups(optimizer, ours_now, saved)
    saved = [_in_our_order(group, ours) for ours, group in zip(ours_now, saved, strict=True)]
    _check_names(ours_now, saved)
    saved, state = _with_dtypes_that_fit(optimizer, ours_now, saved, state_dict["state"])
    _warn_of_dtypes(ours_now, saved)
    _keep_corrections(ours_now, saved, state)
    loaded: dict[Tensor, dict[str, Any]] = {}
    without_state = []
    for ours, group in zip(ours_now, saved, strict=True):
        for key, p in zip(group["params"], ours["params"], strict=True):
            if key in state:
                loaded[p] = _checked_state(optimizer, p, {**ours, **group}, state[key])
            elif not p.is_meta:
                without_state.append((p, ours))
    if len(saved) > len(groups):
        warnings.warn(
            f"the checkpoint's {len(groups)} groups are split into {len(saved)}, because dtypes of the state differ "
            "here within a group: a scheduler saved with it has too few rates. Build a new one at the step reached",
            stacklevel=3,
        )
    if ours_now is not optimizer.param_groups:  # only now: an error above changes nothing
        warnings.warn(
            "the checkpoint has other groups of the same parameters, as older versions made them: param_groups become "
            "those. Build a scheduler after this, and load both checkpoints again: it keeps rates by position",
            stacklevel=3,
        )
        optimizer.param_groups[:] = ours_now
    for ours, group in zip(optimizer.param_groups, saved, strict=True):
        names = ours.get("param_names") or group.get("param_names")
        ours.update({k: v for k, v in group.items() if k not in ("params", "param_names")})
        if names:
            ours["param_names"] = list(names)
    optimizer._keep_structure(loaded=True)
    optimizer.state.update(loaded)
    of_parameters = {key for group in saved for key in group["params"]}
    optimizer.state.update({k: v for k, v in state.items() if k not in of_parameters})  # as torch does
    for p, ours in without_state:  # the checkpoint was written before their first step
        optimizer.state.pop(p, None)
        optimizer._allocate(p, ours)
    optimizer._started = started(optimizer)
    for post in optimizer._optimizer_load_state_dict_post_hooks.values():
        post(optimizer)


def _translate(index: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return a saved group in the terms of this version.

    Rule "muon-norm" is now rule "muon" with `normalize=True`; older "muon" groups lack that key. Older "adam" groups
    lack `adam_dtype`, because their moments are in float32. `nesterov` used to be the number of steps to look ahead,
    with 1 for Nesterov's momentum.
    """
    group = dict(group)
    if group.get("rule") == "muon-norm":
        group |= {"rule": "muon", "normalize": True}
    elif group.get("rule") == "muon":
        group.setdefault("normalize", False)
    elif group.get("rule") == "adam":
        group.setdefault("adam_dtype", None)
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


def _split_by_dtype(optimizer: MatrixOptimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups; one with 8-bit state is split if our dtypes differ within it, because a group has one.

    An override such as {"*norm*": {"adam_dtype": torch.float32}} asks for this.
    """
    dtypes = {name: [group.get(key) for key in DTYPES] for group in optimizer.param_groups for name in _names(group)}
    found: list[dict[str, Any]] = []
    for group in saved:
        names = _names(group)
        parts: dict[str, list[tuple[str, Any]]] = {}
        is_named = len(names) == len(group["params"]) and dtypes.keys() >= set(names)
        if is_named and torch.int8 in (group.get(key) for key in DTYPES):
            for name, key in zip(names, group["params"], strict=True):
                parts.setdefault(str(dtypes[name]), []).append((name, key))
        split = [{"param_names": [x for x, _ in part], "params": [key for _, key in part]} for part in parts.values()]
        found += [group | part for part in split] if len(split) > 1 else [group]
    return found


def _regrouped(optimizer: MatrixOptimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return our groups, or our parameters in the groups of the checkpoint if both name the same parameters.

    Older checkpoints have one group for AdamW, often the first. Our groups change, not the saved ones, because
    schedulers save their rates by position.
    """
    ours = optimizer.param_groups
    theirs = [_names(group) for group in saved]
    held = {name: (p, group) for group in ours for name, p in zip(_names(group), group["params"], strict=False)}
    same = [set(names) for names in theirs] == [set(_names(group)) for group in ours]
    if same or not all(theirs) or sorted(itertools.chain(*theirs)) != sorted(held):
        return ours
    found = []
    for names in theirs:
        first = held[names[0]][1]
        if any(differing(first, held[name][1], (*STRUCTURE, "weight_correction")) for name in names):
            return ours
        found.append({**first, "params": [held[name][0] for name in names], "param_names": list(names)})
    return found


def _names(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; torch.distributed.checkpoint keeps them in `params`."""
    if all(isinstance(key, str) for key in group["params"]):
        return list(group["params"])
    return list(group.get("param_names") or ())


def _in_our_order(saved: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return a saved group with its parameters in our order if both have the same names, else unchanged.

    torch.distributed.checkpoint stores names in `params`, possibly in a different order than `param_names`.
    """
    names, theirs = _names(ours), _names(saved)
    if not names or not theirs or len(set(names)) < len(names) or set(names) != set(theirs):
        return saved
    ids = dict(zip(theirs, saved["params"], strict=True))
    return saved | {"params": [ids[name] for name in names], "param_names": list(names)}


def _check_groups(optimizer: MatrixOptimizer, ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raise a ValueError if the saved groups do not fit ours, in number, parameters or structure."""
    if len(saved) != len(ours):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, this optimizer has {len(ours)}: build it from the same "
            "model, with the same overrides and groups. State of another optimizer, such as AdamW, cannot be loaded"
        )
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        if len(a["params"]) != len(b["params"]):
            raise ValueError(
                f"group {i} has {len(b['params'])} parameters in the checkpoint and {len(a['params'])} here: build the "
                "optimizer from the same model, with the same parameters frozen"
            )
        differ = {key: b[key] for key in differing(a, b, STRUCTURE)}
        if all(optimizer._layouts[p].flips(a | b) == optimizer._layouts[p].flipped for p in a["params"]):
            differ.pop("side", None)
        if differ:
            theirs, here = (", ".join(f"{key}={group[key]!r}" for key in differ) for group in (b, a))
            raise ValueError(f"group {i} was saved with {theirs}, here it has {here}: {_advice(differ, b)}")


def _check_names(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raise a ValueError if a saved parameter is one of ours, but in another place: its state would go to another.

    Names that we do not have are allowed: wrappers of modules change names, and state is then loaded by position. If it
    is not a wrapper that changed them, a warning names the first pair.
    """
    known = {name for group in ours for name in _names(group)}
    renamed = None
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        for here, there in zip(_names(a), _names(b), strict=False):
            if here != there and there in known:
                raise ValueError(
                    f"group {i} has {there!r} in the checkpoint where it has {here!r} here, and {there!r} has another "
                    "place here: build the optimizer with the same overrides and groups, and the same parameters "
                    "frozen. If the model was renamed, delete param_names from the checkpoint's groups"
                )
            if renamed is None and not _is_wrapped(here, there):
                renamed = here, there
    if renamed:
        warnings.warn(
            f"the checkpoint has {renamed[1]!r} where this optimizer has {renamed[0]!r}: its state is loaded by "
            "position. That is right only if the model was renamed",
            stacklevel=4,
        )


def _is_wrapped(a: str, b: str) -> bool:
    """Return whether one name is the other with parts added, as wrappers of modules add them."""
    fewer, more = sorted((a.split("."), b.split(".")), key=len)
    rest = iter(more)
    return all(part in rest for part in fewer)


def _with_dtypes_that_fit(
    optimizer: MatrixOptimizer, ours: list[dict[str, Any]], saved: list[dict[str, Any]], state: Mapping[Any, Any]
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Return the saved groups and state, with 8-bit state that our shards cannot hold converted to our dtype.

    That dtype is left out of the saved group, so that ours stays. Raise ValueError if the user did not choose one.
    """
    groups, found = [], dict(state)
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        layouts = [optimizer._layouts[p] for p in a["params"]]
        kept = dict(b)
        for key in differing(a, b, DTYPES):
            theirs = a | kept
            refused = next(((x, error) for x in layouts if (error := _dtype_error(x, theirs))), None)
            if refused is None:
                continue
            if a[key] is None:
                layout, error = refused
                override = f"overrides={{{layout.name!r}: {{{key!r}: torch.float32}}}}"
                raise ValueError(
                    f"group {i} was saved with {key}={b[key]}, which cannot be loaded here: {error}. To convert "
                    f"what was saved, build the optimizer with {key}=torch.float32, or only for such parameters: "
                    f"param_groups(model, {override})"
                )
            del kept[key]
            for at, layout in zip(b["params"], layouts, strict=True):
                if at in state:
                    found[at] = _dequantized(layout, theirs, state[at])
        groups.append(kept)
    return groups, found


def _dtype_error(layout: Layout, settings: Mapping[str, Any]) -> str:
    """Return why a layout cannot hold state of these dtypes, or "" if it can."""
    try:
        layout.check_dtypes(settings)
    except ValueError as error:
        return str(error)
    return ""


def _dequantized(layout: Layout, settings: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return one parameter's saved state with whole moments, or a whole momentum, in float32 instead of codes."""
    settings = settings | {"weight_correction": False}
    _check_state(layout, layout.slots(settings), saved)
    held = {name: saved[name] for name in layout.slots(settings)}
    held = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in held.items()}
    kept = {name: x for name, x in saved.items() if name not in (*adam.SCALES, M_SCALE)}
    dtype = torch.promote_types(layout.dtype, torch.float32)
    if layout.rule.elementwise:
        return kept | adam.load(held, dtype)._asdict()
    like = torch.empty(layout.shape, dtype=layout.dtype, device="meta")
    whole = Layout(layout.name, like, layout.rule, settings)
    M = torch.empty(layout.shape, dtype=dtype, device=held["M"].device)
    for block, x in zip(whole.blocks(M), whole.state_blocks(held, settings), strict=True):
        block.copy_(load_momentum(x, dtype))
    return kept | {"M": M}


def _warn_of_dtypes(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Warn if the checkpoint's momentum or moments are stored as int8 and ours are not, or the other way round."""
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        for key in differing(a, b, DTYPES):
            if torch.int8 in (a[key], b[key]):
                warnings.warn(
                    f"group {i} was saved with {key}={b[key]}, which replaces {a[key]}: {DTYPES[key]}", stacklevel=4
                )


def _keep_corrections(ours: list[dict[str, Any]], saved: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Remove `weight_correction` from the saved groups, so that ours stays; warn if their state does not fit it.

    Corrected weights are not rounded stochastically: with ours on, a saved `stochastic_rounding` is removed too.
    """
    outcomes = {
        True: "has no corrections of its weights, so they begin at zero",
        False: "has corrections of its weights, which are dropped: the weights continue from their bfloat16 values. To "
        "keep all 24 bits, build the optimizer with weight_correction=True",
    }
    unlike: dict[bool, list[int]] = {True: [], False: []}  # our setting -> the groups with other state
    for i, (a, b) in enumerate(zip(ours, saved, strict=True)):
        wanted = bool(a.get("weight_correction"))
        if wanted:
            b.pop("stochastic_rounding", None)
        had = bool(b.pop("weight_correction", wanted))  # torch.distributed.checkpoint loads only the state that we keep
        if had != wanted or any((CORRECTION in state[key]) != wanted for key in b["params"] if key in state):
            unlike[wanted].append(i)
    for wanted, groups in unlike.items():
        if groups:
            text = f"groups {groups} have weight_correction={wanted} here, and the checkpoint {outcomes[wanted]}"
            warnings.warn(text, stacklevel=4)


def _advice(differ: dict[str, Any], saved: dict[str, Any]) -> str:
    """Return advice on how to build an optimizer that matches the saved group."""
    if "rule" in differ:
        form = ", two_sided=True" if str(differ["rule"]).endswith(two_sided("")) else ""
        return f"build the optimizer of rule {differ['rule']!r} that wrote it{form}"
    wanted = ", ".join(f"{key}={value!r}" for key, value in differ.items())
    paper = saved["rule"].startswith("cosmos") and all(saved[key] == PAPER[key] for key in ("rank", "row_beta2"))
    hint = ", or a CosmosPaper, which has these defaults" if paper else ""
    return f"build the optimizer with {wanted} to continue this checkpoint{hint}"


def _checked_state(optimizer: MatrixOptimizer, p: Tensor, group: Settings, saved: dict[str, Any]) -> dict[str, Any]:
    """Return copies of one parameter's saved tensors, on its device and with the shapes that this optimizer keeps.

    A correction that is missing is zero. State of other code, such as an average that a wrapper keeps, is copied with
    its dtype, and cut like the parameter if it has its shape.
    """
    layout = optimizer._layouts[p]
    if p.is_meta:
        raise ValueError(f"parameter {layout.name!r} is on the meta device: materialize the model (to_empty) first")
    slots: dict[str, Slot | None] = {"step": None, **layout.slots(group)}
    saved = dict(adam.without_codes(saved, slots))
    _check_state(layout, layout.slots(group), saved)

    def adopted(value: Tensor) -> Tensor:
        if value.shape == p.shape:
            return layout.adopt(value.detach(), p, Slot("*", tuple(p.shape), value.dtype))
        return value.detach().to(p.device, copy=True)

    checked = {name: converted(value, adopted) for name, value in saved.items() if name not in (*slots, CORRECTION)}
    if CORRECTION in slots and CORRECTION not in saved:
        slot = slots.pop(CORRECTION)
        assert slot is not None
        checked[CORRECTION] = layout.zeros(p, slot)
    for name, slot in slots.items():
        value = _as_tensor(saved[name])
        dtype = torch.float32 if slot is None else slot.dtype
        checked[name] = layout.adopt(value.detach().to(dtype), p, slot)
    return checked


def _check_state(layout: Layout, slots: Mapping[str, Slot], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if one parameter's saved state has other names or shapes. A correction may be missing."""
    shapes = {"step": (), **{name: tuple(slot.shape) for name, slot in slots.items()}}
    if (set(saved) & STATE_NAMES) - {CORRECTION} != set(shapes) - {CORRECTION}:
        raise ValueError(
            f"parameter {layout.name!r}: the checkpoint has state {sorted(saved)}, this optimizer keeps "
            f"{sorted(shapes)}: load it into the optimizer class and options that wrote it"
        )
    for name, shape in shapes.items():
        if name in saved and (found := tuple(_as_tensor(saved[name]).shape)) != shape:
            raise ValueError(
                f"parameter {layout.name!r}: state {name!r} has shape {found} in the checkpoint and {shape} here: load "
                "it into the same model and options that wrote it"
            )


def _as_tensor(value: Any) -> Tensor:
    """Return a tensor of the state, or a number as one."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
