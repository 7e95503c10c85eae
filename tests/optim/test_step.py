"""Steps as real runs take them: odd gradients, shapes, rates and callers work or are refused, and state stays sound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import OPTIMIZERS, Cosmos, GaLore, param_groups
from cosmos_optim.engine import run
from tests.optim.helpers import backward, decoder, gradient, loss_of, matrix, same, small_rank, snapshot, train

# One float32 rounding per step and element, a handful of steps.
FLOAT32 = 1e-5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_zero_gradient_step_before_training_changes_nothing(name: str) -> None:
    """Checkpoint tools take a step with zero gradients and lr=0 to create the state."""
    kwargs = small_rank(name)
    model, other = decoder(), decoder()
    a, b = OPTIMIZERS[name](model, **kwargs), OPTIMIZERS[name](other, **kwargs)
    rates = [group["lr"] for group in a.param_groups]
    for group in a.param_groups:
        group["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    a.step()
    for group, lr in zip(a.param_groups, rates, strict=True):
        group["lr"] = lr
    train(model, a, range(4))
    train(other, b, range(4))
    assert same(snapshot(model, a), snapshot(other, b))


def test_zero_gradients_later_decay_the_momentum_and_move_nothing() -> None:
    p = matrix((12, 8))
    opt = Cosmos([p], rank=3)
    p.grad = gradient((12, 8), 0)
    opt.step()
    before = opt.state[p]["M"].clone()
    p.grad = torch.zeros_like(p)
    held = p.detach().clone()
    for _ in range(50):
        opt.step()
    assert torch.equal(p, held)
    torch.testing.assert_close(opt.state[p]["M"], before * 0.9**50, rtol=1e-4, atol=0)
    basis = opt.state[p]["U"]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(3), atol=FLOAT32, rtol=0)


def test_parameters_without_a_gradient_do_not_change() -> None:
    p, q = matrix((6, 4)), matrix((6, 4), 1)
    opt = Cosmos([p, q], rank=2, weight_decay=0.1)
    p.grad = gradient((6, 4), 0)
    held = q.detach().clone()
    opt.step()
    assert torch.equal(q, held)
    assert opt.state[q]["step"] == 0
    assert opt.state[p]["step"] == 1
    q.grad = gradient((6, 4), 1)
    opt.step()
    assert opt.state[q]["step"] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["embed.weight", "up.weight"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_non_finite_gradient_skips_the_whole_step(bad: float, where: str, step: int) -> None:
    model, other = decoder(), decoder()
    opt = Cosmos(model, rank=4, weight_decay=0.1)
    clean = Cosmos(other, rank=4, weight_decay=0.1)
    train(model, opt, range(step))
    train(other, clean, range(step))
    backward(model, step)
    dict(model.named_parameters())[where].grad.view(-1)[3] = bad
    before = snapshot(model, opt)
    opt.step()
    assert same(before, snapshot(model, opt))
    assert (opt.skipped_steps, clean.skipped_steps) == (1, 0)
    train(model, opt, range(step, 4))
    train(other, clean, range(step, 4))
    assert same(snapshot(model, opt), snapshot(other, clean))
    assert (opt.skipped_steps, copy.deepcopy(opt).skipped_steps) == (1, 0)  # a copy counts its own steps


def test_nonfinite_raise_names_the_parameter_and_changes_nothing() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4, nonfinite="raise")
    train(model, opt, range(2))
    backward(model, 2)
    model.down.weight.grad[1, 2] = float("nan")
    before = snapshot(model, opt)
    with pytest.raises(FloatingPointError, match=r"down\.weight"):
        opt.step()
    assert same(before, snapshot(model, opt))


@pytest.mark.parametrize("bad", ["embed.weight", "down.weight"])
def test_nonfinite_raise_in_one_group_raises_for_its_parameters_only(bad: str) -> None:
    """A gradient of another group that is not finite skips the step, as that group says."""
    model = decoder()
    opt = Cosmos(param_groups(model, overrides={"down.weight": {"nonfinite": "raise"}}), rank=4)
    train(model, opt, range(2))
    backward(model, 2)
    model.get_parameter(bad).grad[1, 2] = float("nan")
    before = snapshot(model, opt)
    if bad == "down.weight":
        with pytest.raises(FloatingPointError, match=r"down\.weight"):
            opt.step()
    else:
        opt.step()
        assert opt.skipped_steps == 1
    assert same(before, snapshot(model, opt))


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (3, 20), (20, 3)])
def test_updates_of_thin_matrices_have_rms_lr_at_any_rank(shape: tuple[int, int]) -> None:
    for two_sided in (False, True):
        p = matrix(shape)
        opt = Cosmos([p], lr=0.1, rank=64, two_sided=two_sided)
        side = shape[1] if two_sided else min(shape)
        assert opt.state[p]["U"].shape == (side, side)
        for step in range(5):
            before = p.detach().clone()
            p.grad = gradient(shape, step)
            opt.step()
            rms = (p.detach() - before).square().mean().sqrt()
            torch.testing.assert_close(rms, torch.tensor(0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", ["run_jobs", "write_back"])
def test_a_first_step_that_is_interrupted_can_be_repeated(name: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the bases, which only a first step takes, would be zero forever: Ctrl-C in a notebook, or no memory."""
    kwargs = small_rank(name)
    model, other = decoder(), decoder()
    a, b = OPTIMIZERS[name](model, **kwargs), OPTIMIZERS[name](other, **kwargs)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    backward(model, 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, at, interrupted)
        a.step()
    model.load_state_dict(other.state_dict())  # some weights may have moved
    train(model, a, range(3))
    train(other, b, range(3))
    assert same(snapshot(model, a), snapshot(other, b))


def test_an_empty_parameter_is_skipped() -> None:
    empty = nn.Parameter(torch.zeros(0, 4))
    p = matrix((6, 4))
    opt = Cosmos([empty, p], rank=2)
    empty.grad, p.grad = torch.zeros(0, 4), gradient((6, 4), 0)
    opt.step()
    assert opt.state[p]["step"] == 1


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18])
@pytest.mark.parametrize("name", ["cosmos", "muon", "soap", "adam"])
def test_gradients_of_extreme_size_leave_everything_finite(scale: float, name: str) -> None:
    """The direction must not depend on the scale, within the range of float32 squares (eps=0, because eps does)."""
    p, q = matrix((24, 16)), matrix((24, 16))
    kwargs = {"rank": 4} if name == "cosmos" else {}
    a = OPTIMIZERS[name]([p], lr=1e-2, eps=0.0, **kwargs)
    b = OPTIMIZERS[name]([q], lr=1e-2, eps=0.0, **kwargs)
    for step in range(4):
        p.grad = gradient((24, 16), step) * scale
        q.grad = gradient((24, 16), step)
        a.step()
        b.step()
    assert torch.isfinite(p).all()
    for value in a.state[p].values():
        assert torch.isfinite(value).all()
    if name == "muon" or scale == 1e18:
        torch.testing.assert_close(p, q, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_parameters_train_with_float32_state(dtype: torch.dtype, name: str) -> None:
    kwargs = small_rank(name)
    model = decoder(dtype=dtype)
    opt = OPTIMIZERS[name](model, **kwargs)
    losses = train(model, opt, range(20))
    assert sum(losses[-3:]) < sum(losses[:3])
    for p in model.parameters():
        assert p.dtype is dtype
        assert all(value.dtype is torch.float32 for value in opt.state[p].values())


def test_sparse_gradients_and_complex_parameters_are_refused_by_name() -> None:
    table = nn.Embedding(8, 4, sparse=True)
    opt = Cosmos([{"params": [("table", table.weight)], "rule": "adam"}])
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="'table' has a sparse gradient"):
        opt.step()
    with pytest.raises(ValueError, match="'z'.*complex"):
        Cosmos([("z", nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64)))])


def test_a_parameter_added_later_starts_at_step_one() -> None:
    p, q = matrix((6, 4)), matrix((8, 4), 1)
    opt = Cosmos([p], rank=2)
    p.grad = gradient((6, 4), 0)
    opt.step()
    opt.add_param_group({"params": [q], "rank": 3, "lr": 1e-3})
    p.grad, q.grad = gradient((6, 4), 1), gradient((8, 4), 1)
    opt.step()
    assert (opt.state[p]["step"], opt.state[q]["step"]) == (2, 1)
    assert opt.state[q]["U"].shape == (4, 3)
    assert opt.param_groups[1]["gamma"] == 0.5


def test_lr_as_a_tensor_trains_as_a_number_and_schedulers_keep_gamma() -> None:
    model, other = decoder(), decoder()
    a = Cosmos(model, lr=torch.tensor(5e-4), adam_lr=torch.tensor(2e-3), rank=4, weight_decay=0.1)
    b = Cosmos(other, lr=5e-4, adam_lr=2e-3, rank=4, weight_decay=0.1)
    for opt in (a, b):
        opt.schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    for step in range(5):
        for m, opt in ((model, a), (other, b)):
            train(m, opt, range(step, step + 1))
            opt.schedule.step()
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=FLOAT32, atol=1e-7)
    assert b.param_groups[0]["gamma"] == a.param_groups[0]["gamma"] == 0.25
    assert isinstance(a.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_gamma_of_a_group_added_late_does_not_depend_on_the_schedule(make: Callable[[float], Any]) -> None:
    opt = Cosmos([matrix((8, 6))], lr=make(1e-3), adam_lr=make(8e-3), rank=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    opt.param_groups[0]["params"][0].grad = gradient((8, 6), 0)
    opt.step()
    schedule.step()
    for late in (opt, copy.deepcopy(opt)):
        late.add_param_group({"params": [matrix((8, 6), 1)]})
        assert late.param_groups[1]["gamma"] == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_lr_of_shape_1_that_is_written_later_trains_as_a_number(dtype: torch.dtype) -> None:
    """Whoever holds the tensor can still change the rate."""
    held = [[matrix((8, 6), dtype=dtype), nn.Parameter(torch.ones((), dtype=dtype))] for _ in range(2)]
    a, b = (Cosmos([{"params": p}, {"params": q, "rule": "adam"}], lr=1e-2, adam_lr=1e-2, rank=2, weight_decay=0.1)
            for p, q in held)  # fmt: skip
    lr = torch.tensor([1e-2])
    for group in a.param_groups:
        group["lr"] = lr
    for step in range(2):
        lr.fill_(1e-2 / (1 + step))
        for group in b.param_groups:
            group["lr"] = float(lr)
        for p, q in held:
            p.grad, q.grad = gradient((8, 6), step, dtype), gradient((), step, dtype)
        a.step()
        b.step()
    for x, y in zip(*held, strict=True):
        torch.testing.assert_close(x, y, rtol=FLOAT32, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_where_the_step_count_ends(name: str) -> None:
    """A float32 number stops at 2^24; corrections of the bias are 1 by then."""
    model = decoder()
    opt = OPTIMIZERS[name](model, **small_rank(name))
    train(model, opt, range(2))
    for state in opt.state.values():
        state["step"].fill_(2.0**24 - 1)
    losses = train(model, opt, range(2, 12))
    assert {float(state["step"]) for state in opt.state.values()} == {2.0**24}
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_closure_runs_with_gradients_enabled() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)

    def closure() -> float:
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    assert opt.step(closure) > opt.step(closure)


def test_grad_scaler_skips_a_step_that_overflows() -> None:
    """The scaler does not call `step`, and sets no flag: the optimizer never sees the gradient."""
    model, other = decoder(), decoder()
    opt, clean = Cosmos(model, rank=4), Cosmos(other, rank=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        opt.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1:
            model.up.weight.grad[0, 0] = float("inf")
            before = snapshot(model, opt)
        scaler.step(opt)
        scaler.update()
        assert step != 1 or same(before, snapshot(model, opt))
    assert opt.skipped_steps == 0
    assert scaler.get_scale() == 2.0**9
    train(other, clean, range(1))
    train(other, clean, range(2, 3))
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=FLOAT32, atol=1e-6)


def test_gradients_are_never_written() -> None:
    model = decoder()
    opt = Cosmos(param_groups(model), rank=4, weight_decay=0.1, nesterov=True)
    for step in range(3):
        backward(model, step)
        held = copy.deepcopy([p.grad for p in model.parameters()])
        opt.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), held, strict=True))


def test_galore_keeps_its_projector_if_the_gradient_is_zero_when_an_update_is_due() -> None:
    """For example an expert without tokens at that step: a zero matrix has no leading directions."""
    p = matrix((12, 8))
    opt = GaLore([p], rank=3, update_gap=4)
    for step in range(12):
        before = opt.state[p]["Q"].clone()
        p.grad = torch.zeros_like(p) if step == 4 else gradient((12, 8), step)
        opt.step()
        assert torch.equal(opt.state[p]["Q"], before) == (step not in (0, 8))
