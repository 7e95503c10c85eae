"""Cosmos: the paper's optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from cosmos_optim.optim.base import MatrixOptimizer


class Cosmos(MatrixOptimizer):
    r"""SOAP in the leading rank-r eigenspace of each matrix's gradient, MUON on the rest (COSMOS, Algorithm 1).

    For an m x n matrix W with gradient G, momentum M and tracked eigenbasis U of G'G:

        A = (M U / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps) U'       the SOAP half
        B = NORM(NS5((M - M U U') / |M - M U U'|))                     the MUON half
        W <- W - lr sqrt(m) NORM(A + gamma B sqrt(m))                  so each update has RMS lr

    Embeddings, the output head, norms and biases go to Adam at `adam_lr`.

    Args:
        params: a model, `param_groups(model)`, or what torch.optim takes (then all of them matrices).
        lr: RMS of a hidden matrix's update.
        adam_lr: learning rate of the Adam groups.
        betas: decay of the momentum and of the second moments, for both rules.
        eps: added to the root of the second moment; 0 is legal.
        rank: dimension of the tracked subspace, at most n.
        gamma: weight of the MUON half; None is the paper's lr / adam_lr, taken once when a group is added.
        weight_decay: decoupled, times the group's own lr.
        nesterov: look-ahead momentum in both halves: True for one step (Nesterov), or a number of steps.
        two_sided: track a basis on both sides (Algorithm 4).
        options: eps_placement, side, ns_steps, ns_coefficients, ns_dtype, momentum_dtype, residual_guard,
            stochastic_rounding, maximize, split_sizes, nonfinite; each may stand in a group too. See the README.
            row_beta2: NorMuon's second moment of each row of the update; off by default; not in the paper.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> opt = Cosmos(model, lr=5e-4, adam_lr=2e-3)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> opt.step()
    >>> opt.param_groups[0]["gamma"]
    0.25
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 5e-4,
        *,
        adam_lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        rank: int = 64,
        gamma: float | None = None,
        weight_decay: float = 0.0,
        nesterov: float = False,
        two_sided: bool = False,
        **options: Any,
    ) -> None:
        hyper = {"betas": betas, "eps": eps, "rank": rank, "gamma": gamma, "weight_decay": weight_decay,
                 "nesterov": nesterov, "two_sided": two_sided, **options}  # fmt: skip
        super().__init__(params, rule="cosmos", lr=lr, adam_lr=adam_lr, hyper=hyper)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; `two_sided` chooses between the paper's two algorithms."""
        group = dict(param_group)
        two_sided = group.pop("two_sided", self._setup["hyper"].get("two_sided", False))
        if two_sided and group.get("rule", "cosmos") == "cosmos":
            group["rule"] = "cosmos-two-sided"
        super().add_param_group(group)
