"""The factors of an update, for all matrices of a chunk in one launch each, from sums that other kernels left.

    |X|^2, and the weight 1 / |X|^2 of the first product of Newton-Schulz            (norms)
    b = gamma sqrt(m n) / |B|, or 0 where the residual is rounding noise             (muon_gain)
    W <- decay W - lr s (b B + P U'), s = sqrt(m n) / |b B + P U'|                   (finish: all but the pass over W)
                                                        with `rows`, row i of b B + P U' times g_i; with `top`, s = 0
                                                        where that is 0

B = (buffer - (buffer U) U') / norm (`operands.Polar`): its first part is the update's, the second joins P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, tl
from cosmos_optim.cuda.kernels.reductions import added, total
from cosmos_optim.cuda.kernels.split_precision import split_torch
from cosmos_optim.cuda.kernels.tiles import thin_rows


@jit
def _unit(energy, root):  # type: ignore[no-untyped-def]
    """root / sqrt(energy), and 0 for none."""
    return tl.where(energy > 0, root / tl.sqrt(tl.where(energy > 0, energy, 1.0)), 0.0)


@jit
def _norms(squares, norm, weight, count, scale, least, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    batch = tl.program_id(0)
    energy = total(squares, batch, count, COUNT)
    energy = tl.where(energy < least, least, energy)
    tl.store(norm + batch, energy)
    tl.store(weight + batch, (scale / energy).to(tl.float32))


def norms(squares: Tensor, scale: float, least: float) -> tuple[Tensor, Tensor]:
    """|X|^2, but at least `least`, in float64, and scale / |X|^2 in float32, (B, 1, 1), from its parts (B, parts)."""
    batch, count = squares.shape
    norm, weight = (squares.new_empty(batch, 1, 1, dtype=dtype) for dtype in (torch.float64, torch.float32))
    _norms[(batch,)](squares, norm, weight, count, scale, least, COUNT=power_of_two(count), num_warps=1)
    return norm, weight


def norms_torch(squares: Tensor, scale: float, least: float) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    norm = added(squares).clamp_min(least)
    return norm, (scale / norm).float()


@jit
def _muon_gain(  # type: ignore[no-untyped-def]
    square, factor, tracked, left, norm, out, square_count, tracked_count, left_count, root, guard,
    SQUARES: tl.constexpr, TRACKED: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    c = tl.load(factor + batch).to(tl.float64)
    residual = total(square, batch, square_count, SQUARES) / c / c
    momentum = residual + total(tracked, batch, tracked_count, TRACKED)
    energy = total(left, batch, left_count, LEFT) / tl.load(norm + batch)
    tl.store(out + batch, tl.where(residual > guard * momentum, _unit(energy, root), 0.0).to(tl.float32))


def muon_gain(
    square: Tensor, factor: Tensor, tracked: Tensor, left: Tensor, norm: Tensor, root: float, guard: float
) -> Tensor:
    """root / |B| where |X|^2 > guard (|X|^2 + tracked), else 0, (B, 1, 1) float32.

    Args:
        square, factor: |factor X|^2 by parts, and factor (B, 1, 1).
        tracked, left: sums by parts (B, ...): |N U|^2, and norm |B|^2.
        norm: (B, 1, 1) float64.
    """
    out = torch.empty(len(factor), 1, 1, dtype=torch.float32, device=factor.device)
    sums = [x.contiguous() for x in (square, tracked, left)]
    counts = [x[0].numel() for x in sums]
    blocks = [power_of_two(n) for n in counts]
    _muon_gain[(len(factor),)](
        sums[0], factor, sums[1], sums[2], norm, out, *counts, root, guard, SQUARES=blocks[0], TRACKED=blocks[1],
        LEFT=blocks[2], num_warps=1,
    )  # fmt: skip
    return out


def muon_gain_torch(
    square: Tensor, factor: Tensor, tracked: Tensor, left: Tensor, norm: Tensor, root: float, guard: float
) -> Tensor:
    """The same in plain torch."""
    residual = added(square) / factor.double().square()
    energy = added(left) / norm
    gain = torch.where(energy > 0, root * energy.rsqrt(), torch.zeros_like(energy))
    return torch.where(residual > guard * (residual + added(tracked)), gain, torch.zeros_like(gain)).float()


@jit
def _number(here, value, there):  # type: ignore[no-untyped-def]
    """A number in memory (there > 0) or one that the host gave, in float64."""
    zero = tl.full((), 0.0, dtype=tl.float64)
    return tl.where(zero + there > 0, tl.load(here), zero + value)


@jit(unaligned=("lr", "decay"))
def _finish(  # type: ignore[no-untyped-def]
    p, bu, b, s, rows, top, squares, left, norm, lr, decay, parts, coefficients, k, r, step, b_step, s_step,
    square_count, left_count, root, lr_value, lr_there, decay_value, decay_there,
    BLOCK: tl.constexpr, R: tl.constexpr, B: tl.constexpr, P: tl.constexpr, BU: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr, SQUARES: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(1)
    size, keep = _number(lr, lr_value, lr_there), _number(decay, decay_value, decay_there)
    gain, square = tl.full((), 1.0, dtype=tl.float64), tl.load(norm + batch)
    if B:
        gain = tl.load(b + batch * b_step).to(tl.float64)
    if SCALED:
        size = size * tl.load(s + batch * s_step).to(tl.float64)
    if TOP:
        size = tl.where(tl.load(top + batch) > 0, size, 0.0)
    if UNIT:
        energy = tl.full((), 0.0, dtype=tl.float64)
        if LEFT > 0:
            energy += gain * gain * total(left, batch, left_count, LEFT) / square
        if SQUARES > 0:
            energy += total(squares, batch, square_count, SQUARES)
        size = size * _unit(energy, root)
    gain = (gain * size / tl.sqrt(square)).to(tl.float32)
    if block == 0:
        tl.store(coefficients + batch * 2, keep.to(tl.float32))
        tl.store(coefficients + batch * 2 + 1, gain)
    if P or BU:
        row, col = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
        base = batch.to(tl.int64) * k * r
        value = tl.zeros((BLOCK, R), dtype=tl.float32)
        if P:
            value -= size.to(tl.float32) * thin_rows(p + base, row, col, k, r)
        if BU:
            value += gain * thin_rows(bu + base, row, col, k, r)
        if ROWS:
            value = value * tl.load(rows + batch * k + row, mask=row < k, other=0.0)[:, None]
        lead = value.to(tl.bfloat16)
        at = parts + (batch.to(tl.int64) * k + row[:, None]) * R + col[None, :]
        tl.store(at, lead, mask=row[:, None] < k)
        tl.store(at + step, (value - lead.to(tl.float32)).to(tl.bfloat16), mask=row[:, None] < k)


def finish(
    b: Tensor | None, norm: Tensor, lr: float | Tensor, decay: float | Tensor, *,
    P: Tensor | None = None, BU: Tensor | None = None, s: Tensor | None = None,
    rows: Tensor | None = None, top: Tensor | None = None, left: Tensor | None = None, squares: Tensor | None = None,
    root: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(decay, lr s b / norm) by matrix (B, 2), and g (-lr s P + (lr s b / norm) BU) in bfloat16 parts (2, B, m, R).

    Args:
        b, s: (B or 1, 1, 1), None for 1.
        norm: its square (B, 1, 1) in float64.
        P, BU: (B, m, r) or None.
        rows: g (B, m, 1), None for 1.
        top: (B,); given, lr counts as 0 where this is 0.
        root: if not 0, s is besides root / sqrt(b^2 left / norm^2 + squares).
        left, squares: sums by parts, None for 0.
    """
    thin = P if P is not None else BU
    k, r = (1, 16) if thin is None else thin.shape[1:]
    R, device = power_of_two(r), norm.device
    block = max(1, 2048 // R)
    parts = None if thin is None else torch.empty(2, len(norm), k, R, dtype=torch.bfloat16, device=device)
    coefficients = torch.empty(len(norm), 2, dtype=torch.float32, device=device)
    sums = [norm if x is None else x.contiguous() for x in (squares, left)]
    counts = [x[0].numel() for x in sums]
    sizes = [0 if x is None else power_of_two(count) for x, count in zip((squares, left), counts, strict=True)]
    (rate, *rate_value), (keep, *keep_value) = _known(lr, norm), _known(decay, norm)
    _finish[(1 if thin is None else -(-k // block), len(norm))](
        _or(P, norm), _or(BU, norm), _or(b, norm), _or(s, norm), _or(rows, norm), _or(top, norm), sums[0], sums[1],
        norm, rate, keep, _or(parts, norm), coefficients, k, r, 0 if parts is None else parts.stride(0), _step(b),
        _step(s), counts[0], counts[1], root, *rate_value, *keep_value, BLOCK=block, R=R, B=b is not None,
        P=P is not None, BU=BU is not None, SCALED=s is not None, ROWS=rows is not None, TOP=top is not None,
        UNIT=root != 0.0, SQUARES=sizes[0], LEFT=sizes[1], num_warps=4,
    )  # fmt: skip
    return coefficients, parts


def finish_torch(
    b: Tensor | None, norm: Tensor, lr: float | Tensor, decay: float | Tensor, *,
    P: Tensor | None = None, BU: Tensor | None = None, s: Tensor | None = None,
    rows: Tensor | None = None, top: Tensor | None = None, left: Tensor | None = None, squares: Tensor | None = None,
    root: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same in plain torch."""
    one = torch.ones_like(norm)
    b, size = one if b is None else b.double(), one * lr if s is None else lr * s.double()
    size = size if top is None else size * (top > 0).view(-1, 1, 1)
    if root:
        energy = 0 * one if left is None else b.square() * added(left) / norm
        energy = energy if squares is None else energy + added(squares)
        size = size * torch.where(energy > 0, root * energy.rsqrt(), torch.zeros_like(energy))
    gain, size = (b * norm.rsqrt() * size).float(), size.float()
    coefficients = torch.cat([torch.zeros_like(gain) + decay, gain], dim=-1).view(-1, 2)
    value = None if P is None else P * -size
    if BU is not None:
        value = BU * gain if value is None else torch.addcmul(value, BU, gain)
    value = value if value is None or rows is None else value * rows
    return coefficients, None if value is None else split_torch(value, torch.bfloat16)


def _known(x: float | Tensor, like: Tensor) -> tuple[Tensor, float, float]:
    """Where a kernel finds a number, its value if that is known here, and which of the two counts: 1 for memory."""
    if isinstance(x, Tensor) and x.device == like.device:
        return x.double(), 0.0, 1.0
    return like, float(x), 0.0


def _step(x: Tensor | None) -> int:
    """From one matrix's number to the next one's."""
    return int(x is not None and x.numel() > 1)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    return other if x is None else x
