"""Eigenvalues and eigenvectors of stacks of small symmetric matrices."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.kernels import jacobi as eigen
from cosmos_optim.cuda.kernels.launch import INTERPRET
from tests.gpu import never_waiting

# A few hundred rotations, each with the rounding of float32; LAPACK leaves as much.
ROUNDING = 2e-6
KINDS = ["random", "negative", "steep", "repeated", "clusters", "diagonal", "zero", "ones"]
# The interpreter is slow.
CASES = [(5, KINDS), (16, KINDS), (33, KINDS[1:3])] if INTERPRET else [(k, KINDS) for k in (10, 20, 48, 64)]


def symmetric(X: Tensor) -> Tensor:
    """The symmetric part, the same to the last bit on both sides."""
    return (X + X.mT) / 2


def made_of(values: Tensor) -> Tensor:
    """A matrix with these eigenvalues."""
    Q = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return symmetric((Q * values) @ Q.mT).float()


def problem(kind: str, k: int) -> Tensor:
    """One matrix of a kind."""
    count = torch.arange(k, dtype=torch.float64)
    if kind == "random":
        return symmetric(torch.randn(k, k))
    if kind == "negative":  # the zeros of the padding would come last
        return -made_of(1 + count)
    if kind == "steep":
        return made_of(torch.logspace(0, -12, k, dtype=torch.float64))
    if kind == "repeated":
        return made_of(1.0 + (count > k / 2))
    if kind == "clusters":
        return made_of(10.0 ** -(count // 4))
    return {"diagonal": torch.randn(k).diag(), "zero": torch.zeros(k, k), "ones": torch.ones(k, k)}[kind]


def check(A: Tensor) -> None:
    """Values, vectors and order against float64."""
    values, V = (x.double() for x in eigen.eigh(A))
    A = A.double()
    norm = torch.linalg.matrix_norm(A)
    size = torch.where(norm > 0, norm, 1).view(-1, 1, 1)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    assert (values.diff(dim=-1) >= 0).all()
    assert float(((values - torch.linalg.eigvalsh(A)).unsqueeze(1) / size).abs().max()) < ROUNDING
    assert float(torch.linalg.matrix_norm((A @ V - V * values.unsqueeze(1)) / size).max()) < ROUNDING
    assert float((V.mT @ V - eye).abs().max()) < ROUNDING


@pytest.mark.parametrize(("k", "kinds"), CASES)
def test_every_kind(k: int, kinds: list[str], device: torch.device) -> None:
    """As exact as float32 allows, whatever the spectrum, in one stack."""
    check(torch.stack([problem(kind, k) for kind in kinds]).to(device))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_every_size(size: float, device: torch.device) -> None:
    """Squares of the entries need not be numbers."""
    check((torch.stack([problem("random", 6), problem("steep", 6)]) * size).to(device))


def test_one_column(device: torch.device) -> None:
    """There is nobody to meet."""
    values, V = eigen.eigh(torch.tensor([[[-3.0]]], device=device))
    assert values.tolist() == [[-3.0]]
    assert V.tolist() == [[[1.0]]]


def test_half_of_the_matrix_is_read(device: torch.device) -> None:
    """The lower one, as in torch."""
    A = problem("random", 7).to(device)
    half = torch.where(torch.ones_like(A).tril() > 0, A, float("nan"))
    assert all(torch.equal(x, y) for x, y in zip(eigen.eigh(A[None]), eigen.eigh(half[None]), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float, device: torch.device) -> None:
    """It ends, says so, and leaves the others alone."""
    A = torch.stack([problem("random", 6)] * 2).to(device)
    A[0, 3, 2] = bad
    values, V = eigen.eigh(A)
    alone = eigen.eigh(A[1:])
    assert values[0].isnan().all()
    assert torch.equal(values[1:], alone[0])
    assert torch.equal(V[1:], alone[1])


def test_the_algebra_asks_for_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fits; torch otherwise."""
    asked = []
    monkeypatch.setattr(eigen, "eigh", lambda A: asked.append(A.shape[-1]) or torch.linalg.eigh(A))
    for k in (eigen.MAX_COLUMNS, eigen.MAX_COLUMNS + 1):
        FusedAlgebra(8, 8).eigh(torch.eye(k, device=device)[None])
    assert asked == [eigen.MAX_COLUMNS]


@pytest.mark.gpu
def test_the_host_is_not_asked() -> None:
    """Not even for how many sweeps it takes."""
    A = torch.stack([problem("random", 64)] * 12).to("cuda")
    eigen.eigh(A)
    with never_waiting():
        eigen.eigh(A)
