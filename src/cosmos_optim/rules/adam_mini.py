"""Adam-mini (Zhang et al. 2024): Adam with one second moment for a block of rows.

    m = b1 m + (1 - b1) G,  v = b2 v + (1 - b2) mean of G^2 over the block,  D = (m / c1) / (sqrt(v / c2) + eps)

A block is one row (an output neuron, a token of an embedding) or `block_rows` of them (a head of the queries or keys).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.common import correction, quotient
from cosmos_optim.rules.rule import Hyper, Probe, Rule, Slot, State, check_betas, check_eps, require

HYPER: dict[str, Any] = {"betas": (0.9, 0.98), "eps": 1e-8, "block_rows": 1}


def direction(
    G: Tensor, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
) -> tuple[Tensor, State]:
    """One Adam-mini step."""
    (b1, b2), rows = h["betas"], blocks_of(alg.m, h)
    m = torch.lerp(state["exp_avg"], G, 1 - b1)
    mean = alg.mm(G * G, G.new_full((G.shape[-1], 1), 1 / alg.n))
    if rows > 1:
        member = alg.T.slice_n(membership(alg.m, rows, like=G))
        mean = alg.tn(member.expand(*G.shape[:-2], -1, -1), mean) / rows
    v = b2 * state["v"] + (1 - b2) * mean
    root = (v / correction(b2, t)).sqrt() + h["eps"]
    D = quotient(m / correction(b1, t), (member @ root if rows > 1 else root).expand_as(m))
    return D, {"exp_avg": m, "v": v}


def blocks_of(m: int, h: Hyper) -> int:
    """Rows in a block; where they do not divide the matrix, one row."""
    return h["block_rows"] if m % h["block_rows"] == 0 else 1


def membership(m: int, rows: int, like: Tensor) -> Tensor:
    """(m, m / rows): 1 where a row belongs to a block."""
    block = torch.arange(m, dtype=torch.int64, device=like.device) // rows
    return torch.nn.functional.one_hot(block, m // rows).to(like.dtype)


def slots(m: int, n: int, h: Hyper) -> dict[str, Slot]:
    """The momentum, and a number a block."""
    rows = blocks_of(m, h)
    v = Slot("mo", (m, 1)) if rows == 1 else Slot("ko", (m // rows, 1))
    return {"exp_avg": Slot("mn", (m, n)), "v": v}


def check(h: Hyper) -> None:
    """Hyper-parameters within their ranges."""
    check_betas(h)
    check_eps(h)
    require(isinstance(h["block_rows"], int) and h["block_rows"] >= 1, "block_rows", h["block_rows"],
            "it must be a positive integer")  # fmt: skip


RULE = Rule(
    "adam-mini", HYPER, slots, direction, check=check,
    laws=frozenset({"row_permutation", "scale_invariance", "batched_equals_single", "deterministic", "grad_untouched",
                    "odd"}),
)  # fmt: skip
