"""The optimizers that are compared. Each builder takes the hidden matrices (m, n) and the other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosmos_optim import Cosmos, CosmosPaper, Muon

Build = Callable[[list[Tensor], list[Tensor]], list[torch.optim.Optimizer]]


def _groups(hidden: list[Tensor], rest: list[Tensor], rule: str) -> list[dict[str, Any]]:
    return [{"params": hidden, "rule": rule}, {"params": rest, "rule": "adam"}]


def cosmos(kind: type[Cosmos] = Cosmos, **hyper: Any) -> Build:
    """Return a builder of COSMOS with these hyper-parameters."""
    return lambda hidden, rest: [kind(_groups(hidden, rest, "cosmos"), **hyper)]


def muon(**hyper: Any) -> Build:
    """Return a builder of this library's Muon with these hyper-parameters."""
    return lambda hidden, rest: [Muon(_groups(hidden, rest, "muon"), **hyper)]


def adamw(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Build torch's fused AdamW for all parameters."""
    return [torch.optim.AdamW([*hidden, *rest], lr=1e-3, fused=hidden[0].is_cuda)]


def muon_torch(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Build torch's Muon for the hidden matrices, and its fused AdamW for the others."""
    return [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=hidden[0].is_cuda)]


def cosmos_loop(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """Build COSMOS with one group per matrix: the plain loop that batching is compared with."""
    groups = [{"params": [p], "rule": "cosmos"} for p in hidden]
    return [Cosmos([*groups, {"params": rest, "rule": "adam"}])]


BUILDERS: dict[str, Build] = {
    "cosmos": cosmos(),
    "cosmos-4": cosmos(ns_steps=4),
    "cosmos-equal-rows": cosmos(equal_rows=True),
    "cosmos-bf16": cosmos(momentum_dtype=torch.bfloat16),
    "cosmos-int8": cosmos(momentum_dtype=torch.int8),
    "cosmos-int8-offload": cosmos(momentum_dtype=torch.int8, offload="cpu"),
    "cosmos-int8-adam8": cosmos(momentum_dtype=torch.int8, adam_dtype=torch.int8),
    "cosmos-24bit": cosmos(weight_correction=True),  # with --dtype bfloat16
    "cosmos-24bit-int8": cosmos(weight_correction=True, momentum_dtype=torch.int8),
    "cosmos-24bit-int8-adam8": cosmos(weight_correction=True, momentum_dtype=torch.int8, adam_dtype=torch.int8),
    "cosmos-eager": cosmos(cuda_graphs=False),
    "cosmos-paper": cosmos(CosmosPaper),
    "cosmos-loop": cosmos_loop,
    "muon": muon(),
    "muon-24bit": muon(weight_correction=True),
    "adamw": adamw,
    "muon-torch": muon_torch,
}
