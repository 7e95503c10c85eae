"""A = V diag(w) V' for a stack of small symmetric matrices by Jacobi's rotations: the Ritz step of the first basis.

One program holds a matrix and its eigenvectors in registers. In each round every row is rotated with a partner; the
rounds of a sweep pair each row with each other row once, as a round-robin schedule does. Libraries process a stack one
matrix at a time, with hundreds of launches for each; this is one launch without host synchronization.

Shapes: A and V (batch, k, k), w (batch, k); N is the next power of two of k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import exponent, scale_down, scale_up

# Matrix and eigenvectors fit in the registers of one block.
MAX_COLUMNS = 64
# Never reached: once the off-diagonal part is small, each sweep squares it, and six to nine sweeps suffice.
SWEEPS = 12
# Half a unit of rounding. The off-diagonal part may keep up to twice this share of the norm of A.
EPS = 2.0**-24
# Entries are scaled to about 2^10. Off-diagonal entries below this count as zero; its square is still a normal number.
ZERO = 1e-16


@jit
def _partner(round_index, j, count):
    """Return the partner of row j in this round, for an even number of rows; rows beyond `count` pair with themselves.

    All rows except the last are on a circle of odd length and pair with their mirror image; the row that would pair
    with itself pairs with the last one.
    """
    circle, last = count - 1, count - 1
    mirror = (round_index - j + circle) % circle
    unpaired = (round_index * (count // 2)) % circle
    p = tl.where(mirror == j, last, mirror)
    return tl.where(j < last, p, tl.where(j == last, unpaired, j))


@jit
def _rotation(d, o, i, p, ZERO: tl.constexpr, EPS: tl.constexpr):
    """Return sin(t) and tan(t / 2) of the rotations that make each pair (i, p) diagonal, and the diagonal after them.

    tan(t) = +-2 o / (|D| + sqrt(D^2 + 4 o^2)) with D = d_p - d_i is the smaller angle; a right angle is added if the
    larger value would not come first. Sorted values, with equal ones next to each other, save a third of the sweeps.
    Both rows use the same off-diagonal entry `o`, so the angle of p is exactly that of i with the other sign. Because
    sin(t) is computed from tan(t / 2), the rotation is orthogonal to the last bit for any rounding of the angle.
    """
    other = tl.gather(d, p, 0)
    gap = other - d
    o = tl.where(tl.abs(o) > tl.maximum(EPS * tl.minimum(tl.abs(d), tl.abs(other)), ZERO), o, 0.0)
    up = (gap > 0) | ((gap == 0) & (i < p))
    tan = tl.where(up, 2 * o, -2 * o) / tl.where(o == 0, 1.0, tl.abs(gap) + tl.sqrt(gap * gap + 4 * o * o))
    half = tan / (1 + tl.sqrt(1 + tan * tan))
    swap = (o != 0) & (gap != 0) & (up == (i < p))
    d = tl.where(swap, other + tan * o, d - tan * o)
    with_right_angle = (tl.abs(half) - 1) / (tl.abs(half) + 1)
    half = tl.where(swap, tl.where(half > 0, with_right_angle, -with_right_angle), half)
    return tl.div_rn(2 * half, 1 + half * half), half, d


@jit
def _rotate_rows(X, p, sin, half, N: tl.constexpr):
    """Return J'X: row i becomes cos x_i - sin x_p, in a form with a small rounding error for small angles."""
    other = tl.gather(X, tl.broadcast_to(p[:, None], (N, N)), 0)
    return X - sin[:, None] * (other + half[:, None] * X)


@jit
def _sweep(A, V, d, count, N: tl.constexpr, ZERO: tl.constexpr, EPS: tl.constexpr):
    """Rotate every pair of rows once: A <- J'A J, with its diagonal in d, and V' <- J'V'."""
    i, j = tl.arange(0, N), tl.arange(0, N)
    for round_index in range(count - 1):
        p = _partner(round_index, i, count)
        pairs = tl.where(p[:, None] == j[None, :], A, 0.0)
        o = tl.sum(pairs, axis=1)
        sin, half, d = _rotation(d, 0.5 * (o + tl.gather(o, p, 0)), i, p, ZERO, EPS)
        # A is symmetric, so rotate the rows of its transpose instead of its columns: rows stay within a warp.
        A = _rotate_rows(tl.trans(_rotate_rows(A - pairs, p, sin, half, N)), p, sin, half, N)
        V = _rotate_rows(V, p, sin, half, N)
    return A, V, d


@jit
def _eigh(
    a, values, vectors, k, N: tl.constexpr, SWEEPS: tl.constexpr, ZERO: tl.constexpr, EPS: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, N), tl.arange(0, N)
    diagonal, inside = i[:, None] == j[None, :], (i[:, None] < k) & (j[None, :] < k)
    low, high = tl.minimum(i[:, None], j[None, :]), tl.maximum(i[:, None], j[None, :])
    A = tl.load(a + batch * k * k + high * k + low, mask=inside, other=0.0)
    e = exponent(tl.max(tl.abs(A)))
    A = A * scale_up(e)
    norm_sq = tl.sum(A * A)
    d = tl.sum(tl.where(diagonal, A, 0.0), axis=1)
    A = tl.where(diagonal, 0.0, A)
    V = tl.where(diagonal, 1.0, 0.0)
    off_diagonal_sq = tl.sum(A * A)
    for _ in range(SWEEPS):  # not a while loop: Triton 3.5 cannot compile one with these tensors
        if off_diagonal_sq > 4 * EPS * EPS * norm_sq:
            A, V, d = _sweep(A, V, d, k + k % 2, N, ZERO, EPS)
            off_diagonal_sq = tl.sum(A * A)
    d = d * scale_down(e) + 0 * norm_sq  # NaN if an entry of A is not finite
    key = tl.where((d == d) & (i < k), d, float("inf"))
    below = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
    rank = tl.sum(below.to(tl.int32), axis=1)
    tl.store(values + batch * k + rank, d, mask=i < k)
    tl.store(vectors + batch * k * k + j[None, :] * k + rank[:, None], V, mask=inside)


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order (batch, k) and orthonormal eigenvectors (batch, k, k) of symmetric A.

    Only the lower half of A is read. A matrix with an entry that is not finite gets NaN eigenvalues.
    """
    batch, k, _ = A.shape
    A = A.contiguous()
    values, vectors = A.new_empty(batch, k), torch.empty_like(A)
    N = power_of_two(k)
    _eigh[(batch,)](A, values, vectors, k, N=N, SWEEPS=SWEEPS, ZERO=ZERO, EPS=EPS, num_warps=max(1, N * N // 512))
    return values, vectors
