"""Load optimizer state: match groups, check shapes, and keep each rule's dtypes.

"Ours" is what the optimizer has, "saved" is what the checkpoint has. The matching of groups is in `saved_groups`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_optim import saved_groups
from cosmos_optim.engine import adam_state
from cosmos_optim.engine.layout import CORRECTION, Layout
from cosmos_optim.engine.parameter_state import converted
from cosmos_optim.hyperparameters import check_options
from cosmos_optim.rules import RULES, adam
from cosmos_optim.rules.rule import M_SCALE, Settings, Slot, load_momentum
from cosmos_optim.saved_groups import DTYPES, Match, differing, written_by_another

if TYPE_CHECKING:
    from cosmos_optim.optimizer import MatrixOptimizer


# The names of the state tensors of all rules. Any other name in a parameter's state belongs to other code.
STATE_NAMES = frozenset(("step", M_SCALE, CORRECTION, *adam.SCALES)).union(*(r.State._fields for r in RULES.values()))


def load(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> None:
    """Load a state_dict as torch does, but keep the dtype of each state slot: torch would cast to the parameter's.

    Match the groups, check and convert what was saved, and apply it. An error before `_apply` changes nothing.
    """
    _require("state_dict", state_dict, dict)
    state_dict = state_dict.copy()  # hooks may change it, but the caller owns the original
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = hook(optimizer, state_dict) or state_dict
    _check_form(state_dict)
    groups = saved_groups.read(state_dict["param_groups"])
    # A copy, as `groups` are: the functions below change both. State that was reset to {} counts as missing.
    saved_state = {key: state for key, state in state_dict["state"].items() if not isinstance(state, dict) or state}
    optimizer._match_layouts()

    matches = saved_groups.match_with(optimizer, groups)
    _check_settings(matches)
    _convert_dtypes(optimizer, matches, saved_state)
    _warn_of_dtypes(matches)
    _keep_our_corrections(matches, saved_state)
    new_state = _new_state(optimizer, matches, saved_state)
    _warn_of_groups(optimizer, matches, len(groups))
    _warn_of_missing_state(optimizer, new_state)
    _apply(optimizer, matches, new_state)

    for post in optimizer._optimizer_load_state_dict_post_hooks.values():
        post(optimizer)


# -- check and convert ------------------------------------------------------------------------------------------------


def _check_form(state_dict: Mapping[str, Any]) -> None:
    """Raise an error if this is not the state_dict of an optimizer."""
    for name in ("param_groups", "state"):
        if name not in state_dict:
            inside = [key for key, value in state_dict.items() if isinstance(value, dict) and name in value]
            hint = f"did you mean its entry {inside[0]!r}?" if inside else "give what optimizer.state_dict() returned"
            raise ValueError(f"the state_dict has no {name!r}, only {list(state_dict)[:8]}: {hint}")
    _require("'state' of the state_dict", state_dict["state"], dict)
    _require("'param_groups' of the state_dict", state_dict["param_groups"], list)
    for i, group in enumerate(state_dict["param_groups"]):
        _require(f"group {i} of the state_dict", group, dict)
        if "params" not in group:
            raise ValueError(f"group {i} of the state_dict has no 'params', only {list(group)[:8]}")


def _require(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise TypeError(f"{name} must be a {wanted.__name__}, got a {type(value).__name__}")


def _check_settings(matches: list[Match]) -> None:
    """Raise ValueError for a saved setting that no optimizer would take: a step would fail on it halfway."""
    for i, match in enumerate(matches):
        settings, lr = match.saved, match.saved.get("lr")
        if isinstance(lr, (Real, Tensor)):  # a schedule may end a little below 0 by rounding, and a step takes that
            settings = settings | {"lr": abs(lr)}
        try:
            check_options(settings)
        except ValueError as error:
            if "rule" not in settings:  # torch's Muon has three numbers as ns_coefficients
                raise ValueError(written_by_another(i)) from error
            raise ValueError(f"group {i} of the checkpoint: {error}") from None


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
        return kept | adam_state.load(held, dtype)._asdict()
    like = torch.empty(layout.shape, dtype=layout.dtype, device="meta")
    whole = Layout(layout.name, like, layout.rule, settings)
    M = torch.empty(layout.shape, dtype=dtype, device=held["M"].device)
    for block, x in zip(whole.blocks(M), whole.state_blocks(held, settings), strict=True):
        block.copy_(load_momentum(x, dtype))
    return kept | {"M": M}


def _warn_of_dtypes(matches: list[Match]) -> None:
    """Warn if the checkpoint's momentum or moments are stored in another dtype than ours."""
    for i, (ours, saved) in enumerate(matches):
        for key in differing(ours, saved, DTYPES):
            warnings.warn(
                f"group {i} was saved with {key}={saved[key]}, which replaces {ours[key]}: {DTYPES[key]}", stacklevel=4
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
    _require(f"the state of parameter {layout.name!r}", saved, dict)
    slots: dict[str, Slot | None] = {"step": None, **layout.slots(group)}
    saved = dict(adam_state.without_codes(saved, slots))
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
        if name not in saved:
            continue
        if not isinstance(saved[name], (Tensor, Real)):
            kind = type(saved[name]).__name__
            raise ValueError(f"parameter {layout.name!r}: state {name!r} in the checkpoint is a {kind}, not a tensor")
        layout.check_loaded(saved[name])
        if (found := tuple(_as_tensor(saved[name]).shape)) != shape:
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
            "the checkpoint has other groups of the same parameters, as after add_param_group or in an older version: "
            "param_groups become those. Build a scheduler after this, and load both checkpoints again: it keeps rates "
            "by position",
            stacklevel=4,
        )


def _warn_of_missing_state(optimizer: MatrixOptimizer, new_state: Mapping[Any, Any]) -> None:
    """Warn of trained parameters without saved state. None at all is that of a run before its first step."""
    layouts = optimizer._layouts
    missing = [x.name for p, x in layouts.items() if p.requires_grad and not p.is_meta and p not in new_state]
    entries = [(key, x) for key, x in new_state.items() if not isinstance(key, Tensor) and isinstance(x, dict)]
    strays = [key for key, x in entries if not STATE_NAMES.isdisjoint(x)]  # numbers that became text, for example
    if missing and (strays or len(missing) < sum(p.requires_grad for p in layouts)):
        others = f" and of {len(missing) - 1} others" if len(missing) > 1 else ""
        unused = f". It has state of {strays[0]!r}, which is in none of its groups" if strays else ""
        warnings.warn(
            f"the checkpoint has no state of parameter {missing[0]!r}{others}, and it begins at zero{unused}: check "
            "that the checkpoint is complete",
            stacklevel=4,
        )


def _apply(optimizer: MatrixOptimizer, matches: list[Match], new_state: dict[Any, Any]) -> None:
    """Write saved settings and new state into the optimizer. Parameters without saved state get state of zeros."""
    optimizer.param_groups[:] = [match.ours for match in matches]
    for ours, saved in matches:
        names = ours.get("param_names") or saved.get("param_names")
        # `nonfinite` stays ours: a run resumes with another value to find a NaN, or to pass it.
        ours.update({key: value for key, value in saved.items() if key not in ("params", "param_names", "nonfinite")})
        if names:
            ours["param_names"] = list(names)
    optimizer._group_checks.note_structure(optimizer.param_groups, loaded=True)
    optimizer.state.update(new_state)
    for ours, _ in matches:
        for p in ours["params"]:
            if p not in new_state and not p.is_meta:  # the checkpoint was written before its first step
                optimizer.state.pop(p, None)
                optimizer._allocate(p, ours)
    optimizer._started = started(optimizer)


def started(optimizer: MatrixOptimizer) -> set[Tensor]:
    """Return the parameters that have had a non-zero gradient: those with a step count above 0."""
    states = ((p, optimizer.state.get(p)) for p in optimizer._layouts)
    held = [(p, s["step"]) for p, s in states if s and "step" in s and not s["step"].is_meta]
    if not held:
        return set()
    counts = torch.stack([optimizer._layouts[p].local(step).cpu() for p, step in held]).tolist()
    return {p for (p, _), count in zip(held, counts, strict=True) if count > 0}
