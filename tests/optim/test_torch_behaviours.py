"""What torch's own optimizer tests ask of every optimizer: errors, groups, closures, hooks, names, copies, dtypes."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Adam, Cosmos
from cosmos_optim.optimizer import MatrixOptimizer
from tests.optim.helpers import backward, decoder, gradient, loss_of, matrix, same, small_rank, snapshot, train

ALL = pytest.mark.parametrize("name", OPTIMIZERS)
SMALLEST_LOSS = 0.7  # of the loss before training: each optimizer learns something in a few steps


def build(name: str, params: Any, **options: Any) -> MatrixOptimizer:
    return OPTIMIZERS[name](params, **small_rank(name), **options)


def with_gradient(shape: tuple[int, ...] = (8, 6), seed: int = 0) -> nn.Parameter:
    p = matrix(shape, seed)
    p.grad = gradient(shape, seed)
    return p


# -- arguments --------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(
    "params", [None, 3, torch.ones(4, 4), nn.Parameter(torch.ones(4, 4)), {torch.ones(4, 4)}, "ab"]
)
def test_params_that_are_no_list_of_tensors_are_a_type_error(name: str, params: object) -> None:
    with pytest.raises(TypeError, match="params must be|can only optimize Tensors"):
        build(name, params)


@ALL
@pytest.mark.parametrize("params", [[], (), iter([])])
def test_no_parameters_are_a_value_error(name: str, params: object) -> None:
    with pytest.raises(ValueError, match="empty"):
        build(name, params)


@ALL
@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1e-2), ("lr", float("nan")), ("lr", torch.tensor([1e-3, 1e-3])), ("lr", torch.tensor(-1.0)),
     ("adam_lr", -1e-2), ("adam_lr", "fast"), ("weight_decay", -1.0), ("betas", (1.0, 0.0)), ("betas", (0.0, 1.0)),
     ("betas", (-0.1, 0.9)), ("betas", (0.9,)), ("eps", -1.0), ("eps", "small"), ("nonfinite", "ignore"),
     ("missing", 0), ("maximize", "yes"), ("stochastic_rounding", "yes"), ("weight_correction", "yes"),
     ("cuda_graphs", "yes")],
)  # fmt: skip
def test_a_wrong_option_is_a_value_error_whether_or_not_a_group_reads_it(name: str, option: str, value: object) -> None:
    """Also before params are looked at, as in torch."""
    for params in ([matrix((8, 6))], decoder(), None):
        with pytest.raises(ValueError, match=option):
            build(name, params, **{option: value})


@ALL
def test_every_option_with_a_check_is_checked_without_a_group_that_reads_it(name: str) -> None:
    for option in inspect.signature(OPTIMIZERS[name]).parameters:
        if option != "params":
            with pytest.raises(ValueError, match=option):
                OPTIMIZERS[name]([{"params": [matrix((8,))], "rule": "adam"}], **{option: object()})


@ALL
def test_parameters_that_are_not_leaves_are_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="non-leaf"):
        build(name, [matrix((8, 6)) * 2])


@ALL
def test_a_parameter_twice_in_a_group_is_a_warning_and_in_two_groups_an_error(name: str) -> None:
    p = matrix((8, 6))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        build(name, [p, p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        build(name, [{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match="with/without names"):
        build(name, [("p", p), matrix((8, 6), 1)])


@ALL
def test_an_optimizer_can_be_printed_and_its_groups_listed(name: str) -> None:
    text = repr(build(name, decoder()))
    assert type(build(name, decoder())).__name__ in text and "Parameter Group 0" in text and "lr" in text


# -- steps ------------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("lr", ["number", "tensor", "tensor of one element"])
def test_the_loss_falls_for_rates_as_numbers_and_as_tensors(name: str, lr: str) -> None:
    rate = {"number": 1e-2, "tensor": torch.tensor(1e-2), "tensor of one element": torch.tensor([1e-2])}[lr]
    model = decoder()
    opt = build(name, model, lr=rate, adam_lr=rate)
    before = loss_of(model, 0).item()
    losses = [train(model, opt, range(1))[0] for _ in range(30)]
    assert losses[-1] < SMALLEST_LOSS * before
    assert isinstance(opt.param_groups[0]["lr"], Tensor) == (lr != "number")


@ALL
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_is_returned(name: str) -> None:
    model = decoder()
    opt = build(name, model)
    modes = []

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = opt.step(closure)  # type: ignore[arg-type]
    assert modes == [True] and isinstance(loss, Tensor) and loss.requires_grad
    assert opt.step() is None


@ALL
@pytest.mark.parametrize("kind", ["none", "zero", "frozen"])
def test_a_step_without_a_gradient_changes_nothing(name: str, kind: str) -> None:
    model = decoder()
    opt = build(name, model)
    if kind == "zero":
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    model.requires_grad_(kind != "frozen")
    before = snapshot(model, opt)
    opt.step()
    opt.step()
    assert same(before, snapshot(model, opt))


@pytest.mark.parametrize("how", ["frozen", "replaced"])
def test_an_optimizer_that_never_had_a_gradient_warns(how: str) -> None:
    """Its parameters are not those that the model trains; nothing else would say so."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    if how == "frozen":
        model.requires_grad_(False)  # as peft does, which then adds its own parameters
    else:
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
        backward(model, 0)
    with pytest.warns(UserWarning, match="no parameter of the optimizer has a gradient, so nothing is trained"):
        opt.step()


def test_an_optimizer_that_gets_no_more_gradients_warns_after_20_steps() -> None:
    """A loop that returns to a copy of the model after a spike trains nothing from then on."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(2))
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(other, opt, range(19))
        train(model, opt, range(1))  # the optimizers of a GAN take turns
        train(other, opt, range(19))
    expected = "no parameter of the optimizer has a gradient.*a deepcopy of the model.*on purpose, do not call its step"
    with pytest.warns(UserWarning, match=expected):
        train(other, opt, range(1))


@ALL
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_removes_gradients_or_fills_them_with_zeros(name: str, to_none: bool) -> None:
    model = decoder()
    opt = build(name, model)
    loss_of(model, 0).backward()
    opt.zero_grad(set_to_none=to_none)
    for p in model.parameters():
        assert p.grad is None if to_none else (p.grad is not None and not p.grad.any())


@ALL
def test_rates_and_decay_of_a_group_override_those_of_the_optimizer(name: str) -> None:
    rule = {"rule": "adam"} if name == "adam" else {}
    p, q, fast, decayed = (with_gradient() for _ in range(4))
    other = build(
        name, [{"params": [fast], "lr": 0.2, **rule}, {"params": [decayed], "weight_decay": 0.5, **rule}], lr=0.1
    )
    one, two = (build(name, [{"params": [x], **rule}], lr=lr) for x, lr in ((p, 0.1), (q, 0.2)))
    start = p.detach().clone()
    for opt in (one, two, other):
        opt.step()
    if "gamma" not in other.param_groups[0]:  # gamma = lr / adam_lr depends on the rate
        assert torch.equal(fast, q)
    torch.testing.assert_close(decayed, p - 0.1 * 0.5 * start)


@ALL
def test_the_order_of_dtypes_in_a_group_does_not_matter(name: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)

    def params() -> dict[torch.dtype, nn.Parameter]:
        made = {dtype: matrix((8, 6), i, dtype) for i, dtype in enumerate(dtypes)}
        for i, (dtype, p) in enumerate(made.items()):
            p.grad = gradient((8, 6), i, dtype)
        return made

    a, b = params(), params()
    one, two = build(name, list(a.values())), build(name, list(reversed(b.values())))
    for opt in (one, one, two, two):
        opt.step()
    for dtype in dtypes:
        assert torch.equal(a[dtype], b[dtype]) and a[dtype].dtype is dtype
        assert not torch.equal(a[dtype], matrix((8, 6), dtypes.index(dtype), dtype))


@ALL
def test_maximize_can_be_turned_on_for_one_group(name: str) -> None:
    rule = {"rule": "adam"} if name == "adam" else {}
    p, q = with_gradient(), with_gradient()
    opt = build(name, [{"params": [p], **rule}, {"params": [q], "maximize": True, **rule}])
    start = p.detach().clone()
    opt.step()
    torch.testing.assert_close(p - start, start - q, rtol=1e-5, atol=1e-7)


@ALL
def test_parameters_from_a_generator_and_named_parameters_are_taken(name: str) -> None:
    p = with_gradient()

    def generated() -> Iterator[nn.Parameter]:
        yield p

    build(name, generated()).step()
    layer = nn.Linear(6, 8, bias=False)
    opt = build(name, layer.named_parameters())
    assert opt.param_groups[0]["param_names"] == ["weight"]
    assert build(name, [{"params": layer.named_parameters()}]).param_groups[0]["param_names"] == ["weight"]


@ALL
def test_a_group_added_after_steps_trains_and_the_others_continue(name: str) -> None:
    p, q = with_gradient(seed=0), with_gradient(seed=1)
    opt, alone = build(name, [p]), build(name, [r := with_gradient(seed=0)])
    for step in range(3):
        opt.step()
        alone.step()
        if step == 0:
            opt.add_param_group({"params": q, **({"rule": "adam"} if name == "adam" else {})})
    assert torch.equal(p, r)
    assert (float(opt.state[p]["step"]), float(opt.state[q]["step"])) == (3.0, 2.0)
    with pytest.raises(TypeError, match="param_group must be a dict"):
        opt.add_param_group([q])  # type: ignore[arg-type]


# -- state ------------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(("saved", "here"), [(True, False), (False, True), (True, True), (False, False)])
def test_names_survive_if_the_checkpoint_or_the_optimizer_has_them(name: str, saved: bool, here: bool) -> None:
    layers = [nn.Linear(6, 8, bias=False) for _ in range(2)]
    first, second = (
        build(name, layer.named_parameters() if named else layer.parameters())
        for layer, named in zip(layers, (saved, here), strict=True)
    )
    layers[0].weight.grad = gradient((8, 6), 0)
    first.step()
    second.load_state_dict(first.state_dict())
    names = second.state_dict()["param_groups"][0].get("param_names")
    assert names == (["weight"] if saved or here else None)
    assert float(second.state[layers[1].weight]["step"]) == 1.0
    layers[1].weight.grad = gradient((8, 6), 1)
    copy.deepcopy(second).step()
    second.step()


def test_an_optimizer_keeps_its_own_names_if_the_checkpoint_has_others() -> None:
    """So the next checkpoint has the names of the model that wrote it, and can be read by name."""
    opt = Cosmos([("query", matrix((8, 6)))], rank=2)
    opt.load_state_dict(Cosmos([("q", matrix((8, 6)))], rank=2).state_dict())
    assert opt.param_groups[0]["param_names"] == ["query"]


@ALL
def test_state_dicts_of_equal_runs_are_equal_and_a_step_count_may_be_a_number(name: str) -> None:
    models = [decoder(), decoder()]
    a, b = (build(name, model) for model in models)
    for model, opt in zip(models, (a, b), strict=True):
        train(model, opt, range(2))
    one, two = a.state_dict(), b.state_dict()
    assert one["param_groups"] == two["param_groups"]
    for key, state in one["state"].items():
        assert all(torch.equal(value, two["state"][key][slot]) for slot, value in state.items())
        state["step"] = float(state["step"])
    b.load_state_dict(one)
    assert {float(s["step"]) for s in b.state.values()} == {2.0}
    assert isinstance(next(iter(b.state.values()))["step"], Tensor)


@ALL
def test_an_older_checkpoint_without_newer_group_keys_can_be_loaded(name: str) -> None:
    model = decoder()
    opt = build(name, model)
    train(model, opt, range(2))
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        for key in ("maximize", "missing", "stochastic_rounding", "weight_correction", "nonfinite"):
            del group[key]
    opt.load_state_dict(saved)
    train(model, opt, range(2, 3))
    assert opt.param_groups[0]["maximize"] is False


@ALL
def test_an_older_pickle_without_newer_group_keys_continues_with_the_defaults(name: str) -> None:
    model = decoder()
    opt = build(name, model)
    train(model, opt, range(2))
    older_model, older = copy.deepcopy((model, opt))
    for group in older.param_groups:
        for key in ("maximize", "missing", "stochastic_rounding", "weight_correction", "nonfinite"):
            del group[key]
    newer_model, newer = pickle.loads(pickle.dumps((older_model, older)))
    train(model, opt, range(2, 3))
    train(newer_model, newer, range(2, 3))
    assert same(snapshot(model, opt), snapshot(newer_model, newer))


@ALL
def test_a_step_after_a_setting_was_deleted_names_it_and_changes_nothing(name: str) -> None:
    model = decoder()
    opt = build(name, model)
    train(model, opt, range(2))
    before = snapshot(model, opt)
    for key in ("rule", "lr", "nonfinite", "missing", "weight_correction", "maximize", "weight_decay"):
        value = opt.param_groups[-1].pop(key)
        with pytest.raises(ValueError, match=rf"group \d has lost its \['{key}'\]: set a value"):
            train(model, opt, range(2, 3))
        opt.param_groups[-1][key] = value
    assert same(before, snapshot(model, opt))


@ALL
def test_hooks_of_steps_and_checkpoints_run_in_order_and_may_replace_a_checkpoint(name: str) -> None:
    model = decoder()
    opt = build(name, model)
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before step"))
    opt.register_step_post_hook(lambda *_: calls.append("after step"))
    opt.register_state_dict_pre_hook(lambda _: calls.append("before save"))
    opt.register_state_dict_post_hook(lambda _, saved: saved | {"version": 2})
    opt.register_load_state_dict_pre_hook(lambda _, saved: saved | {"param_groups": faster(saved["param_groups"])})
    opt.register_load_state_dict_pre_hook(lambda *_: calls.append("first before load"), prepend=True)
    opt.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
    handle = opt.register_step_post_hook(lambda *_: calls.append("removed"))
    handle.remove()
    train(model, opt, range(1))
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert calls == ["before step", "after step", "before save", "first before load", "after load"]
    assert saved["version"] == 2
    assert opt.param_groups[0]["lr"] == 2 * saved["param_groups"][0]["lr"]


def test_a_hook_may_put_a_checkpoint_into_another_dict() -> None:
    opt = Cosmos([with_gradient()], rank=2)
    opt.register_state_dict_post_hook(lambda _, saved: {"optimizer": saved})
    opt.register_load_state_dict_pre_hook(lambda _, saved: saved["optimizer"])
    opt.step()
    saved = opt.state_dict()
    assert list(saved) == ["optimizer"]
    opt.load_state_dict(saved)


def faster(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group | {"lr": 2 * group["lr"]} for group in groups]


def test_hooks_of_all_optimizers_run_around_those_of_one() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("all")),
        register_optimizer_step_post_hook(lambda *_: calls.append("all after")),
    ]
    opt = Adam([with_gradient()])
    opt.register_step_pre_hook(lambda *_: calls.append("one"))
    opt.step()
    for handle in handles:
        handle.remove()
    assert calls == ["all", "one", "all after"]


@ALL
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_of_every_optimizer_continue_bit_for_bit(name: str, copier: Any) -> None:
    model = decoder()
    opt = build(name, model, weight_decay=0.1, lr=torch.tensor(1e-2))
    train(model, opt, range(2))
    other, again = copier((model, opt))
    assert {key for key in vars(opt) if not key.startswith("_")} == {k for k in vars(again) if not k.startswith("_")}
    assert set(opt.defaults) <= set(again.defaults)
    train(model, opt, range(2, 4))
    train(other, again, range(2, 4))
    assert same(snapshot(model, opt), snapshot(other, again))


@ALL
def test_flags_of_torch_in_a_group_are_kept_without_effect(name: str) -> None:
    rule = {"rule": "adam"} if name == "adam" else {}
    flags = {"capturable": True, "fused": True, "foreach": False, "differentiable": False}
    p, q = with_gradient(), with_gradient()
    flagged, plain = build(name, [{"params": [p], **flags, **rule}]), build(name, [{"params": [q], **rule}])
    for opt in (flagged, plain):
        opt.step()
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        opt.step()
    assert torch.equal(p, q)
    assert {key: flagged.param_groups[0][key] for key in flags} == flags
