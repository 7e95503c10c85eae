"""Eigenvalues and eigenvectors of stacks of small symmetric matrices, compared with LAPACK's in double precision."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.jacobi import eigh
from tests.cuda.reference import INTERPRETED
from tests.gpu import never_waiting

# A few hundred rotations, each with the rounding of float32; LAPACK leaves as much.
ROUNDING = 2e-6
KINDS = ["random", "negative", "steep", "repeated", "clusters", "diagonal", "zero", "ones"]
# The interpreter is slow.
CASES = [(5, KINDS), (16, KINDS), (33, KINDS[1:3])] if INTERPRETED else [(k, KINDS) for k in (10, 20, 48, 64)]


def symmetric(X: Tensor) -> Tensor:
    """Return the symmetric part, the same to the last bit on both sides."""
    return (X + X.mT) / 2


def with_eigenvalues(values: Tensor) -> Tensor:
    """Return a random matrix with these eigenvalues."""
    Q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return symmetric((Q * values) @ Q.mT).float()


def matrix(kind: str, k: int) -> Tensor:
    """Return one (k, k) matrix of a kind."""
    index = torch.arange(k, dtype=torch.float64)
    if kind == "random":
        return symmetric(torch.randn(k, k))
    if kind == "negative":  # the zeros of the padding would come last
        return -with_eigenvalues(1 + index)
    if kind == "steep":
        return with_eigenvalues(torch.logspace(0, -12, k, dtype=torch.float64))
    if kind == "repeated":
        return with_eigenvalues(1.0 + (index > k / 2))
    if kind == "clusters":
        return with_eigenvalues(10.0 ** -(index // 4))
    return {"diagonal": torch.randn(k).diag(), "zero": torch.zeros(k, k), "ones": torch.ones(k, k)}[kind]


def check(A: Tensor) -> None:
    """Assert that values, vectors and their order agree with float64."""
    values, V = (x.double() for x in eigh(A))
    A = A.double()
    norm = torch.linalg.matrix_norm(A)
    size = torch.where(norm > 0, norm, 1).view(-1, 1, 1)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    assert (values.diff(dim=-1) >= 0).all()
    assert float(((values - torch.linalg.eigvalsh(A)).unsqueeze(1) / size).abs().max()) < ROUNDING
    assert float(torch.linalg.matrix_norm((A @ V - V * values.unsqueeze(1)) / size).max()) < ROUNDING
    assert float((V.mT @ V - eye).abs().max()) < ROUNDING


@pytest.mark.parametrize(("k", "kinds"), CASES)
def test_eigh_is_exact_to_float32_for_every_spectrum(k: int, kinds: list[str], device: torch.device) -> None:
    """One stack holds all kinds of spectra."""
    check(torch.stack([matrix(kind, k) for kind in kinds]).to(device))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_eigh_takes_entries_with_squares_out_of_range(size: float, device: torch.device) -> None:
    """1e-60 and 1e60 are not float32 numbers."""
    check((torch.stack([matrix("random", 6), matrix("steep", 6)]) * size).to(device))


def test_eigh_of_a_single_number_is_that_number(device: torch.device) -> None:
    """A (1, 1) matrix has no pair of rows."""
    values, V = eigh(torch.tensor([[[-3.0]]], device=device))
    assert values.tolist() == [[-3.0]]
    assert V.tolist() == [[[1.0]]]


def test_eigh_reads_only_the_lower_half(device: torch.device) -> None:
    """NaN above the diagonal changes nothing, as in torch."""
    A = matrix("random", 7).to(device)
    half = torch.where(torch.ones_like(A).tril() > 0, A, float("nan"))
    assert all(torch.equal(x, y) for x, y in zip(eigh(A[None]), eigh(half[None]), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_matrix_that_is_not_finite_gets_nan_and_leaves_the_others_alone(bad: float, device: torch.device) -> None:
    """The sweeps end, and the second matrix of the stack is as if it were alone."""
    A = torch.stack([matrix("random", 6)] * 2).to(device)
    A[0, 3, 2] = bad
    values, V = eigh(A)
    alone = eigh(A[1:])
    assert values[0].isnan().all()
    assert torch.equal(values[1:], alone[0])
    assert torch.equal(V[1:], alone[1])


@pytest.mark.gpu
def test_the_host_does_not_wait_for_eigh() -> None:
    """The number of sweeps is decided on the device."""
    A = torch.stack([matrix("random", 64)] * 12).to("cuda")
    eigh(A)
    with never_waiting():
        eigh(A)
