"""COSMOS and the optimizers the paper compares it with, each a shell that binds its rule to the same engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.routing.param_groups import as_groups
from cosmos_optim.rules.cosmos import PAPER

Params = nn.Module | Iterable[Any]
Rate = float | Tensor


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


class Muon(MatrixOptimizer):
    """MUON (the paper's Algorithm 3): W <- W - lr sqrt(max(m, n)) NS5(N / |N|), N the Nesterov momentum.

    Args:
        lr: with scaling="paper" the RMS of an update is about lr; "original" and "match_rms_adamw" are torch's.
        momentum: decay of the momentum; the paper's LLaMA runs use 0.9.
        normalize: scale every update to RMS lr, the paper's normalization ablation; `scaling` is then ignored.
        adam_lr, betas, eps: for embeddings, head, norms and biases.
        options: nesterov, ns_steps, ns_coefficients, ns_dtype, momentum_dtype and what every optimizer here takes.
    """

    rule = "muon"

    def __init__(
        self, params: Params, lr: Rate = 1e-3, *, adam_lr: Rate = 2e-3, momentum: float = 0.95, scaling: str = "paper",
        normalize: bool = False, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.0,
        **options: Any,
    ) -> None:  # fmt: skip
        hyper = dict(
            momentum=momentum, scaling=scaling, normalize=normalize, betas=betas, eps=eps, weight_decay=weight_decay,
            **options,
        )  # fmt: skip
        super().__init__(params, lr=lr, adam_lr=adam_lr, hyper=hyper)


class NorMuon(MatrixOptimizer):
    """NorMuon: MUON with a second moment for each row after Newton-Schulz, scaled to RMS lr.

    Args:
        beta2: decay of the rows' second moments.
    """

    rule = "normuon"

    def __init__(
        self, params: Params, lr: Rate = 1e-3, *, adam_lr: Rate = 2e-3, momentum: float = 0.95, beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        hyper = dict(momentum=momentum, beta2=beta2, betas=betas, eps=eps, weight_decay=weight_decay, **options)
        super().__init__(params, lr=lr, adam_lr=adam_lr, hyper=hyper)


class SOAP(MatrixOptimizer):
    """SOAP: Adam in the eigenbasis of the averaged G'G (the paper's Algorithm 2), or of both sides.

    Args:
        frequency: steps between two turns of the basis. Turned often it needs a warm-up: as long as few gradients were
            seen, a turn brings momentum to directions whose second moment is still near 0 (docs/algorithm.md).
        two_sided: a basis on each side, as published SOAP has.
        squares: "gradient" (published) or "momentum" (the paper's box) is what the second moment averages.
    """

    rule = "soap"

    def __init__(
        self, params: Params, lr: Rate = 2e-3, *, adam_lr: Rate | None = None, frequency: int = 1,
        two_sided: bool = False, squares: str = "gradient", betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8, weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        hyper = dict(
            frequency=frequency, two_sided=two_sided, squares=squares, betas=betas, eps=eps, weight_decay=weight_decay,
            **options,
        )  # fmt: skip
        super().__init__(params, lr=lr, adam_lr=lr if adam_lr is None else adam_lr, hyper=hyper)


class GaLore(MatrixOptimizer):
    """GaLore: Adam on gradients projected to their leading singular vectors.

    Args:
        rank: of the projection. update_gap: steps between projectors. scale: factor of the update.
    """

    rule = "galore"

    def __init__(
        self, params: Params, lr: Rate = 1e-2, *, adam_lr: Rate | None = None, rank: int = 128, update_gap: int = 200,
        scale: float = 0.25, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.0,
        **options: Any,
    ) -> None:  # fmt: skip
        hyper = dict(
            rank=rank, update_gap=update_gap, scale=scale, betas=betas, eps=eps, weight_decay=weight_decay, **options
        )
        super().__init__(params, lr=lr, adam_lr=lr if adam_lr is None else adam_lr, hyper=hyper)


class AdamMini(MatrixOptimizer):
    """Adam-mini: one second moment for each head of queries and keys, each row of other matrices, each token.

    Vectors go to Adam: biases as in the authors' package, which has one second moment for the whole of a norm.

    Args:
        head_dim: rows of a head, 64 unless given: the block_rows of all groups that have some. Which parameters are
            queries and keys is told by name; other naming needs groups with rule="adam-mini" and block_rows.
    """

    rule = "adam-mini"

    def __init__(
        self, params: Params, lr: Rate = 2e-3, *, adam_lr: Rate | None = None, head_dim: int | None = None,
        betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        if head_dim is not None:
            params = [g | {"block_rows": head_dim} if "block_rows" in g else g for g in as_groups(params, self.rule)]
        hyper = dict(betas=betas, eps=eps, weight_decay=weight_decay, **options)
        super().__init__(params, lr=lr, adam_lr=lr if adam_lr is None else adam_lr, hyper=hyper)


class Adam(MatrixOptimizer):
    """Adam with decoupled weight decay, for every parameter: torch.optim.AdamW on this library's engine."""

    rule = "adam"

    def __init__(
        self, params: Params, lr: Rate = 2e-3, *, adam_lr: Rate | None = None, betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8, weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        hyper = dict(betas=betas, eps=eps, weight_decay=weight_decay, **options)
        super().__init__(params, lr=lr, adam_lr=lr if adam_lr is None else adam_lr, hyper=hyper)


OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {
    "cosmos": Cosmos,
    "cosmos-paper": CosmosPaper,
    "muon": Muon,
    "normuon": NorMuon,
    "soap": SOAP,
    "galore": GaLore,
    "adam-mini": AdamMini,
    "adam": Adam,
}
