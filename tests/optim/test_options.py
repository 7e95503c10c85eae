"""Options of a group: diagnostics, sides, guard, rounding, maximize."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import nn

from cosmos_optim import OPTIMIZERS, Cosmos, CosmosPaper, Muon
from cosmos_optim.engine.rounding import stochastic_bfloat16
from cosmos_optim.rules import RULES
from cosmos_optim.rules.cosmos import PAPER
from tests.optim.helpers import decoder, gradient, loss_of, matrix, small_rank, train


def test_diagnostics_are_recorded_by_name_and_only_inside_the_block() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(2))
    opt.zero_grad()
    loss_of(model, 2).backward()
    with opt.diagnostics() as seen:
        opt.step()
    assert set(seen) == {"up.weight", "down.weight"}
    for values in seen.values():
        assert 0 < values["energy"] <= 1 + 1e-6
        assert 0 <= values["drift"] < 1
        assert values["update_rms"] == pytest.approx(1, abs=1e-5)
        assert values["ratio"] > 0
    count = len(seen)
    train(model, opt, range(3, 4))
    assert len(seen) == count


def test_overlapping_diagnostics_all_record_whichever_ends_first() -> None:
    """A logger and a user may both watch a step, and a block may end by an exception."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    first, second, third = opt.diagnostics(), opt.diagnostics(), opt.diagnostics()
    outer, inner, other = first.__enter__(), second.__enter__(), third.__enter__()
    train(model, opt, range(1))
    assert outer == inner == other and len(outer) == 2
    assert second.__exit__(KeyError, KeyError("left"), None) is False
    train(model, opt, range(1, 2))
    assert outer == other != inner
    before = dict(outer)
    first.__exit__(None, None, None)
    train(model, opt, range(2, 3))
    assert set(other) == set(before) and outer["up.weight"] != other["up.weight"]
    third.__exit__(None, None, None)
    last = {name: dict(values) for name, values in other.items()}
    train(model, opt, range(3, 4))
    assert other == last


def test_diagnostics_of_two_optimizers_do_not_mix() -> None:
    a, b = (Cosmos([(name, matrix((10, 6)))], rank=2) for name in "ab")
    with a.diagnostics() as of_a, b.diagnostics() as of_b:
        for opt in (a, b):
            opt.param_groups[0]["params"][0].grad = gradient((10, 6), 0)
            opt.step()
    assert (set(of_a), set(of_b)) == ({"a"}, {"b"})


def test_diagnostics_report_the_true_energy_and_drift() -> None:
    p = matrix((10, 6))
    opt = Cosmos([("w", p)], rank=2)
    p.grad = gradient((10, 6), 0)
    with opt.diagnostics() as seen:
        opt.step()
    values = torch.linalg.svdvals(p.grad).square()
    assert seen["w"]["energy"] == pytest.approx(float(values[:2].sum() / values.sum()), rel=1e-4)
    assert seen["w"]["drift"] == pytest.approx(0, abs=1e-5)


def test_the_guard_keeps_a_low_rank_update_in_the_gradients_row_space() -> None:
    """With gradient rank 8 and r = 64 the unguarded update is mostly rounding noise, from both halves."""
    torch.manual_seed(0)
    left, right = torch.randn(96, 8), torch.randn(8, 80)
    outside = {}
    for guard in (0.0, 1e-5):
        p = torch.nn.Parameter(torch.zeros(96, 80))
        opt = Cosmos([p], lr=1.0, rank=64, residual_guard=guard)
        p.grad = left @ right
        opt.step()
        basis = torch.linalg.qr(right.T)[0]
        inside = p.detach() @ basis @ basis.T
        outside[guard] = float((p.detach() - inside).square().sum() / p.detach().square().sum())
    assert outside[0.0] > 0.5
    assert outside[1e-5] < 1e-11  # the square of float32 rounding; measured 8e-14


def test_the_guard_changes_nothing_if_the_residual_is_real() -> None:
    a, b = matrix((24, 16)), matrix((24, 16))
    with_guard, without = Cosmos([a], rank=4), Cosmos([b], rank=4, residual_guard=0.0)
    for step in range(5):
        a.grad = gradient((24, 16), step)
        b.grad = a.grad.clone()
        with_guard.step()
        without.step()
    assert torch.equal(a, b)


def test_the_smaller_side_saves_state() -> None:
    wide = matrix((8, 32))
    assert Cosmos([wide], rank=4).state[wide]["U"].shape == (32, 4)
    opt = Cosmos([wide], rank=4, side="smaller", lr=0.1)
    assert opt.state[wide]["U"].shape == (8, 4)
    assert opt.state[wide]["V"].shape == (32, 4)
    assert opt.state[wide]["M"].shape == (8, 32)
    tall = torch.nn.Parameter(wide.detach().T.clone())
    other = Cosmos([tall], rank=4, lr=0.1)
    for step in range(3):
        wide.grad = gradient((8, 32), step)
        tall.grad = wide.grad.T.clone()
        opt.step()
        other.step()
    torch.testing.assert_close(wide.T, tall, rtol=1e-5, atol=1e-6)


def test_a_matrix_with_fewer_rows_than_the_rank_is_tracked_on_the_side_of_its_rows() -> None:
    """A factor of LoRA then has hardly more state than with AdamW; from `rank` rows on, the input side is tracked."""
    few, more = matrix((8, 1024)), matrix((32, 64))
    opt = Cosmos([few, more])
    assert opt.state[few]["U"].shape == (8, 8)
    assert sum(x.numel() for x in opt.state[few].values()) < 1.1 * 2 * few.numel()
    assert opt.state[more]["U"].shape == (64, 32)
    assert Cosmos([few], side="input").state[few]["U"].shape == (1024, 32)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("maximize", [np.bool_(True), 1, torch.tensor(True)])
def test_maximize_may_be_anything_that_is_true(name: str, maximize: Any) -> None:
    model, other = decoder(), decoder()
    train(model, OPTIMIZERS[name](model, maximize=True, **small_rank(name)), range(2))
    train(other, OPTIMIZERS[name](other, maximize=maximize, **small_rank(name)), range(2))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_maximize_mirrors_minimize(name: str) -> None:
    kwargs = small_rank(name, 3)
    p, q = matrix((8, 6)), matrix((8, 6))
    rule = {"rule": "adam"} if name == "adam" else {}
    down = OPTIMIZERS[name]([{"params": [p], **rule}], **kwargs)
    up = OPTIMIZERS[name]([{"params": [q], **rule}], maximize=True, **kwargs)
    for step in range(3):
        p.grad = gradient((8, 6), step)
        q.grad = -p.grad
        down.step()
        up.step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_stochastic_rounding_keeps_what_rounding_to_nearest_loses() -> None:
    """Updates of a tenth of the last place: rounded to nearest nothing moves, rounded stochastically the mean does."""
    moved = {}
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        opt = Cosmos([p], lr=2.0**-8 / 10, rank=4, stochastic_rounding=stochastic)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            opt.step()
        moved[stochastic] = float((1 - p.detach().float()).mean())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(20 * 2.0**-8 / 10, rel=0.15)


def test_stochastic_rounding_is_unbiased_and_leaves_exact_values_alone() -> None:
    x = torch.randn(1 << 16)
    mean = torch.stack([stochastic_bfloat16(x, torch.tensor(i)).double() for i in range(64)]).mean(0)
    # 64 draws of a spacing of at most 2^-7 |x|: the mean's deviation is about 2^-7 / 8 / sqrt(12) of |x|.
    assert float(((mean - x.double()) / x.double().abs()).square().mean().sqrt()) < 2.0**-7 / 8 / 3
    exact = torch.randn(100).bfloat16().float()
    assert torch.equal(stochastic_bfloat16(exact, torch.tensor(5)).float(), exact)
    low_nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # without its low bits it would be inf
    odd = torch.cat([torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0]), low_nan])
    assert torch.equal(stochastic_bfloat16(odd, torch.tensor(1)).float().nan_to_num(7), odd.nan_to_num(7))


@pytest.mark.parametrize("rule", ["muon", "adam"])
def test_stochastic_rounding_draws_other_numbers_at_every_step(rule: str) -> None:
    """200 updates of a tenth of the last place move each weight by about 20 places; the same draws, by 0 or 200."""
    p = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    group = {"params": [p], "rule": rule, "stochastic_rounding": True}
    opt = Muon([group | {"normalize": True} if rule == "muon" else group], lr=2.0**-8 / 10, adam_lr=2.0**-8 / 10)
    p.grad = torch.ones_like(p)
    for _ in range(200):
        opt.step()
    places = (1 - p.detach().double()) / 2.0**-8
    assert float(places.min()) > 0 and float(places.max()) < 45  # six deviations of 200 draws with a chance of 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stochastic_rounding_changes_no_bit_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """Norms of a bfloat16 model may be float32: its draws would leave them 8 bits."""
    models = [decoder(dtype=dtype) for _ in range(2)]
    for model, rounded in zip(models, (False, True), strict=True):
        train(model, OPTIMIZERS[name](model, stochastic_rounding=rounded, **small_rank(name)), range(3))
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def test_adam_rounds_bfloat16_parameters_stochastically() -> None:
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    opt = Cosmos([{"params": [p], "rule": "adam", "lr": 2.0**-8 / 10, "stochastic_rounding": True}])
    for _ in range(10):
        p.grad = torch.ones_like(p)
        opt.step()
    assert float((1 - p.detach().float()).mean()) == pytest.approx(10 * 2.0**-8 / 10, rel=0.15)


def test_gamma_zero_with_full_rank_is_normalized_soap() -> None:
    p = matrix((12, 8), dtype=torch.float64)
    q = torch.nn.Parameter(p.detach().clone())
    cosmos = CosmosPaper([p], lr=0.1, rank=8, gamma=0.0)
    soap = OPTIMIZERS["soap"]([q], lr=1.0)
    for step in range(5):
        p.grad = gradient((12, 8), step, torch.float64)
        q.grad = p.grad.clone()
        before, other = p.detach().clone(), q.detach().clone()
        cosmos.step()
        soap.step()
        direction = other - q.detach()
        expected = 0.1 * direction * (12 * 8) ** 0.5 / direction.norm()
        # Both bases come from the QR of the same matrix, up to the 1e-16 shift; both are exact in float64.
        torch.testing.assert_close(before - p.detach(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("two_sided", [False, True])
def test_rows_with_a_gradient_far_below_epsilon_do_not_move(two_sided: bool) -> None:
    """Dead neurons: epsilon keeps them out of both halves, and dividing rows by their size must not bring them back."""
    p = matrix((64, 96))
    opt = Cosmos([p], lr=1.0, two_sided=two_sided)
    start = p.detach().clone()
    for step in range(30):
        p.grad = 1e-2 * gradient((64, 96), step)
        p.grad[:4] *= 1e-12  # 1e-14: epsilon is 1e-8
        p.grad[4:8] = 0
        p.grad[8:12] *= 1e-3  # small, and real
        opt.step()
    moved = (p.detach() - start).square().mean(1).sqrt() / 15  # about what the other rows do
    assert moved[12:].mean() > 0.9
    assert moved[:4].max() < 0.01
    assert not moved[4:8].any()
    assert moved[8:12].min() > 0.2


def test_a_compiled_step_is_not_recompiled() -> None:
    """torch.compile of step() with lr as a tensor does not recompile from step to step."""
    model = decoder()
    opt = Cosmos(model, lr=torch.tensor(5e-4), adam_lr=torch.tensor(2e-3), rank=4)
    train(model, opt, range(1))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(opt.step, backend=counter)
    for step in range(1, 5):
        opt.zero_grad()
        loss_of(model, step).backward()
        compiled()
        opt.param_groups[0]["lr"].mul_(0.9)
        if step == 1:
            frames = counter.frame_count
    assert counter.frame_count == frames
    assert next(iter(opt.state.values()))["step"] == 5


def test_the_defaults_of_the_classes_are_those_of_the_rule() -> None:
    """Groups without an option take the rule's default, `Cosmos(model)` its signature's; CosmosPaper changes three."""
    ours, paper = (kind([matrix((8, 6))]).param_groups[0] for kind in (Cosmos, CosmosPaper))
    assert {key: ours[key] for key in RULES["cosmos"].defaults if key != "gamma"} == {
        key: value for key, value in RULES["cosmos"].defaults.items() if key != "gamma"
    }
    assert {key: value for key, value in paper.items() if key != "params" and ours[key] != value} == PAPER


def test_gamma_counts_adam_lr_as_2e_3_at_most_except_in_cosmos_paper() -> None:
    """gamma = lr / min(adam_lr, 2e-3), because a fast embedding must not speed up the SOAP half; a given gamma wins."""
    model = nn.Linear(8, 8)

    def gamma(kind: type[Cosmos], **rates: float) -> float:
        value = kind(model, lr=1e-3, **rates).param_groups[0]["gamma"]
        assert isinstance(value, float)
        return value

    assert [gamma(Cosmos, adam_lr=x) for x in (1e-3, 2e-3, 8e-3)] == [1.0, 0.5, 0.5]
    assert [gamma(CosmosPaper, adam_lr=x) for x in (1e-3, 2e-3, 8e-3)] == [1.0, 0.5, 0.125]
    assert gamma(Cosmos, adam_lr=8e-3, gamma=0.125) == 0.125
