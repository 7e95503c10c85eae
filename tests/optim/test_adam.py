"""Rule "adam" equals torch.optim.AdamW."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_optim import Adam, Cosmos, param_groups
from tests.optim.helpers import decoder, gradient, matrix, train

# Tolerance of the agreement with torch.optim.AdamW: the order of float32 operations differs by path.
ADAMW = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_adam_equals_torchs_adamw(dtype: torch.dtype, weight_decay: float, eps: float) -> None:
    model, other = decoder(dtype=dtype), decoder(dtype=dtype)
    groups = param_groups(model, "adam", decay="all")
    ours = Adam(groups, lr=2e-3, betas=(0.9, 0.98), eps=eps, weight_decay=weight_decay)
    theirs = torch.optim.AdamW(other.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=eps, weight_decay=weight_decay)
    train(model, ours, range(20))
    train(other, theirs, range(20))
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=ADAMW, atol=ADAMW)


@pytest.mark.parametrize("maximize", [False, True])
def test_the_formula_and_the_fused_kernel_agree(maximize: bool) -> None:
    """With bf16 parameters or eps=0 the formula runs; weights and moments must be the same, so each can continue."""
    p, q = matrix((9, 7)), matrix((9, 7))
    a = Cosmos([{"params": [p], "rule": "adam", "eps": 1e-20, "maximize": maximize}])
    b = Cosmos([{"params": [q], "rule": "adam", "eps": 0.0, "maximize": maximize}])
    for step in range(10):
        p.grad = gradient((9, 7), step)
        q.grad = p.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(p, q, rtol=ADAMW, atol=ADAMW)
    for name, moment in a.state[p].items():
        torch.testing.assert_close(moment, b.state[q][name], rtol=ADAMW, atol=ADAMW)


def test_an_override_gives_an_adam_group_its_own_rate_and_betas() -> None:
    """The paper's NanoGPT run: embedding at lr 0.3, head at 3e-3, both with beta1 0.8."""
    from cosmos_optim import param_groups

    model = decoder()
    groups = param_groups(
        model,
        overrides={
            "embed.*": {"rule": "adam", "lr": 0.3, "betas": (0.8, 0.95)},
            "lm_head.*": {"rule": "adam", "lr": 3e-3, "betas": (0.8, 0.95)},
        },
    )
    opt = Cosmos(groups, lr=5e-4, adam_lr=2e-3, rank=4)
    found = {n: (g["rule"], g["lr"], g["betas"]) for g in opt.param_groups for n in g["param_names"]}
    assert found["embed.weight"] == ("adam", 0.3, (0.8, 0.95))
    assert found["lm_head.weight"] == ("adam", 3e-3, (0.8, 0.95))
    assert found["up.weight"] == ("cosmos", 5e-4, (0.9, 0.98))
    assert found["norm.weight"] == ("adam", 2e-3, (0.9, 0.98))


class LargeTensorOps(TorchDispatchMode):
    """Count the torch operations that touch a tensor of at least `size` elements: each is a pass over memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count it if one of its tensors is large."""
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(x, torch.Tensor) and x.numel() >= self.size for x in leaves):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_of_adam_is_one_pass_over_the_gradients_and_one_fused_kernel() -> None:
    """Count passes over memory, which set the time: the check for non-finite gradients, then torch's fused kernel."""
    params = [nn.Parameter(torch.randn(30, 30)) for _ in range(40)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = Adam([{"params": params, "rule": "adam"}])
    opt.step()  # creates the state
    with LargeTensorOps(size=30 * 30) as passes:
        opt.step()
    assert passes.calls == {"aminmax": len(params), "_fused_adamw_": 1}
