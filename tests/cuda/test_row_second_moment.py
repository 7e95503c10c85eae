"""The second moment of the rows of an update: its kernels against float64, and its factors in the pass over W."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.gains import update_coefficients
from cosmos_optim.cuda.kernels.row_second_moment import row_gains, row_norm_sq
from cosmos_optim.cuda.kernels.split_precision import split_both
from cosmos_optim.cuda.kernels.update import update_
from cosmos_optim.cuda.pointer_list import MatrixList
from tests.cuda.reference import (
    BFLOAT16_PARTS,
    FLOAT32,
    add_parts,
    orthonormal_columns,
    relative_error,
    stacked,
    sum_of_parts,
)


def work_buffer(wide: bool, device: torch.device) -> Tensor:
    """Return a half-precision work buffer with padded rows, transposed if the matrices are wide."""
    B = torch.randn(2, 75, 56).half().to(device)[:, :, :50]
    return B.mT if wide else B


@pytest.mark.parametrize("wide", [False, True])
def test_row_squares_equal_the_sums_in_float64(wide: bool, device: torch.device) -> None:
    """Rows are contiguous or not."""
    X = work_buffer(wide, device)
    assert relative_error(row_norm_sq(X), X.double().square().sum(2)) < FLOAT32


@pytest.mark.parametrize("thin", [True, False])
@pytest.mark.parametrize("eps", [1e-2, 0.0])
def test_row_gains_equal_their_formula_in_float64(thin: bool, eps: float, device: torch.device) -> None:
    """v, the factors g and |g D|^2 of D = b B + P U', or of D = B; a row of zeros stays one."""
    m, n, r = 75, 50, 9
    U, norm_sq = orthonormal_columns(n, r, device).double(), torch.rand(2, 1, 1).to(device).double() + 1
    b, P, v = torch.rand(2, 1, 1).to(device), torch.randn(2, m, r).to(device), torch.rand(2, m, 1).to(device)
    buffer = torch.randn(2, m, n, dtype=torch.float64).to(device)
    buffer = buffer - (buffer @ U) @ U.mT
    buffer[:, 7], P[:, 7], v[:, 7] = 0, 0, 0
    D = b * buffer / norm_sq.sqrt() + P.double() @ U.mT if thin else buffer / norm_sq.sqrt()
    row_sq = D.square().sum(2, keepdim=True)
    B_row_sq = buffer.square().sum(2).float()
    found, gain, D_sq = row_gains(v, B_row_sq, norm_sq, n, 0.9, eps, **({"b": b, "P": P} if thin else {}))
    exact = 0.9 * v.double() + 0.1 * row_sq / n
    exact_gain = torch.where(exact.sqrt() + eps > 0, 1 / (exact.sqrt() + eps), 0.0)
    assert relative_error(found, exact) < FLOAT32
    assert relative_error(gain, exact_gain) < FLOAT32
    assert relative_error(add_parts(D_sq).flatten(), (exact_gain.square() * row_sq).sum((1, 2))) < FLOAT32


def test_a_row_with_a_squared_norm_below_zero_by_rounding_counts_as_zero(device: torch.device) -> None:
    """`overlap` subtracts two sums, so that a row inside of the basis may come out negative."""
    v, norm_sq = torch.zeros(1, 3, 1, device=device), torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    found, _, D_sq = row_gains(v, torch.tensor([[4.0, -1e-7, 0.0]], device=device), norm_sq, 4, 0.5, 1e-4)
    assert found.flatten().tolist() == [0.5, 0.0, 0.0]
    assert float(D_sq.sum()) >= 0


def test_factors_of_rows_reach_both_parts_of_an_update(device: torch.device) -> None:
    """g multiplies the thin part in `update_coefficients` and b B in `update_`."""
    m, n, r = 35, 21, 9
    P, BU, U = (torch.randn(2, k, r).to(device) for k in (m, m, n))
    b, norm_sq = torch.rand(2, 1, 1).to(device), torch.rand(2, 1, 1).to(device).double() + 1
    gain, D_sq = torch.rand(2, m, 1).to(device) + 0.5, torch.rand(2, 33).to(device).double()
    given = {"P": P, "BU": BU, "row_gain": gain, "other_sq": D_sq, "target_norm": 9.0}
    coefficients, parts = update_coefficients(b, norm_sq, 0.01, 0.9, torch.ones(2, device=device), **given)
    assert parts is not None
    W = MatrixList.of([torch.randn(m, n).to(device) for _ in range(2)])
    before, B = stacked(W, torch.float64), torch.randn(2, m, 24).half().to(device)[:, :, :n]
    update_(W, B, parts, split_both(U)[1], coefficients, None, None, gain)
    size = 0.01 * 9 / add_parts(D_sq).sqrt()
    thin = gain.double() * (size * b / norm_sq.sqrt() * BU - size * P)
    assert relative_error(sum_of_parts(parts, r), thin) < BFLOAT16_PARTS
    exact = 0.9 * before - gain.double() * size * b / norm_sq.sqrt() * B.double() + thin @ U.double().mT
    assert relative_error(stacked(W), exact) < BFLOAT16_PARTS
