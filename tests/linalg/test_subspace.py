"""The first basis, by plain torch and by the kernels."""

import pytest
import torch
from torch import Tensor

from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.kernels.launch import INTERPRET, power_of_two
from cosmos_optim.linalg import subspace
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.subspace import first_basis

# Single precision; the gaps below are wide enough for the steps that are made.
ANGLE = 1e-4
ORTHONORMAL = 2e-6
# Of the energy that r columns can hold: what a spectrum without a gap leaves after eight steps.
LOST = 1e-3
# An eigenvalue of a small matrix, in roundings of the largest: of the products, and of a dozen sweeps.
ROUNDINGS = 64
KERNELS = pytest.mark.skipif(not INTERPRET, reason="kernels on the CPU need Triton's interpreter")


def gradient(m: int, n: int, values: Tensor) -> Tensor:
    """A stack of one matrix with these singular values."""
    left, right = (torch.linalg.qr(torch.randn(1, s, len(values), dtype=torch.float64))[0] for s in (m, n))
    return ((left * values.double()) @ right.mT).float()


def gap(r: int, others: int) -> Tensor:
    """r singular values, and others far below."""
    return torch.cat([torch.linspace(2, 1, r), torch.full((others,), 0.01)])


def basis_of(kind: type[Algebra], G: Tensor, r: int) -> Tensor:
    """What a rule's start makes of it."""
    alg = kind(*G.shape[-2:])
    return first_basis(alg.load(list(G), torch.float32), r, alg, like=torch.zeros(len(G), G.shape[-1], r))


def check(U: Tensor, G: Tensor, directions: int) -> None:
    """Orthonormal columns, the first of them the leading eigenvectors in their order."""
    exact, first = torch.linalg.svd(G.double())[2][:, :directions].mT, U[..., :directions].double()
    assert float((U.mT @ U - torch.eye(U.shape[-1])).abs().max()) < ORTHONORMAL
    assert float(torch.linalg.vector_norm(exact - first @ (first.mT @ exact))) < ANGLE
    assert bool(((first * exact).sum(-2).abs() > 0.99).all())


@pytest.mark.parametrize(("m", "n", "r"), [(80, 90, 16), (20, 256, 5), (70, 512, 64)])
def test_up_to_a_gap(m: int, n: int, r: int) -> None:
    """Also of a matrix with fewer rows than columns are iterated."""
    G = gradient(m, n, gap(r, m - r))
    check(basis_of(Algebra, G, r), G, r)


@pytest.mark.parametrize("kind", [Algebra, pytest.param(FusedAlgebra, marks=KERNELS)])
@pytest.mark.parametrize(("m", "n"), [(6, 14), (14, 6), (9, 9), (1, 5)])
def test_eigenvectors_of_a_gram_matrix(kind: type[Algebra], m: int, n: int) -> None:
    """By the smaller of P'P and PP': the same eigenvalues, the same vectors where those are not 0."""
    P = torch.randn(3, m, n)
    values, vectors = kind(m, n).eigh_of_gram(P)
    exact, right = torch.linalg.eigh((P.mT @ P).double())
    assert float((values - exact).abs().max()) < ROUNDINGS * torch.finfo(torch.float32).eps * float(exact.max())
    k = min(m, n)
    turns = (vectors.double()[..., -k:] * right[..., -k:]).sum(-2).abs()
    assert float((turns - 1).abs().max()) < ANGLE
    assert bool(vectors.isfinite().all())


@pytest.mark.parametrize("rows", [5, 40])
def test_the_whole_space(rows: int) -> None:
    """SOAP's: the directions of the gradient first, then any that complete them."""
    G = gradient(rows, 60, torch.linspace(2, 1, rows))
    U = basis_of(Algebra, G, 60)
    check(U, G, rows)
    assert float(U[..., rows:].abs().max()) < 0.9  # a unit vector may lie in a dead input


@pytest.mark.parametrize("power", [0.5, 1, 2, 4])
def test_spectra_without_a_gap(power: float) -> None:
    """Where a few directions hold nearly everything, random columns are as good as dependent after one product."""
    values = torch.arange(1, 201, dtype=torch.float64) ** -power
    G = gradient(200, 220, values)
    held = float((G @ basis_of(Algebra, G, 32)).double().square().sum() / values[:32].square().sum())
    assert held > 1 - LOST


@KERNELS
@pytest.mark.parametrize(("values", "directions"), [(gap(16, 4), 16), (torch.tensor([3.0, 2.0, 1.0]), 3)])
def test_by_kernels(values: Tensor, directions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a column to spare, up to a gap, and with fewer directions than columns."""
    monkeypatch.setitem(subspace.START_STEPS, torch.float32, 3)  # the interpreter is slow
    G = gradient(24, 34, values)
    U = basis_of(FusedAlgebra, G, 16)
    check(U, G, directions)
    assert float(U.abs().max()) < 0.9  # a unit vector may lie in a dead input


@pytest.mark.parametrize("kind", [Algebra, pytest.param(FusedAlgebra, marks=KERNELS)])
def test_a_zero_gradient(kind: type[Algebra], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any orthonormal columns."""
    monkeypatch.setitem(subspace.START_STEPS, torch.float32, 1)
    check(basis_of(kind, torch.zeros(1, 24, 34), 16), torch.zeros(1, 24, 34), 0)


@pytest.mark.parametrize("r", [1, 8, 10, 16, 33, 48, 60, 64, 65, 120, 128])
def test_columns_to_spare(r: int) -> None:
    """Sixteen, and for the kernels never more than they compute anyway."""
    assert Algebra(256, 256).oversampling(r) == 16
    k = r + FusedAlgebra(256, 256).oversampling(r)
    assert power_of_two(k) == power_of_two(r)
    assert k in (r + 16, power_of_two(r))


def test_columns_are_made_once() -> None:
    """Thin ones; those of a whole space are not kept."""
    subspace._columns_on_host.cache_clear()
    for _ in range(2):
        basis_of(Algebra, torch.randn(2, 50, 44), 4)
        basis_of(Algebra, torch.randn(2, 20, 12), 4)
    found = subspace._columns_on_host.cache_info()
    assert (found.misses, found.hits) == (1, 1)
