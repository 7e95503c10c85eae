"""What a program has set for all of torch: a step works beside it, is not changed by it and leaves it alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cosmos_optim import OPTIMIZERS, Cosmos
from tests.optim.helpers import backward, decoder, same, small_rank, snapshot, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_and_reduced_matmul_precision_do_not_reach_the_step(name: str) -> None:
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
    """How products in float32 are made: by all backends, by cuBLAS, by oneDNN."""
    backends = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return [backend.fp32_precision for backend in backends]


def at_the_start() -> None:
    """Torch's global settings as a program finds them."""
    torch.set_float32_matmul_precision("highest")
    for backend in (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        backend.fp32_precision = "none"
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.fixture
def untouched() -> Iterator[None]:
    """Settings of other tests do not come in, and none go out."""
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
def test_the_precision_of_a_backend_does_not_reach_the_step_and_stays(backend: Any, value: str) -> None:
    """Torch's newer switches, beside which its older one may not be read."""
    model, other = decoder(), decoder()
    a, b = Cosmos(model, rank=4), Cosmos(other, rank=4)
    train(other, b, range(2))
    assert switches() == ["none"] * 3  # a step leaves nothing behind
    for step in range(2):
        backward(model, step)
        backend.fp32_precision = value
        told = switches()
        a.step()
        assert switches() == told
        backend.fp32_precision = "none"
    assert same(snapshot(model, a), snapshot(other, b))
    torch.backends.fp32_precision = "tf32"
    assert switches() == ["tf32"] * 3  # what was not set follows


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_default_device_and_dtype_do_not_reach_the_step(name: str) -> None:
    """Scripts set them to build a model where it will live; here they are set to what would show at once."""
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
