"""Orthonormal columns, above all of square matrices (B, n, n), SOAP's bases, against torch's QR in float64."""

import math

import pytest
import torch

from cosmos_optim.linalg import cholesky_qr
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.cholesky_qr import (
    fill_missing_directions,
    inverse_factor,
    orthonormalize,
    orthonormalize_square,
)
from cosmos_optim.linalg.subspace import first_basis

N = 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decades", [1, 5, 12])
def test_orthonormalize_square_equals_householder_qr(
    decades: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take a power step near the eigenvectors of a wide spectrum; three matrices, in stacks of two and one."""
    monkeypatch.setattr(cholesky_qr, "FACTORIZED_BYTES", 2 * 8 * N * N)
    torch.manual_seed(0)
    V = torch.linalg.qr(torch.randn(3, N, N, dtype=torch.float64))[0]
    L = (V * torch.logspace(0, -decades, N, dtype=torch.float64)) @ V.mT
    U = torch.linalg.qr(V + 1e-3 * torch.randn(3, N, N, dtype=torch.float64))[0]
    Y = (L @ U).to(dtype)
    exact, R = torch.linalg.qr(Y.double())
    exact = exact * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    found = orthonormalize_square(Y, U.to(dtype))
    rounding = N * torch.finfo(dtype).eps
    assert found.dtype is dtype
    assert (found.mT @ found - torch.eye(N, dtype=dtype)).abs().max() < rounding
    # Both factorize in double precision, and its rounding grows with the condition of Y.
    assert (found.double() - exact).abs().max() < max(rounding, N * torch.finfo(torch.float64).eps * 10**decades)


@pytest.mark.parametrize(("part", "kept"), [(1e-2, True), (1e-4, False)])
def test_a_column_is_replaced_if_less_than_a_thousandth_of_it_is_independent(part: float, kept: bool) -> None:
    """The root of the shift of 3 columns is 2e-3: below it, rounding would choose the column's direction."""
    eye = torch.eye(10)
    Y = torch.stack([eye[0], eye[0] + part * eye[1], eye[2]], dim=-1)
    expected = torch.stack([eye[0], eye[1] if kept else eye[6], eye[2]], dim=-1)
    found = orthonormalize(Y, lambda A, B: A.mT @ B, fallback=eye[:, 5:8])
    assert (found - expected).abs().max() < 1e-5  # a rounding of Y, over `part`


def test_a_matrix_of_nan_keeps_its_basis_and_does_not_affect_others() -> None:
    """Factorize a matrix of NaN together with a diagonal one."""
    old = torch.eye(5).repeat(2, 1, 1)
    Y = torch.stack([torch.full((5, 5), math.nan), torch.diag(torch.arange(1.0, 6.0))])
    assert torch.equal(orthonormalize_square(Y, old), old)


@pytest.mark.parametrize("n", [3, 8, 9, 16, 31, 40, 64])
def test_inverse_factor_by_blocks_equals_the_one_without_blocks(n: int) -> None:
    """Use sizes that are multiples of the block, and sizes that are not."""
    torch.manual_seed(0)
    X = torch.randn(3, 2 * n, n, dtype=torch.float64)
    A = X.mT @ X / n
    (W, ok), (whole, _) = inverse_factor(A, block=8), inverse_factor(A)
    assert ok.all()
    assert torch.equal(W, W.tril())
    rounding = torch.finfo(torch.float64).eps * torch.linalg.cond(A).max() * n  # n terms in each sum
    assert (W - whole).abs().max() < rounding
    assert (W @ A @ W.mT - torch.eye(n, dtype=torch.float64)).abs().max() < rounding


@pytest.mark.parametrize("index", [0, 9, 30])
def test_inverse_factor_flags_only_the_matrix_that_is_not_positive_definite(index: int) -> None:
    """Put the negative pivot into the first, a middle and the last block."""
    A = torch.eye(31, dtype=torch.float64).repeat(3, 1, 1)
    A[1, index, index] = -1.0
    W, ok = inverse_factor(A, block=8)
    assert ok.tolist() == [True, False, True]
    assert W.isfinite().all()
    assert torch.equal(W[0], A[0])


@pytest.mark.parametrize("dead", [0, 1, 5])
@pytest.mark.parametrize("rank", [3, N])
def test_dead_inputs_do_not_freeze_the_rest_of_the_basis(dead: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare ten steps with Householder QR, with inputs that never have a gradient."""
    monkeypatch.setattr(cholesky_qr, "inverse_factor", lambda A, block=8: inverse_factor(A, block))
    torch.manual_seed(0)
    spectrum = torch.randn(N, N) * torch.logspace(0, -3, N)
    live = torch.arange(N) >= dead

    def gradient() -> torch.Tensor:
        return torch.randn(2, 96, rank) @ spectrum[:rank] * live

    G = gradient()
    U = first_basis(G, N, Algebra(96, N), like=torch.empty(2, N, N))
    L = G.mT @ G
    for _ in range(10):
        G = gradient()
        L = 0.9 * L + 0.1 * G.mT @ G
        Y = fill_missing_directions(L @ U, U)
        old, U = U, orthonormalize_square(Y, U)
        assert not (old == U).all(-1).all(-1).any()
        assert (U.mT @ U - torch.eye(N)).abs().max() < N * torch.finfo(torch.float32).eps
        exact = torch.linalg.qr(Y.double())[0]
        assert ((U.double() * exact).sum(-2).abs() - 1).abs().max() < N * torch.finfo(torch.float32).eps


def test_a_matrix_too_ill_conditioned_for_two_passes_keeps_its_basis() -> None:
    """Factorize Kahan's matrix, with pivots that do not show that its columns are nearly dependent."""
    n, c = 40, math.cos(0.78)
    Y = torch.eye(n) - c * torch.ones(n, n).triu(1)
    Y = math.sin(0.78) ** torch.arange(n)[:, None] * Y
    old = torch.eye(n)
    Q = orthonormalize_square(Y[None], old[None])[0]
    assert torch.equal(Q, old)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [300, 1000])
def test_orthonormalize_square_on_a_gpu_equals_it_on_a_cpu(n: int) -> None:
    """Use matrices of several blocks."""
    torch.manual_seed(0)
    V = torch.linalg.qr(torch.randn(2, n, n, dtype=torch.float64))[0]
    Y = (V * torch.logspace(0, -6, n, dtype=torch.float64)) @ V.mT @ (V + 1e-3 * torch.randn(2, n, n))
    old = torch.eye(n).repeat(2, 1, 1)
    found = orthonormalize_square(Y.float().cuda(), old.cuda()).cpu()
    # A rounding of Y's largest entries in double precision counts 1e6 times in its smallest columns.
    assert (found - orthonormalize_square(Y.float(), old)).abs().max() < n * torch.finfo(torch.float64).eps * 1e6 + 1e-7
    assert (found.mT @ found - torch.eye(n)).abs().max() < n * torch.finfo(torch.float32).eps
