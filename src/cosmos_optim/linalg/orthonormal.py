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
# Columns that a GPU's library factorizes at a time.
LEAF = 64
# The smallest singular values that the last of two passes may begin with.
STEEP = 1e-4


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
        W, fine = inverse_factor(gram + shift * eye)
        ok = ok & fine
        Q = Q @ W.mT
    ok = ok & (gram - eye).abs().amax((-2, -1)).lt(0.5) & gram.isfinite().all(-1).all(-1)
    return torch.where(ok[..., None, None], Q, fallback)


def inverse_factor(A: Tensor, leaf: int | None = None) -> tuple[Tensor, Tensor]:
    """W = L^-1 where L L' = A, (..., n, n), and whether A is positive definite (...,); W is any, but finite, if not.

    Blocks beyond `leaf` columns are eliminated by products. Libraries factorize a stack of large matrices on a GPU a
    column at a time, at a few percent of the rate of its products.
    """
    n, leaf = A.shape[-1], leaf or (LEAF if A.is_cuda else A.shape[-1])
    if n <= leaf:
        L, info = torch.linalg.cholesky_ex(A)
        ok, eye = info == 0, torch.eye(n, dtype=A.dtype, device=A.device)
        # A failed factor would spread inf through the solve; the identity keeps that matrix finite until it is dropped.
        return torch.linalg.solve_triangular(torch.where(ok[..., None, None], L, eye), eye, upper=False), ok
    k = -(-n // (2 * leaf)) * leaf
    W_a, ok_a = inverse_factor(A[..., :k, :k], leaf)
    B = A[..., k:, :k] @ W_a.mT
    W_c, ok_c = inverse_factor(A[..., k:, k:] - B @ B.mT, leaf)
    W = A.new_zeros(A.shape)
    W[..., :k, :k], W[..., k:, k:], W[..., k:, :k] = W_a, W_c, -(W_c @ B) @ W_a
    return W, ok_a & ok_c


def _unit_columns(Y: Tensor, inner: Inner) -> Tensor:
    """Scale each column to norm 1; a zero column stays zero."""
    norm = inner(Y, Y).diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().unsqueeze(-2)
    return torch.where(norm > 0, Y / norm, torch.zeros_like(Y))


def turned(Y: Tensor, U: Tensor) -> Tensor:
    """The basis after U, (..., n, n): the Q of Y = L U, up to the signs of its columns.

    By reflections, which a GPU would work through one matrix after the other: there by Cholesky.
    """
    Y = completed(Y, U)
    return by_cholesky(Y, U) if Y.is_cuda else torch.linalg.qr(Y)[0]


def completed(Y: Tensor, U: Tensor) -> Tensor:
    """Y = L U and a rounding of U.

    Y may lack directions that had no gradient yet (dead inputs), and holds nothing but rounding of those that had too
    little: both stay as they are while the others turn.
    """
    return torch.addcmul(Y, U, torch.finfo(Y.dtype).eps * Y.abs().amax((-2, -1), keepdim=True))


def by_cholesky(Y: Tensor, fallback: Tensor) -> Tensor:
    """The same as `orthonormalize` in double precision, which a square matrix with its wide spectrum needs.

    As many matrices at a time as `STACK_BYTES` holds.
    """
    n = Y.shape[-1]
    several = max(1, STACK_BYTES // (8 * n * n))
    parts = zip(*(x.reshape(-1, n, n).split(several) for x in (Y, fallback)), strict=True)
    make = _whole if Y.dtype is torch.float64 else _rounded
    return torch.cat([make(y.double(), old.double()).to(Y.dtype) for y, old in parts]).view_as(Y)


def _whole(Y: Tensor, fallback: Tensor) -> Tensor:
    return orthonormalize(Y, lambda A, B: A.mT @ B, fallback)


def _rounded(Y: Tensor, fallback: Tensor) -> Tensor:
    """For a result that is rounded to half its digits: two passes do.

    The second one begins with singular values of at least STEEP, unless the condition of Y with columns of norm 1 is
    beyond some 1e9, and its error is a rounding times their inverse square.
    """
    n, eps = Y.shape[-1], torch.finfo(Y.dtype).eps
    Q = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True)
    first, fine = inverse_factor(Q.mT @ Q + 10 * n * eps * torch.eye(n, dtype=Y.dtype, device=Y.device))
    Q = Q @ first.mT
    second, ok = inverse_factor(Q.mT @ Q)
    ok = ok & fine & (second.abs().amax((-2, -1)) < 1 / STEEP)
    return torch.where(ok[..., None, None], Q @ second.mT, fallback)
