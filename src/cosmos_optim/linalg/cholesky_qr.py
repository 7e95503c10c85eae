"""Orthonormal columns by Cholesky factorization: a QR that needs only sums over rows.

Shapes: Y (..., n, r) columns, Q (..., n, r) the orthonormal result, A (..., r, r) a Gram matrix, W (..., r, r) the
inverse of its Cholesky factor; r = n for the square bases of SOAP.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# inner(A, B) returns A'B, summed over all processes that hold rows.
Inner = Callable[[Tensor, Tensor], Tensor]
# Largest stack of square matrices to factorize at once. This needs about six temporaries of the same size.
FACTORIZED_BYTES = 256 << 20
# On a GPU, larger matrices are factorized in blocks of this many columns.
BLOCK_COLUMNS = 256


def orthonormalize(Y: Tensor, inner: Inner, fallback: Tensor) -> Tensor:
    """Return the Q of QR(Y) with a positive diagonal of R, by Cholesky: Q = Y R^-1 with R'R = Y'Y. (..., n, r).

    The columns of a power step are nearly orthogonal, but their norms span the whole spectrum, so they are scaled to
    norm 1 first. That removes most of the ill-conditioning. The first of the three passes adds a shift to the Gram
    matrix (shifted CholeskyQR3, Fukaya et al. 2020), which keeps the factorization positive up to condition 1/eps. A
    column that is zero, or depends on the columns before it up to the root of that shift, is replaced by the column of
    `fallback`, made orthogonal to the others: rounding would choose its direction. If the factorization of a matrix
    fails anyway, its result is all of `fallback`: no host synchronization, no exception.
    """
    return _cholesky_passes(_unit_columns(Y, inner), inner, fallback, passes=3, max_entry=2.0, max_share=0.5)


def _cholesky_passes(
    Q: Tensor, inner: Inner, fallback: Tensor, passes: int, max_entry: float, max_share: float = math.inf
) -> Tensor:
    """Orthonormalize Q, which must have columns of norm 1.

    The error after a pass is one rounding times the square of its factor W. So the result is `fallback` if an entry of
    the last W is `max_entry` or more. The share of the shift in pivot j is shift |W_j|^2: 1 if the column has nothing
    that the columns before it lack. If it exceeds `max_share`, the column is replaced by that of `fallback`.
    """
    r = Q.shape[-1]
    eye = torch.eye(r, dtype=Q.dtype, device=Q.device)
    ok = torch.ones(Q.shape[:-2], dtype=torch.bool, device=Q.device)
    shift = 10 * r * torch.finfo(Q.dtype).eps
    for k in range(passes):
        W, positive = inverse_factor(inner(Q, Q) + (shift if k == 0 else 0.0) * eye)
        ok = ok & positive
        Q = Q @ W.mT
        if k == 0:
            Q = torch.where(shift * W.square().sum(-1).unsqueeze(-2) > max_share, fallback, Q)
    ok = ok & (W.abs().amax((-2, -1)) < max_entry)
    return torch.where(ok[..., None, None], Q, fallback)


def inverse_factor(A: Tensor, block: int | None = None) -> tuple[Tensor, Tensor]:
    """Return W = L^-1 with L L' = A, (..., n, n), and whether A is positive definite, (...,).

    If A is not positive definite, W is finite but has no meaning. If n exceeds `block`, A is eliminated by blocks, so
    that most of the work is in products.
    """
    n, block = A.shape[-1], block or (BLOCK_COLUMNS if A.is_cuda else A.shape[-1])
    if n <= block:
        L, info = torch.linalg.cholesky_ex(A)
        ok, eye = info == 0, torch.eye(n, dtype=A.dtype, device=A.device)
        # A failed factor would give inf in the solve. The identity keeps that matrix finite until it is replaced.
        return torch.linalg.solve_triangular(torch.where(ok[..., None, None], L, eye), eye, upper=False), ok
    k = -(-n // (2 * block)) * block
    W_a, ok_a = inverse_factor(A[..., :k, :k], block)
    B = A[..., k:, :k] @ W_a.mT
    W_c, ok_c = inverse_factor(A[..., k:, k:] - B @ B.mT, block)
    W = A.new_zeros(A.shape)
    W[..., :k, :k], W[..., k:, k:], W[..., k:, :k] = W_a, W_c, -(W_c @ B) @ W_a
    return W, ok_a & ok_c


def _unit_columns(Y: Tensor, inner: Inner) -> Tensor:
    """Scale each column to norm 1; a zero column stays zero, and NaN stays NaN."""
    norm = inner(Y, Y).diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt().unsqueeze(-2)
    return torch.where(norm == 0, torch.zeros_like(Y), Y / norm)


def next_basis(Y: Tensor, U: Tensor) -> Tensor:
    """Return the basis that follows U, (..., n, n): the Q of Y = L U, up to the signs of its columns.

    On a GPU, Householder QR would run one matrix after the other, so this uses Cholesky there.
    """
    Y = fill_missing_directions(Y, U)
    return orthonormalize_square(Y, U) if Y.is_cuda else torch.linalg.qr(Y)[0]


def fill_missing_directions(Y: Tensor, U: Tensor) -> Tensor:
    """Return Y = L U plus one rounding of U.

    Y may lack directions without any gradient so far (dead inputs), and has only rounding noise in directions with very
    little. With this term, U keeps both while the other directions change.
    """
    return torch.addcmul(Y, U, torch.finfo(Y.dtype).eps * Y.abs().amax((-2, -1), keepdim=True))


def orthonormalize_square(Y: Tensor, fallback: Tensor) -> Tensor:
    """Orthonormalize square Y, (..., n, n), in double precision, because its spectrum is wide.

    If the result is rounded to float32, two passes are enough: an error of 1e8 double-precision roundings is
    fine. `FACTORIZED_BYTES` limits how many matrices run at a time.
    """
    n = Y.shape[-1]
    count = max(1, FACTORIZED_BYTES // (8 * n * n))
    passes, max_entry = (3, 2.0) if Y.dtype is torch.float64 else (2, 1e4)
    results = []
    for y, old in zip(*(x.reshape(-1, n, n).split(count) for x in (Y, fallback)), strict=True):
        wide = y.double()
        unit = wide / torch.linalg.vector_norm(wide, dim=-2, keepdim=True)
        results.append(_cholesky_passes(unit, lambda A, B: A.mT @ B, old.double(), passes, max_entry).to(Y.dtype))
    return torch.cat(results).view_as(Y)
