"""Global settings of torch: a step works with any of them, does not depend on them and does not change them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cosmos_optim import OPTIMIZERS, Cosmos
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
    torch.set_default_device(None)


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
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        a.step()
        a.load_state_dict(copy.deepcopy(a.state_dict()))
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert same(snapshot(model, a), snapshot(other, b))
