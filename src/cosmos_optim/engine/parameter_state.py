"""Allocate the state of one parameter, and move it after the parameter. It is a dict: name -> value.

The step count and the tensors of the parameter's layout are ours. Other code may keep values beside them, such as an
average of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.engine.layout import Layout, check_correction, check_trainable
from cosmos_optim.rules.rule import Settings


def allocated(layout: Layout, p: Tensor, settings: Settings, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with ours, newly allocated, beside what other code keeps there."""
    with torch.inference_mode(False):  # what is allocated in inference mode can be written only there
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        return {**state, "step": step, **layout.allocate(p, settings)}


@torch.inference_mode(False)
@torch.no_grad()
def moved(layout: Layout, p: Tensor, settings: Settings, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` on the device and in the dtype that the parameter has after model.to(...). Update the layout too.

    Other code's state follows the parameter's dtype if it had it before.
    """
    check_trainable(layout.name, p)
    check_correction(layout.name, p, settings)
    old, layout.dtype = layout.dtype, p.dtype
    dtypes = {"step": torch.float32} | {name: slot.dtype for name, slot in layout.slots(settings).items()}

    def follow(x: Tensor) -> Tensor:
        return x.to(p.device, p.dtype if x.dtype is old else x.dtype)

    there = {
        name: value.to(p.device, dtypes[name]) if name in dtypes else converted(value, follow)
        for name, value in state.items()
    }
    return placed(layout, p, settings, there)


def placed(layout: Layout, p: Tensor, settings: Settings, state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` where the layout keeps it: in pinned memory only if the parameter is on a GPU."""
    if not layout.offloads or p.is_meta:
        return state
    slots = {name: slot for name, slot in layout.slots(settings).items() if name in state}
    return state | {name: layout.adopt(state[name], p, slot) for name, slot in slots.items()}


def converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of other code's state with all of its tensors converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, dict):
        return {key: converted(x, convert) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(converted(x, convert) for x in value)
    return copy.deepcopy(value)
