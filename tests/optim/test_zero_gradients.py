"""A matrix with a zero gradient in a step: an expert that got no tokens, alone or in a stack."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Adam, Cosmos, Muon, NorMuon
from tests.optim.helpers import small_rank

# Optimizers with updates of a constant size, for a momentum of any size.
CONSTANT = [("cosmos", {}), ("cosmos-paper", {}), ("muon", {}), ("muon", {"normalize": True}), ("normuon", {})]
SHAPE = (3, 14, 10)
MOVED = 5e-3  # half of lr: Muon's update has RMS lr, except for what five iterations leave of the singular values
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # of float32: products of a stack are summed in another order
FED = [0, 1, 2, 9]  # steps in which expert 1 has tokens; the others always have


def gradients(step: int) -> Tensor:
    G = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
    if step not in FED:
        G[1] = 0
    return G


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(99))


@pytest.mark.parametrize(("name", "options"), CONSTANT)
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_an_expert_without_tokens_is_only_decayed(name: str, options: dict[str, Any], weight_decay: float) -> None:
    p = nn.Parameter(start())
    opt = OPTIMIZERS[name]([p], lr=0.01, weight_decay=weight_decay, **small_rank(name), **options)
    decay = 1 - 0.01 * weight_decay
    for step in range(12):
        before = p.detach().clone()
        p.grad = gradients(step)
        opt.step()
        moved = (p.detach() - decay * before).square().mean((1, 2)).sqrt()
        assert (moved[[0, 2]] > MOVED).all()
        if step in FED:
            assert moved[1] > MOVED
        else:
            assert torch.equal(p[1], decay * before[1])


@pytest.mark.parametrize(("name", "options"), [*CONSTANT, ("soap", {}), ("galore", {})])
def test_a_stack_moves_as_its_matrices_would_alone(name: str, options: dict[str, Any]) -> None:
    stack, alone = nn.Parameter(start()), [nn.Parameter(x.clone()) for x in start()]
    one, other = (OPTIMIZERS[name](x, lr=0.01, **small_rank(name), **options) for x in ([stack], alone))
    for step in range(12):
        stack.grad = gradients(step)
        for p, g in zip(alone, gradients(step), strict=True):
            p.grad = g
        one.step()
        other.step()
        torch.testing.assert_close(stack.detach(), torch.stack([x.detach() for x in alone]), **CLOSE)


@pytest.mark.parametrize(("name", "options"), [("soap", {"frequency": 3}), ("galore", {"update_gap": 3})])
def test_matrices_that_began_at_different_steps_renew_their_bases_at_their_own(
    name: str, options: dict[str, Any]
) -> None:
    """Equal shapes share a stack, in which only some are due."""
    ends = []
    for groups in ([[0, 1]], [[0], [1]]):
        params = [nn.Parameter(x.clone()) for x in start()[:2]]
        made = [OPTIMIZERS[name]([params[i] for i in which], lr=0.01, **small_rank(name), **options)
                for which in groups]  # fmt: skip
        for step in range(9):
            for i, p in enumerate(params):
                p.grad = gradients(step)[2 * i] * (step >= i)  # the second begins a step later
            for opt in made:
                opt.step()
        ends.append(torch.stack([p.detach() for p in params]))
    torch.testing.assert_close(*ends, **CLOSE)


def test_two_sided_cosmos_moves_only_experts_with_tokens() -> None:
    p = nn.Parameter(start())
    opt = Cosmos([p], lr=0.01, rank=4, two_sided=True)
    for step in range(6):
        before = p.detach().clone()
        p.grad = gradients(step)
        opt.step()
        assert torch.equal(p[1], before[1]) == (step not in FED)
        assert not torch.equal(p[0], before[0])


@pytest.mark.parametrize("name", ["soap", "galore", "adam"])
def test_updates_that_follow_the_momentum_continue_after_a_zero_gradient(name: str) -> None:
    """As in torch's AdamW: the updates die away with the momentum."""
    p = nn.Parameter(start()[0])
    opt = OPTIMIZERS[name]([p], lr=0.01, **small_rank(name))
    p.grad = gradients(0)[0]
    opt.step()
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert not torch.equal(p, before)


def test_a_block_of_a_fused_weight_without_a_gradient_does_not_move() -> None:
    p = nn.Parameter(start().flatten(0, 1))
    opt = Cosmos([{"params": [p], "split_sizes": (14, 14, 14)}], lr=0.01, rank=4)
    for step in range(5):
        before = p.detach().clone()
        p.grad = gradients(step).flatten(0, 1)
        opt.step()
        moved = (p.detach() - before).view(SHAPE).square().mean((1, 2)).sqrt()
        torch.testing.assert_close(moved, torch.tensor([0.01, 0.01 * (step in FED), 0.01]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_expert_without_tokens_does_not_move_in_float64_and_bfloat16(dtype: torch.dtype) -> None:
    """Also with gradients that would be zero in float32, and with stochastic rounding."""
    p = nn.Parameter(start().to(dtype))
    opt = Cosmos([p], lr=0.05, rank=4, stochastic_rounding=dtype is torch.bfloat16)
    for step in range(5):
        before = p.detach().clone()
        p.grad = gradients(step).to(dtype)
        if dtype is torch.float64:
            p.grad *= 1e-60
        opt.step()
        assert torch.equal(p[1], before[1]) == (step not in FED)
        assert not torch.equal(p[0], before[0]) and not torch.equal(p[2], before[2])


def test_diagnostics_report_no_update_for_an_expert_without_tokens() -> None:
    p = nn.Parameter(start())
    opt = Cosmos([("experts", p)], lr=0.01, rank=4)
    for step in range(4):
        p.grad = gradients(step)
        with opt.diagnostics() as seen:
            opt.step()
    assert [seen[f"experts[{i}]"]["update_rms"] for i in range(3)] == pytest.approx([1.0, 0.0, 1.0], rel=1e-4)


def test_missing_zero_takes_the_step_of_a_zero_gradient_except_for_frozen_parameters() -> None:
    """The momentum of a parameter with the gradient None decays; a frozen parameter is left alone."""
    (p, q), frozen = (nn.Parameter(start()[0]) for _ in range(2)), nn.Parameter(start()[1])
    asked, given = Adam([p, frozen], weight_decay=0.1, missing="zero"), Adam([q], weight_decay=0.1)
    p.grad, q.grad, frozen.grad = gradients(0)[0], gradients(0)[0], gradients(0)[1]
    asked.step()
    given.step()
    frozen.requires_grad_(False)
    kept = frozen.detach().clone()
    p.grad, q.grad, frozen.grad = None, torch.zeros_like(q), None
    asked.step()
    given.step()
    assert torch.equal(p, q)
    assert torch.equal(frozen, kept)


def test_a_frozen_layer_with_a_zero_gradient_does_not_move() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    opt = Cosmos(list(model.parameters()), lr=0.01, rank=2)
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(False)
            held = model[0].weight.detach().clone()
        opt.zero_grad(set_to_none=False)
        model(torch.randn(4, 8)).square().sum().backward()
        opt.step()
    assert torch.equal(model[0].weight, held)


@pytest.mark.parametrize("shape", [SHAPE, (3, 10, 14)])
def test_an_expert_of_galore_gets_its_projector_from_its_first_gradient(shape: tuple[int, int, int]) -> None:
    """If it had no tokens in the first step, it must not keep a random projector until the next renewal."""
    p = nn.Parameter(torch.zeros(shape))
    opt = OPTIMIZERS["galore"]([p], lr=0.01, rank=4)
    for step in range(5):
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        p.grad[1] *= step == 3
        before = opt.state[p]["Q"].clone()
        opt.step()
        Q, changed = opt.state[p]["Q"], (opt.state[p]["Q"] != before).any((1, 2)).tolist()
        assert changed == [step == 0, step in (0, 3), step == 0]
        if step == 3:
            U, _, Vh = torch.linalg.svd(p.grad[1], full_matrices=False)
            leading = Vh[:4].mT if shape[1] >= shape[2] else U[:, :4]
            torch.testing.assert_close(Q[1] @ Q[1].mT, leading @ leading.mT, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [Muon, NorMuon, Cosmos])
def test_rows_without_gradients_stop_a_little_later_if_rows_get_equal_norm(make: Any) -> None:
    """The row's momentum fades, but keeps its share of the update until it is 1e-3 of the usual size."""
    drifts = []
    for equal_rows in (False, True):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.zeros(64, 96))
        opt = make([("w", p)], lr=1.0, equal_rows=equal_rows, **({"gamma": 0.25} if make is Cosmos else {}))
        for step in range(300):
            if step == 40:
                before = p.detach()[:8].clone()
            p.grad = torch.randn(64, 96, generator=generator)
            if step >= 40:
                p.grad[:8] = 0
            opt.step()
        at_300 = p.detach()[:8].clone()
        for _ in range(20):
            opt.step()
        drifts.append((at_300 - before).norm())
        assert (p.detach()[:8] - at_300).norm() < 1e-2 * drifts[-1]
    assert 2.0 < drifts[1] / drifts[0] < 4.0  # measured 2.5 to 3.6
