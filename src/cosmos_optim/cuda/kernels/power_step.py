"""The thin arithmetic of the power step, b2 U S + (1 - b2) G'G U (L5), divided by its scale c^2.

    scale_for_power_step  G U / c in float16 parts, with c^2 = |G U|^2 + trace S
    power_sum             Y = beta U S / c^2 + (1 - beta) HU / c, with HU = G'(G U / c)

The scale c avoids overflow and underflow for gradients of any size. Each is one kernel that also removes rounding noise
from its input, as `linalg.subspace.power_step` does. Ranks above `thin_qr.MAX_COLUMNS` use plain torch (`power_sum`).

Shapes: GU (batch, m, r), S (batch, r, r), U, HU and Y (batch, n, r), c (batch, 1, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch, thin_qr
from cosmos_optim.cuda.kernels.launch import jit, power_of_two, thin_rows, tl
from cosmos_optim.cuda.kernels.reductions import max_parts, sum_parts
from cosmos_optim.cuda.kernels.tiles import (
    dot_split_tile,
    exponent,
    load_thin,
    scale_down,
    scale_up,
    split_float16,
    store_thin,
)
from cosmos_optim.linalg.subspace import NOISE, moment_without_noise


@jit
def _scale_for_power_step(
    gu, s, norm_sq_parts, max_abs_parts, gu_parts, scale, gu_max, m, r, parts, part_stride, noise,
    BLOCK: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    row, col = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
    diagonal = tl.load(s + batch * r * r + col * (r + 1), mask=col < r, other=0.0)
    c = tl.sqrt(sum_parts(norm_sq_parts, batch, parts, PARTS) + tl.sum(diagonal.to(tl.float64))).to(tl.float32)
    c = tl.where(c > 0, c, 1.0)
    scaled_max = max_parts(max_abs_parts, batch, parts, PARTS) / c
    value = load_thin(gu + batch.to(tl.int64) * m * r, row, col, m, r) / c
    value = tl.where(tl.abs(value) > noise * tl.max(tl.abs(value), axis=1)[:, None], value, 0.0)
    part1, part2 = split_float16(value * scale_up(exponent(scaled_max)))
    at, inside = gu_parts + (batch.to(tl.int64) * m + row[:, None]) * R + col[None, :], row[:, None] < m
    tl.store(at, part1, mask=inside)
    tl.store(at + part_stride, part2, mask=inside)
    if block == 0:
        tl.store(scale + batch, c)
        tl.store(gu_max + batch, scaled_max)


def scale_for_power_step(
    GU: Tensor, S: Tensor, norm_sq_parts: Tensor, max_abs_parts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return GU / c in float16 parts (2, batch, m, R), its largest |entry| (batch,), and c (batch, 1, 1).

    Entries of GU that are rounding noise become 0. If GU and S are 0, c is 1.

    norm_sq_parts, max_abs_parts: |GU|^2 and the largest |entry| of GU by parts, from `norm_sq_and_max`.
    """
    batch, m, r = GU.shape
    GU, S, R = GU.contiguous(), S.contiguous(), power_of_two(r)
    GU_parts = torch.empty(2, batch, m, R, dtype=torch.float16, device=GU.device)
    c, GU_max = (torch.empty(batch, dtype=torch.float32, device=GU.device) for _ in range(2))
    block, parts = thin_rows(R), norm_sq_parts.shape[1]
    _scale_for_power_step[(-(-m // block), batch)](
        GU, S, norm_sq_parts, max_abs_parts, GU_parts, c, GU_max, m, r, parts, GU_parts.stride(0), NOISE[torch.float32],
        BLOCK=block, R=R, PARTS=power_of_two(parts), num_warps=4,
    )  # fmt: skip
    return GU_parts, GU_max, c.view(-1, 1, 1)


@jit
def _moment_without_noise(T, i, j, noise):
    """Return T with 0 for entries that are rounding noise: `linalg.subspace.moment_without_noise`."""
    diagonal = tl.where(i[:, None] == j[None, :], T, 0.0)
    floor = noise * noise * tl.sum(diagonal)
    by_row, by_col = tl.sum(diagonal, axis=1), tl.sum(diagonal, axis=0)
    size = (tl.sqrt_rn(tl.where(by_row > floor, by_row, 0.0))[:, None]
            * tl.sqrt_rn(tl.where(by_col > floor, by_col, 0.0))[None, :])  # fmt: skip
    return tl.where((tl.abs(T) > noise * size) & (size > 0), T, 0.0)


@jit
def _power_sum(
    u, s, hu, scale, y, columns, n, r, beta, one_minus_beta, noise,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, FLOAT32_DOTS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the sum, and the squared norms of its columns over them."""
    part, batch, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    base = batch.to(tl.int64) * n * r
    i, col = tl.arange(0, R), tl.arange(0, R)
    c = tl.load(scale + batch)
    T = _moment_without_noise(load_thin(s + batch * r * r, i, col, r, r) / c / c, i, col, noise)
    e_t, e = exponent(tl.max(tl.abs(T))), exponent(tl.full((), 1.0, dtype=tl.float32))
    t1, t2 = split_float16(T * scale_up(e_t))
    norm_sq = tl.zeros((R,), dtype=tl.float32)
    for first in range(0, ROWS, BLOCK):
        row = part * ROWS + first + tl.arange(0, BLOCK)
        U = load_thin(u + base, row, col, n, r)
        zeros = tl.zeros((BLOCK, R), dtype=tl.float32)
        Y = scale_down(e_t) * dot_split_tile(U, e, t1, t2, zeros, False, False, FLOAT32_DOTS)
        Y = beta * Y + one_minus_beta * (load_thin(hu + base, row, col, n, r) / c)
        norm_sq += tl.sum(Y * Y, axis=0)
        store_thin(y + base, row, col, n, r, Y)
    tl.store(columns + (batch * parts + part) * R + col, norm_sq)


def power_sum(U: Tensor, S: Tensor, HU: Tensor, c: Tensor, beta: float) -> tuple[Tensor, Tensor | None]:
    """Return Y = beta U S / c^2 + (1 - beta) HU / c, (batch, n, r), and the `columns` that `orthonormalize` takes.

    Entries of S that are rounding noise count as 0. Those of U are at most 1; the product is as exact as in float32.

    U, S: the old basis and its second moment. HU: G'(G U / c). c: from `scale_for_power_step`.
    """
    batch, n, r = U.shape
    if not thin_qr.supports(r):
        return beta * U @ (moment_without_noise(S) / c / c) + (1 - beta) * HU / c, None
    parts, how = thin_qr.row_blocks(n, r)
    U, S, HU = U.contiguous(), S.contiguous(), HU.contiguous()
    Y, columns = torch.empty_like(U), U.new_empty(batch, parts, how["R"])
    _power_sum[(parts, batch)](
        U, S, HU, c, Y, columns, n, r, beta, 1 - beta, NOISE[torch.float32], FLOAT32_DOTS=launch.TARGET.float32_dots,
        **how, num_warps=thin_qr.warps(how["R"]), num_stages=1,
    )  # fmt: skip
    return Y, columns
