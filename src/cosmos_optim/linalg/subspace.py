"""The tracked eigenbasis: its first value and one power step.

Letters: G (..., m, n) gradient, U (..., n, r) basis, S (..., r, r) the second moment in it, H = G'G. Everything goes
through sums over rows or columns, so the same lines run on whole matrices and on shards.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra

# A first basis in float32 is as good as its rounding after this many steps wherever the spectrum has a real gap.
START_STEPS = {torch.float32: 8, torch.float64: 100}
# A condition of the columns of 1 / (KEPT eps) is well within what `orthonormalize` can take.
KEPT = 512


def power_step(G: Any, U: Tensor, S: Tensor, beta2: float, alg: Algebra) -> Tensor:
    """QR(beta2 U S + (1 - beta2) G'G U): one power step on the running second moment.

    Divided by its own scale c^2 = |G U|^2 + trace S (so that neither 1e18 nor 1e-30 leaves the number range), with
    (1 - beta2) eps c^2 U added: above the rounding of G'G U, so that the columns stay independent where the moment
    lacks full rank, and below all that counts where it has it.
    """
    Y, c = alg.scaled(alg.mm(G, U), S)
    Y = alg.power_sum(U, S, alg.tn(G, Y), c, beta2)
    return alg.orthonormalize(Y, fallback=U)


def first_basis(G: Any, r: int, alg: Algebra, like: Tensor) -> Tensor:
    """The top-r eigenvectors of G'G, (..., n, r), by subspace iteration with a Rayleigh-Ritz step.

    A full n x n decomposition takes minutes at a billion parameters; k columns, r and a few more, and a few products
    with G give the same basis wherever the spectrum has a gap at r. Where k would be most of n, the whole space is
    taken: the Ritz step is then the exact eigendecomposition. A whole basis starts from the identity.
    """
    k = r + alg.oversampling(r)
    whole = alg.n <= 2 * k
    F = alg.slice_n(_random_columns(alg.n, alg.n if whole else k, like))
    Y = alg.slice_n(torch.eye(alg.n, dtype=like.dtype, device=like.device)) if r == alg.n else F
    Q, before = Y.expand(*like.shape[:-2], -1, -1).contiguous(), None
    nothing = Q.new_zeros(*Q.shape[:-2], Q.shape[-1], Q.shape[-1])
    for _ in range(0 if whole else START_STEPS.get(like.dtype, 8)):
        GQ = alg.mm(G, Q)
        if not Q.is_cuda:  # on a GPU a few steps more cost less than to ask
            energy = alg.energy_m(GQ)
            if before is not None and _settled(energy, before, Q.dtype):
                break
            before = energy
        Y, c = alg.scaled(GQ, nothing)
        HQ = alg.tn(G, Y) / c
        Q = alg.orthonormalize(torch.addcmul(HQ, Q, _damping(alg.un(HQ, HQ))), fallback=Q)
    return _ritz(G, Q, F, alg)[..., :r].contiguous()


def _settled(energy: Tensor, before: Tensor, dtype: torch.dtype) -> bool:
    """Whether the energy in every subspace has stopped growing."""
    return bool(((energy - before).abs() <= torch.finfo(dtype).eps * energy).all())


def _damping(gram: Tensor) -> Tensor:
    """How much of itself each column keeps in a step, (..., 1, k): KEPT roundings of its new length, and one of all.

    Where the gradient has fewer than k directions, or a few that hold nearly all of it, the products of random columns
    with it are dependent to rounding and could not be made orthonormal. In proportion to the length of a column this
    does not keep small eigenvalues from converging.
    """
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-2)
    return (length + 1 / KEPT) * (KEPT * torch.finfo(gram.dtype).eps)


def _or_one(c: Tensor) -> Tensor:
    """c, or 1 where it is 0: something to divide by."""
    return c + (c == 0)  # `where` with a number would make the host wait for the GPU


def _random_columns(n: int, k: int, like: Tensor) -> Tensor:
    """Orthonormal columns, the same on every machine; on their way to a GPU while the host goes on.

    Where the first gradient has fewer than r directions the other columns of the basis come from here. Unit vectors
    may lie in inputs that are dead, where no power step finds them again.
    """
    if k < n:
        return _columns_on_host(n, k, like.dtype, like.is_cuda).to(like.device, non_blocking=True)
    F = _normal(n, n)  # a whole basis is too large to be kept
    if like.is_cuda:
        F = F.pin_memory().to(like.device, non_blocking=True)
    return torch.linalg.qr(F)[0].to(like)


@lru_cache(maxsize=4)  # the stacks of a first step share them; each costs more than the rest of its stack
def _columns_on_host(n: int, k: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    Q = torch.linalg.qr(_normal(n, k))[0].to(dtype)
    return Q.pin_memory() if pinned else Q


def _normal(n: int, k: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(n, k, generator=generator, dtype=torch.float64, device="cpu")


def _ritz(G: Any, Y: Tensor, F: Tensor, alg: Algebra) -> Tensor:
    """Turn orthonormal Y to the eigenvectors of G'G within its span, largest first.

    Eigenvectors of the eigenvalue 0 are any, whatever rounding makes them: random columns F made orthogonal to the
    others stand for them, so that shards of a matrix with fewer rows than r go the same way as the whole of it.
    """
    GY = alg.mm(G, Y)
    c = alg.energy_m(GY).sqrt().to(Y.dtype)
    GY = GY / _or_one(c)
    values, vectors = alg.eigh_of_gram(GY)
    Q, k = Y @ vectors.flip(-1), Y.shape[-1]
    real = (values > 10 * k * torch.finfo(Y.dtype).eps * values[..., -1:]).flip(-1).unsqueeze(-2)
    V, F = Q * real, F.expand_as(Q)
    return alg.orthonormalize(torch.where(real, Q, F - V @ alg.un(V, F)), fallback=F)
