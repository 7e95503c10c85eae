"""V <- beta2 V + (1 - beta2) Y*Y and P = (N / (1 - beta1^t)) / root(V), for thin factors (B, k, r), in one pass.

What comes next needs the sums of squares of P and N by row blocks, and N in bfloat16 parts: both are left on the way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.reductions import square_sum
from cosmos_optim.cuda.kernels.tiles import thin_rows


@jit
def correction(log, steps):  # type: ignore[no-untyped-def]
    """1 - beta^steps from the logarithm of beta."""
    return (1 - tl.exp(steps * log)).to(tl.float32)


@jit
def _adapt(  # type: ignore[no-untyped-def]
    v, y, x, real, t, new, p, parts, squares, k, r, step, squares_step, beta, rest, eps, log1, log2, ahead,
    BLOCK: tl.constexpr, R: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    block, batch, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row, col = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    base, inside = batch.to(tl.int64) * k * r, (row[:, None] < k) & (col[None, :] < r)
    steps = tl.load(t + batch).to(tl.float64)
    c1, c2 = correction(log1, steps + ahead), correction(log2, steps)
    Y, X = thin_rows(y + base, row, col, k, r), thin_rows(x + base, row, col, k, r)
    V = beta * thin_rows(v + base, row, col, k, r) + rest * Y * Y
    if INSIDE:
        root = tl.sqrt_rn((V + eps) / c2)
    else:
        root = tl.sqrt_rn(V / c2) + eps
    keep = tl.load(real + batch * r + col, mask=col < r, other=0.0)
    P = tl.where(root > 0, X / c1 / tl.where(root > 0, root, 1.0), 0.0) * keep[None, :]
    P = tl.where(inside, P, 0.0)
    at = base + row[:, None] * r + col[None, :]
    tl.store(new + at, V, mask=inside)
    tl.store(p + at, P, mask=inside)
    lead = (-X).to(tl.bfloat16)
    at = parts + (batch.to(tl.int64) * k + row[:, None]) * R + col[None, :]
    tl.store(at, lead, mask=row[:, None] < k)
    tl.store(at + step, (-X - lead.to(tl.float32)).to(tl.bfloat16), mask=row[:, None] < k)
    at = squares + batch * blocks + block
    tl.store(at, square_sum(P))
    tl.store(at + squares_step, square_sum(X))


def adapt(
    V: Tensor, Y: Tensor, N: Tensor, real: Tensor, t: Tensor, *,
    betas: tuple[float, float], eps: float, inside: bool, ahead: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """V and P (B, k, r); -N in bfloat16 parts (2, B, k, R); |P|^2 and |N|^2 by row blocks, (2, B, blocks) in float64.

    Args:
        V, Y, N: second moment, the numbers whose squares it averages, and those to divide by its root.
        real: (B, 1, r), what each column of P is multiplied by.
        t: (B, 1, 1) steps, counted from 1; N is an average over `ahead` steps more.
        inside: eps stands within the root.
    """
    batch, k, r = V.shape
    V, Y, N, R = V.contiguous(), Y.contiguous(), N.contiguous(), power_of_two(r)
    new, P = torch.empty_like(V), torch.empty_like(V)
    block = max(1, 2048 // R)
    blocks = -(-k // block)
    parts = torch.empty(2, batch, k, R, dtype=torch.bfloat16, device=V.device)
    squares = torch.empty(2, batch, blocks, dtype=torch.float64, device=V.device)
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
    _adapt[(blocks, batch)](
        V, Y, N, real, t, new, P, parts, squares, k, r, parts.stride(0), squares.stride(0), betas[1], 1 - betas[1], eps,
        logs[0], logs[1], ahead, BLOCK=block, R=R, INSIDE=inside, num_warps=4,
    )  # fmt: skip
    return new, P, parts, squares
