"""Products of matrices with thin factors, and the passes over momentum, residual and parameters, against float64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.momentum import momentum_
from cosmos_optim.cuda.kernels.project import overlap, project
from cosmos_optim.cuda.kernels.project_transposed import project_transposed
from cosmos_optim.cuda.kernels.residual import residual
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE, split, split_both
from cosmos_optim.cuda.kernels.update import update_
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.engine.rounding import stochastic_bfloat16
from tests.cuda.reference import (
    BFLOAT16,
    BFLOAT16_PARTS,
    FLOAT16,
    FLOAT32,
    add_parts,
    orthonormal_columns,
    relative_error,
    stacked,
    sum_of_parts,
)

PRODUCT = 1e-6  # two float16 parts hold 22 bits; the sum is float32's
LERP = 1e-6  # two float32 operations

# rows, columns, dtype, storage: rows of 16-byte multiples, of odd lengths, fewer than a tile, transposed storage.
Case = tuple[int, int, torch.dtype, str]
CASES: list[Case] = [
    (24, 32, torch.float32, "rows"),
    (35, 21, torch.float32, "rows"),
    (18, 38, torch.float32, "rows"),
    (20, 24, torch.float32, "columns"),
    (20, 19, torch.bfloat16, "rows"),
]
SIZES = [1e-30, 1.0, 1e18]


def matrices(
    m: int, n: int, dtype: torch.dtype, storage: str, device: torch.device, size: float = 1.0
) -> MatrixList:  # fmt: skip
    """Return two random (m, n) matrices, stored by rows or by columns."""
    shape = (m, n) if storage == "rows" else (n, m)
    drawn = [(torch.randn(shape) * size).to(device, dtype) for _ in range(2)]
    return MatrixList.of(drawn if storage == "rows" else [x.mT for x in drawn])


def wide_parts(X: Tensor) -> Tensor:
    """Return a thin factor in bfloat16 parts."""
    return split_both(X)[1]


def max_abs(X: MatrixList) -> Tensor:
    """Return the largest |entry| of each matrix."""
    return stacked(X).abs().amax((1, 2))


def test_the_two_parts_of_a_factor_add_up_to_it(device: torch.device) -> None:
    """float16 parts hold 22 bits, bfloat16 parts 16; the columns of the padding are zero."""
    U = torch.randn(2, 19, 5).to(device) * 1e-3
    half, wide = split_both(U)
    for parts, exact, tolerance in ((half, BASIS_SCALE * U, 2**-20), (wide, U, 2**-14)):
        assert parts.shape == (2, 2, 19, 16)
        assert relative_error(sum_of_parts(parts, 5), exact) < tolerance
        assert not parts[..., 5:].any()


def test_a_given_largest_entry_scales_the_parts_by_a_power_of_two(device: torch.device) -> None:
    """The largest entry ends in [2^9, 2^10), and the first part is the rounded product."""
    U = torch.randn(2, 19, 5).to(device) * 1e-3
    u_max = U.abs().amax((1, 2))
    parts = split(U, u_max)
    scaled = torch.ldexp(U, 10 - torch.frexp(u_max.view(-1, 1, 1)).exponent)
    assert all(2**9 <= x < 2**10 for x in scaled.abs().amax((1, 2)).tolist())
    assert torch.equal(parts[0, ..., :5], scaled.half())
    assert torch.equal(parts[1, ..., :5], (scaled - scaled.half().float()).half())


@pytest.mark.parametrize(("k", "r"), [(20, 4), (75, 9), (70, 16)])
def test_split_both_makes_the_same_float16_parts_as_split(k: int, r: int, device: torch.device) -> None:
    """Two kernels, one formula."""
    U = orthonormal_columns(k, r, device)
    assert torch.equal(split_both(U)[0], split(U))


@pytest.mark.parametrize("case", CASES)
def test_project_equals_the_product_in_float64(case: Case, device: torch.device) -> None:
    """Compute X U for every way in which rows are stored."""
    X = matrices(*case, device)
    U = orthonormal_columns(X.shape[1], 9, device)
    Y = project(X, split(U), 9, max_abs(X))
    assert relative_error(Y, stacked(X, torch.float64) @ U.double()) < PRODUCT


@pytest.mark.parametrize("case", CASES)
def test_project_transposed_equals_the_product_in_float64(case: Case, device: torch.device) -> None:
    """Compute X'Y for a Y of small numbers."""
    X = matrices(*case, device)
    Y = torch.randn(2, X.shape[0], 9).to(device) * 1e-7
    y_max = Y.abs().amax((1, 2))
    C = project_transposed(X, split(Y, y_max), y_max, 9, max_abs(X))
    assert relative_error(C, stacked(X, torch.float64).mT @ Y.double()) < PRODUCT


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_any_size_keep_their_precision(size: float, device: torch.device) -> None:
    """Neither 1e-30 nor 1e18 is lost in X U, in the residual or in its squared norm."""
    X, M = (matrices(20, 18, torch.float32, "rows", device, size) for _ in range(2))
    U = orthonormal_columns(18, 4, device)
    half, wide = split_both(U)
    assert relative_error(project(X, half, 4, max_abs(X)), stacked(X, torch.float64) @ U.double()) < PRODUCT
    _, MU, block_max = momentum_(M, X, 0.1, (half, wide), 4, None, max_abs(X))
    minus = wide_parts(-MU)
    buffer, norm_sq, scale = residual(M, X, 1.0, 0.0, minus, wide, block_max)
    N = stacked(M, torch.float64)
    exact = N - (N @ U.double()) @ U.double().mT
    assert relative_error(buffer.double() / scale.double(), exact) < FLOAT16
    found = add_parts(norm_sq) / scale.double().square()
    assert relative_error(found, exact.square().sum((1, 2), keepdim=True)) < BFLOAT16_PARTS


@pytest.mark.parametrize("case", CASES)
def test_momentum_updates_m_and_returns_both_products_and_the_largest_entry(case: Case, device: torch.device) -> None:
    """Without a basis it makes the same M."""
    G, M, alone = (matrices(*case, device) for _ in range(3))
    for x, y in zip(alone.tensors, M.tensors, strict=True):
        x.copy_(y)
    before, gradient, U = stacked(M, torch.float64), stacked(G), orthonormal_columns(G.shape[1], 9, device)
    GU, MU, block_max = momentum_(M, G, 0.1, split_both(U), 9, None, max_abs(G))
    exact = before + 0.1 * (gradient.double() - before)
    assert relative_error(stacked(M), exact) < (LERP if M.dtype is torch.float32 else BFLOAT16)
    assert relative_error(GU, gradient.double() @ U.double()) < PRODUCT
    assert relative_error(MU, stacked(M, torch.float64) @ U.double()) < BFLOAT16_PARTS
    assert torch.equal(block_max.amax(1), torch.maximum(max_abs(G), max_abs(M)))
    momentum_(alone, G, 0.1, None, 1, None)
    assert torch.equal(stacked(alone), stacked(M))


def test_a_skipped_step_writes_neither_momentum_nor_parameters(device: torch.device) -> None:
    """The flag is read on the device."""
    skip = torch.tensor(True, device=device)
    G, M, W = (matrices(20, 18, torch.float32, "rows", device) for _ in range(3))
    M_before, W_before = stacked(M), stacked(W)
    momentum_(M, G, 0.1, split_both(orthonormal_columns(18, 4, device)), 4, skip, max_abs(G))
    B = torch.ones(2, 20, 24, dtype=torch.float16, device=device)[:, :, :18]
    update_(W, B, None, None, torch.ones(2, 2, device=device), skip)
    assert torch.equal(stacked(M), M_before)
    assert torch.equal(stacked(W), W_before)


@pytest.mark.parametrize("case", CASES[:4])
@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.9, 0.1)])
def test_residual_equals_its_formula_in_float64(case: Case, a: float, b: float, device: torch.device) -> None:
    """The buffer holds c (N - N U U') with N = a M + b G, always tall, and comes with its squared norm."""
    M, G = matrices(*case, device), matrices(*case, device)
    (m, n), U = M.shape, orthonormal_columns(M.shape[1], 9, device)
    N = a * stacked(M, torch.float64) + b * stacked(G, torch.float64)
    minus_NU, block_max = -(N @ U.double()), torch.maximum(max_abs(M), max_abs(G))[:, None]
    parts = wide_parts(minus_NU.float()), wide_parts(U)
    buffer, norm_sq, scale = residual(M, G, a, b, *parts, block_max)
    exact = N + minus_NU @ U.double().mT
    assert buffer.shape == (2, max(m, n), min(m, n))
    assert buffer.stride(1) % 8 == 0
    assert relative_error((buffer if m >= n else buffer.mT).double() / scale.double(), exact) < FLOAT16
    found = add_parts(norm_sq) / scale.double().square()
    assert relative_error(found, exact.square().sum((1, 2), keepdim=True)) < BFLOAT16_PARTS


@pytest.mark.parametrize("case", CASES)
def test_update_equals_its_formula_in_float64(case: Case, device: torch.device) -> None:
    """Compute W <- decay W - gain B + thin U' with coefficients of each matrix."""
    W = matrices(*case, device)
    m, n = W.shape
    before, U, P = stacked(W, torch.float64), orthonormal_columns(n, 9, device), torch.randn(2, m, 9).to(device)
    B = torch.randn(2, max(m, n), 48, device=device).half()[:, :, : min(m, n)]
    coefficients = torch.tensor([[0.9, 0.5], [0.8, -2.0]], device=device)
    update_(W, B, wide_parts(P), wide_parts(U), coefficients, None)
    decay, b = coefficients.double().view(2, 2, 1, 1).unbind(1)
    exact = decay * before - b * (B if m >= n else B.mT).double() + P.double() @ U.double().mT
    assert relative_error(stacked(W), exact) < (BFLOAT16_PARTS if W.dtype is torch.float32 else BFLOAT16)


def test_update_draws_the_same_stochastic_rounding_as_the_engine(device: torch.device) -> None:
    """A parameter must not depend on whether a kernel or torch rounds it."""
    W = MatrixList.of([torch.randn(20, 18).to(device, torch.bfloat16) for _ in range(2)])
    before = stacked(W)
    B = torch.randn(2, 20, 24, device=device).half()[:, :, :18]
    update_(W, B, None, None, torch.tensor([[1.0, 0.01]] * 2, device=device), None,
            torch.tensor([3, 4], dtype=torch.int32, device=device))  # fmt: skip
    for i, seed in enumerate((3, 4)):
        expected = stochastic_bfloat16(before[i] - 0.01 * B[i].float(), torch.tensor(seed, device=device))
        # A fused multiply-add may differ from two roundings in the last bit, which then draws differently.
        assert (W.tensors[i] == expected).float().mean() > 0.99


@pytest.mark.parametrize("wide", [False, True])
def test_overlap_returns_the_part_inside_a_basis_and_the_squared_norm_outside(wide: bool, device: torch.device) -> None:
    """Compute B U and |B - B U U'|^2, in total and by rows."""
    B = torch.randn(2, 37, 24, device=device).half()[:, :, :20]
    X = B.mT if wide else B
    U = orthonormal_columns(X.shape[2], 5, device)
    BU, outside_sq, rows = overlap(X, split(U), 5)
    exact = X.double() @ U.double()
    assert relative_error(BU, exact) < PRODUCT
    exact_rows = X.double().square().sum(2) - exact.square().sum(2)
    assert relative_error(rows, exact_rows) < FLOAT32
    assert relative_error(add_parts(outside_sq).flatten(), exact_rows.sum(1)) < FLOAT32


@pytest.mark.gpu
@pytest.mark.parametrize("r", [5, 16, 32, 64, 128])
@pytest.mark.parametrize("wide", [False, True])
def test_overlap_is_the_same_every_time(wide: bool, r: int) -> None:
    """These matrices have many tiles, some of which are loaded while others are multiplied."""
    device = torch.device("cuda")
    B = torch.randn(3, 1024, 512, device=device).half()
    X = B.mT if wide else B
    U = torch.linalg.qr(torch.randn(3, X.shape[2], r, device=device))[0].contiguous()
    first = overlap(X, split(U), r)
    assert relative_error(first[0], X.double() @ U.double()) < FLOAT16
    for _ in range(30):
        assert all(torch.equal(x, y) for x, y in zip(overlap(X, split(U), r), first, strict=True))
