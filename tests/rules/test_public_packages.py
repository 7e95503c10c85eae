"""Each baseline against the public package that people use for it, over 20 steps of the same gradients.

If a package differs from our rule, the test's docstring says how. The test removes that difference by the smallest
change (an argument, the order of two calls, a sign), so that everything else is still compared to `TOLERANCE`.

Shapes: weights and gradients are (m, n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cosmos_optim import OPTIMIZERS, SOAP, Adam, AdamMini, GaLore, Muon
from tests.oracles.gradients import gradients

STEPS = 20
# Difference of the displacements relative to the displacement, at every step: float64 in both, measured 3e-14.
TOLERANCE = 1e-12
# The packages of GaLore and SOAP compute a new basis in float32; measured 2.0e-6.
SINGLE = 1e-5
# Newton-Schulz in bfloat16: 2^-8 per product, five iterations that each may triple it, different roundings in both.
BFLOAT16 = 0.03

LR = 3e-3
BETAS = (0.9, 0.98)
TALL, WIDE = (24, 14), (12, 26)
Shape = tuple[int, int]


def package(name: str) -> Any:
    """Import a package of the [test] extra, or skip the test and say how to install it."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[test]'")


def sequence(shape: Shape, rank: int | None = None) -> list[Tensor]:
    """Return float64 gradients with well separated leading directions."""
    return [torch.from_numpy(g) for g in gradients(STEPS, *shape, rank=rank or min(shape), seed=3)]


def start(shape: Shape) -> Tensor:
    return torch.from_numpy(np.random.default_rng(5).normal(size=shape))


def compare(
    ours: Callable[[nn.Parameter], torch.optim.Optimizer],
    theirs: Callable[[nn.Parameter], torch.optim.Optimizer],
    grads: list[Tensor],
    *,
    tolerance: float = TOLERANCE,
    before: Callable[[torch.optim.Optimizer, nn.Parameter], None] | None = None,
) -> None:
    """Run both from the same weights. `before` is called once on theirs, after the first gradient is set."""
    W0 = start(tuple(grads[0].shape))
    p, q = nn.Parameter(W0.clone()), nn.Parameter(W0.clone())
    a, b = ours(p), theirs(q)
    for step, g in enumerate(grads, 1):
        p.grad, q.grad = g.clone(), g.clone()
        if step == 1 and before is not None:
            before(b, q)
        a.step()
        b.step()
        error = float((p - q).detach().norm() / (q - W0).detach().norm())
        assert error < tolerance, f"step {step}: displacement differs by {error:.2e}"


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam_equals_torchs_adamw(decay: float) -> None:
    """The two do not differ."""
    common = {"lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": decay}
    compare(lambda p: Adam([p], **common), lambda p: torch.optim.AdamW([p], **common), sequence(TALL))


class NoCastToBfloat16(TorchFunctionMode):
    """Copy tensors instead of casting them to bfloat16, in both forms that versions of torch.optim.Muon use."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any function except the cast."""
        given = (*args, *(kwargs or {}).values())
        if func is torch.Tensor.bfloat16 or (func is torch.Tensor.to and any(x is torch.bfloat16 for x in given)):
            return args[0].clone()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torchs_muon_except_for_its_cast_to_bfloat16(shape: Shape, scaling: str, nesterov: bool) -> None:
    """Compare once in bfloat16, and once in float64 with torch's cast removed.

    torch.optim.Muon casts the momentum to bfloat16, then normalizes and iterates, on every device. Ours normalizes
    before the cast, so in bfloat16 the two agree to rounding only.
    """
    common = {"lr": LR, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}

    def theirs(p: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.Muon([p], adjust_lr_fn=scaling, **common)

    def ours(dtype: torch.dtype) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
        return lambda p: Muon([p], scaling=scaling, ns_dtype=dtype, **common)

    compare(ours(torch.bfloat16), theirs, sequence(shape), tolerance=BFLOAT16)
    with NoCastToBfloat16():
        compare(ours(torch.float64), theirs, sequence(shape))


class Llama(nn.Module):
    """The parameters of one decoder layer under the names that Adam-mini's package looks for."""

    def __init__(self, vocab: int = 20, width: int = 16, mlp: int = 24) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(width, width, bias=name == "q_proj") for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.mlp = nn.ModuleDict(
            {"up_proj": nn.Linear(width, mlp, bias=False), "down_proj": nn.Linear(mlp, width, bias=False)}
        )
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)


def test_adam_mini_equals_its_package_in_all_blocks() -> None:
    """Compare queries and keys by head, values, output projection and MLP by row, embedding and head by token.

    Biases use Adam in both. A norm's weight has one second moment for the whole vector in the package and Adam here (a
    state as large as the vector), so it is not compared. The package never decays norms and biases; here that is set in
    their parameter group.
    """
    adam_mini = package("adam_mini")
    heads, width = 4, 16
    model, other = Llama().double(), Llama().double()
    other.load_state_dict(model.state_dict())
    common = {"lr": LR, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.3}
    a = AdamMini(model, head_dim=width // heads, **common)
    for group in a.param_groups:
        group["weight_decay"] = 0.0 if group["rule"] == "adam" else 0.3
    b = adam_mini.Adam_mini(other.named_parameters(), dim=width, n_heads=heads, verbose=False, **common)
    begin = {name: p.detach().clone() for name, p in model.named_parameters()}
    rng = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            # Rows and heads of very different size: a wrong block would show.
            size = torch.logspace(-2, 1, len(p), dtype=torch.float64).view(-1, *[1] * (p.dim() - 1))
            p.grad = size * torch.randn(p.shape, generator=rng, dtype=torch.float64)
            q.grad = p.grad.clone()
        a.step()
        b.step()
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            if name != "norm.weight":
                error = float((p - q).detach().norm() / (q - begin[name]).detach().norm())
                assert error < TOLERANCE, f"step {step}: {name} differs by {error:.2e}"


def galore_pair(scale: float, gap: int, decay: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ours and galore-torch's with equal settings.

    The package decays after the update, W <- (1 - lr wd)(W - lr D), so our rates are changed to match. It adds eps
    before the bias correction, which is eps / sqrt(1 - b2^t) in our form, so eps is 0 in both.
    """
    galore_torch = package("galore_torch")
    kept = 1 - LR * decay
    settings = {"rank": 4, "update_proj_gap": gap, "scale": scale, "proj_type": "std"}

    def ours(p: nn.Parameter) -> torch.optim.Optimizer:
        return GaLore([p], lr=LR * kept, weight_decay=decay / kept, rank=4, update_gap=gap, scale=scale, eps=0.0)

    def theirs(p: nn.Parameter) -> torch.optim.Optimizer:
        group = {"params": [p], **settings}
        return galore_torch.GaLoreAdamW(
            [group], lr=LR, betas=BETAS, eps=0.0, weight_decay=decay, no_deprecation_warning=True
        )

    return ours, theirs


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_galore_equals_its_package_until_the_projector_changes(shape: Shape, decay: float) -> None:
    """Only eps and the order of decay differ (`galore_pair`): the sign of a projector's column cancels."""
    compare(*galore_pair(0.25, 200, decay), sequence(shape, rank=4), tolerance=SINGLE)


@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_galore_equals_its_package_if_new_projectors_keep_signs(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the package's new columns the sign that agrees with the old column, as ours does.

    The package keeps the sign that LAPACK gives a new singular vector, while its momentum still has the old sign.
    """
    projector = package("galore_torch").galore_projector.GaLoreProjector
    ours, theirs = galore_pair(1.0, 6, 0.0)
    original = projector.get_orthogonal_matrix

    def aligned(self: Any, weights: Tensor, rank: int, type: str) -> Tensor:
        new, old = original(self, weights, rank, type), self.ortho_matrix
        if old is None:
            return new
        sign = torch.where((new * old).sum(1 if type == "right" else 0) < 0, -1.0, 1.0)
        return sign[:, None] * new if type == "right" else new * sign

    monkeypatch.setattr(projector, "get_orthogonal_matrix", aligned)
    compare(ours, theirs, sequence(shape, rank=4), tolerance=SINGLE)


def soap_pair(frequency: int, decay: float = 0.0, cls: type | None = None) -> tuple[Callable[..., Any], ...]:
    """Return ours and pytorch-optimizer's with equal settings, and its extra first call, which only computes the basis.

    Decay comes after the update and eps before the bias correction, as in `galore_pair`.
    """
    cls = cls or package("pytorch_optimizer").SOAP
    kept = 1 - LR * decay

    def ours(p: nn.Parameter) -> torch.optim.Optimizer:
        return SOAP([p], lr=LR * kept, weight_decay=decay / kept, frequency=frequency, eps=0.0)

    def theirs(p: nn.Parameter) -> torch.optim.Optimizer:
        return cls(
            [p], lr=LR, betas=BETAS, eps=0.0, weight_decay=decay, precondition_frequency=frequency,
            max_precondition_dim=min(p.shape),
        )  # fmt: skip

    return ours, theirs, lambda optimizer, p: optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_soap_equals_its_package_in_a_fixed_basis(decay: float) -> None:
    """Only eps and the order of decay differ until the basis changes."""
    ours, theirs, before = soap_pair(STEPS + 1, decay)
    compare(ours, theirs, sequence(TALL), before=before)


@pytest.mark.parametrize("frequency", [1, 4])
def test_soap_equals_its_package_if_that_updates_the_basis_first(frequency: int) -> None:
    """Move the package's update of the basis before the update of the weights.

    The package updates the basis after the weights, with gradients up to the previous one. Ours does so before, with
    gradients up to this one, as in the paper's box. The package also sorts columns by their estimated eigenvalues and
    runs QR in float32: these gradients keep one order.
    """
    SoapOfPackage = package("pytorch_optimizer").SOAP

    class BasisFirst(SoapOfPackage):
        """The package's SOAP, with its preconditioner updated before it is used."""

        def update_pre_conditioner(self, grad: Tensor, state: Any, step: int, **kwargs: Any) -> None:
            if state["Q"] is None or kwargs.pop("now", False):
                super().update_pre_conditioner(grad, state, step, **kwargs)

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                done = group.get("step", 0)
                for p in group["params"] if done > 1 else ():
                    settings = {k: group[k] for k in ("max_precondition_dim", "merge_dims", "precondition_1d")}
                    self.update_pre_conditioner(p.grad, self.state[p], done - 1, now=True, **settings)
            return super().step(closure)

    ours, theirs, before = soap_pair(frequency, cls=BasisFirst)
    rng = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 8, generator=rng, dtype=torch.float64))[0]
    weights = torch.logspace(0, -2, 8, dtype=torch.float64)
    grads = [torch.randn(24, 8, generator=rng, dtype=torch.float64) * weights @ basis.T for _ in range(STEPS)]
    compare(ours, theirs, grads, tolerance=SINGLE, before=before)


def test_every_optimizer_but_three_is_compared_with_a_public_package() -> None:
    """COSMOS is compared with recorded trajectories of its authors' code, NorMuon with its numpy oracle only."""
    tested = {"adam", "muon", "adam-mini", "galore", "soap"}
    assert set(OPTIMIZERS) - tested == {"cosmos", "cosmos-paper", "normuon"}
