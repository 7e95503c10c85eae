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
LEAF = 256


def orthonormalize(Y: Tensor, inner: Inner, fallback: Tensor) -> Tensor:
    """QR(Y) with a positive diagonal, by Cholesky: Q = Y R^-1 where R'R = Y'Y. (..., n, r) -> the same.

    The columns of a power step are nearly orthogonal but their norms span the whole spectrum, so they are scaled to
    norm 1 first; that removes most of the ill-conditioning. The first of the three passes adds a shift to the Gram
    matrix (shifted CholeskyQR3, Fukaya et al. 2020), which keeps the factorization positive up to condition 1/eps.
    `inner(A, B)` is A'B summed over wherever the rows live. A matrix whose factorization fails all the same keeps
    `fallback`: no host synchronization, no exception.
    """
    return _by_passes(_unit_columns(Y, inner), inner, fallback, passes=3, steep=2.0)


def _by_passes(Q: Tensor, inner: Inner, fallback: Tensor, passes: int, steep: float) -> Tensor:
    """Q's columns, of norm 1, made orthonormal; `fallback` where the last factor has an entry beyond `steep`.

    A pass leaves an error of a rounding times the square of its factor.
    """
    r = Q.shape[-1]
    eye = torch.eye(r, dtype=Q.dtype, device=Q.device)
    ok = torch.ones(Q.shape[:-2], dtype=torch.bool, device=Q.device)
    shift = 10 * r * torch.finfo(Q.dtype).eps
    for k in range(passes):
        W, fine = inverse_factor(inner(Q, Q) + (shift if k == 0 else 0.0) * eye)
        ok = ok & fine
        Q = Q @ W.mT
    ok = ok & (W.abs().amax((-2, -1)) < steep)
    return torch.where(ok[..., None, None], Q, fallback)


def inverse_factor(A: Tensor, leaf: int | None = None) -> tuple[Tensor, Tensor]:
    """W = L^-1 where L L' = A, (..., n, n), and whether A is positive definite (...,); W is any, but finite, if not.

    More than `leaf` columns are eliminated by blocks, so that most of the work is in products.
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


def next_basis(Y: Tensor, U: Tensor) -> Tensor:
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

    Of a result that is rounded to float32 the second pass may leave 1e8 roundings of double precision; it is the last.
    As many matrices at a time as `STACK_BYTES` holds.
    """
    n = Y.shape[-1]
    several = max(1, STACK_BYTES // (8 * n * n))
    passes, steep = (3, 2.0) if Y.dtype is torch.float64 else (2, 1e4)
    made = []
    for y, old in zip(*(x.reshape(-1, n, n).split(several) for x in (Y, fallback)), strict=True):
        wide = y.double()
        unit = wide / torch.linalg.vector_norm(wide, dim=-2, keepdim=True)
        made.append(_by_passes(unit, lambda A, B: A.mT @ B, old.double(), passes, steep).to(Y.dtype))
    return torch.cat(made).view_as(Y)
