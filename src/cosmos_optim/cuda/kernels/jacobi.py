"""A = V diag(w) V' for a stack of small symmetric matrices, (B, k, k) -> (B, k), (B, k, k), by Jacobi's rotations.

One program holds a matrix and its eigenvectors in registers. In each round every row is rotated against a partner; the
rounds of a sweep pair each row with each other row once, as in a tournament. Libraries go through a stack one matrix at
a time, with hundreds of launches for each; here it is one launch, and nothing is asked back by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.tiles import bring, exponent, undo

# Matrix and eigenvectors fit in the registers of one block.
MAX_COLUMNS = 64
# A bound that is not met: once what is beside the diagonal is small each sweep squares it, and six to nine suffice.
SWEEPS = 12
# Half a rounding: twice as much, of the norm of the whole, may be left beside the diagonal.
EPS = 2.0**-24
# Entries are brought near 2^10; what is this small beside that is zero, and its square still a normal number.
ZERO = 1e-16


@jit
def _partner(turn, j, players):  # type: ignore[no-untyped-def]
    """Who meets j in this round of a tournament of an even number of players; those beyond it meet themselves.

    All but the last sit on a circle of odd length and meet their mirror image; who would meet himself meets the last.
    """
    circle, last = players - 1, players - 1
    mirror = (turn - j + circle) % circle
    alone = (turn * (players // 2)) % circle
    p = tl.where(mirror == j, last, mirror)
    return tl.where(j < last, p, tl.where(j == last, alone, j))


@jit
def _rotation(d, o, i, p, ZERO: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """sin(t) and tan(t / 2) of the rotations that make each pair (i, p) diagonal, and the diagonal after them.

    tan(t) = +-2 o / (|D| + sqrt(D^2 + 4 o^2)), D = d_p - d_i, is the smaller angle; it is turned by a right angle where
    the larger value would not come first. Values in order, equal ones side by side, save a third of the sweeps. With
    the same `o` on both sides the angle of p is exactly that of i with the other sign, so that both turn alike; with
    sin(t) from tan(t / 2) the rotation is orthogonal to the last bit, whatever the angle was rounded to.
    """
    other = tl.gather(d, p, 0)
    gap = other - d
    o = tl.where(tl.abs(o) > tl.maximum(EPS * tl.minimum(tl.abs(d), tl.abs(other)), ZERO), o, 0.0)
    up = (gap > 0) | ((gap == 0) & (i < p))
    tan = tl.where(up, 2 * o, -2 * o) / tl.where(o == 0, 1.0, tl.abs(gap) + tl.sqrt(gap * gap + 4 * o * o))
    half = tan / (1 + tl.sqrt(1 + tan * tan))
    swap = (o != 0) & (gap != 0) & (up == (i < p))
    d = tl.where(swap, other + tan * o, d - tan * o)
    turned = (tl.abs(half) - 1) / (tl.abs(half) + 1)
    half = tl.where(swap, tl.where(half > 0, turned, -turned), half)
    return tl.div_rn(2 * half, 1 + half * half), half, d


@jit
def _rows(X, p, sin, half, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """J'X: row i becomes cos x_i - sin x_p, written so that a small angle makes a small rounding error."""
    other = tl.gather(X, tl.broadcast_to(p[:, None], (N, N)), 0)
    return X - sin[:, None] * (other + half[:, None] * X)


@jit
def _sweep(A, V, d, players, N: tl.constexpr, ZERO: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every pair of rows once: A <- J'A J without its diagonal, which is d, and V' <- J'V'."""
    i, j = tl.arange(0, N), tl.arange(0, N)
    for turn in range(players - 1):
        p = _partner(turn, i, players)
        met = tl.where(p[:, None] == j[None, :], A, 0.0)
        o = tl.sum(met, axis=1)
        sin, half, d = _rotation(d, 0.5 * (o + tl.gather(o, p, 0)), i, p, ZERO, EPS)
        # A is symmetric: to turn its columns is to turn the rows of its transpose. Rows stay within a warp.
        A = _rows(tl.trans(_rows(A - met, p, sin, half, N)), p, sin, half, N)
        V = _rows(V, p, sin, half, N)
    return A, V, d


@jit
def _eigh(  # type: ignore[no-untyped-def]
    a, values, vectors, k, N: tl.constexpr, SWEEPS: tl.constexpr, ZERO: tl.constexpr, EPS: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, N), tl.arange(0, N)
    diagonal, inside = i[:, None] == j[None, :], (i[:, None] < k) & (j[None, :] < k)
    low, high = tl.minimum(i[:, None], j[None, :]), tl.maximum(i[:, None], j[None, :])
    A = tl.load(a + batch * k * k + high * k + low, mask=inside, other=0.0)
    e = exponent(tl.max(tl.abs(A)))
    A = A * bring(e)
    total = tl.sum(A * A)
    d = tl.sum(tl.where(diagonal, A, 0.0), axis=1)
    A = tl.where(diagonal, 0.0, A)
    V = tl.where(diagonal, 1.0, 0.0)
    beside, sweep = tl.sum(A * A), 0
    while (sweep < SWEEPS) & (beside > 4 * EPS * EPS * total):
        A, V, d = _sweep(A, V, d, k + k % 2, N, ZERO, EPS)
        beside = tl.sum(A * A)
        sweep += 1
    d = d * undo(e) + 0 * total  # whatever was not finite makes the values not-a-number
    key = tl.where((d == d) & (i < k), d, float("inf"))
    below = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
    place = tl.sum(below.to(tl.int32), axis=1)
    tl.store(values + batch * k + place, d, mask=i < k)
    tl.store(vectors + batch * k * k + j[None, :] * k + place[:, None], V, mask=inside)


def supports(k: int) -> bool:
    """Whether matrices of this size fit."""
    return k <= MAX_COLUMNS


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and orthonormal eigenvectors of symmetric A, of which the lower half is read."""
    batch, k, _ = A.shape
    A = A.contiguous()
    values, vectors = A.new_empty(batch, k), torch.empty_like(A)
    N = power_of_two(k)
    _eigh[(batch,)](A, values, vectors, k, N=N, SWEEPS=SWEEPS, ZERO=ZERO, EPS=EPS, num_warps=max(1, N * N // 512))
    return values, vectors
