"""COSMOS and the Muon family on a GPU: schedules of kernels over lists of matrices, one kernel call per line.

The definitions are `rules.cosmos.direction`, `rules.muon.direction` and `direction_normuon`; tests compare
these schedules with them. The letters are the same. A step on a batch of matrices (m, n) reads and writes:

    G  read 3 or 4 times       project, project_transposed, momentum_ (with M), residual (with Nesterov's momentum)
    M  read twice, written     momentum_, residual
    X  written                 residual, in half precision; Newton-Schulz turns it into B
    X  read twice, written     equalize_rows_, only with `equal_rows`
    B  read twice              overlap, update_
    W  read and written        update_

Thin factors U, S, V, P, v are stacked, (batch, ...). A kernel returns a sum over rows, such as a sum of squares, in
parts, one for each block of rows: (batch, parts) or (batch, parts, ...). The kernel that needs the sum adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import syrk
from cosmos_optim.cuda.kernels.basis_second_moment import second_moment
from cosmos_optim.cuda.kernels.equal_rows import equalize_rows_
from cosmos_optim.cuda.kernels.gains import muon_gain, norm_and_weight, update_coefficients
from cosmos_optim.cuda.kernels.momentum import momentum_
from cosmos_optim.cuda.kernels.power_step import power_sum, scale_for_power_step
from cosmos_optim.cuda.kernels.project import overlap, project
from cosmos_optim.cuda.kernels.project_transposed import project_transposed
from cosmos_optim.cuda.kernels.reductions import norm_sq_and_max
from cosmos_optim.cuda.kernels.residual import residual
from cosmos_optim.cuda.kernels.row_second_moment import row_gains, row_norm_sq
from cosmos_optim.cuda.kernels.soap_half import soap_half
from cosmos_optim.cuda.kernels.split_precision import split, split_both
from cosmos_optim.cuda.kernels.syrk import SymmetricProducts
from cosmos_optim.cuda.kernels.thin_qr import orthonormalize, thin_product_parts
from cosmos_optim.cuda.kernels.update import update_
from cosmos_optim.cuda.memory_pool import newton_schulz_bytes
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.cuda.streams import Streams
from cosmos_optim.linalg.newton_schulz import HALF_SCALE, NewtonSchulz, TorchProducts, iterate, iterations_for
from cosmos_optim.rules.cosmos import ROW_FLOOR, CosmosState
from cosmos_optim.rules.muon import SCALINGS, MuonState, NorMuonState

Number = float | Tensor
# Replaces |X|^2 of a zero matrix, so that quotients stay finite; they are multiplied by 0 later.
LEAST_NORM_SQ = 1e-30


def do_nothing() -> None:
    """Do nothing when M has been read: it stays where it is."""


# fmt: off
def cosmos_step_(
    W: MatrixList, G: MatrixList, state: Any, t: Tensor, *, lr: Number, decay: Number, grad_max: Tensor,
    skip: Tensor | None = None, seeds: Tensor | None = None, M_done: Callable[[], None] = do_nothing,
    betas: tuple[float, float], eps: float, eps_placement: str, gamma: float, nesterov: bool, row_beta2: float | None,
    equal_rows: bool, residual_guard: float, ns: NewtonSchulz, momentum_dtype: torch.dtype | None = None,
) -> CosmosState:
    """Take one step of COSMOS: write W and M, and return the new thin state. See also `rules.cosmos.direction`.

    Args:
        lr, decay: W <- decay W - lr D; numbers, or scalars on the device.
        grad_max: the largest |g| of each matrix, (batch,). A matrix with a zero gradient is only decayed.
        skip: a boolean on the device; if True, nothing is written.
        seeds: (batch,) int32; if given, bfloat16 parameters are rounded stochastically.
        M_done: called when M has been read for the last time; state in host memory goes back there.
        momentum_dtype: not read, because M has it.
    """
    (b1, b2), (M, U_old, S, V, v) = betas, state
    (m, n), r, guard = W.shape, U_old.shape[-1], residual_guard
    a = b1 if nesterov else 1.0                                                             # N = a M + (1 - a) G
    unit = math.sqrt(m * n)                                                                 # |D| if its RMS is 1

    GU = project(G, split(U_old), r, grad_max)                                              # L5   G U
    GU_sq, GU_max = norm_sq_and_max(GU)
    Z, Z_max, c = scale_for_power_step(GU, S, GU_sq, GU_max)                                #      G U / c
    HU = project_transposed(G, Z, Z_max, r, grad_max)                                       #      G'G U / c
    del GU, Z
    Y, Y_columns = power_sum(U_old, S, HU, c, b2)                                           #      b2 U S + (1-b2) G'G U
    U = orthonormalize(Y, U_old, Y_columns)                                                 #      QR
    U_f16, U_bf16 = split_both(U)

    GU, MU, M_max = momentum_(M, G, 1 - b1, (U_f16, U_bf16), r, skip, grad_max)             # L4, with G U and M U
    C, E = thin_product_parts(U, U_old), thin_product_parts(GU, GU, gain=1 - b2)
    S, tracked = second_moment(S, C, E, b2, guard)                                          # L6
    NU = torch.add(a * MU, GU, alpha=1 - a) if nesterov else MU
    V, P, minus_NU, (P_sq, NU_sq) = soap_half(
        V, GU, NU, tracked, t, betas=betas, eps=eps, eps_inside_root=eps_placement == "inside",
        extra_steps=int(nesterov), guard=guard)                                             # L7, L8
    X, X_sq, X_scale = residual(M, G, a, 1 - a, minus_NU, U_bf16, M_max)                    #      N - N U U'
    M_done()

    del Y, HU, C, E, GU, MU, NU, minus_NU                                                   #      free before products
    Y_sq = equalize_rows_(X if m >= n else X.mT, X_sq) if equal_rows else X_sq              #      Y: in the place of X
    B, norm_sq = newton_schulz_in_place(X, Y_sq, ns)                                        # L9
    BU, B_sq, B_rows = overlap(B if m >= n else B.mT, U_f16, r)                             #      B U: noise, taken out
    b = muon_gain(X_sq, X_scale, NU_sq, B_sq, norm_sq, gamma * unit, guard)                 #      gamma NORM sqrt(m)

    D_sq: tuple[Tensor | None, Tensor] = B_sq, P_sq                                         #      |b B|^2 + |P|^2
    rows = None
    if row_beta2 is not None:                                                               #      Not in the paper
        v, rows, rows_sq = row_gains(v, B_rows, norm_sq, n, row_beta2, max(eps, ROW_FLOOR), b=b, P=P)
        D_sq = None, rows_sq                                                                #      |D|^2 in one number
    factors, thin = update_coefficients(
        b, norm_sq, lr, decay, grad_max, P=P, BU=BU, row_gain=rows, B_sq=D_sq[0], other_sq=D_sq[1],
        target_norm=unit)                                                                   # L10, L11
    update_(W, B, thin, U_bf16, factors, skip, seeds, rows)                                 #      W <- decay W - lr D
    return CosmosState(M, U, S, V, v)


def muon_step_(
    W: MatrixList, G: MatrixList, state: Any, t: Tensor, *, lr: Number, decay: Number, grad_max: Tensor,
    skip: Tensor | None = None, seeds: Tensor | None = None, M_done: Callable[[], None] = do_nothing,
    momentum: float, nesterov: bool, equal_rows: bool, ns: NewtonSchulz, scaling: str = "paper",
    normalize: bool = False, beta2: float | None = None, eps: float = 0.0, momentum_dtype: torch.dtype | None = None,
) -> MuonState | NorMuonState:
    """Take one step of Muon, or of NorMuon if `beta2` is given: write W and M, and return the new thin state."""
    M, (m, n), a = state.M, W.shape, momentum if nesterov else 1.0
    unit = math.sqrt(m * n)

    _, _, M_max = momentum_(M, G, 1 - momentum, None, 1, skip)                              # L4
    X, X_sq, _ = residual(M, G, a, 1 - a, None, None, M_max)                                # L5   N
    M_done()
    if equal_rows:
        X_sq = equalize_rows_(X if m >= n else X.mT, X_sq)
    B, norm_sq = newton_schulz_in_place(X, X_sq, ns)                                        # L6   NS5(N / |N|)

    b = rows = B_sq = D_sq = v = None
    if beta2 is not None:                                                                   #      NorMuon
        B_rows = row_norm_sq(B if m >= n else B.mT)
        v, rows, D_sq = row_gains(state.v, B_rows, norm_sq, n, beta2, eps)
    elif normalize:                                                                         # L7   sqrt(m) NORM(B)
        B_sq = torch.linalg.vector_norm(B, dim=(1, 2), dtype=torch.float64).square()[:, None]
    else:                                                                                   # L7   sqrt(m) B
        b = t.new_full((1, 1, 1), SCALINGS[scaling](m, n))
    target = 0.0 if b is not None else unit                                                 #      0: D keeps its size
    factors, _ = update_coefficients(b, norm_sq, lr, decay, grad_max, B_sq=B_sq, other_sq=D_sq, target_norm=target)
    update_(W, B, None, None, factors, skip, seeds, rows)                                   #      W <- decay W - lr D
    return MuonState(M) if v is None else NorMuonState(M, v)


# fmt: on

# The rules that have a schedule, by name.
SCHEDULES: dict[str, Callable[..., Any]] = {"cosmos": cosmos_step_, "muon": muon_step_, "normuon": muon_step_}


def newton_schulz_in_place(X: Tensor, X_sq: Tensor, ns: NewtonSchulz) -> tuple[Tensor, Tensor]:
    """Return B, times a norm, and the square of that norm. X (batch, long, short) is overwritten.

    The products run on the stream of low priority, where the temporaries of all chunks share one pool of memory.
    """
    norm_sq, weight = norm_and_weight(X_sq, HALF_SCALE**2, LEAST_NORM_SQ)
    symmetric = syrk.supports(X)
    iterations, gram_steps = iterations_for(ns, X.shape[1], X.shape[2], torch.float16, selective=symmetric)
    # The chunk's stream reads the result, so it must own that memory: the other stream would reuse its own too early.
    batch, long, short = X.shape
    out = X if len(gram_steps) > 1 else syrk.empty_stack(X, long)
    streams = Streams.of(X.device)
    with streams.products():
        pool = streams.pool(newton_schulz_bytes(batch, long, short, ns))
        products = SymmetricProducts(pool.empty_stack) if symmetric else TorchProducts()
        B = iterate(X, iterations, products, weight=weight, scale=HALF_SCALE, gram_steps=gram_steps, out=out)
    return B, norm_sq
