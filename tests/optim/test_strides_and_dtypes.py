"""Tensors of any strides and dtypes, also if they change after the optimizer is built.

Each case either trains as if it had been so from the start, or says what to do.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Cosmos, plan
from tests.optim.helpers import decoder, gradient, matrix, same, small_rank, snapshot, train
from tests.versions import needs_torch

# A few steps in float32: the order of summation differs, and Newton-Schulz triples the difference.
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
def test_strides_do_not_change_the_training(name: str, restride: Callable[[Tensor], Tensor], when: str) -> None:
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
def test_a_convolution_that_changes_its_memory_format_trains_as_before(
    first: torch.memory_format, then: torch.memory_format
) -> None:
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


def test_parameters_in_one_storage_are_updated_separately() -> None:
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
def test_state_follows_a_model_that_is_cast_later(name: str) -> None:
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


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_made_between_a_cast_and_the_next_step_continues_bit_for_bit(copier: Callable[[Any], Any]) -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(2))
    model.double()
    other, copied = copier((model, opt))
    for m, o in ((model, opt), (other, copied)):
        for step, p in enumerate(m.parameters()):
            p.grad = gradient(tuple(p.shape), step, torch.float64)
        o.step()
    assert {x.dtype for state in copied.state.values() for k, x in state.items() if k != "step"} == {torch.float64}
    assert same(snapshot(model, opt), snapshot(other, copied))


@pytest.mark.parametrize(("saved", "here"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_checkpoint_of_another_precision_continues_in_this_one(saved: torch.dtype, here: torch.dtype) -> None:
    old, new = decoder(dtype=saved), decoder(dtype=here)
    a, b = Cosmos(old, rank=4), Cosmos(new, rank=4)
    train(old, a, range(3))
    b.load_state_dict(a.state_dict())
    new.load_state_dict(old.state_dict())
    train(old, a, range(3, 5))
    train(new, b, range(3, 5))
    assert {v.dtype for k, v in b.state[new.up.weight].items() if k != "step"} == {here}
    torch.testing.assert_close(new.up.weight.double(), old.up.weight.double(), rtol=0, atol=FLOAT32)


@needs_torch("2.10", reason="parameters have no `grad_dtype`, so a gradient of another dtype is refused")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_and_bfloat16_gradients_of_bfloat16_parameters_train_alike(name: str) -> None:
    p, q = matrix((16, 8), dtype=torch.bfloat16), matrix((16, 8), dtype=torch.bfloat16)
    p.grad_dtype = torch.float32
    a, b = build(name, [("w", p)], lr=0.1), build(name, [("w", q)], lr=0.1)
    for step in range(3):
        q.grad = gradient((16, 8), step, torch.bfloat16)
        p.grad = q.grad.float()
        a.step()
        b.step()
    assert torch.equal(p, q)


def test_dtypes_that_cannot_be_trained_are_refused_by_name() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        frozen = nn.Parameter(torch.zeros(8, 4, dtype=dtype), requires_grad=False)
        message = f"'w' of shape .* has dtype {dtype}, which cannot be trained: freeze it and leave it out"
        with pytest.raises(ValueError, match=message):
            Cosmos([("w", frozen)])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_a_model_cast_later_to_a_dtype_that_cannot_be_trained_is_refused(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    opt = Cosmos(layer)
    layer.weight.data = layer.weight.data.to(dtype)
    layer.weight.grad = torch.zeros_like(layer.weight)
    with pytest.raises(ValueError, match="'weight' of shape .* (is complex|which cannot be trained)"):
        opt.step()
    assert opt.state[layer.weight]["M"].dtype is torch.float32


def test_a_plan_refuses_the_dtypes_that_the_optimizer_refuses() -> None:
    layer = nn.Linear(4, 4, dtype=torch.complex64)
    for build_or_plan in (Cosmos, plan):
        with pytest.raises(ValueError, match="'weight' of shape .* is complex: split it into two real parameters"):
            build_or_plan(layer)


def test_a_group_of_several_precisions_trains_as_each_alone() -> None:
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
