"""Orthonormal columns by Cholesky factorization: the QR that needs only sums over rows.

Letters: Y (..., n, r) the columns, Q (..., n, r) the result. Anything that can sum A'B over its rows can use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Inner = Callable[[Tensor, Tensor], Tensor]
# A factorization has half a dozen temporaries as large as what it factorizes.
STACK_BYTES = 256 << 20


def orthonormalize(Y: Tensor, inner: Inner, fallback: Tensor) -> Tensor:
    """QR(Y) with a positive diagonal, by Cholesky: Q = Y R^-1 where R'R = Y'Y. (..., n, r) -> the same.

    The columns of a power step are nearly orthogonal but their norms span the whole spectrum, so they are scaled to
    norm 1 first; that removes most of the ill-conditioning. The first of the three passes adds a shift to the Gram
    matrix (shifted CholeskyQR3, Fukaya et al. 2020), which keeps the factorization positive up to condition 1/eps.
    `inner(A, B)` is A'B summed over wherever the rows live. A matrix whose factorization fails all the same keeps
    `fallback`: no host synchronization, no exception.
    """
    r = Y.shape[-1]
    eps = torch.finfo(Y.dtype).eps
    eye = torch.eye(r, dtype=Y.dtype, device=Y.device)
    Q = _unit_columns(Y, inner)
    ok = torch.ones(Y.shape[:-2], dtype=torch.bool, device=Y.device)
    for shift in (10 * r * eps, 0.0, 0.0):
        gram = inner(Q, Q)
        L, info = torch.linalg.cholesky_ex(gram + shift * eye)
        ok = ok & (info == 0)
        # A failed factor would spread inf through the solve; the identity keeps that matrix finite until it is dropped.
        L = torch.where(ok[..., None, None], L, eye)
        Q = Q @ torch.linalg.solve_triangular(L, eye, upper=False).mT
    ok = ok & (gram - eye).abs().amax((-2, -1)).lt(0.5) & gram.isfinite().all(-1).all(-1)
    return torch.where(ok[..., None, None], Q, fallback)


def _unit_columns(Y: Tensor, inner: Inner) -> Tensor:
    """Scale each column to norm 1; a zero column stays zero."""
    norm = inner(Y, Y).diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().unsqueeze(-2)
    return torch.where(norm > 0, Y / norm, torch.zeros_like(Y))


def qr(Y: Tensor, fallback: Tensor) -> Tensor:
    """The Q of square matrices (..., n, n), up to the signs of its columns.

    By reflections, which a GPU would work through one matrix after the other: there by Cholesky.
    """
    return by_cholesky(Y, fallback) if Y.is_cuda else torch.linalg.qr(Y)[0]


def by_cholesky(Y: Tensor, fallback: Tensor) -> Tensor:
    """`orthonormalize` in double precision, so that the wide spectrum of a square matrix does not make it fail.

    As many matrices at a time as `STACK_BYTES` holds.
    """
    n = Y.shape[-1]
    several = max(1, STACK_BYTES // (8 * n * n))
    parts = zip(*(x.reshape(-1, n, n).split(several) for x in (Y, fallback)), strict=True)
    made = [orthonormalize(y.double(), lambda A, B: A.mT @ B, old.double()).to(Y.dtype) for y, old in parts]
    return torch.cat(made).view_as(Y)
