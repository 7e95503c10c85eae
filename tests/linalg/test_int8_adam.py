"""Adam's moments as 8-bit codes against an independent numpy oracle, and the laws of the format."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cosmos_optim.linalg.int8_adam import (
    dequantize_root,
    dequantize_signed,
    element_index,
    quantize_root,
    quantize_signed,
)
from cosmos_optim.linalg.int8_momentum import BLOCK, LEAST_SCALE, scale_columns
from tests.oracles import int8_adam as oracle


def numbers(m: int, n: int, seed: int = 0, decades: float = 3) -> Tensor:
    """Return Gaussian numbers with sizes over several decades."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=g) * 10 ** (decades * torch.rand(m, n, generator=g))


def stored(X: Tensor, step: int, root: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of X as a first moment, or of X^2 as a second one."""
    index, t = element_index(X), torch.tensor(float(step))
    return quantize_root(X.square(), index, t) if root else quantize_signed(X, index, t)


def loaded(codes: Tensor, scales: Tensor, root: bool) -> Tensor:
    """Return the moment of these codes, the root of a second one."""
    return dequantize_root(codes, scales).sqrt() if root else dequantize_signed(codes, scales)


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("n", [1, 5, 127, 128, 129, 300])
def test_codes_and_scales_are_those_of_the_oracle(n: int, root: bool) -> None:
    """In float64: noise is near the threshold of no element."""
    X = numbers(5, n, seed=n).double()
    codes, scales = stored(X, 7 + n, root)
    expected, expected_scales = oracle.quantize(X.abs().numpy() if root else X.numpy(), 7 + n, root)
    assert scales.shape == (5, scale_columns(n))
    assert torch.equal(scales.double(), torch.from_numpy(expected_scales))
    assert torch.equal(codes, torch.from_numpy(expected))
    value = torch.from_numpy(oracle.dequantize(expected, expected_scales))
    assert torch.allclose(loaded(codes, scales, root).double(), value, rtol=1e-6, atol=0)


@given(st.integers(1, 300), st.integers(0, 10_000), st.integers(-15, 15), st.booleans())
def test_a_round_trip_is_exact_for_any_noise(n: int, seed: int, decade: int, root: bool) -> None:
    """What was stored at one step is stored bit for bit at another."""
    codes, scales = stored(numbers(3, n, seed, decades=2) * 10.0**decade, seed, root)
    again, same = stored(loaded(codes, scales, root), seed + 1, root)
    assert torch.equal(scales, same)
    assert torch.equal(codes, again)


@given(st.integers(1, 200), st.integers(0, 10_000), st.integers(-30, 30), st.booleans())
def test_a_power_of_two_changes_only_the_scales(n: int, seed: int, power: int, root: bool) -> None:
    X = numbers(2, n, seed)
    (codes, scales), (others, scaled) = stored(X, 5, root), stored(X * 2.0**power, 5, root)
    assert torch.equal(codes, others)
    assert torch.equal(scales * 2.0**power, scaled)


@given(st.integers(0, 10_000), st.booleans())
def test_no_element_moves_by_more_than_a_step(seed: int, root: bool) -> None:
    """Between codes k and k + 1 a step is (2 k + 1) scales; at most 3 from 1 to the least code of a second moment."""
    X = numbers(3, 200, seed)
    codes, scales = stored(X, seed, root)
    each = scales.repeat_interleave(BLOCK, dim=-1)[..., :200]
    size = X.abs() if root else X
    step = (2 * codes.float().abs() + 3.5) * each
    assert ((loaded(codes, scales, root) - size).abs() <= step).all()


@pytest.mark.parametrize("root", [False, True])
def test_the_mean_over_steps_is_the_number(root: bool) -> None:
    """The noise visits (0, 1) evenly: after 512 steps the mean is within 1 % of a step."""
    X = numbers(2, 150, decades=1)
    X = X.abs() + 0.1 if root else X
    mean = torch.stack([loaded(*stored(X, step, root), root) for step in range(512)]).mean(0)
    codes, scales = stored(X, 0, root)
    step = (2 * codes.float().abs() + 3) * scales.repeat_interleave(BLOCK, dim=-1)[..., :150]
    assert ((mean - X).abs() < 0.02 * step).all()


def test_a_second_moment_above_zero_is_never_stored_as_zero() -> None:
    """A million times below its block's largest, it reads as 4 / 255^2 of it. Zero stays zero."""
    v = torch.zeros(2, 130)
    v[0, 0], v[0, 1], v[1, 129] = 1.0, 1e-30, 1e-12
    read = dequantize_root(*quantize_root(v, element_index(v), torch.tensor(1.0)))
    assert torch.equal(read > 0, v > 0)
    assert read[0, 1].sqrt() == pytest.approx(4 / 255**2, rel=1e-5)
    assert read[1, 129] == pytest.approx(1e-12, rel=1e-5)


def test_an_outlier_costs_only_its_own_block() -> None:
    X = numbers(3, 3 * BLOCK, decades=0)
    Y = X.clone()
    Y[1, BLOCK + 7] = 1e6
    hit = torch.zeros_like(X, dtype=torch.bool)
    hit[1, BLOCK : 2 * BLOCK] = True
    for root in (False, True):
        before, after = (loaded(*stored(Z, 1, root), root) for Z in (X, Y))
        assert torch.equal(before[~hit], after[~hit])
        assert after[1, BLOCK + 7] == pytest.approx(1e6, rel=2**-19)


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 1e18, 3.4028234e38])
def test_extreme_sizes_stay_finite(value: float, root: bool) -> None:
    X = torch.full((2, 130), value)
    codes, scales = stored(X.clamp(max=1.8e19) if root else X, 1, root)
    assert loaded(codes, scales, root).isfinite().all()
    assert (scales >= LEAST_SCALE).all()


def test_the_largest_element_never_gets_a_code_above_the_largest() -> None:
    """Its scale is rounded down, so its code is a little above 255, and the least noise would round it up to 256."""
    scale = 0.5 * (1 + 0.9 * 2.0**-20)  # 0.5 in 20 bits
    v = torch.full((1, 1), scale * 255**2, dtype=torch.float64).square()
    codes, scales = quantize_root(v, element_index(v), torch.tensor(0.0))  # step 0 has the least noise at element 0
    assert (int(codes), float(scales)) == (255, 0.5)


@pytest.mark.parametrize("beta", [0.9, 0.98, 0.999])
@pytest.mark.parametrize("root", [False, True])
def test_small_elements_decay_although_their_block_does_not(beta: float, root: bool) -> None:
    """To a tenth in the time that exact numbers need, within a quarter; to nearest they would never move."""
    X = torch.full((1, BLOCK), 0.05)
    X[0, 0] = 1.0
    codes, scales = stored(X, 0, root)
    count = round(torch.log(torch.tensor(0.1)).item() / torch.log(torch.tensor(beta)).item())
    for step in range(count):
        Y = loaded(codes, scales, root) * beta
        Y[0, 0] = 1.0
        codes, scales = stored(Y, step + 1, root)
    mean = loaded(codes, scales, root)[0, 1:].mean()
    assert mean == pytest.approx(0.005, rel=0.25)


def test_the_same_step_gives_the_same_bits_and_another_step_others() -> None:
    X = numbers(4, 140)
    for root in (False, True):
        assert torch.equal(stored(X, 3, root)[0], stored(X, 3, root)[0])
        assert not torch.equal(stored(X, 3, root)[0], stored(X, 4, root)[0])


def test_a_part_of_rows_or_columns_is_rounded_as_in_the_whole() -> None:
    X, t = numbers(10, 3 * BLOCK), torch.tensor(2.0)
    whole, scales = quantize_signed(X, element_index(X), t)
    part = X[4:7, BLOCK:]
    codes, own = quantize_signed(part, element_index(part, (4, BLOCK), 3 * BLOCK), t)
    assert torch.equal(codes, whole[4:7, BLOCK:])
    assert torch.equal(own, scales[4:7, 1:])
