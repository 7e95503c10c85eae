"""COSMOS and the optimizers that the paper compares it with: their arguments.

Each class names a rule (the update, in rules/) and passes its arguments to `MatrixOptimizer`, which does the rest.
Letters: W (m, n) matrix, G its gradient, M the moving average of G, N = Nesterov's momentum, NS5 = Newton-Schulz.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_optim.optimizer import MatrixOptimizer

Params = nn.Module | Iterable[Any]
Rate = float | Tensor
Betas = tuple[float, float]


def arguments(local_variables: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a constructor was called with, given its `locals()`.

    Call this before the constructor has other local variables: each of them would become an option.
    """
    return {name: value for name, value in local_variables.items() if name not in ("self", "__class__")}


class Cosmos(MatrixOptimizer):
    r"""COSMOS: SOAP in the leading rank-r eigenspace of each matrix's gradient, Muon on the rest (Algorithm 1).

    For an m x n matrix W with gradient G, Nesterov's momentum N and the tracked eigenbasis U of G'G:

        A = (N U / (1 - b1^(t+1))) / (sqrt(V / (1 - b2^t)) + eps) U'   the SOAP half
        B = NORM(NS5((N - N U U') / |N - N U U'|))                     the Muon half
        D = A + gamma B sqrt(m), each row divided by the root of its average mean square
        W <- W - lr sqrt(m) NORM(D)                                    so each update has RMS lr

    Nesterov's momentum and the row averages are not in the paper; `CosmosPaper` omits them. Embeddings, the
    output head, norms and biases are trained by AdamW at `adam_lr`.

    Args:
        params: a model, `param_groups(model)`, or anything torch.optim takes (then every parameter must be a matrix).
        lr: learning rate of the hidden matrices: the RMS of their update.
        adam_lr: learning rate of embeddings, output head, norms and biases; None means 4 lr.
        weight_decay: decoupled weight decay, multiplied by the group's lr. Of a model only the hidden matrices are
            decayed, unless `param_groups(model, decay="all")` or an override asks for more.

    Options that rarely need a change; each is also a key of a parameter group, except cuda_graphs and offload:
        rank: dimension of the tracked subspace, at most n.
        gamma: weight of the Muon half; None means lr / min(adam_lr, 2e-3), computed once when a group is added.
        betas: decay of the momentum and of the second moments, for COSMOS and AdamW.
        eps: added to the root of the second moment; 0 is allowed.
        nesterov: use Nesterov's momentum in both halves.
        row_beta2: decay of the mean squares of the update's rows, as in NorMuon; None leaves the rows as they are.
        equal_rows: give the rows of N - N U U' equal norm before Newton-Schulz, as `Muon` can; it needs no state.
        two_sided: track a basis on both sides of a matrix (Algorithm 4).
        side: the tracked side: "auto" (columns; rows if there are fewer of them than `rank`), "input" (columns), or
            "smaller", which saves state. Not with two_sided.
        eps_placement: "outside" is sqrt(V) + eps; "inside" is sqrt(V + eps), as printed in the paper.
        residual_guard: share of the momentum's energy below which the Muon half is dropped as noise; 0 is off.
        ns_steps: Newton-Schulz iterations.
        ns_coefficients: "ns5" or "polar-express".
        ns_dtype: precision of Newton-Schulz; None means float16 on CUDA and at least float32 elsewhere.
        momentum_dtype: dtype of M; None means float32, torch.bfloat16 halves the largest state, and torch.int8 quarters
            it, with one scale for each 128 elements of a row.
        adam_dtype: dtype of AdamW's two moments; None means float32, and torch.int8 quarters them in tensors of more
            than 4,096 elements with rows of at least 16, with one scale for each 128 elements of a row.
        split_sizes: rows of each block of a fused weight, or one number for equal blocks; each block is updated as its
            own matrix. In a group, `split_side="input"` cuts columns instead.
        maximize: ascend instead of descend.
        nonfinite: "skip" skips a step with a NaN or inf gradient; "raise" raises an error that names the parameter,
            and uses no CUDA graph, because it must look at every gradient.
        missing: "skip" ignores a parameter with gradient None; "zero" treats it as zero.
        stochastic_rounding: round updates of bfloat16 parameters stochastically.
        weight_correction: keep 8 more bits of each bfloat16 weight in the state, so that updates below its last place
            are not lost, down to 2^-16 of the weight. The model reads bfloat16; `float32_weights` returns all 24 bits.
            This replaces a float32 copy of the weights by one byte for each. Only for bfloat16 parameters.
        cuda_graphs: record the step on a GPU as a CUDA graph and replay it.
        offload: "cpu" keeps the state in pinned host memory and brings it to the GPU in chunks during the step, with
            the same results; None keeps it on the GPU. It has no effect on parameters on a CPU.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> opt = Cosmos(model, lr=5e-4, adam_lr=2e-3)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> opt.step()
    >>> opt.param_groups[0]["gamma"]
    0.25
    """

    rule = "cosmos"
    adam_ratio = 4.0

    def __init__(
        self, params: Params, lr: Rate = 5e-4, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        rank: int = 32, gamma: float | None = None, betas: Betas = (0.9, 0.98), eps: float = 1e-8,
        nesterov: bool = True, row_beta2: float | None = 0.95, equal_rows: bool = False, two_sided: bool = False,
        side: str = "auto", eps_placement: str = "outside", residual_guard: float = 1e-5,
        ns_steps: int = 5, ns_coefficients: str = "ns5", ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None, split_sizes: int | Sequence[int] | None = None,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class CosmosPaper(Cosmos):
    """COSMOS with the paper's settings: rank 64, plain momentum, no row averages, gamma = lr / adam_lr at any rate.

    Two points differ from the printed algorithm: epsilon is outside the root (`eps_placement="inside"` is the
    paper's), and `residual_guard` is on (0 turns it off).

    Arguments and options are those of `Cosmos`, but `adam_lr` is the paper's 2e-3 for any lr.

    >>> group = CosmosPaper(nn.Linear(8, 16), lr=5e-4, adam_lr=4e-3).param_groups[0]
    >>> group["rank"], group["nesterov"], group["row_beta2"], group["gamma"]
    (64, False, None, 0.125)
    """

    soap_lr = math.inf

    def __init__(
        self, params: Params, lr: Rate = 5e-4, *, adam_lr: Rate = 2e-3, weight_decay: float = 0.0,
        rank: int = 64, gamma: float | None = None, betas: Betas = (0.9, 0.98), eps: float = 1e-8,
        nesterov: bool = False, row_beta2: float | None = None, equal_rows: bool = False, two_sided: bool = False,
        side: str = "auto", eps_placement: str = "outside", residual_guard: float = 1e-5,
        ns_steps: int = 5, ns_coefficients: str = "ns5", ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None, split_sizes: int | Sequence[int] | None = None,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class Muon(MatrixOptimizer):
    """Muon (the paper's Algorithm 3): the orthogonalized momentum, W <- W - lr sqrt(max(m, n)) NS5(N / |N|).

    Args:
        lr: learning rate of the hidden matrices; with scaling="paper" the RMS of their update is about lr.
        adam_lr: learning rate of embeddings, output head, norms and biases; None means 2 lr.
        params, weight_decay: as in `Cosmos`; the groups are `param_groups(model, "muon")`.

    Options that rarely need a change; each is also a key of a parameter group, except cuda_graphs and offload:
        momentum: decay of the momentum; the paper's LLaMA runs use 0.9.
        nesterov: use Nesterov's momentum.
        equal_rows: give the rows of N equal norm before Newton-Schulz (MuonEq, arXiv 2603.28254).
        scaling: "paper" is the formula above; "original" and "match_rms_adamw" are those of torch.optim.Muon.
        normalize: scale every update to RMS lr (the paper's normalization ablation); `scaling` is then ignored.
        betas: decay of AdamW's two moments.
        eps: added to the root of AdamW's second moment.
        ns_steps, ns_coefficients, ns_dtype, momentum_dtype, adam_dtype, split_sizes, maximize, nonfinite, missing,
            stochastic_rounding, weight_correction, cuda_graphs, offload: as in `Cosmos`.

    >>> opt = Muon(nn.Linear(8, 16), lr=1e-3)
    >>> [(group["rule"], group["lr"]) for group in opt.param_groups]
    [('muon', 0.001), ('adam', 0.002)]
    """

    rule = "muon"
    adam_ratio = 2.0

    def __init__(
        self, params: Params, lr: Rate = 1e-3, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        momentum: float = 0.95, nesterov: bool = True, equal_rows: bool = False, scaling: str = "paper",
        normalize: bool = False, betas: Betas = (0.9, 0.98), eps: float = 1e-8,
        ns_steps: int = 5, ns_coefficients: str = "ns5", ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None, split_sizes: int | Sequence[int] | None = None,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class NorMuon(MatrixOptimizer):
    """NorMuon (Li et al. 2025): Muon with a second moment for each row after Newton-Schulz.

        B = NS5(N / |N|),  v = b2 v + (1 - b2) mean of each row of B^2,  W <- W - lr B / (sqrt(v) + eps), at RMS lr

    Args:
        lr: learning rate of the hidden matrices: the RMS of their update.
        adam_lr: learning rate of embeddings, output head, norms and biases; None means 2 lr.
        params, weight_decay: as in `Cosmos`; the groups are `param_groups(model, "normuon")`.

    Options that rarely need a change; each is also a key of a parameter group, except cuda_graphs and offload:
        momentum: decay of the momentum.
        beta2: decay of the row second moments.
        nesterov: use Nesterov's momentum.
        equal_rows: give the rows of N equal norm before Newton-Schulz, as `Muon` can.
        betas: decay of AdamW's two moments.
        eps: added to the roots of the second moments, of rows and of AdamW.
        ns_steps, ns_coefficients, ns_dtype, momentum_dtype, adam_dtype, split_sizes, maximize, nonfinite, missing,
            stochastic_rounding, weight_correction, cuda_graphs, offload: as in `Cosmos`.

    >>> layer = nn.Linear(8, 16, bias=False)
    >>> {name: tuple(x.shape) for name, x in NorMuon(layer).state[layer.weight].items()}
    {'step': (), 'M': (16, 8), 'v': (16, 1)}
    """

    rule = "normuon"
    adam_ratio = 2.0

    def __init__(
        self, params: Params, lr: Rate = 1e-3, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        momentum: float = 0.95, beta2: float = 0.95, nesterov: bool = True, equal_rows: bool = False,
        betas: Betas = (0.9, 0.98), eps: float = 1e-8,
        ns_steps: int = 5, ns_coefficients: str = "ns5", ns_dtype: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None, split_sizes: int | Sequence[int] | None = None,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class SOAP(MatrixOptimizer):
    """SOAP (Vyas et al. 2024; the paper's Algorithm 2): Adam in the eigenbasis U of the averaged G'G, or of both sides.

        V = b2 V + (1 - b2) (G U)^2,  W <- W - lr ((M U / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)) U'

    Args:
        lr: learning rate of the hidden matrices.
        adam_lr: learning rate of embeddings, output head, norms and biases; None means lr.
        params, weight_decay: as in `Cosmos`; the groups are `param_groups(model, "soap")`.

    Options that rarely need a change; each is also a key of a parameter group, except cuda_graphs and offload:
        frequency: steps between two updates of the basis. Frequent updates need a warm-up (docs/algorithm.md): after
            few gradients they rotate momentum into directions with a second moment near 0.
        two_sided: keep a basis on each side, as published SOAP does.
        squares: average the squares of the "gradient" (published SOAP) or of the "momentum" (the paper's box).
        side: the side of a one-sided basis: "auto" and "input" (columns), or "smaller", which saves state.
        betas: decay of the momentum and of the second moments, for SOAP and AdamW.
        eps: added to the root of the second moment; 0 is allowed.
        adam_dtype, split_sizes, maximize, nonfinite, missing, stochastic_rounding, weight_correction, cuda_graphs,
            offload: as in `Cosmos`.

    >>> opt = SOAP(nn.Linear(8, 16), lr=2e-3, frequency=10, two_sided=True)
    >>> [group["rule"] for group in opt.param_groups]
    ['soap-two-sided', 'adam']
    """

    rule = "soap"

    def __init__(
        self, params: Params, lr: Rate = 2e-3, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        frequency: int = 1, two_sided: bool = False, squares: str = "gradient", side: str = "auto",
        betas: Betas = (0.9, 0.98), eps: float = 1e-8, split_sizes: int | Sequence[int] | None = None,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class GaLore(MatrixOptimizer):
    """GaLore (Zhao et al. 2024): Adam on gradients projected to their leading singular vectors Q.

        W <- W - lr scale Adam(G Q) Q'

    Args:
        lr: learning rate of the hidden matrices.
        adam_lr: learning rate of embeddings, output head, norms and biases; None means lr.
        params, weight_decay: as in `Cosmos`; the groups are `param_groups(model, "galore")`.

    Options that rarely need a change; each is also a key of a parameter group, except cuda_graphs and offload:
        rank: columns of Q, at most the shorter side of the matrix.
        update_gap: steps between two updates of Q.
        scale: factor of the update.
        betas: decay of the two moments, for GaLore and AdamW.
        eps: added to the root of the second moment; 0 is allowed.
        adam_dtype, split_sizes, maximize, nonfinite, missing, stochastic_rounding, weight_correction, cuda_graphs,
            offload: as in `Cosmos`.

    >>> layer = nn.Linear(8, 16, bias=False)
    >>> {name: tuple(x.shape) for name, x in GaLore(layer, rank=4).state[layer.weight].items()}
    {'step': (), 'Q': (8, 4), 'exp_avg': (16, 4), 'exp_avg_sq': (16, 4)}
    """

    rule = "galore"

    def __init__(
        self, params: Params, lr: Rate = 1e-2, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        rank: int = 128, update_gap: int = 200, scale: float = 0.25,
        betas: Betas = (0.9, 0.98), eps: float = 1e-8, split_sizes: int | Sequence[int] | None = None,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class AdamMini(MatrixOptimizer):
    """Adam-mini (Zhang et al. 2024): AdamW with one second moment for each block of rows.

        v = b2 v + (1 - b2) mean of G^2 over the block,  W <- W - lr (M / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    A block is an attention head of queries and keys, a row of any other matrix, a token of an embedding. AdamW trains
    vectors. The authors' package does so for biases, but has one second moment per norm.

    Args:
        lr: learning rate of all matrices and embeddings.
        adam_lr: learning rate of norms and biases; None means lr.
        params, weight_decay: as in `Cosmos`; the groups are `param_groups(model, "adam-mini")`.

    Options that rarely need a change; each is also a key of a group, except head_dim, cuda_graphs and offload:
        head_dim: rows of an attention head (64 if None): the block_rows of the queries and keys, found by name.
        block_rows: rows of a block elsewhere; None is an attention head, for a group of queries or keys that the names
            do not tell.
        betas: decay of the two moments.
        eps: added to the root of the second moment; 0 is allowed.
        adam_dtype, maximize, nonfinite, missing, stochastic_rounding, weight_correction, cuda_graphs,
            offload: as in `Cosmos`.

    >>> attention = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "v_proj": nn.Linear(8, 8, bias=False)})
    >>> [group["block_rows"] for group in AdamMini(attention, head_dim=4).param_groups]
    [4, 1]
    """

    rule = "adam-mini"

    def __init__(
        self, params: Params, lr: Rate = 2e-3, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        head_dim: int | None = None, block_rows: int = 1, betas: Betas = (0.9, 0.98), eps: float = 1e-8,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


class Adam(MatrixOptimizer):
    """AdamW for every parameter: torch.optim.AdamW on this library's engine.

        V = b2 V + (1 - b2) G^2,  W <- W - lr (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)

    Args:
        lr: learning rate.
        adam_lr: overrides lr, for code that passes both to every optimizer.
        params, weight_decay: as in `Cosmos`, so of a model only the hidden matrices are decayed. torch decays
            everything, which is `param_groups(model, "adam", decay="all")`. A list of parameters may hold vectors too.

    Options that rarely need a change; each is also a key of a parameter group, except cuda_graphs and offload:
        betas: decay of the two moments.
        eps: added to the root of the second moment; 0 is allowed.
        adam_dtype, maximize, nonfinite, missing, stochastic_rounding, weight_correction, cuda_graphs,
            offload: as in `Cosmos`.

    >>> layer = nn.Linear(8, 16, bias=False)
    >>> sorted(Adam(layer, lr=2e-3).state[layer.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    rule = "adam"

    def __init__(
        self, params: Params, lr: Rate = 2e-3, *, adam_lr: Rate | None = None, weight_decay: float = 0.0,
        betas: Betas = (0.9, 0.98), eps: float = 1e-8,
        adam_dtype: torch.dtype | None = None, maximize: bool = False, nonfinite: str = "skip", missing: str = "skip",
        stochastic_rounding: bool = False, weight_correction: bool = False, cuda_graphs: bool = True,
        offload: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(**arguments(locals()))


OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {
    "cosmos": Cosmos, "cosmos-paper": CosmosPaper, "muon": Muon, "normuon": NorMuon, "soap": SOAP, "galore": GaLore,
    "adam-mini": AdamMini, "adam": Adam,
}  # fmt: skip
