"""Orthonormal columns and Gram matrices of thin factors, compared with double precision."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.thin_qr import MAX_COLUMNS, orthonormalize, thin_product_parts
from tests.cuda.reference import FLOAT32, orthonormal_columns, relative_error

ORTHONORMAL = 3e-6  # the largest entry of Q'Q - I: one float32 rounding in each of a few dozen products


def exact_qr(Y: Tensor) -> Tensor:
    """Return the Q of a QR decomposition with a positive diagonal, in double precision."""
    Q, R = torch.linalg.qr(Y.double())
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def deviation(Q: Tensor) -> float:
    """Return the largest |entry| of Q'Q - I."""
    eye = torch.eye(Q.shape[-1], dtype=torch.float64, device=Q.device)
    return float((Q.double().mT @ Q.double() - eye).abs().max())


def test_the_product_of_thin_factors_is_as_exact_as_float32(device: torch.device) -> None:
    """Compute A'B for factors of very different sizes."""
    A, B = torch.randn(2, 150, 9).to(device), torch.randn(2, 150, 9).to(device) * 1e-9
    product = thin_product_parts(A, B).sum(1)[:, :9, :9]
    assert relative_error(product, A.double().mT @ B.double()) < FLOAT32


@pytest.mark.parametrize("spread", [0, -8])
@pytest.mark.parametrize("r", [7, 8, 200])
def test_orthonormal_equals_qr_in_float64(r: int, spread: int, device: torch.device) -> None:
    """The norms of the columns span the spectrum of a gradient. Ranks above MAX_COLUMNS run in torch."""
    assert (r > MAX_COLUMNS) == (r == 200)
    k = 150 if r < 100 else 300
    Y = (torch.randn(2, k, r) * torch.logspace(0, spread, r)).to(device)
    Q = orthonormalize(Y, torch.zeros_like(Y))
    assert deviation(Q) < ORTHONORMAL
    # A rounding of Y turns its columns by as much as the condition of the scaled columns, 10 for these wide factors.
    assert relative_error(Q, exact_qr(Y)) < (FLOAT32 if r < 100 else 10 * FLOAT32)


@pytest.mark.parametrize("angle", [1e-1, 1e-2, 5e-3])
def test_columns_that_nearly_agree_become_orthonormal(angle: float, device: torch.device) -> None:
    """At conditions up to 200 the second pass begins far from the identity; beyond, the fallback replaces columns."""
    Y = (torch.randn(2, 60, 1) + angle * torch.randn(2, 60, 8)).to(device)
    Q = orthonormalize(Y, orthonormal_columns(60, 8, device))
    assert deviation(Q) < ORTHONORMAL
    # A change of Y by rounding turns such columns by 1 / angle times as much.
    assert relative_error(Q, exact_qr(Y)) < FLOAT32 / angle


@pytest.mark.parametrize("r", [6, 130])
def test_a_column_without_a_direction_takes_that_of_the_fallback(r: int, device: torch.device) -> None:
    """A zero column, and one that depends on others; the other matrices of the stack are not changed by them."""
    Y = torch.randn(3, 4 * r, r).to(device)
    fallback = torch.linalg.qr(torch.randn(3, 4 * r, r))[0].contiguous().to(device)
    Y[1, :, 3] = 0
    Y[2, :, 4] = 2 * Y[2, :, 0] - Y[2, :, 1]
    expected = Y.double()
    expected[1, :, 3], expected[2, :, 4] = fallback[1, :, 3].double(), fallback[2, :, 4].double()
    Q = orthonormalize(Y, fallback)
    assert deviation(Q) < ORTHONORMAL
    # QR takes the columns in order, so that those behind a replaced one are orthogonal to its replacement.
    assert relative_error(Q, exact_qr(expected)) < FLOAT32


@pytest.mark.parametrize("r", [6, 130])
def test_a_matrix_of_nan_keeps_the_fallback(r: int, device: torch.device) -> None:
    """The other matrix of the stack is not changed by it."""
    Y = torch.randn(2, 4 * r, r).to(device)
    fallback = torch.linalg.qr(torch.randn(2, 4 * r, r))[0].contiguous().to(device)
    Y[1, 5, 2] = float("nan")
    Q = orthonormalize(Y, fallback)
    assert torch.equal(Q[1:], fallback[1:])
    assert relative_error(Q[:1], exact_qr(Y[:1])) < FLOAT32
