"""The first basis of the tracked subspace, with plain torch; tests/cuda tests the same with kernels.

Shapes: G (B, m, n) gradient, U (B, n, r) basis.
"""

import pytest
import torch
from torch import Tensor

from cosmos_optim.linalg import subspace
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.subspace import NOISE, first_basis, power_step

# Single precision. The gaps of the spectra are wide enough for START_STEPS power steps.
ANGLE = 1e-4
ORTHONORMAL = 2e-6
# Share of the energy that r columns can hold and that is missing after eight steps if the spectrum has no gap.
LOST = 1e-3
# Error of the eigenvalues of a small matrix, in roundings of the largest one: from products and a dozen Jacobi sweeps.
ROUNDINGS = 64


def gradient(m: int, n: int, values: Tensor) -> Tensor:
    """Return a stack of one m x n matrix with these singular values."""
    left, right = (torch.linalg.qr(torch.randn(1, s, len(values), dtype=torch.float64))[0] for s in (m, n))
    return ((left * values.double()) @ right.mT).float()


def gap(r: int, others: int) -> Tensor:
    """Return r singular values between 2 and 1, and `others` far below."""
    return torch.cat([torch.linspace(2, 1, r), torch.full((others,), 0.01)])


def basis_of(G: Tensor, r: int) -> Tensor:
    """Return the basis that a rule starts with."""
    return first_basis(G, r, Algebra(*G.shape[-2:]), like=torch.zeros(len(G), G.shape[-1], r))


def check(U: Tensor, G: Tensor, directions: int) -> None:
    """Assert that U is orthonormal and begins with the leading eigenvectors in their order."""
    exact, first = torch.linalg.svd(G.double())[2][:, :directions].mT, U[..., :directions].double()
    assert float((U.mT @ U - torch.eye(U.shape[-1])).abs().max()) < ORTHONORMAL
    assert float(torch.linalg.vector_norm(exact - first @ (first.mT @ exact))) < ANGLE
    assert bool(((first * exact).sum(-2).abs() > 0.99).all())


@pytest.mark.parametrize(("m", "n", "r"), [(80, 90, 16), (20, 256, 5), (70, 512, 64)])
def test_the_first_basis_spans_the_leading_eigenvectors_up_to_a_gap(m: int, n: int, r: int) -> None:
    """Include a matrix with fewer rows than the iteration has columns."""
    G = gradient(m, n, gap(r, m - r))
    check(basis_of(G, r), G, r)


@pytest.mark.parametrize(("m", "n"), [(6, 14), (14, 6), (9, 9), (1, 5)])
def test_eigh_gram_by_the_smaller_side_equals_the_eigenvectors_of_the_gram_matrix(m: int, n: int) -> None:
    """Compare all eigenvalues, and the vectors of those that are not 0."""
    P = torch.randn(3, m, n)
    values, vectors = Algebra(m, n).eigh_gram(P)
    exact, right = torch.linalg.eigh((P.mT @ P).double())
    assert float((values - exact).abs().max()) < ROUNDINGS * torch.finfo(torch.float32).eps * float(exact.max())
    k = min(m, n)
    turns = (vectors.double()[..., -k:] * right[..., -k:]).sum(-2).abs()
    assert float((turns - 1).abs().max()) < ANGLE
    assert bool(vectors.isfinite().all())


@pytest.mark.parametrize("rows", [5, 40])
def test_a_whole_basis_begins_with_the_directions_of_the_gradient(rows: int) -> None:
    """Use r = n, as SOAP does: the other columns may be any that complete the basis."""
    G = gradient(rows, 60, torch.linspace(2, 1, rows))
    U = basis_of(G, 60)
    check(U, G, rows)
    assert float(U[..., rows:].abs().max()) < 0.9  # a unit vector could be a dead input


@pytest.mark.parametrize("power", [0.5, 1, 2, 4])
def test_a_spectrum_without_a_gap_loses_little_energy(power: float) -> None:
    """Include steep spectra: if a few directions hold nearly everything, one product makes random columns dependent."""
    values = torch.arange(1, 201, dtype=torch.float64) ** -power
    G = gradient(200, 220, values)
    held = float((G @ basis_of(G, 32)).double().square().sum() / values[:32].square().sum())
    assert held > 1 - LOST


def test_a_zero_gradient_gives_orthonormal_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any orthonormal columns will do."""
    monkeypatch.setitem(subspace.START_STEPS, torch.float32, 1)
    check(basis_of(torch.zeros(1, 24, 34), 16), torch.zeros(1, 24, 34), 0)


def test_random_columns_are_made_once_for_each_size() -> None:
    """Only thin ones are cached; those of a whole space are too large."""
    subspace._columns_on_host.cache_clear()
    for _ in range(2):
        basis_of(torch.randn(2, 50, 44), 4)
        basis_of(torch.randn(2, 20, 12), 4)
    found = subspace._columns_on_host.cache_info()
    assert (found.misses, found.hits) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_without_gradient_stay_while_the_others_turn(dtype: torch.dtype) -> None:
    """After a gradient of rank 3 and one of rank 2 with other rows, three of eight columns still hold nothing.

    The new basis has both row spaces, and what the old one had beside them: nothing comes from rounding.
    """
    first, second = (torch.randn(1, 40, k, dtype=dtype) @ torch.randn(1, k, 60, dtype=dtype) for k in (3, 2))
    alg = Algebra(40, 60)
    U = first_basis(first, 8, alg, like=torch.zeros(1, 60, 8, dtype=dtype))
    new = power_step(second, U, (first @ U).mT @ (first @ U), 0.9, alg)
    held = torch.linalg.svd(torch.cat([first, second], -2)[0].double())[2][:5].mT
    kept = new[0].double() - held @ (held.mT @ new[0].double())
    sizes = kept.norm(dim=0)
    assert int((sizes > 0.5).sum()) == 3
    surplus = kept[:, sizes > 0.5]
    old = torch.linalg.qr(torch.cat([U[0].double(), held], -1))[0]
    rounding = 10 * NOISE[torch.float32] if dtype is torch.float32 else NOISE[dtype]
    assert float((surplus - old @ (old.mT @ surplus)).abs().max()) < rounding
    assert float((second @ new).abs()[..., sizes > 0.5].max() / second.abs().max()) < rounding


def test_equal_eigenvalues_are_turned_by_the_span_and_not_by_rounding() -> None:
    """Two equal blocks have every eigenvalue twice; one rounding of the gradient must not turn their eigenvectors."""
    G = torch.block_diag(*[torch.randn(6, 9, dtype=torch.float64)] * 2)[None]
    off = 1 + torch.randint(-1, 2, G.shape).double() * torch.finfo(torch.float64).eps
    a, b = (first_basis(x, 8, Algebra(12, 18), like=torch.zeros(1, 18, 8, dtype=torch.float64)) for x in (G, G * off))
    assert float((a - b).abs().max()) < NOISE[torch.float64]


@pytest.mark.parametrize("size", [1e-25, 1e18])
def test_the_size_of_the_gradient_does_not_change_the_basis(size: float) -> None:
    """G'G U would underflow or overflow: products are divided by their own scale first."""
    G, alg = gradient(400, 30, torch.linspace(20, 1, 30)), Algebra(400, 30)
    U = torch.linalg.qr(torch.randn(1, 30, 4))[0]
    expected, found = (power_step(c * G, U, torch.zeros(1, 4, 4), 0.98, alg) for c in (1.0, size))
    assert float((expected - U).abs().max()) > 0.1
    assert float((found - expected).abs().max()) < ANGLE
    assert float((basis_of(size * G, 4) - basis_of(G, 4)).abs().max()) < ANGLE
