"""The tracked eigenbasis of the moving average of G'G: the first basis, and one power step.

Shapes: G (..., m, n) gradient, U (..., n, r) basis, S (..., r, r) the second moment in it. Everything uses sums over
rows or columns, so the same code runs on whole matrices and on shards.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.cholesky_qr import orthonormalize

# Columns beyond r in the first subspace iteration: they speed up convergence if the spectrum is flat around r.
OVERSAMPLING = 16
# Power steps of the first basis. In float32, 8 reach rounding error if the spectrum has a real gap.
START_STEPS = {torch.float32: 8, torch.float64: 100}
# A condition number of 1 / (KEPT eps) is well within what `orthonormalize` can handle.
KEPT = 512
# Below this, relative to what it is computed with, a number is rounding noise: 64 roundings in float32; more in
# float64, where rounding may grow through many steps and is still far below anything that matters.
NOISE = {torch.float32: 2.0**-17, torch.float64: 2.0**-30}


def power_step(G: Any, U: Tensor, S: Tensor, beta2: float, alg: Algebra) -> Tensor:
    """Return QR(beta2 U S + (1 - beta2) G'G U): one power step on the running second moment of G'G.

    If the moment has fewer directions than U has columns, some columns of the sum are zero or depend on those before
    them. They become the old columns of U, made orthogonal to the others (`cholesky_qr.orthonormalize`). For this, what
    is zero in exact arithmetic must be zero here. Noise would decide where a column without gradient turns, and it
    would grow: QR keeps a column orthogonal to a stronger direction only as long as their product is 0. The sum is
    divided by its own scale c^2 = |G U|^2 + trace S, so that gradients of 1e18 or 1e-30 do not overflow or underflow.
    """
    GU = alg.mm(G, U)
    c = or_one((alg.norm_sq_m(GU) + trace(S)).sqrt().to(GU.dtype))
    HU = alg.tn(G, rows_without_noise(GU) / c) / c
    return alg.orthonormalize(beta2 * U @ (moment_without_noise(S) / c / c) + (1 - beta2) * HU, fallback=U)


def rows_without_noise(GU: Tensor) -> Tensor:
    """Return G U with 0 for elements that are rounding noise, relative to the largest of their row."""
    return GU * (GU.abs() > NOISE[GU.dtype] * GU.abs().amax(-1, keepdim=True))


def moment_without_noise(S: Tensor) -> Tensor:
    """Return S with 0 for elements that are rounding noise.

    A diagonal element is noise relative to the trace, any other relative to the root of its two diagonal elements.
    """
    noise, size_sq = NOISE[S.dtype], S.diagonal(dim1=-2, dim2=-1)
    size = (size_sq * (size_sq > noise**2 * size_sq.sum(-1, keepdim=True))).sqrt()
    size_ij = size.unsqueeze(-1) * size.unsqueeze(-2)
    return S * ((S.abs() > noise * size_ij) & (size_ij > 0))


def trace(S: Tensor) -> Tensor:
    """Return the trace of each matrix, (..., 1, 1)."""
    return S.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


def take_first_bases(G: Any, state: Any, *, alg: Algebra | None = None) -> Any:
    """Return a rule's state with U, the leading eigenvectors of the first G'G, and, if it has one, O, those of GG'.

    The paper omits the initialization.
    """
    alg = alg or Algebra(*G.shape[-2:])
    bases = {"U": first_basis(G, state.U.shape[-1], alg, like=state.U)}
    if "O" in state._fields:
        bases["O"] = first_basis(G.mT, state.O.shape[-1], alg.T, like=state.O)
    return state._replace(**bases)


def first_basis(G: Any, r: int, alg: Algebra, like: Tensor, oversampling: int = OVERSAMPLING) -> Tensor:
    """Return the top-r eigenvectors of G'G, (..., n, r), by subspace iteration with a Rayleigh-Ritz step.

    A full n x n decomposition takes minutes at a billion parameters. A few products of G with k = r + `oversampling`
    columns give the same basis if the spectrum has a gap at r. If k is most of n, the iteration uses the whole space,
    and the Ritz step is the exact eigendecomposition. A whole basis (r = n) starts from the identity.
    """
    k = r + oversampling
    whole = alg.n <= 2 * k
    F = alg.slice_n(_random_columns(alg.n, alg.n if whole else k, like))
    Y = alg.slice_n(torch.eye(alg.n, dtype=like.dtype, device=like.device)) if r == alg.n else F
    Q, before = Y.expand(*like.shape[:-2], -1, -1).contiguous(), None
    for _ in range(0 if whole else START_STEPS.get(like.dtype, 8)):
        GQ = alg.mm(G, Q)
        GQ_sq = alg.norm_sq_m(GQ)
        if not Q.is_cuda:  # on a GPU, a few more steps cost less than this test, which waits
            if before is not None and _settled(GQ_sq, before, Q.dtype):
                break
            before = GQ_sq
        c = or_one(GQ_sq.sqrt().to(Q.dtype))
        HQ = alg.tn(G, GQ / c) / c
        Q = alg.orthonormalize(torch.addcmul(HQ, Q, _damping(alg.un(HQ, HQ))), fallback=Q)
    return _ritz(G, Q, F, alg)[..., :r].contiguous()


def _settled(now: Tensor, before: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the energy |G Q|^2 of every subspace has stopped growing."""
    return bool(((now - before).abs() <= torch.finfo(dtype).eps * now).all())


def _damping(gram: Tensor) -> Tensor:
    """Return the weight of the old column that each new column keeps, (..., 1, k): KEPT eps times its length, plus eps.

    If fewer than k directions hold nearly all of the gradient, its products with random columns are dependent up to
    rounding and could not be orthonormalized. The weight is proportional to the column's length, so small eigenvalues
    still converge.
    """
    length = gram.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-2)
    return (length + 1 / KEPT) * (KEPT * torch.finfo(gram.dtype).eps)


def or_one(c: Tensor) -> Tensor:
    """Return c, or 1 where it is 0, for use as a divisor."""
    return c + (c == 0)  # `torch.where` with a number would make the host wait for the GPU


def _random_columns(n: int, k: int, like: Tensor) -> Tensor:
    """Return orthonormal columns, the same on every machine; the copy to a GPU does not block the host.

    If the first gradient has rank below r, these fill the other columns of the basis. Unit vectors could select dead
    inputs, and power steps would never leave them.
    """
    if k < n:
        return _columns_on_host(n, k, like.dtype, like.is_cuda).to(like.device, non_blocking=True)
    F = _normal(n, n)  # a whole basis is too large for the cache
    if like.is_cuda:
        F = F.pin_memory().to(like.device, non_blocking=True)
    return torch.linalg.qr(F)[0].to(like)


@lru_cache(maxsize=4)  # shared by all stacks of a first step, because they are expensive
def _columns_on_host(n: int, k: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    Q = torch.linalg.qr(_normal(n, k))[0].to(dtype)
    return Q.pin_memory() if pinned else Q


def _normal(n: int, k: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(n, k, generator=generator, dtype=torch.float64, device="cpu")


def _ritz(G: Any, Y: Tensor, F: Tensor, alg: Algebra) -> Tensor:
    """Rotate orthonormal Y to the eigenvectors of G'G within its span, largest first.

    Eigenvectors of the eigenvalue 0 would depend on rounding. Random columns F, made orthogonal to the others, replace
    them, so that a sharded matrix with fewer than r rows gets the same basis as a whole one. F also decides how
    eigenvectors of equal eigenvalues are turned.
    """
    GY = alg.mm(G, Y)
    GY = GY / or_one(alg.norm_sq_m(GY).sqrt().to(Y.dtype))
    values, vectors = (x.flip(-1) for x in alg.eigh_gram(GY))
    Q, k = Y @ vectors, Y.shape[-1]
    F = F.expand_as(Q)
    Q = Q @ _turns(values, alg.un(Q, F))
    real = (values > 10 * k * torch.finfo(Y.dtype).eps * values[..., :1]).unsqueeze(-2)
    V = Q * real
    return alg.orthonormalize(torch.where(real, Q, F - V @ alg.un(V, F)), fallback=F)


def _turns(values: Tensor, QF: Tensor) -> Tensor:
    """Return the (..., k, k) rotations of eigenvectors Q among those of equal `values`: the Q of QR(Q'F) of each group.

    Any rotation of these gives eigenvectors too, so rounding would choose one. This one depends only on their span.
    """
    apart = values.diff(dim=-1).abs() > NOISE[values.dtype] * values[..., :-1]
    group = torch.nn.functional.pad(apart.cumsum(-1), (1, 0))
    same = group.unsqueeze(-1) == group.unsqueeze(-2)
    eye = torch.eye(values.shape[-1], dtype=QF.dtype, device=QF.device).expand_as(QF)
    return orthonormalize(QF * same, lambda A, B: A.mT @ B, fallback=eye)
