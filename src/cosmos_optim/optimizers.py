"""The optimizers the paper compares COSMOS with, each a shell that binds its rule to the same engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.routing.param_groups import as_groups

Params = nn.Module | Iterable[Any]
Rate = float | Tensor


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
