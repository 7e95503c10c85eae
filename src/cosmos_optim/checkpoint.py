"""Load optimizer state: match groups, check shapes, and keep each rule's dtypes. `_translate` reads older versions.

`load` is the entry. "Ours" is what the optimizer has, "saved" is what the checkpoint has.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Match(NamedTuple):
    """One of our groups, and the saved group that is loaded into it.

    `ours["params"]` has our parameters, `saved["params"]` the keys of their saved state, numbers or names.
    """

    ours: dict[str, Any]
    saved: dict[str, Any]


def load(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> None:
    """Load a state_dict as torch does, but keep the dtype of each state slot: torch would cast to the parameter's.

    Match the groups, check and convert what was saved, and apply it. An error before `_apply` changes nothing.
    """
    state_dict = state_dict.copy()  # hooks may change it, but the caller owns the original
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    saved_groups = dtypes_from_text(copy.deepcopy(state_dict["param_groups"]))
    saved_groups = [_translate(i, group) for i, group in enumerate(saved_groups)]
    saved_state = dict(state_dict["state"])
    optimizer._match_layouts()

    matches = _match(optimizer, saved_groups)
    _convert_dtypes(optimizer, matches, saved_state)
    _warn_of_dtypes(matches)
    _keep_our_corrections(matches, saved_state)
    new_state = _new_state(optimizer, matches, saved_state)
    _warn_of_groups(optimizer, matches, len(saved_groups))
    _apply(optimizer, matches, new_state)

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


# -- match ------------------------------------------------------------------------------------------------------------


def _match(optimizer: MatrixOptimizer, saved_groups: list[dict[str, Any]]) -> list[Match]:
    """Return each of our groups with its saved group, their parameters in the same order.

    Raise a ValueError if they do not fit in number, parameters or structure.
    """
    saved_groups = _split_by_dtype(optimizer, saved_groups)
    our_groups = _regrouped(optimizer, saved_groups)
    if len(saved_groups) != len(our_groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, this optimizer has {len(our_groups)}: build it "
            "from the same model, with the same overrides and groups. State of another optimizer, such as AdamW, "
            "cannot be loaded"
        )
    matches = [Match(ours, saved) for ours, saved in zip(our_groups, saved_groups, strict=True)]
    for i, match in enumerate(matches):
        _check_group(optimizer, i, match)
    matches = [_in_our_order(match) for match in matches]
    _check_names(matches)
    return matches


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

    Older checkpoints have one group for AdamW, often the first. Our groups change, not the saved ones, because
    schedulers save their rates by position.
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
        raise ValueError(
            f"group {index} has {len(saved['params'])} parameters in the checkpoint and {len(ours['params'])} here: "
            "build the optimizer from the same model, with the same parameters frozen"
        )
    keys = differing(ours, saved, STRUCTURE)
    layouts = [optimizer._layouts[p] for p in ours["params"]]
    if "side" in keys and all(layout.flips(ours | saved) == layout.flipped for layout in layouts):
        keys.remove("side")  # another word for the same side
    if keys:
        theirs, here = (", ".join(f"{key}={group[key]!r}" for key in keys) for group in (saved, ours))
        raise ValueError(f"group {index} was saved with {theirs}, here it has {here}: {_advice(keys, saved)}")


def _advice(keys: list[str], saved: dict[str, Any]) -> str:
    """Return advice on how to build an optimizer that matches the saved group, which differs in these keys."""
    if "rule" in keys:
        form = ", two_sided=True" if str(saved["rule"]).endswith(two_sided("")) else ""
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
                    "frozen. If the model was renamed, delete param_names from the checkpoint's groups"
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


# -- check and convert ------------------------------------------------------------------------------------------------


def _convert_dtypes(optimizer: MatrixOptimizer, matches: list[Match], saved_state: dict[Any, Any]) -> None:
    """Convert saved 8-bit state that our shards cannot hold to our dtype, in `saved_state`.

    That dtype is removed from the saved group, so that ours stays. Raise ValueError if the user did not choose one.
    """
    for i, (ours, saved) in enumerate(matches):
        layouts = [optimizer._layouts[p] for p in ours["params"]]
        for key in differing(ours, saved, DTYPES):
            settings = ours | saved
            refused = next(((layout, error) for layout in layouts if (error := _dtype_error(layout, settings))), None)
            if refused is None:
                continue
            if ours[key] is None:
                layout, error = refused
                override = f"overrides={{{layout.name!r}: {{{key!r}: torch.float32}}}}"
                raise ValueError(
                    f"group {i} was saved with {key}={saved[key]}, which cannot be loaded here: {error}. To convert "
                    f"what was saved, build the optimizer with {key}=torch.float32, or only for such parameters: "
                    f"param_groups(model, {override})"
                )
            del saved[key]
            for state_key, layout in zip(saved["params"], layouts, strict=True):
                if state_key in saved_state:
                    saved_state[state_key] = _dequantized(layout, settings, saved_state[state_key])


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


def _warn_of_dtypes(matches: list[Match]) -> None:
    """Warn if the checkpoint's momentum or moments are stored as int8 and ours are not, or the other way round."""
    for i, (ours, saved) in enumerate(matches):
        for key in differing(ours, saved, DTYPES):
            if torch.int8 in (ours[key], saved[key]):
                warnings.warn(
                    f"group {i} was saved with {key}={saved[key]}, which replaces {ours[key]}: {DTYPES[key]}",
                    stacklevel=4,
                )


def _keep_our_corrections(matches: list[Match], saved_state: Mapping[Any, Any]) -> None:
    """Remove `weight_correction` from the saved groups, so that ours stays; warn if their state does not fit it.

    Corrected weights are not rounded stochastically: with ours on, a saved `stochastic_rounding` is removed too.
    """
    outcomes = {
        True: "has no corrections of its weights, so they begin at zero",
        False: "has corrections of its weights, which are dropped: the weights continue from their bfloat16 values. To "
        "keep all 24 bits, build the optimizer with weight_correction=True",
    }
    unlike: dict[bool, list[int]] = {True: [], False: []}  # our setting -> the groups with other state
    for i, (ours, saved) in enumerate(matches):
        wanted = bool(ours.get("weight_correction"))
        if wanted:
            saved.pop("stochastic_rounding", None)
        had = bool(saved.pop("weight_correction", wanted))
        # Look at the state too: torch.distributed.checkpoint loads only the state that we keep.
        states = [saved_state[key] for key in saved["params"] if key in saved_state]
        if had != wanted or any((CORRECTION in state) != wanted for state in states):
            unlike[wanted].append(i)
    for wanted, groups in unlike.items():
        if groups:
            text = f"groups {groups} have weight_correction={wanted} here, and the checkpoint {outcomes[wanted]}"
            warnings.warn(text, stacklevel=4)


def _new_state(optimizer: MatrixOptimizer, matches: list[Match], saved_state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state to load, by parameter; state that belongs to no parameter keeps its key, as torch does."""
    found: dict[Any, Any] = {}
    of_parameters = set()
    for ours, saved in matches:
        of_parameters.update(saved["params"])
        for key, p in zip(saved["params"], ours["params"], strict=True):
            if key in saved_state:
                found[p] = _checked_state(optimizer, p, ours | saved, saved_state[key])
    return found | {key: value for key, value in saved_state.items() if key not in of_parameters}


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


# -- apply ------------------------------------------------------------------------------------------------------------


def _warn_of_groups(optimizer: MatrixOptimizer, matches: list[Match], saved_count: int) -> None:
    """Warn if schedulers must be built again, because groups were split or ours are replaced."""
    if len(matches) > saved_count:
        warnings.warn(
            f"the checkpoint's {saved_count} groups are split into {len(matches)}, because dtypes of the state differ "
            "here within a group: a scheduler saved with it has too few rates. Build a new one at the step reached",
            stacklevel=4,
        )
    if any(match.ours is not group for match, group in zip(matches, optimizer.param_groups, strict=False)):
        warnings.warn(
            "the checkpoint has other groups of the same parameters, as older versions made them: param_groups become "
            "those. Build a scheduler after this, and load both checkpoints again: it keeps rates by position",
            stacklevel=4,
        )


def _apply(optimizer: MatrixOptimizer, matches: list[Match], new_state: dict[Any, Any]) -> None:
    """Write saved settings and new state into the optimizer. Parameters without saved state get state of zeros."""
    optimizer.param_groups[:] = [match.ours for match in matches]
    for ours, saved in matches:
        names = ours.get("param_names") or saved.get("param_names")
        ours.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        if names:
            ours["param_names"] = list(names)
    optimizer._keep_structure(loaded=True)
    optimizer.state.update(new_state)
    for ours, _ in matches:
        for p in ours["params"]:
            if p not in new_state and not p.is_meta:  # the checkpoint was written before its first step
                optimizer.state.pop(p, None)
                optimizer._allocate(p, ours)
    optimizer._started = started(optimizer)
