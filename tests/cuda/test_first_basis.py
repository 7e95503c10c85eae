"""First bases of lists of matrices by kernels equal those of stacked tensors by plain torch."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.first_basis import ListAlgebra, first_basis
from cosmos_optim.cuda.kernels import jacobi
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.linalg import subspace
from cosmos_optim.linalg.algebra import Algebra

# |sin| of the largest angle between two spans of float32 bases. Columns are compared by span, because eigenvectors of
# near eigenvalues turn into each other by rounding / gap. Measured 4.6e-7.
SPAN = 1e-6
ORTHONORMAL = 5e-7  # the largest entry of U'U - I; measured 2.0e-7


def gapped(m: int, n: int, r: int, size: float = 1.0) -> Tensor:
    """Return two matrices with r singular values that are ten times the others."""
    k = min(m, n)
    left, right = (torch.linalg.qr(torch.randn(2, x, k, dtype=torch.float64))[0] for x in (m, n))
    values = torch.cat([torch.linspace(20, 10, r), torch.linspace(1, 0.1, k - r)]).double()
    return (left * values @ right.mT * size).float()


def apart(A: Tensor, B: Tensor) -> float:
    """Return the largest part of a unit vector in the span of A that is outside of the span of B."""
    A, B = A.double(), B.double()
    return float(torch.linalg.matrix_norm(A - B @ (B.mT @ A), ord=2).max())


def by_kernels(G: Tensor, r: int) -> Tensor:
    """Return first bases of a list of matrices."""
    like = G.new_empty(len(G), G.shape[2], r)
    return first_basis(MatrixList.of([g.clone() for g in G]), like, G.abs().amax((1, 2)))


@pytest.mark.parametrize(("m", "n", "r", "size"), [(30, 20, 4, 1e12), (17, 36, 4, 1e-12)])
def test_a_first_basis_spans_the_leading_eigenvectors(
    m: int, n: int, r: int, size: float, device: torch.device
) -> None:  # fmt: skip
    """The whole space if r is a large part of n, subspace iteration otherwise; gradients of any size."""
    G = gapped(m, n, r, size).to(device)
    U = by_kernels(G, r)
    plain = subspace.first_basis(G, r, Algebra(m, n), like=U)
    exact = torch.linalg.eigh(G.double().mT @ G.double())[1].flip(-1)[..., :r]
    identity = torch.eye(r, dtype=torch.float64, device=device)
    assert apart(U, plain) < SPAN
    assert apart(U, exact) < SPAN
    assert float((U.double().mT @ U.double() - identity).abs().max()) < ORTHONORMAL


def test_columns_without_a_gradient_are_filled_with_orthonormal_ones(device: torch.device) -> None:
    """A gradient of rank 2: its two directions, and two more that are orthonormal to them."""
    G = (torch.randn(2, 20, 2) @ torch.randn(2, 2, 24)).to(device)
    U = by_kernels(G, 4)
    identity = torch.eye(4, dtype=torch.float64, device=device)
    assert float((U.double().mT @ U.double() - identity).abs().max()) < ORTHONORMAL
    right = torch.linalg.svd(G.double())[2][:, :2].mT
    assert apart(right, U) < SPAN


def test_operations_on_a_list_of_matrices_equal_those_on_a_stack(device: torch.device) -> None:
    """G U and G'Y read the list, A'B reads thin factors: within float32 rounding. Measured 2e-7."""
    G, U, Y = (torch.randn(2, *shape).to(device) for shape in ((37, 20), (20, 5), (37, 5)))
    lists, plain = ListAlgebra(37, 20, G.abs().amax((1, 2))), Algebra(37, 20)
    wide, grads = [x.double() for x in (G, U, Y)], MatrixList.of([g.clone() for g in G])
    for found, exact in (
        (lists.mm(grads, U), plain.mm(wide[0], wide[1])),
        (lists.tn(grads, Y), plain.tn(wide[0], wide[2])),
        (lists.tn(Y, Y), plain.tn(wide[2], wide[2])),
        (lists.un(U, U), plain.un(wide[1], wide[1])),
    ):
        assert float((found.double() - exact).norm() / exact.norm()) < 5e-7


def test_eigenvectors_come_from_one_launch_up_to_64_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more columns they come from torch, which makes the host wait."""
    asked: list[int] = []
    monkeypatch.setattr(jacobi, "eigh", lambda A: asked.append(A.shape[-1]) or torch.linalg.eigh(A))
    for k in (64, 65):
        ListAlgebra(80, 80, torch.ones(1))._eigh(torch.eye(k)[None])
    assert asked == [64]
