"""Matrices of 8-bit integers against an independent numpy oracle, and the laws of the format."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmos_optim.linalg.int8_momentum import BLOCK, LEAST_SCALE, dequantize, quantize, scale_columns
from tests.oracles import int8_momentum as oracle

# Half a step of a code, and the rounding of a scale to 17 bits, which moves the largest code's value by 2^-18 of it.
HALF_STEP = 0.5 + 127 * 2.0**-18


def numbers(m: int, n: int, seed: int = 0, decades: float = 3) -> Tensor:
    """Return Gaussian numbers with sizes over several decades."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=g) * 10 ** (decades * torch.rand(m, n, generator=g))


def scale_of_elements(scales: Tensor, n: int) -> Tensor:
    """Return the scale of each element, (m, n)."""
    return scales.repeat_interleave(BLOCK, dim=-1)[..., :n]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 5, 127, 128, 129, 300, 512])
def test_codes_and_scales_are_those_of_the_oracle(n: int, dtype: torch.dtype) -> None:
    """For rows that are a multiple of a block, one more or less, and shorter than a block."""
    X = numbers(7, n, seed=n).to(dtype)
    codes, scales = quantize(X)
    expected_codes, expected_scales = oracle.quantize(X.numpy())
    assert scales.shape == (7, scale_columns(n))
    assert torch.equal(scales.double(), torch.from_numpy(expected_scales))
    assert torch.equal(codes, torch.from_numpy(expected_codes))
    Y = dequantize(codes, scales, torch.float64)
    assert torch.equal(Y, torch.from_numpy(oracle.dequantize(expected_codes, expected_scales)))


@given(st.integers(1, 300), st.integers(0, 10_000), st.integers(-36, 36))
def test_a_round_trip_is_exact(n: int, seed: int, decade: int) -> None:
    """What was stored once is stored again bit for bit, at every size that float32 holds."""
    codes, scales = quantize(numbers(3, n, seed, decades=1) * 10.0**decade)
    again, same = quantize(dequantize(codes, scales))
    assert torch.equal(codes, again)
    assert torch.equal(scales, same)


@given(st.integers(1, 300), st.integers(0, 10_000))
def test_no_element_moves_by_more_than_half_a_step(n: int, seed: int) -> None:
    """A step is the scale of the element's block."""
    X = numbers(3, n, seed)
    codes, scales = quantize(X)
    assert ((dequantize(codes, scales) - X).abs() <= HALF_STEP * scale_of_elements(scales, n)).all()


@given(st.integers(1, 200), st.integers(0, 10_000), st.integers(-60, 60))
def test_a_power_of_two_changes_only_the_scales(n: int, seed: int, power: int) -> None:
    X = numbers(2, n, seed)
    codes, scales = quantize(X)
    others, scaled = quantize(X * 2.0**power)
    assert torch.equal(codes, others)
    assert torch.equal(scales * 2.0**power, scaled)


def test_an_outlier_costs_only_its_own_block() -> None:
    """An entry a million times the others makes them zero in its block of one row."""
    X = numbers(3, 3 * BLOCK, decades=0)
    Y = X.clone()
    Y[1, BLOCK + 7] = 1e6
    before, after = (dequantize(*quantize(Z)) for Z in (X, Y))
    hit = torch.zeros_like(X, dtype=torch.bool)
    hit[1, BLOCK : 2 * BLOCK] = True
    assert torch.equal(before[~hit], after[~hit])
    assert after[1, BLOCK + 7] == pytest.approx(1e6, rel=2**-17)
    hit[1, BLOCK + 7] = False
    assert not after[hit].any()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-37, 3.4028234e38])
def test_extreme_sizes_stay_finite(value: float) -> None:
    """Zeros have a scale too, so nothing is divided by zero."""
    codes, scales = quantize(torch.full((2, 130), value))
    X = dequantize(codes, scales)
    assert X.isfinite().all()
    assert (scales >= LEAST_SCALE).all()
    assert ((X - value).abs() <= 0.5 * scales.max() + 2**-7 * value).all()


def test_a_batch_and_a_transposed_matrix_are_stored_alike() -> None:
    """Memory order and leading dimensions have no effect."""
    X = torch.stack([numbers(6, 140, seed) for seed in range(4)])
    codes, scales = quantize(X)
    for x, c, s in zip(X, codes, scales, strict=True):
        for view in (x, x.mT.contiguous().mT):
            assert torch.equal(quantize(view)[0], c)
            assert torch.equal(quantize(view)[1], s)
