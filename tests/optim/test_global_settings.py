"""Global settings of torch: a step works with any of them, does not depend on them and does not change them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cosmos_optim import OPTIMIZERS, Cosmos
from cosmos_optim import optimizer as optimizer_module
from tests.optim.helpers import backward, decoder, same, small_rank, snapshot, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_and_reduced_matmul_precision_do_not_change_the_step(name: str) -> None:
    kwargs = small_rank(name)
    model, other = decoder(), decoder()
    a, b = OPTIMIZERS[name](model, **kwargs), OPTIMIZERS[name](other, **kwargs)
    for step in range(3):
        backward(model, step)
        backward(other, step)
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            a.step()
        assert torch.get_float32_matmul_precision() == "medium"
        torch.set_float32_matmul_precision("highest")
        b.step()
    assert same(snapshot(model, a), snapshot(other, b))


def switches() -> list[str]:
    """Return the precision of float32 products: of all backends, of cuBLAS, of oneDNN."""
    backends = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return [backend.fp32_precision for backend in backends]


def at_the_start() -> None:
    """Reset torch's global settings to those of a new process."""
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def untouched() -> Iterator[None]:
    """Reset the settings before and after the test."""
    at_the_start()
    yield
    at_the_start()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("backend", "value"),
    [
        (torch.backends, "tf32"),
        (torch.backends.cuda.matmul, "tf32"),
        (torch.backends.cuda.matmul, "ieee"),
        (torch.backends.mkldnn.matmul, "bf16"),
    ],
)
def test_the_precision_of_a_backend_does_not_change_the_step_nor_is_it_changed(backend: Any, value: str) -> None:
    """With torch's newer switches in use, its older one must not be read."""
    model, other = decoder(), decoder()
    a, b = Cosmos(model, rank=4), Cosmos(other, rank=4)
    train(other, b, range(2))
    assert switches() == ["none"] * 3  # a step changes no setting
    for step in range(2):
        backward(model, step)
        backend.fp32_precision = value
        told = switches()
        a.step()
        assert switches() == told
        backend.fp32_precision = "none"
    assert same(snapshot(model, a), snapshot(other, b))
    torch.backends.fp32_precision = "tf32"
    assert switches() == ["tf32"] * 3  # a setting that was not set follows the general one


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_default_device_and_dtype_do_not_change_the_step(name: str) -> None:
    """Scripts set them to build a model on its device; the values here would fail at once."""
    kwargs = small_rank(name)
    model, other = decoder(), decoder()
    a, b = OPTIMIZERS[name](model, **kwargs), OPTIMIZERS[name](other, **kwargs)
    train(other, b, range(3))
    for step in range(3):
        backward(model, step)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):  # set_default_device(None) would break get_default_device of torch 2.9.1
            a.step()
            a.load_state_dict(copy.deepcopy(a.state_dict()))
        torch.set_default_dtype(torch.float32)
    assert same(snapshot(model, a), snapshot(other, b))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_an_optimizer_built_stepped_and_loaded_without_autograd_continues_with_it(name: str, mode: Any) -> None:
    """State made in inference mode could be written only there, and an evaluation loop may load a checkpoint."""
    kwargs = small_rank(name)
    model, other = decoder(), decoder()
    b = OPTIMIZERS[name](other, **kwargs)
    train(other, b, range(4))
    with mode():
        a = OPTIMIZERS[name](model, **kwargs)
    train(model, a, range(2))
    backward(model, 2)
    with mode():
        a.step()
        a.load_state_dict(copy.deepcopy(a.state_dict()))
    train(model, a, range(3, 4))
    assert same(snapshot(model, a), snapshot(other, b))


def test_state_that_a_step_in_inference_mode_moves_to_another_dtype_can_be_written_by_the_next() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    train(model, opt, range(1))
    backward(model.double(), 1)
    with torch.inference_mode():
        opt.step()
    train(model, opt, range(2, 3))
    assert {float(state["step"]) for state in opt.state.values()} == {3.0}


def test_a_tensor_lr_given_in_inference_mode_can_be_scheduled() -> None:
    """Cosmos makes the rate of AdamW from it, and a scheduler writes into both."""
    lr = torch.tensor(1e-3)
    with torch.inference_mode():
        opt = Cosmos(decoder(), lr=lr, rank=4)
    torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)
    assert {float(group["lr"] / lr) for group in opt.param_groups} == {1.0, 4.0}


WAIT_S = 60.0  # long enough for a busy machine; a test that waits so long has failed


def step_in_threads(
    monkeypatch: pytest.MonkeyPatch, during: Callable[[], None]
) -> tuple[list[list[str]], list[list[str]]]:
    """Step two optimizers in two threads: the second begins inside the first and ends after it.

    Call `during` after both have begun. Return the settings that the products of the steps had: of the first after
    both began, of the second after the first ended, and of a third that begins and ends meanwhile.
    """
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
    run, seen, later = optimizer_module.run, [], []
    opts = [Cosmos(decoder(), rank=4) for _ in range(3)]

    def paused(entries: Any, *rest: Any) -> None:
        if entries[0].p in opts[0].state:
            begun.set()
            assert may_end.wait(WAIT_S)
            seen.append(switches())
        elif entries[0].p in opts[1].state:
            during()
            step(opts[2])
            may_end.set()
            assert ended.wait(WAIT_S)
            seen.append(switches())
        else:
            later.append(switches())
        run(entries, *rest)

    def step(opt: torch.optim.Optimizer) -> None:
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        opt.step()

    def first() -> None:
        step(opts[0])
        ended.set()

    monkeypatch.setattr(optimizer_module, "run", paused)
    threads = [threading.Thread(target=first), threading.Thread(target=step, args=(opts[1],))]
    threads[0].start()
    assert begun.wait(WAIT_S)
    threads[1].start()
    for thread in threads:
        thread.join(WAIT_S)
    return seen, later


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("old", [True, False], ids=["older switch", "newer switches"])
def test_steps_in_two_threads_are_exact_and_restore_the_users_precision(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        torch.set_float32_matmul_precision("medium")
    else:
        torch.backends.fp32_precision = "tf32"
    before = switches()
    seen, later = step_in_threads(monkeypatch, during=lambda: None)
    assert [s[1:] for s in seen + later] == [["ieee", "ieee"]] * 3
    assert switches() == before
    if old:
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32


@pytest.mark.usefixtures("untouched")
def test_a_precision_that_another_thread_sets_during_a_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step that begins is exact again, and the last one to end leaves the setting of the other thread."""
    torch.set_float32_matmul_precision("medium")
    _, later = step_in_threads(monkeypatch, during=lambda: torch.set_float32_matmul_precision("high"))
    assert later[0][1:] == ["ieee", "ieee"]
    assert torch.get_float32_matmul_precision() == "high"
    assert switches()[1:] == ["tf32", "tf32"]
