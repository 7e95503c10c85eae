"""State: its names and bytes, round trips that continue bit for bit, and checkpoints that do not fit."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from cosmos_optim import OPTIMIZERS, Cosmos, CosmosPaper, Muon, plan
from tests.optim.helpers import decoder, gradient, matrix, same, small_rank, snapshot, train

SMALL_RANK = {"rank": 4}


def build(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](model, weight_decay=0.01, **small_rank(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_trip_through_a_file_continues_bit_for_bit(name: str) -> None:
    model = decoder()
    opt = build(name, model)
    train(model, opt, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    train(model, opt, range(4, 8))
    other = decoder(seed=7)
    again = build(name, other)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(other, again, range(4, 8))
    assert same(snapshot(model, opt), snapshot(other, again))


@pytest.mark.parametrize("sequence", [tuple, list])
def test_a_checkpoint_with_numbers_of_numpy_is_read_with_weights_only(sequence: type) -> None:
    model = decoder()
    opt = Cosmos(model, lr=np.float64(1e-3), betas=sequence((np.float32(0.5), 0.98)), rank=np.int64(SMALL_RANK["rank"]))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: np.cos(step / 100))
    train(model, opt, range(2))
    schedule.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = Cosmos(model, **SMALL_RANK)
    again.load_state_dict(torch.load(file, weights_only=True))
    for saved, group in zip(again.param_groups, opt.param_groups, strict=True):
        assert (saved["lr"], tuple(saved["betas"])) == (group["lr"], (0.5, 0.98))


def linears(*names: str) -> torch.nn.Module:
    """Return a model of square layers of the same shape, in this order."""
    model = torch.nn.Module()
    for name in names:
        model.add_module(name, torch.nn.Linear(8, 8, bias=False))
    return model


def test_state_follows_the_names_if_the_order_of_the_parameters_changed() -> None:
    """If both sides have the same names; a checkpoint with other names is read by position, as torch reads it."""
    a, b, c = linears("q", "k"), linears("k", "q"), linears("query", "key")
    first = Cosmos(a, **SMALL_RANK)
    for i, p in enumerate(a.parameters()):
        p.grad = gradient((8, 8), i)
    first.step()
    moved, renamed = Cosmos(b, **SMALL_RANK), Cosmos(c, **SMALL_RANK)
    moved.load_state_dict(first.state_dict())
    renamed.load_state_dict(first.state_dict())
    assert moved.param_groups[0]["param_names"] == ["k.weight", "q.weight"]
    for name, new in (("q", "query"), ("k", "key")):
        momentum = first.state[getattr(a, name).weight]["M"]
        assert torch.equal(moved.state[getattr(b, name).weight]["M"], momentum)
        assert torch.equal(renamed.state[getattr(c, new).weight]["M"], momentum)


@pytest.mark.parametrize("flat", [False, True])
def test_state_follows_the_names_through_distributed_checkpoints(flat: bool) -> None:
    """torch puts the parameters in our order, and leaves their names in the order of the checkpoint."""
    a, b = linears("q", "k"), linears("k", "q")
    first, moved = Cosmos(a, **SMALL_RANK), Cosmos(b, **SMALL_RANK)
    for i, p in enumerate(a.parameters()):
        p.grad = gradient((8, 8), i)
    first.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(b, moved, get_optimizer_state_dict(a, first, options=options), options=options)
    plain = Cosmos(b, **SMALL_RANK)
    plain.load_state_dict(get_optimizer_state_dict(a, first))
    for name in ("q", "k"):
        held = getattr(b, name).weight
        one, two, three = first.state[getattr(a, name).weight], moved.state[held], plain.state[held]
        assert torch.equal(one["M"], two["M"]) and torch.equal(one["U"], two["U"])
        assert torch.equal(one["M"], three["M"])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_deepcopy_and_pickle_continue_bit_for_bit(copier) -> None:
    model = decoder()
    opt = Cosmos(model, **SMALL_RANK)
    train(model, opt, range(3))
    other, again = copier((model, opt))
    train(model, opt, range(3, 6))
    train(other, again, range(3, 6))
    assert same(snapshot(model, opt), snapshot(other, again))


def test_bf16_parameters_keep_float32_state_through_a_checkpoint() -> None:
    model = decoder(dtype=torch.bfloat16)
    opt = Cosmos(model, **SMALL_RANK)
    train(model, opt, range(300, 303))
    saved = copy.deepcopy(opt.state_dict())
    again = Cosmos(model, **SMALL_RANK)
    again.load_state_dict(saved)
    for p in model.parameters():
        for key, value in opt.state[p].items():
            assert again.state[p][key].dtype is value.dtype is torch.float32
            assert torch.equal(again.state[p][key], value)


def test_the_step_count_passes_256_in_bf16() -> None:
    p = matrix((4, 4), dtype=torch.bfloat16)
    opt = Cosmos([p], rank=2)
    for step in range(300):
        p.grad = gradient((4, 4), step, torch.bfloat16)
        opt.step()
    assert opt.state[p]["step"].item() == 300


def test_loading_copies_and_does_not_alias() -> None:
    model = decoder()
    opt = Cosmos(model, **SMALL_RANK)
    train(model, opt, range(2))
    saved = opt.state_dict()
    again = Cosmos(model, **SMALL_RANK)
    again.load_state_dict(saved)
    for p in model.parameters():
        for key, value in opt.state[p].items():
            assert again.state[p][key].data_ptr() != value.data_ptr()


def test_state_has_the_papers_letters_and_shapes() -> None:
    p, e = matrix((10, 6)), matrix((3, 10, 6))
    opt = Cosmos([("w", p), ("experts", e)], rank=4)
    assert {k: tuple(v.shape) for k, v in opt.state[p].items()} == {
        "step": (), "M": (10, 6), "U": (6, 4), "S": (4, 4), "V": (10, 4), "v": (10, 1),
    }  # fmt: skip
    assert {k: tuple(v.shape) for k, v in opt.state[e].items()} == {
        "step": (), "M": (3, 10, 6), "U": (3, 6, 4), "S": (3, 4, 4), "V": (3, 10, 4), "v": (3, 10, 1),
    }  # fmt: skip
    two = Cosmos([p], rank=4, two_sided=True)
    assert {k: tuple(v.shape) for k, v in two.state[p].items()} == {
        "step": (), "M": (10, 6), "U": (6, 4), "O": (10, 4), "S": (4, 4), "R": (4, 4), "V": (4, 4), "v": (10, 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_occupies_the_bytes_that_the_plan_says(name: str) -> None:
    """The authors' file keeps a view of an n x n matrix alive; here storage is at most 1.01 x the logical bytes."""
    model = decoder()
    opt = build(name, model)
    train(model, opt, range(2))
    logical = sum(v.numel() * v.element_size() for state in opt.state.values() for v in state.values())
    assert logical <= opt.state_bytes() <= 1.01 * logical
    assert plan(opt).state_bytes == logical


def test_bf16_momentum_halves_the_state_and_is_kept_by_a_checkpoint() -> None:
    p = matrix((64, 64))
    opt = Cosmos([p], rank=4, momentum_dtype=torch.bfloat16)
    assert opt.state[p]["M"].dtype is torch.bfloat16
    assert opt.state_bytes() == 64 * 64 * 2 + (64 * 4 * 2 + 16 + 64) * 4 + 4
    for step in range(3):
        p.grad = gradient((64, 64), step)
        opt.step()
    saved = copy.deepcopy(opt.state_dict())
    again = Cosmos([p], rank=4, momentum_dtype=torch.bfloat16)
    again.load_state_dict(saved)
    assert torch.equal(again.state[p]["M"], opt.state[p]["M"])
    assert again.state[p]["M"].dtype is torch.bfloat16


def test_row_beta2_adds_one_number_a_row_to_the_state() -> None:
    p, e = matrix((10, 6)), matrix((3, 10, 6))
    plain, opt = Cosmos([p, e], rank=4, row_beta2=None), Cosmos([p, e], rank=4, row_beta2=0.9)
    assert opt.state[p]["v"].shape == (10, 1)
    assert opt.state[e]["v"].shape == (3, 10, 1)
    assert opt.state_bytes() == plain.state_bytes() + 4 * 40 == plan(opt).state_bytes
    p.grad, e.grad = gradient((10, 6), 0), gradient((3, 10, 6), 0)
    opt.step()
    again = Cosmos([p, e], rank=4, row_beta2=0.9)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(again.state[e]["v"], opt.state[e]["v"])
    assert opt.state[e]["v"].min() > 0
    with pytest.raises(ValueError, match="row_beta2=0.9.*row_beta2=None"):
        plain.load_state_dict(opt.state_dict())
    faster = Cosmos([p, e], rank=4, row_beta2=0.5)  # the checkpoint's value wins, as with betas
    faster.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert faster.param_groups[0]["row_beta2"] == 0.9
    for wrong in (1, False, "slow"):
        with pytest.raises(ValueError, match=f"row_beta2={wrong!r}"):
            Cosmos([p], row_beta2=wrong)


def test_the_error_for_a_checkpoint_of_other_settings_names_all_of_them() -> None:
    p = matrix((100, 80))
    saved = CosmosPaper([p]).state_dict()
    advice = "build the optimizer with rank=64, row_beta2=None to continue this checkpoint, or a CosmosPaper"
    with pytest.raises(ValueError, match=advice):
        Cosmos([p]).load_state_dict(saved)
    two_sided = Cosmos([p], two_sided=True).state_dict()
    with pytest.raises(ValueError, match="the optimizer of rule 'cosmos-two-sided' that wrote it, two_sided=True"):
        Cosmos([p]).load_state_dict(two_sided)


def test_a_checkpoint_of_another_rank_is_refused_with_both_ranks() -> None:
    p = matrix((10, 8))
    saved = Cosmos([p], rank=4).state_dict()
    with pytest.raises(ValueError, match="rank=4.*rank=6"):
        Cosmos([p], rank=6).load_state_dict(saved)


def test_another_rule_model_or_grouping_is_refused_and_changes_nothing() -> None:
    p, q = matrix((10, 8)), matrix((10, 9))
    opt = Cosmos([p], rank=4)
    before = snapshot(torch.nn.ParameterList([p]), opt)
    with pytest.raises(ValueError, match="'muon'.*'cosmos'"):
        opt.load_state_dict(OPTIMIZERS["muon"]([p]).state_dict())
    with pytest.raises(ValueError, match="shape"):
        opt.load_state_dict(Cosmos([q], rank=4).state_dict())
    with pytest.raises(ValueError, match="parameters in the checkpoint"):
        opt.load_state_dict(Cosmos([p, q], rank=4).state_dict())
    with pytest.raises(ValueError, match="2 parameter groups"):
        opt.load_state_dict(Cosmos([{"params": [p]}, {"params": [q]}], rank=4).state_dict())
    assert same(before, snapshot(torch.nn.ParameterList([p]), opt))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: None, "^state_dict must be a dict, got a NoneType$"),
        (lambda saved: {}, r"has no 'param_groups', only \[\]: give what optimizer.state_dict\(\) returned"),
        (lambda saved: {"model": {}, "optimizer": saved}, r"only \['model', 'optimizer'\].*mean its entry 'optimizer'"),
        (lambda saved: {"param_groups": saved["param_groups"]}, "has no 'state'"),
        (lambda saved: saved | {"state": None}, "'state' of the state_dict must be a dict, got a NoneType"),
        (lambda saved: saved | {"param_groups": None}, "'param_groups' of the state_dict must be a list"),
        (lambda saved: saved | {"param_groups": [None]}, "group 0 of the state_dict must be a dict"),
        (lambda saved: saved | {"param_groups": [{"lr": 1.0}]}, r"group 0 .* has no 'params', only \['lr'\]"),
    ],
)
def test_the_error_for_what_is_not_a_state_dict_says_what_is_wrong(damage: Any, message: str) -> None:
    opt = Cosmos([matrix((10, 8))], rank=4)
    with pytest.raises((TypeError, ValueError), match=message):
        opt.load_state_dict(damage(opt.state_dict()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": "5e-4"}, "group 0 of the checkpoint: lr='5e-4' is not valid: give a number"),
        ({"lr": float("nan")}, "group 0 of the checkpoint: lr=nan is not valid: it must be finite"),
        ({"betas": 0.9}, r"group 0 of the checkpoint: betas=0.9 is not valid: give two numbers"),
        ({"momentum_dtype": "torch.float4"}, "group 0 of the checkpoint: momentum_dtype='torch.float4' is not valid"),
    ],
)
def test_a_wrong_setting_in_a_checkpoint_is_refused_by_its_name_and_changes_nothing(
    changed: dict[str, Any], message: str
) -> None:
    """A step would fail on it later, with an error of torch and a part of the parameters changed."""
    p = matrix((10, 8))
    opt = Cosmos([p], rank=4)
    before = snapshot(torch.nn.ParameterList([p]), opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(with_group(opt.state_dict(), **changed))
    assert opt.param_groups[0]["lr"] == 5e-4
    assert same(before, snapshot(torch.nn.ParameterList([p]), opt))


def test_the_error_for_groups_with_and_without_decay_says_that_another_optimizer_wrote_them() -> None:
    """As transformers' Trainer makes them: as many groups as here, with other parameters."""
    model = decoder()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    saved = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]).state_dict()
    with pytest.raises(ValueError, match="so another optimizer wrote it.*Load the model only"):
        Cosmos(model).load_state_dict(saved)


@pytest.mark.parametrize("name", ["cosmos", "muon"])
def test_the_error_for_a_checkpoint_of_torchs_muon_says_that_another_optimizer_wrote_it(name: str) -> None:
    """Its ns_coefficients are numbers and ours a name, but to change them would not help."""
    p = matrix((10, 8))
    with pytest.raises(ValueError, match="group 0 of the checkpoint has no 'rule', so another optimizer wrote it"):
        OPTIMIZERS[name]([p]).load_state_dict(torch.optim.Muon([p]).state_dict())


def test_a_checkpoint_of_a_run_whose_schedule_ended_a_little_below_zero_is_loaded() -> None:
    p = matrix((10, 8))
    opt = Cosmos([p], lr=5e-4, rank=4)
    for _ in range(10):
        p.grad = torch.ones_like(p)
        opt.step()
        opt.param_groups[0]["lr"] -= 5e-5
    assert -1e-18 < opt.param_groups[0]["lr"] < 0
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["lr"] = torch.tensor(-1e-10)
    opt.load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"M": None}, "parameter 'w': state 'M' in the checkpoint is a NoneType, not a tensor"),
        ({"step": "3"}, "parameter 'w': state 'step' in the checkpoint is a str, not a tensor"),
    ],
)
def test_state_that_is_not_a_tensor_is_refused_with_the_name_of_the_parameter(
    state: dict[str, Any], message: str
) -> None:
    opt = Cosmos([("w", matrix((10, 8)))], rank=4)
    saved = opt.state_dict()
    saved["state"][0] = saved["state"][0] | state
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    with pytest.raises(TypeError, match="the state of parameter 'w' must be a dict, got a list"):
        opt.load_state_dict(saved | {"state": {0: []}})


def test_a_checkpoint_without_the_state_of_a_parameter_loads_with_a_warning_that_names_it() -> None:
    """A shard that was lost is not silent. No state at all is that of a run before its first step."""
    model = decoder()
    opt, again = (Cosmos(model, **SMALL_RANK) for _ in range(2))
    train(model, opt, range(2))
    saved = opt.state_dict()
    kept = {key: state for key, state in saved["state"].items() if key != 1}
    name = [name for group in saved["param_groups"] for name in group["param_names"]][1]
    with pytest.warns(UserWarning, match=f"has no state of parameter {name!r}, and it begins at zero"):
        again.load_state_dict(saved | {"state": kept})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(saved | {"state": {}})
        model.get_parameter(name).requires_grad_(False)  # torch.distributed.checkpoint leaves out frozen parameters
        again.load_state_dict(saved | {"state": kept})


def test_a_checkpoint_with_numbers_of_parameters_as_text_loads_with_a_warning_that_names_one() -> None:
    """JSON turns the keys of a dict into text. No state would be loaded, as if the run had taken no step."""
    model = decoder()
    opt, again = (Cosmos(model, **SMALL_RANK) for _ in range(2))
    train(model, opt, range(2))
    saved = opt.state_dict()
    as_text = {str(key): state for key, state in saved["state"].items()}
    with pytest.warns(UserWarning, match="has no state of parameter .* and of 7 others, .* It has state of '0', which"):
        again.load_state_dict(saved | {"state": as_text})


def test_hyper_parameters_travel_with_the_checkpoint() -> None:
    p = matrix((10, 8))
    saved = Cosmos([p], lr=1e-3, rank=4, gamma=0.7, nesterov=False).state_dict()
    opt = Cosmos([p], rank=4)
    opt.load_state_dict(saved)
    group = opt.param_groups[0]
    assert (group["lr"], group["gamma"], group["nesterov"]) == (1e-3, 0.7, False)


@pytest.mark.parametrize(("saved", "here"), [("skip", "raise"), ("raise", "skip")])
def test_a_run_may_resume_with_another_treatment_of_gradients_that_are_not_finite(saved: str, here: str) -> None:
    """The warning of a skipped step says to raise, and the error says to skip: a checkpoint must not undo that."""
    model = decoder()
    opt, again = (Cosmos(model, nonfinite=nonfinite, **SMALL_RANK) for nonfinite in (saved, here))
    train(model, opt, range(2))
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert [group["nonfinite"] for group in again.param_groups] == [here, here]
    assert [group["nonfinite"] for group in copy.deepcopy(opt).param_groups] == [saved, saved]
    assert torch.equal(again.state[model.up.weight]["M"], opt.state[model.up.weight]["M"])


def test_hyper_parameters_are_read_from_the_groups_at_each_step() -> None:
    opt = Cosmos([matrix((10, 8))], rank=4)
    opt.param_groups[0]["gamma"] = 0.0
    p = opt.param_groups[0]["params"][0]
    p.grad = gradient((10, 8), 0)
    with opt.diagnostics() as seen:
        opt.step()
    assert next(iter(seen.values()))["ratio"] == float("inf")


def with_group(saved: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return a checkpoint with other values in its first group; None removes a key."""
    group = {key: value for key, value in (saved["param_groups"][0] | changed).items() if value is not None}
    return saved | {"param_groups": [group, *saved["param_groups"][1:]]}


def muon_norm_checkpoint(p: torch.nn.Parameter) -> dict[str, Any]:
    """Return what MuonNorm wrote before it became an option of Muon."""
    opt = Muon([p], momentum=0.9, normalize=True)
    p.grad = gradient((10, 8), 0)
    opt.step()
    return with_group(copy.deepcopy(opt.state_dict()), rule="muon-norm", normalize=None, scaling=None)


def test_a_checkpoint_of_muon_norm_continues_in_muon_with_normalize() -> None:
    p = matrix((10, 8))
    saved = muon_norm_checkpoint(p)
    opt = Muon([p], normalize=True)
    opt.load_state_dict(saved)
    group = opt.param_groups[0]
    assert (group["rule"], group["normalize"], group["scaling"], group["momentum"]) == ("muon", True, "paper", 0.9)
    assert torch.equal(opt.state[p]["M"], saved["state"][0]["M"])
    before = p.detach().clone()
    opt.step()
    rms = (p.detach() - before).square().mean().sqrt()
    torch.testing.assert_close(rms, torch.tensor(1e-3), rtol=1e-4, atol=0)


def test_checkpoints_of_muon_with_and_without_normalize_refuse_each_other() -> None:
    p = matrix((10, 8))
    with pytest.raises(ValueError, match="normalize=True, here it has normalize=False: build the optimizer with norm"):
        Muon([p]).load_state_dict(muon_norm_checkpoint(p))
    with pytest.raises(ValueError, match="normalize=True, here it has normalize=False"):
        Muon([p]).load_state_dict(Muon([p], normalize=True).state_dict())
    old = with_group(Muon([p]).state_dict(), normalize=None)  # written before Muon had the option
    Muon([p]).load_state_dict(old)
    with pytest.raises(ValueError, match="normalize=False, here it has normalize=True"):
        Muon([p], normalize=True).load_state_dict(old)


@pytest.mark.parametrize(("saved", "loaded"), [(1, True), (1.0, True), (0, False), (True, True), (False, False)])
def test_nesterov_saved_as_a_number_becomes_a_bool(saved: float, loaded: bool) -> None:
    p = matrix((10, 8))
    opt = Cosmos([p], rank=4)
    opt.load_state_dict(with_group(Cosmos([p], rank=4).state_dict(), nesterov=saved))
    assert opt.param_groups[0]["nesterov"] is loaded


@pytest.mark.parametrize("steps", [5, 2.5])
def test_a_checkpoint_that_looks_several_steps_ahead_is_refused_with_the_reason(steps: float) -> None:
    p = matrix((10, 8))
    opt = Cosmos([p], rank=4)
    saved = with_group(Cosmos([p], rank=4).state_dict(), nesterov=steps)
    with pytest.raises(ValueError, match=f"group 0 was saved with nesterov={steps}, .* performed worse: set"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["nesterov"] is True
