"""Orthonormal columns of square matrices, which SOAP's bases are."""

import math

import pytest
import torch

from cosmos_optim.linalg import cholesky_qr as orthonormal
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.cholesky_qr import by_cholesky, completed, inverse_factor
from cosmos_optim.linalg.subspace import first_basis

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


@pytest.mark.parametrize("n", [3, 8, 9, 16, 31, 40, 64])
def test_factors_by_blocks_are_those_of_the_library(n: int) -> None:
    """Of any size, a multiple of the blocks or not."""
    torch.manual_seed(0)
    X = torch.randn(3, 2 * n, n, dtype=torch.float64)
    A = X.mT @ X / n
    (W, ok), (whole, _) = inverse_factor(A, leaf=8), inverse_factor(A)
    assert ok.all()
    assert torch.equal(W, W.tril())
    rounding = torch.finfo(torch.float64).eps * torch.linalg.cond(A).max() * n  # as long as sums, as steep as A
    assert (W - whole).abs().max() < rounding
    assert (W @ A @ W.mT - torch.eye(n, dtype=torch.float64)).abs().max() < rounding


@pytest.mark.parametrize("where", [0, 9, 30])
def test_a_matrix_that_is_not_positive_is_named(where: int) -> None:
    """Whichever block finds it, and the others are factorized."""
    A = torch.eye(31, dtype=torch.float64).repeat(3, 1, 1)
    A[1, where, where] = -1.0
    W, ok = inverse_factor(A, leaf=8)
    assert ok.tolist() == [True, False, True]
    assert W.isfinite().all()
    assert torch.equal(W[0], A[0])


@pytest.mark.parametrize("dead", [0, 1, 5])
@pytest.mark.parametrize("rank", [3, N])
def test_a_basis_turns_beside_dead_inputs(dead: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step, as by reflections: what lacks a gradient must not freeze the others' basis."""
    monkeypatch.setattr(orthonormal, "inverse_factor", lambda A, leaf=8: inverse_factor(A, leaf))
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
        Y = completed(L @ U, U)
        old, U = U, by_cholesky(Y, U)
        assert not (old == U).all(-1).all(-1).any()
        assert (U.mT @ U - torch.eye(N)).abs().max() < N * torch.finfo(torch.float32).eps
        exact = torch.linalg.qr(Y.double())[0]
        assert ((U.double() * exact).sum(-2).abs() - 1).abs().max() < N * torch.finfo(torch.float32).eps


def test_a_matrix_too_steep_for_two_passes_keeps_its_basis() -> None:
    """Kahan's: small pivots do not show that its columns are nearly dependent."""
    n, c = 40, math.cos(0.78)
    Y = torch.eye(n) - c * torch.ones(n, n).triu(1)
    Y = math.sin(0.78) ** torch.arange(n)[:, None] * Y
    old = torch.eye(n)
    Q = by_cholesky(Y[None], old[None])[0]
    assert torch.equal(Q, old)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [300, 1000])
def test_a_gpu_factorizes_as_a_cpu_does(n: int) -> None:
    """Matrices of several blocks."""
    torch.manual_seed(0)
    V = torch.linalg.qr(torch.randn(2, n, n, dtype=torch.float64))[0]
    Y = (V * torch.logspace(0, -6, n, dtype=torch.float64)) @ V.mT @ (V + 1e-3 * torch.randn(2, n, n))
    old = torch.eye(n).repeat(2, 1, 1)
    found = by_cholesky(Y.float().cuda(), old.cuda()).cpu()
    # A rounding of Y's largest entries in double precision counts 1e6 times in its smallest columns.
    assert (found - by_cholesky(Y.float(), old)).abs().max() < n * torch.finfo(torch.float64).eps * 1e6 + 1e-7
    assert (found.mT @ found - torch.eye(n)).abs().max() < n * torch.finfo(torch.float32).eps
