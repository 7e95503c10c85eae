"""`weight_correction=True` on a CPU: the trajectory of float32, state, checkpoints, export, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Adam, Cosmos, Muon, NorMuon, SkippedStepWarning, param_groups, plan
from tests.optim.helpers import decoder, gradient, matrix, resumes_bit_for_bit, same, small_rank, snapshot, train
from tests.oracles import weight24 as oracle

BF16 = torch.bfloat16
MATRIX_RULES = [name for name in OPTIMIZERS if name != "adam"]
# A step rounds a weight once, to 16 significant bits: by at most 2^-16 of it.
ROUNDING = 2.0**-16
# Of the largest weight, after ten steps: torch's fused AdamW, which steps float32, orders its operations differently.
FLOAT32 = 1e-6


def joined(p: Tensor, opt: Any) -> Tensor:
    """Return the weight of 24 bits by the oracle, in float64."""
    return torch.from_numpy(oracle.join(p.detach().double().numpy(), opt.state[p]["correction"].long().numpy()))


def build(name: str, model: nn.Module, **options: Any) -> Any:
    options = {"weight_decay": 0.1, "lr": 1e-3} | small_rank(name) | options
    return OPTIMIZERS[name](model, **options)


def take_steps(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    """Take steps with gradients that bfloat16 holds, so that every dtype of the model gets the same."""
    for step in range(steps):
        for i, p in enumerate(model.parameters()):
            p.grad = gradient(tuple(p.shape), 100 * i + step).bfloat16().to(p.dtype)
        opt.step()


# -- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_are_those_of_float32_but_for_the_rounding_of_each(name: str) -> None:
    """Every weight, in matrices, embeddings and vectors. Without corrections, bfloat16 is a hundred times as far."""
    ends: dict[str, dict[str, Tensor]] = {}
    for kind, dtype, correct in (("float32", torch.float32, False), ("24", BF16, True), ("16", BF16, False)):
        model = decoder(dtype=BF16).to(dtype)
        opt = build(name, model, weight_correction=correct)
        take_steps(model, opt, 10)
        ends[kind] = opt.float32_weights(model)
    for key, exact in ends["float32"].items():
        largest = exact.abs().max() + 10 * 2e-3
        assert (ends["24"][key] - exact).abs().max() <= (10 * ROUNDING + FLOAT32) * largest, key
    far, near = (
        sum(float((ends[kind][key] - exact).square().sum()) for key, exact in ends["float32"].items()) ** 0.5
        for kind in ("16", "24")
    )
    assert far > 50 * near


@pytest.mark.parametrize("name", MATRIX_RULES)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (2, 9, 6)])
def test_a_step_stores_the_float32_result_in_24_bits(name: str, shape: tuple[int, ...]) -> None:
    """Bit for bit, from the numbers that the oracle joins: the step itself is in float32."""
    options = {"lr": 0.01, "weight_decay": 0.1} | small_rank(name)
    p, q = matrix(shape, dtype=BF16), matrix(shape, dtype=BF16)
    q = nn.Parameter(q.detach().float())
    opt, other = (OPTIMIZERS[name]([{"params": [x]}], **options, **more)
                  for x, more in ((p, {"weight_correction": True}), (q, {})))  # fmt: skip
    for step in range(3):
        p.grad = gradient(shape, step, BF16)
        q.grad = p.grad.float()
        opt.step()
        other.step()
        expected, correction = oracle.split(q.detach().numpy())
        assert torch.equal(p.detach().double(), torch.from_numpy(expected))
        assert torch.equal(opt.state[p]["correction"].long(), torch.from_numpy(correction))
        q.data.copy_(joined(p, opt))
    assert opt.state[p]["correction"].any()


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_many_updates_below_the_last_place_are_not_lost(rule: str) -> None:
    """Each is 1e-4 of the weight, a 40th of bfloat16's last place: alone, none of 100 moves a bfloat16 weight."""
    ends = {}
    for correct in (False, True):
        p = nn.Parameter(torch.full((8, 8), 1.5, dtype=BF16))
        group = {"params": [p], "rule": rule, "lr": 1.5e-4, "weight_correction": correct}
        opt = Muon([group | {"normalize": True} if rule == "muon" else group])
        g = torch.eye(8).sub(0.5).mul(2).to(BF16)
        for _ in range(100):
            p.grad = g.clone()
            opt.step()
        ends[correct] = (opt.float32_weights(_Holder(p))["p"] - 1.5).abs()
    assert not ends[False].any()
    # 100 updates of 1.5e-4, each rounded to a multiple of 2^-15, which is 3e-5.
    assert float(ends[True].square().mean().sqrt()) == pytest.approx(0.015, rel=0.1)


class _Holder(nn.Module):
    """A model of one parameter."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    """Neither weights nor corrections nor other state."""
    model = decoder(dtype=BF16)
    opt = build(name, model, weight_correction=True)
    take_steps(model, opt, 2)
    before = snapshot(model, opt)
    model.up.weight.grad[1, 2] = torch.nan
    with pytest.warns(SkippedStepWarning):
        opt.step()
    assert same(before, snapshot(model, opt))
    assert opt.skipped_steps == 1


@pytest.mark.parametrize("name", ["cosmos", "muon", "adam"])
def test_before_the_first_gradient_weights_only_decay_in_24_bits(name: str) -> None:
    """1000 decays of 1e-4: bfloat16 alone would not move."""
    model = decoder(dtype=BF16)
    start = model.up.weight.detach().double()
    opt = build(name, model, lr=1e-3, weight_correction=True, **({"adam_lr": 1e-3} if name != "adam" else {}))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(1000):
        opt.step()
    moved = opt.float32_weights(model)["up.weight"].double() / start
    # A decay of 1e-4 is between 3 and 7 units of 2^-15 to 2^-16, rounded to a whole number of them.
    assert moved.mean() == pytest.approx(0.9999**1000, rel=0.01)


def test_zero_gradients_leave_weights_and_corrections_as_they_are() -> None:
    """Without decay, at the rules that move only with a gradient."""
    p = matrix((12, 9), dtype=BF16)
    opt = Muon([p], weight_correction=True)
    p.grad = gradient((12, 9), 0, BF16)
    opt.step()
    before = [p.detach().clone(), opt.state[p]["correction"].clone()]
    for _ in range(5):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert same(before, [p.detach(), opt.state[p]["correction"]])


@pytest.mark.parametrize(("shape", "options"), [
    ((9, 12), {"layout": "in_out"}), ((6, 4, 3, 3), {"layout": "conv"}), ((2, 9, 6), {}),
    ((12, 9), {"split_sizes": [8, 4]}), ((3, 12), {}),
])  # fmt: skip
def test_the_correction_has_the_shape_of_the_parameter_in_every_layout(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Channels last and transposed memory too; the weights are those of plain memory, bit for bit."""
    found = []
    for order in ("plain", "other"):
        p = matrix(shape, dtype=BF16)
        if order == "other":
            p = nn.Parameter(p.detach().transpose(0, -1).contiguous().transpose(0, -1))
            if len(shape) == 4:
                p = nn.Parameter(p.detach().contiguous(memory_format=torch.channels_last))
        opt = Cosmos([{"params": [p], **options}], rank=2, gamma=0.25, lr=0.01, weight_correction=True)
        for step in range(2):
            p.grad = gradient(shape, step, BF16)
            opt.step()
        assert opt.state[p]["correction"].shape == shape
        assert opt.state[p]["correction"].dtype is torch.int8
        found.append(joined(p, opt))
    assert torch.allclose(found[0], found[1], rtol=2 * ROUNDING, atol=1e-6)


def test_a_weight_set_to_zero_by_other_code_stays_finite() -> None:
    """A mask of pruned weights, with corrections of both signs: what a correction means for a zero is bounded."""
    p = matrix((16, 12), dtype=BF16)
    opt = Muon([p], lr=0.01, weight_correction=True)
    for step in range(3):
        p.data[:8] = 0
        p.grad = gradient((16, 12), step, BF16)
        opt.step()
        assert p.isfinite().all()
        assert p.abs().max() < 5


# -- export -----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A tied weight, a frozen one, a norm in float32, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, dtype=BF16)
        self.up = nn.Linear(8, 12, dtype=BF16)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8, dtype=BF16).requires_grad_(False)
        self.lm_head = nn.Linear(8, 16, bias=False, dtype=BF16)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("mean", torch.ones(3, dtype=BF16))
        self.register_buffer("count", torch.tensor(3))


def test_float32_weights_load_into_the_same_model_in_float32() -> None:
    """Tied, frozen and float32 parameters and buffers among them; nothing of the model is shared or changed."""
    model = Mixed()
    opt = Cosmos(param_groups(model, overrides={"norm.*": {"weight_correction": False}}), weight_correction=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    opt.step()
    found = opt.float32_weights(model)
    assert list(found) == list(model.state_dict())
    assert {x.dtype for x in found.values()} == {torch.float32, torch.int64}
    wide = Mixed().float()
    wide.load_state_dict(found)
    for key in ("embed.weight", "lm_head.weight", "up.weight", "up.bias"):
        p = model.get_parameter(key)
        assert torch.equal(found[key].double(), joined(p, opt)), key
        assert not torch.equal(found[key], p.float()), key
    assert torch.equal(found["frozen.weight"], model.frozen.weight.float())
    assert torch.equal(found["norm.weight"], model.norm.weight)
    found["norm.weight"].zero_()
    assert model.norm.weight.any()
    assert not any(x.requires_grad for x in found.values())


def test_the_float32_weights_of_a_copy_of_the_model_are_refused() -> None:
    """The copy has other parameters, so its weights would silently be those of bfloat16."""
    model = decoder(dtype=BF16)
    opt = Cosmos(model, rank=4, weight_correction=True)
    train(model, opt, range(1))
    with pytest.raises(ValueError, match="none of the parameters with corrections.*not a copy"):
        opt.float32_weights(copy.deepcopy(model))


def test_float32_weights_of_an_optimizer_without_corrections_are_its_weights() -> None:
    model = decoder(dtype=BF16)
    found = Cosmos(model, rank=4).float32_weights(model)
    assert all(torch.equal(found[name], p.float()) for name, p in model.named_parameters())


def test_a_fresh_model_has_no_corrections() -> None:
    model = decoder(dtype=BF16)
    opt = Cosmos(model, rank=4, weight_correction=True)
    assert not any(state["correction"].any() for state in opt.state.values())
    assert all(torch.equal(x, model.get_parameter(k).float()) for k, x in opt.float32_weights(model).items())


def test_float32_weights_of_a_model_that_was_converted_are_refused() -> None:
    """Its parameters are not the bfloat16 weights that the corrections belong to."""
    model = decoder(dtype=BF16)
    opt = Cosmos(model, rank=4, weight_correction=True)
    take_steps(model, opt, 1)
    with pytest.raises(
        ValueError, match=r"'embed.weight' of shape \(32, 12\) has dtype torch.float32: convert it with"
    ):
        opt.float32_weights(model.float())


# -- state and checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_correction_takes_one_byte_for_each_weight(name: str) -> None:
    """In the state, in its plan, and in the plan of the model."""
    model = decoder(dtype=BF16)
    plain, opt = build(name, decoder(dtype=BF16)), build(name, model, weight_correction=True)
    count = sum(p.numel() for p in model.parameters())
    assert opt.state_bytes() - plain.state_bytes() == count
    assert plan(opt).state_bytes == opt.state_bytes()
    assert plan(model, name, weight_correction=True, **small_rank(name)).state_bytes == opt.state_bytes()


@pytest.mark.parametrize("by", ["state_dict", "pickle"])
def test_a_loaded_checkpoint_continues_bit_for_bit(by: str) -> None:
    def build(seed: int) -> tuple[nn.Module, Cosmos]:
        model = decoder(seed, BF16)
        return model, Cosmos(model, rank=4, weight_correction=True)

    assert resumes_bit_for_bit(build, by)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_checkpoint_that_lacks_or_has_corrections_is_loaded_with_a_warning(wanted: bool) -> None:
    """Our setting stays: corrections begin at zero, or are dropped."""
    old, new = decoder(dtype=BF16), decoder(dtype=BF16)
    wrote, reads = (build("cosmos", m, weight_correction=c) for m, c in ((old, not wanted), (new, wanted)))
    take_steps(old, wrote, 2)
    new.load_state_dict(old.state_dict())
    saved = wrote.state_dict()
    if wanted:  # as versions wrote it that had no such setting
        for group in saved["param_groups"]:
            del group["weight_correction"]
    words = "so they begin at zero" if wanted else "dropped: .* build the optimizer with weight_correction=True"
    with pytest.warns(UserWarning) as seen:
        reads.load_state_dict(saved)
    assert len(seen) == 1
    assert re.search(rf"groups \[0, 1\] have weight_correction={wanted} here, and .*{words}", str(seen[0].message))
    assert all(group["weight_correction"] is wanted for group in reads.param_groups)
    for p in new.parameters():
        assert ("correction" in reads.state[p]) is wanted
        assert not wanted or not reads.state[p]["correction"].any()
    take_steps(new, reads, 1)


def test_corrections_that_the_checkpoint_reader_left_out_are_warned_of() -> None:
    """As torch.distributed.checkpoint does: it reads only the state that the optimizer has, but all settings."""
    wrote = build("cosmos", decoder(dtype=BF16), weight_correction=True)
    reads = build("cosmos", decoder(dtype=BF16))
    saved = wrote.state_dict()
    for state in saved["state"].values():
        del state["correction"]
    with pytest.warns(UserWarning, match="has corrections of its weights, which are dropped"):
        reads.load_state_dict(saved)


def test_an_older_pickle_without_the_setting_continues() -> None:
    model = decoder(dtype=BF16)
    opt = Cosmos(model, rank=4)
    for group in opt.param_groups:
        del group["weight_correction"]
    model, opt = pickle.loads(pickle.dumps((model, opt)))
    train(model, opt, range(2))
    assert not any("correction" in state for state in opt.state.values())
    opt.float32_weights(model)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Cosmos, NorMuon, Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_other_dtypes_are_refused_with_name_and_remedy(make: Any, dtype: torch.dtype) -> None:
    """By the optimizer and by the plan."""
    model = nn.Sequential(nn.Linear(8, 12, bias=False).to(BF16), nn.Linear(12, 8, bias=False).to(dtype))
    text = rf"parameter '1.weight' of shape \(8, 12\) has dtype {dtype}: convert it .*weight_correction=False"
    with pytest.raises(ValueError, match=text):
        make(model, weight_correction=True)
    with pytest.raises(ValueError, match=text):
        plan(model, make.rule, weight_correction=True)


def test_a_model_that_moves_to_float32_is_refused_at_the_next_step() -> None:
    """Its corrections would have no meaning; back in bfloat16 it continues."""
    model = decoder(dtype=BF16)
    opt = Cosmos(model, rank=4, weight_correction=True)
    train(model, opt, range(2))
    model.float()
    with pytest.raises(ValueError, match=r"parameter 'up.weight' of shape .* has dtype torch.float32"):
        train(model, opt, range(1))
    train(model.bfloat16(), opt, range(1))


@pytest.mark.parametrize("in_group", [True, False])
def test_both_kinds_of_rounding_together_are_refused(in_group: bool) -> None:
    both = {"weight_correction": True, "stochastic_rounding": True}
    with pytest.raises(ValueError, match="give a group one of them"):
        Cosmos([{"params": [matrix((8, 8), dtype=BF16)], **(both if in_group else {})}], **({} if in_group else both))


def test_a_checkpoint_with_stochastic_rounding_does_not_bring_it_to_corrected_weights() -> None:
    model = decoder(dtype=BF16)
    rounded = Cosmos(model, rank=4, stochastic_rounding=True)
    train(model, rounded, range(1))
    opt = Cosmos(model, rank=4, weight_correction=True)
    with pytest.warns(UserWarning, match="no corrections of its weights"):
        opt.load_state_dict(rounded.state_dict())
    assert {(g["weight_correction"], g["stochastic_rounding"]) for g in opt.param_groups} == {(True, False)}


def test_a_setting_changed_after_the_state_was_made_is_refused() -> None:
    model = decoder(dtype=BF16)
    opt = Cosmos(model, rank=4, weight_correction=True)
    opt.param_groups[0]["weight_correction"] = False
    with pytest.raises(ValueError, match="weight_correction is False now, but its state was allocated for"):
        train(model, opt, range(1))


def test_one_group_may_have_corrections() -> None:
    model = decoder(dtype=BF16)
    groups = [group | {"weight_correction": group["rule"] == "cosmos"} for group in param_groups(model)]
    opt = Cosmos(groups, rank=4)
    train(model, opt, range(2))
    assert {name for name, p in model.named_parameters() if "correction" in opt.state[p]} == {
        "up.weight", "down.weight",
    }  # fmt: skip
