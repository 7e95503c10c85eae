"""Two learning rates in one optimizer: schedulers and loops that know only one, and the rates that replace AdamW's."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from cosmos_optim import OPTIMIZERS, Cosmos, param_groups, plan, rates, rates_from_adamw
from tests.optim.helpers import decoder, same, small_rank, snapshot, train

RESULTS = Path(__file__).resolve().parents[2] / "results"

SCHEDULERS = {
    "OneCycleLR": (lambda opt, lr: lr_scheduler.OneCycleLR(opt, max_lr=lr, total_steps=9), "max_lr"),
    "SWALR": (lambda opt, lr: SWALR(opt, swa_lr=lr), "swa_lr"),
    "CyclicLR": (lambda opt, lr: lr_scheduler.CyclicLR(opt, base_lr=lr, max_lr=1e-1), "base_lr"),
}


@pytest.mark.parametrize(
    ("name", "expected"), [("cosmos", 8e-5), ("muon", 4e-5), ("normuon", 4e-5), ("cosmos-paper", 2e-3), ("soap", 2e-5)]
)
def test_without_adam_lr_the_embedding_follows_lr(name: str, expected: float) -> None:
    """A small rate for fine-tuning is small for the embedding too; the paper's optimizer keeps the paper's rate."""
    for lr in (2e-5, torch.tensor(2e-5, dtype=torch.float64)):
        opt = OPTIMIZERS[name](decoder(), lr=lr)
        rates = {group["rule"]: float(group["lr"]) for group in opt.param_groups}
        assert rates == {opt.rule: 2e-5, "adam": pytest.approx(expected)}
    planned = {row.rule: row.lr for row in plan(decoder(), name, lr=2e-5).rows}
    assert planned == {opt.rule: 2e-5, "adam": pytest.approx(expected)}


def test_the_default_rates_are_those_of_the_paper() -> None:
    opt = Cosmos(decoder())
    assert [group["lr"] for group in opt.param_groups] == [5e-4, 2e-3] and opt.param_groups[0]["gamma"] == 0.25


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_rate_for_both_kinds_is_refused_with_the_list_to_give(name: str) -> None:
    make, argument = SCHEDULERS[name]
    model = decoder()
    opt = Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4)
    schedule = make(opt, 0.01)
    with pytest.raises(ValueError, match=rf"lr=0.001.*adam_lr=0.004.*{name}\({argument}=\[0.01, 0.04\]\)"):
        train(model, opt, range(1))
    again = Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4)
    schedule = make(again, [0.01, 0.04])
    train(model, again, range(1))
    schedule.step()
    train(model, again, range(1, 2))


def test_the_list_to_give_keeps_the_own_rate_of_an_override() -> None:
    model = decoder()
    for lr, adam_lr, shown in ((5e-4, 2e-3, "0.001, 0.6, 0.004"), (1e-3, 1e-3, "0.001, 0.3, 0.001")):
        groups = param_groups(model, overrides={"embed.weight": {"lr": 0.3}})
        opt = Cosmos(groups, lr=lr, adam_lr=adam_lr, rank=4)
        order = [group["lr"] for group in opt.param_groups]
        assert order == [lr, 0.3, adam_lr]
        lr_scheduler.OneCycleLR(opt, max_lr=1e-3, total_steps=9)
        with pytest.raises(ValueError, match=rf"were added with lr=\[.*, 0.3, .*OneCycleLR\(max_lr=\[{shown}\]\)$"):
            train(model, opt, range(1))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_one_rate_is_accepted_by_an_optimizer_with_one_rate(name: str) -> None:
    model = decoder()
    opt = Cosmos(model, lr=1e-3, adam_lr=1e-3, rank=4)
    SCHEDULERS[name][0](opt, 0.01)
    train(model, opt, range(1))


def test_a_loop_that_writes_one_rate_gets_a_warning_with_both_rates() -> None:
    fresh = decoder()
    model, opt = pickle.loads(pickle.dumps((fresh, Cosmos(fresh, lr=1e-3, adam_lr=4e-3, rank=4))))
    for group in opt.param_groups:
        group["lr"] = 3e-3
    with pytest.warns(UserWarning, match="all groups run at one lr.*lr=0.001.*adam_lr=0.004"):
        train(model, opt, range(1))


def test_a_loop_that_fills_tensors_with_one_rate_gets_a_warning_with_both_rates() -> None:
    model = decoder()
    opt = Cosmos(model, lr=torch.tensor(1e-3), adam_lr=torch.tensor(4e-3), rank=4)
    for group in opt.param_groups:
        group["lr"].fill_(3e-3)
    with pytest.warns(UserWarning, match="all groups run at one lr.*lr=0.001.*adam_lr=0.004"):
        train(model, opt, range(1))


def test_a_pickle_has_the_keys_that_other_versions_read_and_loads_without_its_rates() -> None:
    """Older versions keep the rates at build time in an attribute of this name; the oldest have none."""
    opt = Cosmos(decoder(), lr=1e-3, adam_lr=4e-3, rank=4)
    held = opt.__getstate__()
    assert list(held) == ["defaults", "param_groups", "_options", "_first_rates", "state"]
    assert held.pop("_first_rates") == {"lr": 1e-3, "adam_lr": 4e-3}
    again = Cosmos.__new__(Cosmos)
    again.__setstate__(held)
    assert again.__getstate__()["_first_rates"] == {}


def test_a_loop_that_writes_another_rate_at_each_step_gets_one_warning() -> None:
    model = decoder()
    opt = Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for step in range(3):
            for group in opt.param_groups:
                group["lr"] = 1e-3 * (step + 1)
            train(model, opt, range(1))
    assert len(found) == 1


def test_schedules_that_scale_rates_or_meet_at_a_floor_are_quiet() -> None:
    model = decoder()
    opt = Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4)
    schedule = lr_scheduler.CosineAnnealingLR(opt, T_max=2, eta_min=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train(model, opt, range(step, step + 1))
            schedule.step()
    assert opt.param_groups[0]["lr"] > 0


def test_rates_that_meet_at_the_floor_of_a_plateau_schedule_are_quiet_also_after_a_resume() -> None:
    """This scheduler leaves no mark in the groups."""
    model = decoder()
    opt, again = (Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4) for _ in range(2))
    schedule = lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=0, min_lr=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):
            train(model, opt, range(step, step + 1))
            schedule.step(1.0)
        assert {group["lr"] for group in opt.param_groups} == {1e-5}
        again.load_state_dict(opt.state_dict())
        train(model, again, range(6, 8))


def test_a_loop_that_writes_one_rate_after_each_step_gets_a_warning() -> None:
    model = decoder()
    opt = Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4)
    with pytest.warns(UserWarning, match="all groups run at one lr"):
        for step in range(3):
            train(model, opt, range(step, step + 1))
            for group in opt.param_groups:
                group["lr"] = 1e-3 / (step + 2)


@pytest.mark.parametrize("name", [*SCHEDULERS, "CosineAnnealingLR"])
def test_a_checkpoint_saved_with_one_rate_replaces_two_rates_with_a_warning_that_says_so(name: str) -> None:
    model = decoder()
    make = SCHEDULERS[name][0] if name in SCHEDULERS else lambda opt, lr: lr_scheduler.CosineAnnealingLR(opt, 9)
    saved, opt = (Cosmos(model, lr=1e-3, adam_lr=adam_lr, rank=4) for adam_lr in (1e-3, 4e-3))
    make(saved, 0.01)
    train(model, saved, range(1))
    with pytest.warns(UserWarning, match="checkpoint was saved with one rate.*replaces lr=0.001 and adam_lr=0.004"):
        opt.load_state_dict(saved.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, range(1, 2))


def test_a_checkpoint_with_both_rates_and_a_schedule_loads_without_a_warning() -> None:
    model = decoder()
    saved, opt = (Cosmos(model, lr=1e-3, adam_lr=4e-3, rank=4) for _ in range(2))
    lr_scheduler.CosineAnnealingLR(saved, 9)
    train(model, saved, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.load_state_dict(saved.state_dict())
        train(model, opt, range(1, 2))


def test_rates_from_adamw_are_half_and_twice_its_rate() -> None:
    rates = rates_from_adamw(2e-3)
    assert (rates.lr, rates.adam_lr) == (1e-3, 4e-3)
    opt = Cosmos(decoder(), **rates._asdict())
    assert opt.param_groups[0]["gamma"] == 0.5


def best_rate(losses: dict[float, float]) -> float:
    return min(losses, key=lambda lr: losses[lr])


def measured(optimizer: str, *files: str) -> dict[float, float]:
    """Return rate -> validation loss of an optimizer's runs in files of `results/`."""
    rows = [row for name in files for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]]
    return {row["lr"]: row["mean"] for row in rows if row["optimizer"] == optimizer}


def test_the_ratios_that_rates_from_adamw_names_are_those_of_the_results() -> None:
    kept = json.loads((RESULTS / "protocol-60m.json").read_text())["runs"].values()
    runs = [r for r in kept if r["regime"] == "B" and r["seed"] == 0 and r["share"] == 1 and not r.get("variant")]
    runs.sort(key=lambda r: r["val_loss"], reverse=True)  # the best run of a rate comes last, and counts
    long = {name: {r["lr"]: r["val_loss"] for r in runs if r["optimizer"] == name} for name in ("adam", "cosmos")}
    pairs = [
        (measured("cosmos", "wiki-60m"), measured("adam", "wiki-60m")),
        (long["cosmos"], long["adam"]),
        *((measured("cosmos", name, f"{name}-wider"), measured("adam", name, f"{name}-wider"))
          for name in ("wiki-gpt2", "wiki-nanogpt")),
    ]  # fmt: skip
    ratios = [f"{best_rate(ours) / best_rate(theirs):g}" for ours, theirs in pairs]
    assert ratios == re.findall(r"^ +(0\.\d)  ", rates_from_adamw.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "5e-4", None, torch.tensor(torch.nan)])
@pytest.mark.parametrize("index", [0, 1])
def test_a_rate_that_is_not_a_finite_number_is_refused_before_anything_changes(index: int, rate: Any) -> None:
    """A scheduler that divides by zero would turn all weights into NaN; YAML reads 5e-4 as text."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(1))
    before, good = snapshot(model, opt), opt.param_groups[index]["lr"]
    opt.param_groups[index]["lr"] = rate
    shown = "nan" if isinstance(rate, torch.Tensor) else repr(rate)
    with pytest.raises(ValueError, match=f"lr of group {index} is {shown}, .* must be a finite number"):
        train(model, opt, range(1, 2))
    assert same(before, snapshot(model, opt))
    opt.param_groups[index]["lr"] = np.float32(good)  # a number of any type
    train(model, opt, range(1, 2))


@pytest.mark.parametrize(("key", "value", "text"), [
    ("lr", -1e-6, "lr of group 1 is -1e-06, .* a schedule must not go on below 0"),
    ("lr", torch.tensor(-0.5), "lr of group 1 is -0.5, .* a schedule must not go on below 0"),
    ("weight_decay", float("nan"), "weight_decay of group 1 is nan, .* must be a finite number"),
])  # fmt: skip
def test_a_schedule_below_zero_and_a_decay_that_is_no_number_are_refused(key: str, value: Any, text: str) -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    before = snapshot(model, opt)
    opt.param_groups[1][key] = value
    with pytest.raises(ValueError, match=text):
        train(model, opt, range(1))
    assert same(before, snapshot(model, opt))
    for rounded_zero in (-1e-19, torch.tensor(-1e-9)):
        opt.param_groups[1].update(lr=rounded_zero, weight_decay=0.0)
        train(model, opt, range(1))


# With eps=0, AdamW runs by our formula instead of torch's kernel.
@pytest.mark.parametrize(("rule", "options"), [("muon", {}), ("cosmos", {}), ("adam", {}), ("adam", {"eps": 0.0})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_rate_in_a_tensor_of_any_dtype_keeps_the_weight_decay(
    rule: str, options: dict[str, float], dtype: torch.dtype
) -> None:
    """1 - lr * weight_decay, here 1 - 1e-4, rounds to 1 in bfloat16 and float16."""
    rate, ends = torch.tensor(2.0**-9, dtype=dtype), []
    for lr in (rate, float(rate)):
        p = nn.Parameter(torch.full((8, 4), 100.0))
        groups = [{"params": [("w", p)], "rule": rule}]
        opt = OPTIMIZERS[rule](groups, lr=lr, weight_decay=0.05, **small_rank(rule, 2), **options)
        for step in range(3):
            p.grad = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            opt.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=0)


# -- rates for training from scratch ----------------------------------------------------------------------------------


def test_the_width_of_a_model_is_the_most_common_size_of_its_hidden_matrices() -> None:
    """Grouped attention has smaller keys and values, the MLP is wider, the vocabulary is larger than both."""
    layers = [nn.Linear(512, 512), nn.Linear(512, 128), nn.Linear(512, 128), nn.Linear(512, 1400), nn.Linear(1400, 512)]
    model = nn.Sequential(nn.Embedding(3000, 512), *layers, nn.Linear(512, 3000))
    assert rates(model, 1600, 8192) == rates(512, 1600, 8192) == (4.8e-4, 3.3e-2)
    model.requires_grad_(False)  # fine-tuned by adapters: the width is that of the frozen matrices
    with pytest.warns(UserWarning, match="has frozen parameters.*use rates_from_adamw"):
        assert rates(model, 1600, 8192) == (4.8e-4, 3.3e-2)


def test_a_larger_model_of_a_measured_width_is_outside_of_the_range() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(400)))
    with pytest.warns(UserWarning, match=r"236,236,800 parameters \(at most 163,000,000\)"):
        rates(model, 1600, 8192)


@pytest.mark.parametrize("lr", [-1.0, 0.0, float("nan"), "5e-4"])
def test_rates_from_adamw_need_a_positive_rate(lr: Any) -> None:
    with pytest.raises(ValueError, match="lr=.* is not valid"):
        rates_from_adamw(lr)


def test_the_smaller_of_two_equally_common_sizes_is_the_width() -> None:
    """As in an MLP alone, which has both sizes once in each layer."""
    assert rates(nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300)), 1600, 8192) == rates(300, 1600, 8192)


def test_rates_fall_with_width_and_length_and_rise_with_the_batch() -> None:
    at = rates(512, 1600, 16_384)
    wider, longer, larger = rates(768, 1600, 16_384), rates(512, 3200, 16_384), rates(512, 800, 32_768)
    assert wider.lr < at.lr == longer.lr < larger.lr
    assert wider.adam_lr == at.adam_lr == larger.adam_lr > longer.adam_lr


def test_outside_of_the_measured_range_rates_do_not_rise_further_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match=r"width 64 \(256 to 768\), tokens_per_step 524,288 \(8,192 to 65,536\)"):
        small = rates(64, 100, 524_288)
    assert small == rates(256, 800, 65_536)
    with pytest.warns(UserWarning, match=r"tokens in all 819,200 \(3,276,800 to 52,428,800\)"):
        assert rates(512, 100, 8192) == rates(512, 400, 8192)
    with pytest.warns(UserWarning, match="also try the paper's, lr=5e-4 and adam_lr=2e-3"):
        # Ten times the longest measured run, and its rate: 2.2e-2 * 0.1^0.3.
        assert rates(512, 32_000, 16_384).adam_lr == 1.1e-2


def test_the_width_of_convolutions_is_a_number_of_channels() -> None:
    """A convolution is flattened to (out, in * kernel): its kernel is no width."""
    model = nn.Sequential(nn.Conv1d(80, 384, 3), nn.Conv1d(384, 384, 3), nn.Conv1d(384, 384, 1))
    assert rates(model, 1600, 8192) == rates(384, 1600, 8192)


def test_the_width_of_a_recurrent_layer_is_that_of_its_state() -> None:
    for model in (nn.LSTM(256, 512, 2, bidirectional=True), nn.GRU(512, 512, 2), nn.ConvTranspose1d(512, 512, 3)):
        assert rates(model, 1600, 8192) == rates(512, 1600, 8192)


def test_numbers_of_any_type_give_the_same_rates() -> None:
    """The product of two int32 of numpy would overflow, and become negative."""
    with pytest.warns(UserWarning, match="tokens in all 19,660,800,000"):
        expected = rates(512, 300_000, 65_536)
    with pytest.warns(UserWarning, match="tokens in all 19,660,800,000"):
        assert rates(np.int64(512), np.int32(300_000), np.int32(65_536)) == expected
    assert rates(512, 16e2, torch.tensor(8192)) == rates(512, 1600, 8192)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 10, 8192), "width=0 is not valid: it must be 1 or more"),
        ((512, 0, 8192), "steps=0 is not valid"),
        ((512, 10, -1), "tokens_per_step=-1 is not valid"),
        ((512, float("nan"), 8192), "steps=nan is not valid"),
        ((512, float("inf"), 8192), "steps=inf is not valid"),
        ((512, True, 8192), "steps=True is not valid: give a number"),
        ((512, 10, "8e3"), "tokens_per_step='8e3' is not valid: give a number"),
        ((512, 10, None), "tokens_per_step=None is not valid: give a number"),
    ],
)
def test_sizes_for_rates_must_be_positive_numbers(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rates(*given)


@pytest.mark.parametrize("given", [True, 512.0, "512", None, []])
def test_rates_refuse_what_is_neither_a_model_nor_a_width(given: Any) -> None:
    with pytest.raises(TypeError, match=f"give the model, or its width as an int, got a {type(given).__name__}"):
        rates(given, 400, 8192)


def test_a_model_without_hidden_matrices_needs_its_width() -> None:
    with pytest.raises(ValueError, match="give its width"):
        rates(nn.LayerNorm(8), 400, 8192)


def test_a_model_with_a_parameter_that_is_not_recognized_needs_its_width() -> None:
    """Overrides are for `param_groups`; `rates` has none, and would fail with them too."""
    model = nn.Module()
    model.mix = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"width is not known: give it, as in rates\(512.*parameter 'mix'"):
        rates(model, 400, 8192)
