"""Optimizers on a CPU that step as on a GPU: through `cuda.gpu_run`, with kernels under Triton's interpreter."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import optimizer
from cosmos_optim.cuda import gpu_run
from cosmos_optim.cuda.graph import GraphedStep
from cosmos_optim.cuda.step import SCHEDULES
from cosmos_optim.linalg import subspace


def run_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step on a CPU take the path of a GPU; first bases take one power step, because any basis will do."""
    graph = GraphedStep()
    monkeypatch.setattr(optimizer, "run", lambda entries, check, record: gpu_run.run(entries, check, record, graph))
    monkeypatch.setattr(gpu_run, "supported", lambda batch: batch.rule.name in SCHEDULES)
    monkeypatch.setitem(subspace.START_STEPS, torch.float32, 1)


def matrices(device: torch.device, *shapes: tuple[int, int]) -> list[nn.Parameter]:
    """Return the same parameters every time."""
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


def stepped(
    kind: type[torch.optim.Optimizer], params: Sequence[nn.Parameter], steps: int, **options: Any
) -> list[dict[str, Tensor]]:
    """Take a few steps on the same gradients every time; return the state of each parameter."""
    opt = kind([{"params": list(params)}], lr=1e-2, **options)
    for step in range(steps):
        give_gradients(params, step)
        opt.step()
    return [opt.state[p] for p in params]


def give_gradients(params: Sequence[nn.Parameter], seed: int) -> None:
    """Give every parameter a gradient, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)
