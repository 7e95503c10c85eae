"""Tensors as they come: any strides and dtypes, changed after the optimizer is built; overflow; degenerate gradients.

Each case either trains as if it had been so from the start, or says what to do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Cosmos
from tests.optim.helpers import decoder, gradient, matrix, small_rank, train

# A few steps in float32: other orders of summation, Newton-Schulz triples what they differ by.
FLOAT32 = 1e-4


def build(name: str, params: object, **kwargs: object) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](params, **kwargs, **small_rank(name, 3))


# -- memory ----------------------------------------------------------------------------------------------------------


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def sliced(x: Tensor) -> Tensor:
    wide = x.new_zeros(x.shape[0], x.shape[1] + 5)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("restride", [transposed, sliced])
@pytest.mark.parametrize("when", ["before", "after"])
def test_strides_do_not_matter(name: str, restride: Callable[[Tensor], Tensor], when: str) -> None:
    """Parameters and gradients of any strides, restrided before or after the optimizer is built."""
    plain, other = matrix((16, 8)), matrix((16, 8))
    if when == "before":
        other = nn.Parameter(restride(other.data))
    a, b = build(name, [("w", plain)], lr=0.1), build(name, [("w", other)], lr=0.1)
    if when == "after":
        other.data = restride(other.data)
    assert other.stride() != plain.stride()
    for step in range(3):
        plain.grad = gradient((16, 8), step)
        other.grad = plain.grad.clone() if when == "before" else transposed(plain.grad)
        a.step()
        b.step()
    torch.testing.assert_close(plain, other, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("first", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("then", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_may_change_its_memory_format(first: torch.memory_format, then: torch.memory_format) -> None:
    """Between steps, and between a checkpoint and the model it is loaded into."""
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, bias=False)
    moved = copy.deepcopy(plain).to(memory_format=first)
    a, b = Cosmos(plain, lr=0.1, rank=3), Cosmos(moved, lr=0.1, rank=3)
    for step in range(4):
        if step == 1:
            moved.to(memory_format=then)
        if step == 2:
            saved, b = b.state_dict(), Cosmos(moved, lr=0.1, rank=3)
            b.load_state_dict(saved)
        plain.weight.grad = gradient((6, 4, 3, 3), step)
        moved.weight.grad = plain.weight.grad.clone(memory_format=first)
        a.step()
        b.step()
    torch.testing.assert_close(plain.weight, moved.weight, rtol=0, atol=FLOAT32)


def test_parameters_in_one_storage_are_updated_apart() -> None:
    flat = torch.randn(2 * 16 * 8)
    views = [nn.Parameter(flat[:128].view(16, 8)), nn.Parameter(flat[128:].view(16, 8))]
    apart = [nn.Parameter(p.detach().clone()) for p in views]
    a, b = Cosmos(views, rank=3, weight_decay=0.1), Cosmos(apart, rank=3, weight_decay=0.1)
    for step in range(3):
        for i, (p, q) in enumerate(zip(views, apart, strict=True)):
            p.grad = q.grad = gradient((16, 8), 10 * i + step)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(views, apart, strict=True))
    assert a.state_bytes() == b.state_bytes()


# -- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_may_be_cast_after_the_optimizer_is_built(name: str) -> None:
    """The state follows: at least float32, float64 for float64."""
    model = decoder()
    opt = build(name, model)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        model.to(dtype)
        train(model, opt, range(2))
        wide = torch.promote_types(dtype, torch.float32)
        for p in model.parameters():
            assert {v.dtype for k, v in opt.state[p].items() if k != "step"} == {wide}
            assert opt.state[p]["step"].dtype is torch.float32
    assert opt.state[model.up.weight]["step"] == 6


@pytest.mark.parametrize(("saved", "here"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_checkpoint_of_another_precision(saved: torch.dtype, here: torch.dtype) -> None:
    old, new = decoder(dtype=saved), decoder(dtype=here)
    a, b = Cosmos(old, rank=4), Cosmos(new, rank=4)
    train(old, a, range(3))
    b.load_state_dict(a.state_dict())
    new.load_state_dict(old.state_dict())
    train(old, a, range(3, 5))
    train(new, b, range(3, 5))
    assert {v.dtype for k, v in b.state[new.up.weight].items() if k != "step"} == {here}
    torch.testing.assert_close(new.up.weight.double(), old.up.weight.double(), rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_gradients_of_bfloat16_parameters(name: str) -> None:
    p, q = matrix((16, 8), dtype=torch.bfloat16), matrix((16, 8), dtype=torch.bfloat16)
    p.grad_dtype = torch.float32
    a, b = build(name, [("w", p)], lr=0.1), build(name, [("w", q)], lr=0.1)
    for step in range(3):
        q.grad = gradient((16, 8), step, torch.bfloat16)
        p.grad = q.grad.float()
        a.step()
        b.step()
    assert torch.equal(p, q)


def test_what_nothing_can_train_is_refused_by_name() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        frozen = nn.Parameter(torch.zeros(8, 4, dtype=dtype), requires_grad=False)
        with pytest.raises(ValueError, match=f"'w' of shape .* has dtype {dtype}, which cannot be trained: freeze it"):
            Cosmos([("w", frozen)])


# -- overflow and rank -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cosmos", "soap", "galore", "adam-mini", "adam"])
def test_finite_gradients_whose_squares_overflow_do_not_poison_the_state(name: str) -> None:
    """Either the step is skipped whole, or everything it leaves is finite."""
    p = matrix((64, 48))
    opt = build(name, [("w", p)])
    p.grad = gradient((64, 48), 0)
    opt.step()
    for scale in (1e17, 1e18, 1e19, 1e20, 1e30, 3e38):
        p.grad = torch.full((64, 48), scale)
        opt.step()
        assert all(value.isfinite().all() for value in (p, *opt.state[p].values())), scale
    assert opt.state[p]["step"] < 7
    with pytest.raises(FloatingPointError, match="'w'.*its square"):
        opt.param_groups[0]["nonfinite"] = "raise"
        opt.step()


def test_tiny_float64_gradients_start_training() -> None:
    p = matrix((6, 4), dtype=torch.float64)
    opt = Cosmos([p], rank=2)
    p.grad = gradient((6, 4), 0, torch.float64) * 1e-60
    opt.step()
    assert opt.state[p]["step"] == 1


def one_direction(step: int) -> Tensor:
    return torch.outer(gradient((24,), step), torch.linspace(1, 2, 16))


def switching(step: int) -> Tensor:
    """Another subspace and another size every 20 steps."""
    side = (step // 20) % 2
    return gradient((24, 3), step) @ torch.eye(16)[8 * side : 8 * side + 3] * 10.0 ** (12 * side - 6)


def one_entry(step: int) -> Tensor:
    G = torch.zeros(24, 16)
    G[step % 24, step % 16] = 1
    return G


def sporadic(step: int) -> Tensor:
    return gradient((24, 16), step) * (step % 7 == 0)


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("rank", [4, 15])
@pytest.mark.parametrize("of", [one_direction, switching, one_entry, sporadic, lambda step: gradient((24, 16), 0)])
def test_degenerate_gradients_for_long(of: Callable[[int], Tensor], rank: int, two_sided: bool) -> None:
    """Rank one forever, a sudden change of subspace and size, one entry, mostly zero, the same one again and again."""
    p = matrix((24, 16))
    opt = Cosmos([p], lr=1e-3, rank=rank, two_sided=two_sided)
    for step in range(60):
        before = p.detach().clone()
        p.grad = of(step)
        opt.step()
        rms = float((p.detach() - before).square().mean().sqrt())
        assert rms == pytest.approx(1e-3 if p.grad.any() else 0.0, rel=1e-3), step
    U, S = opt.state[p]["U"], opt.state[p]["S"]
    torch.testing.assert_close(U.mT @ U, torch.eye(rank), rtol=0, atol=1e-5)
    assert torch.linalg.eigvalsh(S.double()).min() >= -1e-6 * S.trace()


def test_an_expert_without_tokens_at_first_catches_up() -> None:
    """A stack has one step count and takes its bases at its first gradient. An expert that had none then starts from
    an arbitrary basis; one power step brings it close to the one it would have had."""
    torch.manual_seed(0)
    spectrum = torch.arange(1, 65.0) ** -0.7
    stack, single = matrix((2, 48, 64)), matrix((48, 64))
    a, b = Cosmos([("experts", stack)], rank=16), Cosmos([("w", single)], rank=16)
    for step in range(3):
        G = torch.randn(2, 48, 64) * spectrum
        G[1] *= step > 0
        stack.grad = G
        with a.diagnostics() as late:
            a.step()
        if step > 0:
            single.grad = G[1].clone()
            with b.diagnostics() as exact:
                b.step()
            assert late["experts[1]"]["energy"] > 0.9 * exact["w"]["energy"]


def test_dead_inputs_do_not_hold_the_basis() -> None:
    """Half of the inputs never vary and the first gradient has rank 2. The columns that it leaves open must not be unit
    vectors of dead inputs: no power step would find the directions that come later."""
    torch.manual_seed(0)
    for dead in (slice(0, 32), slice(32, 64)):
        p = matrix((48, 64))
        opt = Cosmos([("w", p)], rank=16)
        right = torch.randn(12, 64)
        right[:, dead] = 0
        for step in range(30):
            count = 2 if step == 0 else 12
            p.grad = gradient((48, count), step) @ right[:count]
            with opt.diagnostics() as seen:
                opt.step()
        assert seen["w"]["energy"] > 0.999


def test_one_group_of_several_precisions() -> None:
    params = [matrix((5,), dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32)]
    apart = [nn.Parameter(p.detach().clone()) for p in params]
    together = Cosmos([{"params": params, "rule": "adam"}])
    singles = [Cosmos([{"params": [p], "rule": "adam"}]) for p in apart]
    for step in range(3):
        for p, q, opt in zip(params, apart, singles, strict=True):
            p.grad = q.grad = gradient((5,), step, p.dtype)
            opt.step()
        together.step()
    assert all(torch.equal(p, q) for p, q in zip(params, apart, strict=True))


@pytest.mark.parametrize("rank", [8, 32])
def test_one_huge_gradient_does_not_hide_the_others(rank: int) -> None:
    """A spike of 1e6 in one direction: when the momentum has forgotten it, the update follows the gradient again, while
    the second moment still knows it."""
    p, constant = nn.Parameter(torch.zeros(48, 32)), gradient((48, 32), 0)
    opt = Cosmos([p], lr=1.0, rank=rank)
    for step in range(1, 26):
        p.grad = constant + gradient((48, 32), step)
        if step == 5:
            p.grad += 1e6 * torch.outer(gradient((48,), 0), gradient((32,), 1))
        before = p.detach().clone()
        opt.step()
    update = before - p.detach()
    assert float((update * constant).sum() / update.norm() / constant.norm()) > 0.4
