"""V <- b2 V + (1 - b2) GU*GU (L7) and P = (NU / (1 - b1^t)) / root(V) (L8), from GU = G U and NU = N U.

root(V) is sqrt(V / (1 - b2^t)) + eps, or the paper's sqrt((V + eps) / (1 - b2^t)). One kernel does both, because both
read the same thin factors. It also computes what the next ones need: |P|^2, |N U|^2, and -N U in bfloat16 parts.

Shapes: V, GU, NU, P (batch, m, r); t (batch, 1, 1); `tracked` (batch, 1, r).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, thin_rows, tl
from cosmos_optim.cuda.kernels.reductions import norm_sq
from cosmos_optim.cuda.kernels.tiles import load_thin, store_bfloat16_parts
from cosmos_optim.rules.cosmos import noise_floor


@jit
def bias_correction(log_beta, steps):
    """Return 1 - beta^steps."""
    return (1 - tl.exp(steps * log_beta)).to(tl.float32)


@jit
def _soap_half(
    v, gu, nu, tracked, t, v_new, p, minus_nu, norm_sq_parts, m, r, part_stride, norm_sq_stride, beta2, one_minus_beta2,
    eps, floor, log_beta1, log_beta2, extra_steps,
    BLOCK: tl.constexpr, R: tl.constexpr, EPS_INSIDE_ROOT: tl.constexpr,
):  # fmt: skip
    block, batch, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row, col = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    base, inside = batch.to(tl.int64) * m * r, (row[:, None] < m) & (col[None, :] < r)
    steps = tl.load(t + batch).to(tl.float64)
    c1, c2 = bias_correction(log_beta1, steps + extra_steps), bias_correction(log_beta2, steps)
    GU, NU = load_thin(gu + base, row, col, m, r), load_thin(nu + base, row, col, m, r)
    V = beta2 * load_thin(v + base, row, col, m, r) + one_minus_beta2 * GU * GU
    if EPS_INSIDE_ROOT:
        root = tl.sqrt_rn((V + eps) / c2)
    else:
        root = tl.sqrt_rn(V / c2) + eps
    keep = tl.load(tracked + batch * r + col, mask=col < r, other=0.0)
    P = tl.where(root > 0, NU / c1 / tl.where(root > 0, root, 1.0), 0.0) * keep[None, :]
    past, GU_max = floor * tl.max(V, axis=1), tl.max(tl.abs(GU), axis=1)
    now = GU / tl.where(GU_max > 0, GU_max, 1.0)[:, None]
    P = tl.where(inside & ((past[:, None] <= V) | (now * now > tl.maximum(floor, 0.0))), P, 0.0)
    at = base + row[:, None] * r + col[None, :]
    tl.store(v_new + at, V, mask=inside)
    tl.store(p + at, P, mask=inside)
    at = minus_nu + (batch.to(tl.int64) * m + row[:, None]) * R + col[None, :]
    store_bfloat16_parts(at, part_stride, -NU, row[:, None] < m)
    at = norm_sq_parts + batch * blocks + block
    tl.store(at, norm_sq(P))
    tl.store(at + norm_sq_stride, norm_sq(NU))


def soap_half(
    V: Tensor, GU: Tensor, NU: Tensor, tracked: Tensor, t: Tensor, *,
    betas: tuple[float, float], eps: float, eps_inside_root: bool, extra_steps: float, guard: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the new V and P, -N U in bfloat16 parts (2, batch, m, R), and |P|^2 and |N U|^2 by row blocks.

    The squared norms are float64, (2, batch, blocks).

    Args:
        V, GU, NU: the second moment so far, and G U and N U in the new basis, (batch, m, r).
        tracked: (batch, 1, r), a factor for each column of P: 1 if it holds gradient, else 0.
        t: (batch, 1, 1) steps, counted from 1.
        betas: decay of the momentum and of V.
        eps_inside_root: whether eps is added to V inside of the root, as in the paper.
        extra_steps: N is an average over t + extra_steps steps (1 with Nesterov's blend, else 0).
        guard: if above 0, entries of P that hold only rounding noise are 0, as `rules.cosmos.resolved` defines it.
    """
    batch, m, r = V.shape
    V, GU, NU, R = V.contiguous(), GU.contiguous(), NU.contiguous(), power_of_two(r)
    V_new, P = torch.empty_like(V), torch.empty_like(V)
    block = thin_rows(R)
    blocks = -(-m // block)
    minus_NU = torch.empty(2, batch, m, R, dtype=torch.bfloat16, device=V.device)
    norm_sq_parts = torch.empty(2, batch, blocks, dtype=torch.float64, device=V.device)
    log_beta1, log_beta2 = (math.log(beta) if beta > 0 else -math.inf for beta in betas)
    _soap_half[(blocks, batch)](
        V, GU, NU, tracked, t, V_new, P, minus_NU, norm_sq_parts, m, r, minus_NU.stride(0), norm_sq_parts.stride(0),
        betas[1], 1 - betas[1], eps, noise_floor(V.dtype, guard), log_beta1, log_beta2, extra_steps, BLOCK=block, R=R,
        EPS_INSIDE_ROOT=eps_inside_root, num_warps=4,
    )  # fmt: skip
    return V_new, P, minus_NU, norm_sq_parts
