"""Weights of 24 bits in kernels: the same bits as the definition."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.launch import jit, tl
from cosmos_optim.cuda.kernels.weight24_tiles import join_weight, split_weight
from cosmos_optim.linalg import weight24
from tests.linalg.test_weight24 import all_pairs, numbers


@jit
def _split(x, p, correction, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, low = split_weight(tl.load(x + at, mask=at < count, other=0.0))
    tl.store(p + at, high, mask=at < count)
    tl.store(correction + at, low, mask=at < count)


@jit
def _join(x, p, correction, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, low = tl.load(p + at, mask=at < count, other=0.0), tl.load(correction + at, mask=at < count, other=0)
    tl.store(x + at, join_weight(high, low), mask=at < count)


def test_a_kernel_splits_as_the_definition(device: torch.device) -> None:
    """Also zeros of both signs, inf, every NaN, and numbers that round to inf."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, -1e-45])
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([numbers(5), special, nans]).to(device)
    p, correction = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int8)
    _split[(-(-x.numel() // 1024),)](x, p, correction, x.numel(), BLOCK=1024)
    expected_p, expected_correction = weight24.split_weight(x)
    assert torch.equal(p.view(torch.int16), expected_p.view(torch.int16))
    assert torch.equal(correction, expected_correction)


@pytest.mark.parametrize("first", [-(1 << 15), -(1 << 12), 0, 1 << 14, 7 << 12])
def test_a_kernel_joins_as_the_definition(first: int, device: torch.device) -> None:
    """All corrections of zeros, inf and NaN among them."""
    p, correction = (x.to(device) for x in all_pairs(first))
    x = torch.empty_like(p, dtype=torch.float32)
    _join[(-(-x.numel() // 65536),)](x, p, correction, x.numel(), BLOCK=65536)
    expected = weight24.join_weight(p, correction)
    assert torch.equal(x.isnan(), expected.isnan())
    assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))
    kept = ~x.isnan()
    assert torch.equal(x.view(torch.int32)[kept], expected.view(torch.int32)[kept])
