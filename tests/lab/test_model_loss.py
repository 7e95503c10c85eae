"""The chunked cross-entropy against torch's, and that it never holds all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_lab.models import loss
from cosmos_lab.models.linear import row_padding

FP32_TOL = 1e-5  # another order of summation, on values of order one


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 22 rows per chunk: 64 tokens take 3 chunks, the last one shorter."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 22 * 251)


class _Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(("size", "expected"), [(5461, 43), (32_100, 28), (5504, 0), (2736, 0), (32_000, 0)])
def test_sixteen_bit_rows_are_aligned(size: int, expected: int) -> None:
    assert row_padding(size, torch.bfloat16) == expected
    assert row_padding(size, torch.float32) == 0


@pytest.mark.parametrize("grad", [True, False])
def test_loss_never_holds_all_logits(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, vocab = 4096, 16, 4096
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", tokens * vocab // 16)
    hidden = torch.randn(tokens, width, requires_grad=grad)
    weight = torch.randn(vocab, width, requires_grad=grad)
    with _Largest() as seen:
        value = loss.linear_cross_entropy(hidden, weight, torch.randint(0, vocab, (tokens,)), torch.float32)
        if grad:
            value.backward()
    assert seen.largest == tokens * vocab // 16


@pytest.mark.parametrize("tokens", [1, 22, 23, 64])
def test_loss_equals_torch_cross_entropy(tokens: int) -> None:
    hidden = torch.randn(tokens, 32, requires_grad=True)
    weight = torch.randn(251, 32, requires_grad=True)
    targets = torch.randint(0, 251, (tokens,))
    ours = loss.linear_cross_entropy(hidden, weight, targets, torch.float32)
    grads = torch.autograd.grad(3 * ours, (hidden, weight))
    theirs = F.cross_entropy(hidden @ weight.mT, targets)
    expected = torch.autograd.grad(3 * theirs, (hidden, weight))
    torch.testing.assert_close((ours, *grads), (theirs, *expected), rtol=FP32_TOL, atol=FP32_TOL)
    with torch.no_grad():
        torch.testing.assert_close(loss.linear_cross_entropy(hidden, weight, targets, torch.float32), ours)


def test_loss_survives_large_logits_and_bf16_weights() -> None:
    weight = torch.randn(251, 32, dtype=torch.bfloat16, requires_grad=True)
    hidden = (1e3 * torch.randn(30, 32)).bfloat16().requires_grad_()
    targets = torch.randint(0, 251, (30,))
    value = loss.linear_cross_entropy(hidden, weight, targets, torch.bfloat16)
    value.backward()
    expected = F.cross_entropy((hidden @ weight.mT).float(), targets)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=FP32_TOL, atol=0)
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16 and weight.grad.isfinite().all()
