"""Weights of 24 bits against an independent numpy oracle, and the laws of the format."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmos_optim.linalg.weight24 import join_weight, split_weight
from tests.oracles import weight24 as oracle

# Half a unit in the last place of 16 significant bits.
HALF_UNIT = 2.0**-16
LEAST = 2.0**-126 * 2.0**-15  # the smallest magnitude of 24 bits


def numbers(seed: int, decades: int = 37, count: int = 1000) -> Tensor:
    """Return float32 of both signs over many decades, powers of two and their neighbours among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=g) * 10.0 ** torch.randint(-decades, decades + 1, (count,), generator=g)
    powers = 2.0 ** torch.arange(-120.0, 121.0)
    return torch.cat([x, *(s * powers * (1 + e) for s in (1, -1) for e in (0, 2**-23, -(2**-24), 2**-9, -(2**-10)))])


def all_pairs(first: int) -> tuple[Tensor, Tensor]:
    """Return 2^12 bfloat16, from the bit pattern `first`, with all 256 corrections each."""
    bits = torch.arange(first, first + (1 << 12), dtype=torch.int32).to(torch.int16)
    p = bits.view(torch.bfloat16).repeat_interleave(256)
    return p, torch.arange(-128, 128).to(torch.int8).repeat(1 << 12)


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_and_corrections_are_those_of_the_oracle(seed: int) -> None:
    """And so is the joined number."""
    x = numbers(seed)
    p, correction = split_weight(x)
    expected_p, expected_correction = oracle.split(x.numpy())
    assert torch.equal(p.double(), torch.from_numpy(expected_p))
    assert torch.equal(correction.long(), torch.from_numpy(expected_correction))
    joined = join_weight(p, correction)
    assert torch.equal(joined.double(), torch.from_numpy(oracle.join(expected_p, expected_correction)))


@given(st.integers(0, 10_000))
def test_a_number_moves_by_at_most_half_a_unit(seed: int) -> None:
    """A unit in the last of 16 significant bits, or the smallest number."""
    x = numbers(seed)
    joined = join_weight(*split_weight(x))
    assert ((joined - x).double().abs() <= torch.maximum(HALF_UNIT * x.double().abs(), torch.tensor(LEAST))).all()


@pytest.mark.parametrize("first", range(-(1 << 15), 1 << 15, 1 << 12))
def test_splitting_a_joined_number_gives_the_same_bits(first: int) -> None:
    """For every bfloat16 and every correction; a zero loses a negative one, and inf and NaN lose any."""
    p, correction = all_pairs(first)
    joined = join_weight(p, correction)
    again, same = split_weight(joined)
    kept = p.isfinite() & ((p != 0) | (correction >= 0))
    assert torch.equal(again.view(torch.int16)[~p.isnan()], p.view(torch.int16)[~p.isnan()])
    assert again[p.isnan()].isnan().all()
    assert torch.equal(same, torch.where(kept, correction, 0))
    assert torch.equal(joined[~kept & ~p.isnan()], p[~kept & ~p.isnan()].float())


def test_the_bfloat16_is_the_nearest() -> None:
    """Torch's own rounding gives the same, except for halves, which torch rounds to even."""
    x = numbers(7)
    p, correction = split_weight(x)
    apart = p != x.bfloat16()
    assert (correction[apart] == -128).all()
    assert apart.float().mean() < 0.2


def test_a_bfloat16_has_no_correction() -> None:
    """A fresh model of bfloat16 is exact."""
    x = numbers(3).bfloat16()
    p, correction = split_weight(x.float())
    assert torch.equal(p, x)
    assert not correction.any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, 3.4028235e38, -3.4028235e38, np.nan])
def test_what_bfloat16_cannot_hold_is_inf_or_nan(value: float) -> None:
    """Also a NaN with all bits set, to which nothing can be added."""
    x = torch.tensor([value, value])
    if np.isnan(value):
        x = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    p, correction = split_weight(x)
    assert not correction.any()
    assert torch.equal(p.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    assert torch.equal(join_weight(p, correction).nan_to_num(7.0), p.float().nan_to_num(7.0))


def test_an_old_correction_moves_a_new_number_by_at_most_half_a_unit() -> None:
    """Other code may write the parameter: no correction makes it NaN or changes its sign."""
    for first in range(-(1 << 15), 1 << 15, 1 << 12):
        p, correction = all_pairs(first)
        p, correction = p[p.isfinite()], correction[p.isfinite()]
        joined = join_weight(p, correction).double()
        assert torch.equal(joined.signbit(), p.signbit())
        moved = (joined - p.double()).abs()
        assert (moved <= torch.maximum(2.0**-8 * p.double().abs(), torch.tensor(2.0**-126 * 2.0**-8))).all()


def test_memory_order_and_shape_are_kept() -> None:
    x = torch.randn(5, 7).mT
    p, correction = split_weight(x)
    assert p.shape == correction.shape == join_weight(p, correction).shape == x.shape
    assert torch.equal(join_weight(p, correction), join_weight(*split_weight(x.contiguous())))
