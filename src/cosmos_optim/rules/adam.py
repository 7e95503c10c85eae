"""Adam with decoupled weight decay (Loshchilov and Hutter 2019), for everything that is not a hidden matrix.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  D = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

State names are torch.optim.AdamW's. With `adam_dtype=torch.int8`, large tensors (`stores_codes`) store both moments as
codes of 8 bits, with the scales of their blocks (`linalg.int8_adam`). A step dequantizes them, computes with the new
moments in float32, and rounds only what it stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.int8_adam import (
    dequantize_root,
    dequantize_signed,
    element_index,
    quantize_root,
    quantize_signed,
)
from cosmos_optim.linalg.int8_momentum import scale_columns
from cosmos_optim.linalg.normalization import bias_correction, quotient
from cosmos_optim.rules.rule import Rule, Settings, Slot

DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "adam_dtype": None}
# Tensors with at most this many elements keep their moments in float32: they need little memory, and norms and biases
# are the most sensitive.
LARGEST_FLOAT32 = 4096
# Rows with fewer elements keep them too: a float32 scale for each row would take most of what codes save, or more.
SHORTEST_ROW = 16
# The scales of a quantized tensor, and all of its state.
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
QUANTIZED = ("exp_avg", "exp_avg_sq", *SCALES)


class AdamState(NamedTuple):
    """Both moments, shaped like the parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


def direction(
    G: Tensor, state: AdamState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8
) -> tuple[Tensor, AdamState]:  # fmt: skip
    """Return the direction of one Adam step, for a tensor of any shape, and the new state."""
    b1, b2 = betas
    m = torch.lerp(state.exp_avg, G, 1 - b1)
    v = b2 * state.exp_avg_sq + (1 - b2) * G * G
    D = quotient(m / bias_correction(b1, t), (v / bias_correction(b2, t)).sqrt() + eps)
    return D, AdamState(m, v)


def fused_(
    params: Sequence[Tensor], grads: Sequence[Tensor], state: dict[str, list[Tensor]], steps: Sequence[Tensor], *,
    settings: Settings, skip: Tensor | None,
) -> None:  # fmt: skip
    """Take the same step with torch's fused kernel, for tensors of one dtype; `steps` are already advanced."""
    lr, betas = settings["lr"], settings["betas"]
    if isinstance(lr, Tensor):
        lr = lr.to(params[0].device)
    torch._fused_adamw_(
        list(params), list(grads), state["exp_avg"], state["exp_avg_sq"], [], list(steps),
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=settings["weight_decay"], eps=settings["eps"],
        amsgrad=False, maximize=bool(settings["maximize"]), grad_scale=None,  # it may be 1, or a bool of numpy
        found_inf=None if skip is None else skip.float(),
    )  # fmt: skip


def stores_codes(m: int, n: int, settings: Settings) -> bool:
    """Return whether m rows of n elements store their moments as codes of 8 bits."""
    return settings.get("adam_dtype") is torch.int8 and m * n > LARGEST_FLOAT32 and n >= SHORTEST_ROW


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return two moments, shaped like the parameter, and the scales of their blocks if they are stored as integers."""
    dtype = settings.get("adam_dtype")
    if not stores_codes(m, n, settings):
        moment = Slot("*", (m, n), None if dtype is torch.int8 else dtype)
        return {"exp_avg": moment, "exp_avg_sq": moment}
    scale = Slot("mc", (m, scale_columns(n)), torch.float32)
    return {"exp_avg": Slot("*", (m, n), torch.int8), "exp_avg_scale": scale,
            "exp_avg_sq": Slot("*", (m, n), torch.uint8), "exp_avg_sq_scale": scale}  # fmt: skip


def load(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> AdamState:
    """Return the moments for computation in `dtype`."""
    m, v = tensors["exp_avg"], tensors["exp_avg_sq"]
    if "exp_avg_scale" not in tensors:
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
    if "exp_avg_scale" not in tensors:
        return state._asdict()
    index = element_index(state.exp_avg, first, width)
    m, m_scale = quantize_signed(state.exp_avg, index, t)
    v, v_scale = quantize_root(state.exp_avg_sq, index, t)
    return {"exp_avg": m, "exp_avg_scale": m_scale, "exp_avg_sq": v, "exp_avg_sq_scale": v_scale}


def without_codes(saved: Mapping[str, Any], slots: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return saved state with moments in float32, if it has codes and the slots do not; otherwise unchanged.

    Checkpoints from before `SHORTEST_ROW` have codes of short rows too.
    """
    if SCALES[0] not in saved or SCALES[0] in slots:
        return saved
    return {name: x for name, x in saved.items() if name not in SCALES} | load(saved, torch.float32)._asdict()


RULE = Rule("adam", DEFAULTS, AdamState, slots, direction, elementwise=True, fused=fused_)
