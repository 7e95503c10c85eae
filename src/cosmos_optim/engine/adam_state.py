"""Adam's moments as they are stored: in a floating-point type, or as codes of 8 bits with the scales of their blocks.

A step loads them, computes with the new moments in float32 or wider, and rounds only what it stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.int8_adam import (
    dequantize_root,
    dequantize_signed,
    element_index,
    quantize_root,
    quantize_signed,
)
from cosmos_optim.rules.adam import SCALES, AdamState, has_codes

QUANTIZED = (*AdamState._fields, *SCALES)  # all state of a tensor with codes


def load(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> AdamState:
    """Return the moments for computation in `dtype`."""
    m, v = tensors["exp_avg"], tensors["exp_avg_sq"]
    if not has_codes(tensors):
        return AdamState(m.to(dtype), v.to(dtype))
    m = dequantize_signed(m, tensors["exp_avg_scale"], dtype)
    return AdamState(m, dequantize_root(v, tensors["exp_avg_sq_scale"], dtype))


def stored(
    state: AdamState, tensors: Mapping[str, Tensor], t: Tensor, first: tuple[int, int], width: int
) -> dict[str, Tensor]:
    """Return the values for the state tensors.

    Args:
        tensors: the state tensors, which decide the format.
        t: the step count, a 0-dim tensor. With the number of an element it decides how a code is rounded.
        first, width: the place of the state in a larger tensor, as `element_index` takes it.
    """
    if not has_codes(tensors):
        return state._asdict()
    index = element_index(state.exp_avg, first, width)
    m, m_scale = quantize_signed(state.exp_avg, index, t)
    v, v_scale = quantize_root(state.exp_avg_sq, index, t)
    return {"exp_avg": m, "exp_avg_scale": m_scale, "exp_avg_sq": v, "exp_avg_sq_scale": v_scale}


def without_codes(saved: Mapping[str, Any], slots: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return saved state with moments in float32, if it has codes and the slots do not; otherwise unchanged.

    Checkpoints from before `SHORTEST_ROW` have codes of short rows too.
    """
    if has_codes(slots) or not has_codes(saved):
        return saved
    return {name: x for name, x in saved.items() if name not in SCALES} | load(saved, torch.float32)._asdict()
