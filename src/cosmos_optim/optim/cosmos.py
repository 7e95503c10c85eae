"""Cosmos, and CosmosPaper with the paper's settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.rules.cosmos import PAPER


class Cosmos(MatrixOptimizer):
    r"""SOAP in the leading rank-r eigenspace of each matrix's gradient, MUON on the rest (COSMOS, Algorithm 1).

    For an m x n matrix W with gradient G, momentum M (looking a step ahead) and tracked eigenbasis U of G'G:

        A = (M U / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps) U'       the SOAP half
        B = NORM(NS5((M - M U U') / |M - M U U'|))                     the MUON half
        D = A + gamma B sqrt(m), its rows divided by the root of their average mean square
        W <- W - lr sqrt(m) NORM(D)                                    so each update has RMS lr

    The look-ahead and the rows' averages are not in the paper; `CosmosPaper` goes without. Embeddings, the output head,
    norms and biases go to Adam at `adam_lr`.

    Args:
        params: a model, `param_groups(model)`, or what torch.optim takes (then all of them matrices).
        lr: RMS of a hidden matrix's update.
        adam_lr: learning rate of the Adam groups.
        betas: decay of the momentum and of the second moments, for both rules.
        eps: added to the root of the second moment; 0 is legal.
        rank: dimension of the tracked subspace, at most n.
        gamma: weight of the MUON half; None is lr / adam_lr, the paper's rule, with at most 2e-3 for adam_lr. It is
            taken once, when a group is added.
        weight_decay: decoupled, times the group's own lr.
        nesterov: use Nesterov's momentum in both halves.
        row_beta2: decay of the mean squares of the update's rows, as in NorMuon; None leaves rows alone.
        two_sided: track a basis on both sides (Algorithm 4).
        options: eps_placement, side, ns_steps, ns_coefficients, ns_dtype, momentum_dtype, residual_guard,
            stochastic_rounding, maximize, split_sizes, nonfinite, missing; each may stand in a group too: README.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> opt = Cosmos(model, lr=5e-4, adam_lr=2e-3)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> opt.step()
    >>> opt.param_groups[0]["gamma"]
    0.25
    """

    rule = "cosmos"

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 5e-4,
        *,
        adam_lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        rank: int = 32,
        gamma: float | None = None,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        row_beta2: float | None = 0.95,
        two_sided: bool = False,
        **options: Any,
    ) -> None:
        hyper = {"betas": betas, "eps": eps, "rank": rank, "gamma": gamma, "weight_decay": weight_decay,
                 "nesterov": nesterov, "row_beta2": row_beta2, "two_sided": two_sided, **options}  # fmt: skip
        super().__init__(params, lr=lr, adam_lr=adam_lr, hyper=hyper)


class CosmosPaper(Cosmos):
    """COSMOS with the paper's settings: rank 64, no look-ahead, rows left alone, gamma = lr / adam_lr at any rate.

    Two things differ from the printed algorithm: epsilon stands outside the root (`eps_placement="inside"` is the
    paper's), and `residual_guard` is on (0 turns it off). All else is as in `Cosmos`.
    """

    soap_lr = math.inf

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 5e-4,
        *,
        rank: int = PAPER["rank"],
        nesterov: bool = PAPER["nesterov"],
        row_beta2: float | None = PAPER["row_beta2"],
        **options: Any,
    ) -> None:
        super().__init__(params, lr, rank=rank, nesterov=nesterov, row_beta2=row_beta2, **options)
