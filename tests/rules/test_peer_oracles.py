"""The optimizers that COSMOS is compared with, against their own fp64 numpy oracles, over 20 steps.

Shapes: W0 (m, n) first weights, G (20, m, n) gradients.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_optim import OPTIMIZERS
from tests.oracles.adam import Adam, AdamMini
from tests.oracles.galore import GaLore
from tests.oracles.gradients import gradients
from tests.oracles.muon import Muon, MuonNorm, NorMuon
from tests.oracles.soap import Soap

STEPS = 20
# fp64 against fp64, amplified by Newton-Schulz and by the inverse gaps of the spectrum.
TOLERANCE = 1e-10

LR = 3e-3
TALL, WIDE, SQUARE = (24, 14), (12, 26), (16, 16)
FP64 = {"ns_dtype": torch.float64}
# O'GU is diagonal at the first step, and its other entries are rounding noise: epsilon must exceed that noise.
TWO_SIDED = {"two_sided": True, "eps": 1e-4}

# (optimizer, options of both, oracle, options only we have, options only the oracle has, shapes)
Case = tuple[str, dict[str, Any], Callable[..., Any], dict[str, Any], dict[str, Any], list[tuple[int, int]]]
CASES: dict[str, Case] = {
    "adam": ("adam", {}, Adam, {}, {}, [TALL, WIDE]),
    "adam, decay": ("adam", {"weight_decay": 0.3, "betas": (0.8, 0.95)}, Adam, {}, {}, [TALL]),
    "adam-mini by row": ("adam-mini", {"weight_decay": 0.3}, AdamMini, {}, {}, [TALL, WIDE]),
    "adam-mini by head": ("adam-mini", {}, AdamMini, {"block_rows": 4}, {"rows": 4}, [TALL, WIDE]),
    "muon": ("muon", {}, Muon, FP64, {}, [TALL, WIDE, SQUARE]),
    "muon, plain momentum": ("muon", {"nesterov": False, "momentum": 0.9}, Muon, FP64, {}, [TALL]),
    "muon, decay": ("muon", {"weight_decay": 0.3}, Muon, FP64, {}, [TALL]),
    "muon, original": ("muon", {}, Muon, FP64 | {"scaling": "original"}, {"scale": "original"}, [TALL, WIDE]),
    "muon, match_rms_adamw": (
        "muon", {}, Muon, FP64 | {"scaling": "match_rms_adamw"}, {"scale": "match_rms_adamw"}, [TALL, WIDE],
    ),
    "muon, normalized": ("muon", {"weight_decay": 0.3}, MuonNorm, FP64 | {"normalize": True}, {}, [TALL, WIDE]),
    "muon, equal rows": ("muon", {"equal_rows": True}, Muon, FP64, {}, [TALL, WIDE]),
    "normuon, equal rows": ("normuon", {"equal_rows": True}, NorMuon, FP64, {}, [TALL, WIDE]),
    "normuon": ("normuon", {}, NorMuon, FP64, {}, [TALL, WIDE]),
    "normuon, other": ("normuon", {"beta2": 0.8, "eps": 1e-2, "weight_decay": 0.3}, NorMuon, FP64, {}, [TALL]),
    # A full basis is defined if G'G has full rank: m >= n (two-sided: m = n).
    "soap": ("soap", {"weight_decay": 0.3}, Soap, {}, {}, [TALL, SQUARE]),
    "soap, every 3": ("soap", {"frequency": 3}, Soap, {}, {}, [TALL]),
    "soap, box": ("soap", {"squares": "momentum"}, Soap, {}, {}, [TALL]),
    "soap, two-sided": ("soap", TWO_SIDED, Soap, {}, {}, [SQUARE]),
    "soap, two-sided, every 4": ("soap", TWO_SIDED | {"frequency": 4}, Soap, {}, {}, [SQUARE]),
    "galore": ("galore", {"rank": 4}, GaLore, {}, {}, [TALL, WIDE]),
    "galore, renewed": ("galore", {"rank": 4, "update_gap": 6, "scale": 1.0}, GaLore, {}, {}, [TALL, WIDE]),
    "galore, decay": ("galore", {"rank": 3, "weight_decay": 0.3}, GaLore, {}, {}, [TALL]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in CASES for shape in CASES[name][5]])
def test_each_optimizer_follows_its_oracle(name: str, shape: tuple[int, int]) -> None:
    """Compare displacements at every step."""
    optimizer, common, make_oracle, ours, theirs, _ = CASES[name]
    rank = common.get("rank", min(shape))
    W = W0 = np.random.default_rng(5).normal(size=shape)
    p = torch.nn.Parameter(torch.from_numpy(W0.copy()))
    opt = OPTIMIZERS[optimizer]([("w", p)], lr=LR, **common, **ours)
    oracle = make_oracle(lr=LR, **common, **theirs)
    for step, G in enumerate(gradients(STEPS, *shape, rank=rank, seed=3)):
        p.grad = torch.from_numpy(G.copy())
        opt.step()
        W = oracle.step(W, G)
        error = np.linalg.norm(p.detach().numpy() - W) / np.linalg.norm(W - W0)
        assert error < TOLERANCE, f"step {step + 1}: displacement differs by {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("two_sided", [False, True])
def test_soap_on_a_gpu_equals_soap_on_a_cpu(two_sided: bool) -> None:
    """On a GPU the bases are updated by Cholesky, on a CPU by Householder reflections."""
    start, eps = torch.randn(SQUARE, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 1e-4
    ends = []
    for device in ("cpu", "cuda"):
        p = torch.nn.Parameter(start.to(device, copy=True))
        opt = OPTIMIZERS["soap"]([p], lr=LR, frequency=2, eps=eps, two_sided=two_sided)
        for G in gradients(STEPS, *SQUARE, 4, 0):
            p.grad = torch.from_numpy(G).to(device)
            opt.step()
        ends.append(p.detach().cpu())
    assert (ends[0] - ends[1]).norm() < 1e-8 * (ends[0] - start).norm()
