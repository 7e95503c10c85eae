"""Adam with decoupled weight decay (Loshchilov and Hutter 2019), for everything that is not a hidden matrix.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  D = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

State names are torch.optim.AdamW's. With `adam_dtype=torch.int8`, large tensors (`stores_codes`) store both moments as
codes of 8 bits, with the scales of their blocks. `engine.adam_state` converts them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.linalg.int8_momentum import scale_columns
from cosmos_optim.linalg.normalization import bias_correction, quotient
from cosmos_optim.rules.rule import Rule, Settings, Slot

DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "adam_dtype": None}
# Tensors with at most this many elements keep their moments in float32: they need little memory, and norms and biases
# are the most sensitive.
LARGEST_FLOAT32 = 4096
# Rows with fewer elements keep them too: a float32 scale for each row would take most of what codes save, or more.
SHORTEST_ROW = 16
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")  # of the codes


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


def stores_codes(m: int, n: int, settings: Settings) -> bool:
    """Return whether m rows of n elements store their moments as codes of 8 bits."""
    return settings.get("adam_dtype") is torch.int8 and m * n > LARGEST_FLOAT32 and n >= SHORTEST_ROW


def has_codes(state: Container[str]) -> bool:
    """Return whether state with these names stores its moments as codes of 8 bits."""
    return SCALES[0] in state


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return two moments, shaped like the parameter, and the scales of their blocks if they are stored as integers."""
    dtype = settings.get("adam_dtype")
    if not stores_codes(m, n, settings):
        moment = Slot("*", (m, n), None if dtype is torch.int8 else dtype)
        return {"exp_avg": moment, "exp_avg_sq": moment}
    scale = Slot("mc", (m, scale_columns(n)), torch.float32)
    return {"exp_avg": Slot("*", (m, n), torch.int8), "exp_avg_scale": scale,
            "exp_avg_sq": Slot("*", (m, n), torch.uint8), "exp_avg_sq_scale": scale}  # fmt: skip


RULE = Rule("adam", DEFAULTS, AdamState, slots, direction, elementwise=True)
