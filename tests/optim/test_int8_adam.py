"""`adam_dtype=torch.int8` on a CPU: the step, its state, rare tokens, checkpoints, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_lab.models import Decoder as Llama
from cosmos_lab.models import resolve
from cosmos_optim import OPTIMIZERS, Adam, Cosmos, plan
from cosmos_optim.engine import adam_state
from cosmos_optim.rules import adam
from tests.optim.helpers import (
    Decoder,
    gradient,
    loss_of,
    matrix,
    resumes_bit_for_bit,
    small_rank,
    train,
)
from tests.oracles import int8_adam as oracle

INT8 = torch.int8
SHAPE = (40, 150)
# Of the largest |m| / sqrt(v) that exact Adam can have: (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), 1.70 for 0.9, 0.98.
LARGEST_UPDATE = 1.70
# Of |W - W_0| after 30 steps with gradients of one size: measured 0.012.
LIKE_FLOAT32 = 0.03


def decoder(seed: int = 0) -> Decoder:
    """Return a decoder with an embedding and a head of more than 4,096 elements, and small vectors."""
    torch.manual_seed(seed)
    return Decoder(vocab=400, width=16)


def optimizer(p: Tensor, **options: Any) -> Adam:
    return Adam([p], **{"lr": 0.01, "adam_dtype": INT8} | options)


def stepped(shape: tuple[int, ...] = SHAPE, steps: int = 3, scale: float = 1.0, **options: Any) -> tuple[Tensor, Any]:
    """Return a parameter after a few steps, and its state."""
    p = matrix(shape)
    opt = optimizer(p, **options)
    for step in range(steps):
        p.grad = scale * gradient(shape, step)
        opt.step()
    return p.detach(), opt.state[p]


def test_moments_and_updates_follow_the_oracle() -> None:
    """Each step averages what was stored with the gradient, moves by the exact result, and stores it rounded."""
    p = matrix(SHAPE, dtype=torch.float64)
    opt, W = optimizer(p), p.detach().numpy().copy()
    m = v = torch.zeros(SHAPE, dtype=torch.float64).numpy()
    for step in range(1, 4):
        p.grad = gradient(SHAPE, step, torch.float64)
        opt.step()
        g = p.grad.numpy()
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        W -= 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.98**step)) ** 0.5 + 1e-8)
        codes, root = oracle.quantize(m, step, False), oracle.quantize(v**0.5, step, True)
        m, v = oracle.dequantize(*codes), oracle.dequantize(*root) ** 2
    state = opt.state[p]
    for name, (expected, scales) in (("exp_avg", codes), ("exp_avg_sq", root)):
        assert torch.equal(state[name], torch.from_numpy(expected))
        assert torch.equal(state[f"{name}_scale"].double(), torch.from_numpy(scales))
    assert torch.allclose(p.detach(), torch.from_numpy(W), atol=1e-9)


@pytest.mark.parametrize(("shape", "scales"), [
    ((40, 150), (40, 2)), ((5000,), (40,)), ((4096,), None), ((64, 64), None), ((2, 30, 130), (2, 30, 2)), ((), None),
    ((300, 16), (300, 1)), ((300, 15), None), ((5000, 1), None), ((32, 32, 3, 3), None),
])  # fmt: skip
def test_tensors_of_more_than_4096_elements_with_rows_of_at_least_16_are_quantized(
    shape: tuple[int, ...], scales: Any
) -> None:
    """By rows, which are the last dimension."""
    p = nn.Parameter(torch.ones(shape))
    opt = optimizer(p)
    p.grad = torch.ones(shape)
    opt.step()
    state = opt.state[p]
    assert state["exp_avg"].shape == shape
    if scales is None:
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].dtype is torch.float32
    else:
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (INT8, torch.uint8)
        assert state["exp_avg_scale"].shape == state["exp_avg_sq_scale"].shape == scales


def test_thirty_steps_are_close_to_those_in_float32() -> None:
    before = matrix(SHAPE).detach()
    moves = [stepped(steps=30, adam_dtype=dtype)[0] - before for dtype in (INT8, None)]
    assert (moves[0] - moves[1]).norm() < LIKE_FLOAT32 * moves[1].norm()


def test_a_power_of_two_in_the_gradients_changes_no_bit_of_codes() -> None:
    (p, a), (q, b) = (stepped(scale=scale, eps=0.0) for scale in (1.0, 2.0**10))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(a[name], b[name])
        assert torch.equal(2.0**10 * a[f"{name}_scale"], b[f"{name}_scale"])
    assert torch.allclose(p, q, atol=1e-6)


def test_the_same_steps_give_the_same_bits() -> None:
    (p, a), (q, b) = stepped(), stepped()
    assert torch.equal(p, q)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_rare_tokens_take_steps_of_the_size_that_adam_has() -> None:
    """Rows with a gradient in one step of 40: no update explodes, and the weights are those of float32."""
    ends = []
    for dtype in (INT8, None):
        p = matrix(SHAPE)
        opt = optimizer(p, lr=1.0, adam_dtype=dtype)
        for step in range(200):
            before = p.detach().clone()
            p.grad = torch.zeros(SHAPE)
            rows = [step % 40, 0]
            p.grad[rows] = gradient(SHAPE, step)[rows]
            opt.step()
            if step > 0:
                assert (p.detach() - before).abs().max() < 1.05 * LARGEST_UPDATE
        ends.append(p.detach() - matrix(SHAPE).detach())
    assert (ends[0] - ends[1]).norm() < 0.05 * ends[1].norm()


def test_columns_of_very_different_sizes_take_no_wild_steps() -> None:
    """Over ten decades in a block: updates stay within three times Adam's largest; measured 3.5."""
    p = matrix(SHAPE)
    opt = optimizer(p, lr=1.0)
    sizes = torch.logspace(-10, 0, SHAPE[1])
    for step in range(60):
        before = p.detach().clone()
        p.grad = gradient(SHAPE, step) * sizes
        opt.step()
        assert (p.detach() - before).abs().max() < 3 * LARGEST_UPDATE


def test_zero_gradients_let_both_moments_decay() -> None:
    """As the exact ones: by 0.9 and 0.98 a step."""
    p = matrix(SHAPE)
    opt = optimizer(p)
    p.grad = gradient(SHAPE, 0)
    opt.step()
    state, g = opt.state[p], p.grad
    p.grad = torch.zeros(SHAPE)
    for _ in range(50):
        opt.step()
    m, v = adam_state.load(state, torch.float32)
    assert m.norm() == pytest.approx(float((0.1 * 0.9**50 * g).norm()), rel=0.02)
    assert v.sqrt().norm() == pytest.approx(float((0.02 * 0.98**50) ** 0.5 * g.norm()), rel=0.02)
    for _ in range(800):
        opt.step()
    m, v = adam_state.load(state, torch.float32)
    assert p.isfinite().all()
    assert m.abs().max() < 1e-30


def test_an_outlier_in_the_gradient_keeps_other_blocks() -> None:
    states = []
    for value in (0.0, 1e6):
        p = matrix(SHAPE)
        opt = optimizer(p)
        p.grad = gradient(SHAPE, 0)
        p.grad[2, 140] += value
        opt.step()
        states.append(opt.state[p])
        assert p.isfinite().all()
    others = torch.ones(SHAPE, dtype=torch.bool)
    others[2, 128:] = False
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(states[0][name][others], states[1][name][others])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    p = matrix(SHAPE)
    opt = optimizer(p)
    p.grad = gradient(SHAPE, 0)
    opt.step()
    before = [p.detach().clone(), *(x.clone() for x in opt.state[p].values())]
    p.grad[3, 5] = bad
    opt.step()
    assert all(torch.equal(x, y) for x, y in zip([p.detach(), *opt.state[p].values()], before, strict=True))
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_every_dtype_train(dtype: torch.dtype) -> None:
    p = matrix(SHAPE, dtype=dtype)
    before = p.detach().clone()
    opt = optimizer(p, stochastic_rounding=dtype is torch.bfloat16)
    for step in range(2):
        p.grad = gradient(SHAPE, step, dtype)
        opt.step()
    assert p.isfinite().all() and not torch.equal(p, before)
    assert opt.state[p]["exp_avg"].dtype is INT8


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_option(name: str) -> None:
    """Its AdamW groups store codes, unless they have no large tensor."""
    model = decoder()
    opt = OPTIMIZERS[name](model, adam_dtype=INT8, **small_rank(name))
    losses = train(model, opt, range(3))
    assert loss_of(model, 0).item() < losses[0]
    quantized = {n for n, p in model.named_parameters() if "exp_avg_scale" in opt.state[p]}
    assert quantized == (set() if name == "adam-mini" else {"embed.weight", "lm_head.weight"})


# -- checkpoints, bytes, and what is refused --------------------------------------------------------------------------


def test_a_loaded_checkpoint_continues_bit_for_bit() -> None:
    def build(seed: int) -> tuple[nn.Module, Cosmos]:
        model = decoder(seed)
        return model, Cosmos(model, rank=4, adam_dtype=INT8)

    assert resumes_bit_for_bit(build, "state_dict")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(("wrote", "reads"), [(None, INT8), (INT8, None), (INT8, torch.float32)])
def test_a_checkpoint_of_another_dtype_replaces_ours_with_a_warning(wrote: Any, reads: Any, older: bool) -> None:
    """The moments stay as they were saved, and so does the group's setting. Older versions did not save it."""
    p, q = matrix(SHAPE), matrix(SHAPE)
    old, new = optimizer(p, adam_dtype=wrote), optimizer(q, adam_dtype=reads)
    p.grad, q.grad = gradient(SHAPE, 0), gradient(SHAPE, 1)
    old.step()
    saved = old.state_dict()
    if older and wrote is None:
        del saved["param_groups"][0]["adam_dtype"]
    with pytest.warns(UserWarning, match=f"saved with adam_dtype={wrote}, which replaces {reads}: both moments keep"):
        new.load_state_dict(saved)
    assert new.param_groups[0]["adam_dtype"] is wrote
    assert new.state[q].keys() == old.state[p].keys()
    assert all(torch.equal(x, old.state[p][name]) for name, x in new.state[q].items())
    new.step()


def test_a_group_of_another_dtype_stays_apart_from_the_saved_group_that_it_was_in() -> None:
    """Whole tensors can hold what was saved, so that its dtype still replaces ours."""
    names, tensors = ("a", "b"), [matrix(SHAPE) for _ in range(4)]
    old = Adam(list(zip(names, tensors[:2], strict=True)), adam_dtype=INT8)
    for i, p in enumerate(tensors):
        p.grad = gradient(SHAPE, i)
    old.step()
    a, b = zip(names, tensors[2:], strict=True)
    new = Adam([{"params": [a], "adam_dtype": INT8}, {"params": [b], "adam_dtype": torch.float32}])
    with pytest.warns(UserWarning, match="1 groups are split into 2.*scheduler"), pytest.warns(
        UserWarning, match="group 1 was saved with adam_dtype=torch.int8, which replaces torch.float32"
    ):  # fmt: skip
        new.load_state_dict(old.state_dict())
    assert [(group["param_names"], group["adam_dtype"]) for group in new.param_groups] == [(["a"], INT8), (["b"], INT8)]
    for p, q in zip(tensors[:2], tensors[2:], strict=True):
        assert all(torch.equal(x, old.state[p][name]) for name, x in new.state[q].items())
    new.step()


def test_the_plan_and_the_state_count_the_same_bytes() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4, adam_dtype=INT8)
    assert plan(opt).state_bytes == opt.state_bytes() < plan(Cosmos(decoder(), rank=4)).state_bytes
    assert plan(model, "cosmos", rank=4, adam_dtype=INT8).state_bytes == plan(opt).state_bytes


@pytest.mark.parametrize("layer", [
    nn.Conv2d(64, 512, 1, bias=False), nn.Conv2d(64, 64, 3, bias=False), nn.Embedding(5000, 1), nn.Embedding(5000, 16),
])  # fmt: skip
def test_int8_moments_never_take_more_memory_than_float32(layer: nn.Module) -> None:
    assert plan(layer, "adam", adam_dtype=INT8).state_bytes <= plan(layer, "adam").state_bytes
    assert Adam(layer, adam_dtype=INT8).state_bytes() == plan(layer, "adam", adam_dtype=INT8).state_bytes


def test_saved_codes_of_short_rows_become_float32() -> None:
    wanted = adam.AdamState(gradient((500, 9), 0), gradient((500, 9), 1).square())
    codes = adam_state.stored(wanted, dict.fromkeys(adam_state.QUANTIZED), torch.tensor(1.0), (0, 0), 9)
    saved = {"step": torch.tensor(1.0), **codes}
    slots = adam.slots(500, 9, {"adam_dtype": INT8})
    found = adam_state.without_codes(saved, slots)
    assert found.keys() == {"step", *slots}
    for name, exact in wanted._asdict().items():
        assert found[name].dtype is torch.float32
        assert (found[name] - exact).norm() < 0.05 * exact.norm()
    assert adam_state.without_codes(saved, adam.slots(300, 16, {"adam_dtype": INT8})) is saved


def test_the_state_of_a_llama_of_1b_parameters_fits_in_1_6_gib() -> None:
    """With momentum in int8 too, at the default rank: 1.53 GiB."""
    with torch.device("meta"):
        model = Llama(resolve("llama-1b"))
    assert plan(model, "cosmos", momentum_dtype=INT8, adam_dtype=INT8).state_bytes <= 1.60 * 2**30


def test_a_dtype_that_changes_after_the_state_is_refused() -> None:
    p = matrix(SHAPE)
    opt = optimizer(p)
    opt.param_groups[0]["adam_dtype"] = None
    p.grad = gradient(SHAPE, 0)
    with pytest.raises(ValueError, match="adam_dtype is None now, but its state was allocated for adam_dtype=torch.in"):
        opt.step()


@pytest.mark.parametrize("rule", ["cosmos", "muon", "soap"])
def test_a_group_of_another_rule_refuses_it_and_names_the_rule_that_has_it(rule: str) -> None:
    with pytest.raises(ValueError, match=r"no hyper-parameter 'adam_dtype'.*\['adam'\] have"):
        Cosmos([{"params": [matrix((8, 8))], "rule": rule, "adam_dtype": INT8}, {"params": [matrix((4, 4))]}])


def test_a_checkpoint_with_codes_of_short_rows_loads_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = matrix((500, 9)), matrix((500, 9))
    with monkeypatch.context() as patch:
        patch.setattr(adam, "SHORTEST_ROW", 1)
        old = Adam([p], adam_dtype=torch.int8)
        p.grad = gradient((500, 9), 0)
        old.step()
        saved = old.state_dict()
        expected = adam_state.load(old.state[p], torch.float32)
    new = Adam([q], adam_dtype=torch.int8)
    new.load_state_dict(saved)
    assert torch.equal(new.state[q]["exp_avg"], expected.exp_avg)
    assert torch.equal(new.state[q]["exp_avg_sq"], expected.exp_avg_sq)
    q.grad = gradient((500, 9), 1)
    new.step()
