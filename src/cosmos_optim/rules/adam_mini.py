"""Adam-mini (Zhang et al. 2024): Adam with one second moment for each block of rows.

    m = b1 m + (1 - b1) G,  v = b2 v + (1 - b2) mean of G^2 over the block,  D = (m / c1) / (sqrt(v / c2) + eps)

A block is one row (an output neuron, a token of an embedding) or `block_rows` of them (a head of the queries or keys).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.normalization import bias_correction, quotient
from cosmos_optim.rules.rule import Rule, Settings, Slot

HEAD_ROWS = 64  # rows of an attention head, if head_dim is not given
DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "block_rows": 1}


class AdamMiniState(NamedTuple):
    """First moment (m, n), and a second moment for each block, (blocks, 1)."""

    exp_avg: Tensor
    v: Tensor


def direction(
    G: Tensor, state: AdamMiniState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    block_rows: int = 1, alg: Algebra | None = None,
) -> tuple[Tensor, AdamMiniState]:  # fmt: skip
    """Return the direction of one Adam-mini step, and the new state."""
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), rows = betas, rows_of_a_block(alg.m, block_rows)
    m = torch.lerp(state.exp_avg, G, 1 - b1)
    mean = alg.mm(G * G, G.new_full((G.shape[-1], 1), 1 / alg.n))
    if rows > 1:
        block = torch.arange(alg.m, dtype=torch.int64, device=G.device) // rows
        member = alg.T.slice_n(one_hot(block, alg.m // rows).to(G.dtype))  # (m, blocks): 1 if the row is in the block
        mean = alg.tn(member.expand(*G.shape[:-2], -1, -1), mean) / rows
    v = b2 * state.v + (1 - b2) * mean
    root = (v / bias_correction(b2, t)).sqrt() + eps
    D = quotient(m / bias_correction(b1, t), (member @ root if rows > 1 else root).expand_as(m))
    return D, AdamMiniState(m, v)


def rows_of_a_block(m: int, block_rows: int) -> int:
    """Return the rows of a block: `block_rows` if it divides m, else 1."""
    return block_rows if m % block_rows == 0 else 1


def slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return the momentum, and one number for each block."""
    rows = rows_of_a_block(m, settings["block_rows"])
    v = Slot("mo", (m, 1)) if rows == 1 else Slot("ko", (m // rows, 1))
    return {"exp_avg": Slot("mn", (m, n)), "v": v}


RULE = Rule("adam-mini", DEFAULTS, AdamMiniState, slots, direction)
