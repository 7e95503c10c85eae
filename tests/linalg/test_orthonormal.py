"""Orthonormal columns of square matrices, which SOAP's bases are."""

import math

import pytest
import torch

from cosmos_optim.linalg import orthonormal
from cosmos_optim.linalg.orthonormal import by_cholesky

N = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decades", [1, 5, 12])
def test_by_cholesky_as_by_reflections(decades: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power step near the eigenvectors of a spectrum that wide, signs aside; two matrices and then one at a time."""
    monkeypatch.setattr(orthonormal, "STACK_BYTES", 2 * 8 * N * N)
    torch.manual_seed(0)
    V = torch.linalg.qr(torch.randn(3, N, N, dtype=torch.float64))[0]
    L = (V * torch.logspace(0, -decades, N, dtype=torch.float64)) @ V.mT
    U = torch.linalg.qr(V + 1e-3 * torch.randn(3, N, N, dtype=torch.float64))[0]
    Y = (L @ U).to(dtype)
    exact, R = torch.linalg.qr(Y.double())
    exact = exact * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    found = by_cholesky(Y, U.to(dtype))
    rounding = N * torch.finfo(dtype).eps
    assert found.dtype is dtype
    assert (found.mT @ found - torch.eye(N, dtype=dtype)).abs().max() < rounding
    # Both factorize in double precision, and its rounding grows with the condition of Y.
    assert (found.double() - exact).abs().max() < max(rounding, N * torch.finfo(torch.float64).eps * 10**decades)


def test_what_cannot_be_factorized_keeps_its_basis() -> None:
    """A matrix that is not a number, beside one that is."""
    old = torch.eye(5).repeat(2, 1, 1)
    Y = torch.stack([torch.full((5, 5), math.nan), torch.diag(torch.arange(1.0, 6.0))])
    assert torch.equal(by_cholesky(Y, old), old)
