"""Compute first bases with kernels: `linalg.subspace.first_basis` on an algebra that reads lists of matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import jacobi
from cosmos_optim.cuda.kernels.launch import power_of_two
from cosmos_optim.cuda.kernels.project import project
from cosmos_optim.cuda.kernels.project_transposed import project_transposed
from cosmos_optim.cuda.kernels.split_precision import split
from cosmos_optim.cuda.kernels.thin_qr import orthonormalize, thin_product_parts
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.subspace import OVERSAMPLING
from cosmos_optim.linalg.subspace import first_basis as subspace_first_basis


class ListAlgebra(Algebra):
    """The operations of `first_basis` on lists of matrices; thin factors are stacked tensors."""

    def __init__(self, m: int, n: int, grad_max: Tensor) -> None:
        super().__init__(m, n)
        self.grad_max = grad_max

    def mm(self, X: Any, U: Tensor) -> Tensor:
        return project(X, split(U), U.shape[-1], self.grad_max)

    def tn(self, X: Any, Y: Tensor) -> Tensor:
        """Return X'Y; X is a list of matrices or a thin factor."""
        if isinstance(X, Tensor):
            return self.un(X, Y)
        Y_max = torch.linalg.vector_norm(Y, float("inf"), dim=(1, 2))
        return project_transposed(X, split(Y, Y_max), Y_max, Y.shape[-1], self.grad_max)

    def un(self, A: Tensor, B: Tensor) -> Tensor:
        r = A.shape[-1]
        return thin_product_parts(A, B).sum(1)[:, :r, :r]

    def orthonormalize(self, Y: Tensor, fallback: Tensor) -> Tensor:
        return orthonormalize(Y, fallback)

    def _eigh(self, A: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors; up to 64 columns take one launch and no host synchronization."""
        return jacobi.eigh(A) if A.shape[-1] <= jacobi.MAX_COLUMNS else super()._eigh(A)


def first_basis(G: MatrixList, U: Tensor, grad_max: Tensor) -> Tensor:
    """Return the leading eigenvectors of each G'G, (batch, n, r), like U.

    The kernels pad the columns to a power of two. Oversampling uses that padding, which is free; one more column would
    double the cost.
    """
    (m, n), r = G.shape, U.shape[-1]
    oversampling = min(OVERSAMPLING, power_of_two(r) - r)
    return subspace_first_basis(G, r, ListAlgebra(m, n, grad_max), like=U, oversampling=oversampling)
