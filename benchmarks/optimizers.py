"""The optimizers that are compared: each row builds one over the same parameters."""

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
    """COSMOS with these hyper-parameters."""
    return lambda hidden, rest: [kind(_groups(hidden, rest, "cosmos"), **hyper)]


def muon(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """This library's MUON."""
    return [Muon(_groups(hidden, rest, "muon"))]


def adamw(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """torch's fused AdamW for everything."""
    return [torch.optim.AdamW([*hidden, *rest], lr=1e-3, fused=hidden[0].is_cuda)]


def muon_torch(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """torch's MUON, and its fused AdamW for the rest."""
    return [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, fused=hidden[0].is_cuda)]


def loop(hidden: list[Tensor], rest: list[Tensor]) -> list[torch.optim.Optimizer]:
    """COSMOS with a group for each matrix: the plain loop that batching is measured against."""
    groups = [{"params": [p], "rule": "cosmos"} for p in hidden]
    return [Cosmos([*groups, {"params": rest, "rule": "adam"}])]


ROWS: dict[str, Build] = {
    "cosmos": cosmos(),
    "cosmos-4": cosmos(ns_steps=4),
    "cosmos-bf16": cosmos(momentum_dtype=torch.bfloat16),
    "cosmos-eager": cosmos(cuda_graphs=False),
    "cosmos-paper": cosmos(CosmosPaper),
    "cosmos-loop": loop,
    "muon": muon,
    "adamw": adamw,
    "muon-torch": muon_torch,
}
