"""Compute the scalar factors of an update from partial sums of earlier kernels, in one launch each for the whole batch.

    norm_and_weight      |X|^2, and the weight scale / |X|^2 of the first product of Newton-Schulz
    muon_gain            b = gamma sqrt(m n) / |B|, or 0 if the residual is rounding noise (L9)
    update_coefficients  all factors of W <- decay W - lr s (b B + P U') (L10, L11),
                         with s = sqrt(m n) / |b B + P U'|; optionally row i times g_i, and lr = 0 for a zero gradient

B = (buffer - (buffer U) U') / norm: Newton-Schulz leaves its result, times a norm, in the work buffer, with rounding
noise along U, although X has no part there. The update subtracts the first term from W and adds the second to P.

Shapes: factors (batch, 1, 1), P and B U (batch, m, r), g (batch, m, 1); sums by parts (batch, parts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.launch import jit, power_of_two, thin_rows, tl
from cosmos_optim.cuda.kernels.reductions import sum_parts
from cosmos_optim.cuda.kernels.tiles import load_thin, store_bfloat16_parts


@jit
def _norm_gain(norm_sq, target_norm):
    """Return target_norm / sqrt(norm_sq), but a number that float32 holds; 0 for a zero norm."""
    gain = target_norm / tl.sqrt(tl.where(norm_sq > 0, norm_sq, 1.0))
    return tl.where(norm_sq > 0, tl.minimum(gain, 3.0e38), 0.0)


@jit
def _norm_and_weight(norm_sq_parts, norm_sq, weight, count, scale, least, COUNT: tl.constexpr):
    batch = tl.program_id(0)
    total = sum_parts(norm_sq_parts, batch, count, COUNT)
    total = tl.where(total < least, least, total)
    tl.store(norm_sq + batch, total)
    tl.store(weight + batch, (scale / total).to(tl.float32))


def norm_and_weight(norm_sq_parts: Tensor, scale: float, least: float) -> tuple[Tensor, Tensor]:
    """Return |X|^2, at least `least`, in float64, and scale / |X|^2 in float32, (batch, 1, 1), from |X|^2 by parts."""
    batch, count = norm_sq_parts.shape
    norm_sq, weight = (norm_sq_parts.new_empty(batch, 1, 1, dtype=dtype) for dtype in (torch.float64, torch.float32))
    COUNT = power_of_two(count)
    _norm_and_weight[(batch,)](norm_sq_parts, norm_sq, weight, count, scale, least, COUNT=COUNT, num_warps=1)
    return norm_sq, weight


@jit
def _muon_gain(
    x_sq, x_scale, nu_sq, b_sq, norm_sq, out, x_count, nu_count, b_count, target_norm, guard,
    X_PARTS: tl.constexpr, NU_PARTS: tl.constexpr, B_PARTS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    c = tl.load(x_scale + batch).to(tl.float64)
    X_sq = sum_parts(x_sq, batch, x_count, X_PARTS) / c / c
    N_sq = X_sq + sum_parts(nu_sq, batch, nu_count, NU_PARTS)
    B_sq = sum_parts(b_sq, batch, b_count, B_PARTS) / tl.load(norm_sq + batch)
    tl.store(out + batch, tl.where(X_sq > guard * N_sq, _norm_gain(B_sq, target_norm), 0.0).to(tl.float32))


def muon_gain(
    X_sq: Tensor, X_scale: Tensor, NU_sq: Tensor, B_sq: Tensor, norm_sq: Tensor, target_norm: float, guard: float
) -> Tensor:
    """Return target_norm / |B|, or 0 if |X|^2 <= guard (|X|^2 + |N U|^2), (batch, 1, 1) float32.

    Args:
        X_sq, X_scale: |c X|^2 by parts and c (batch, 1, 1), as `residual` returns them.
        B_sq: norm_sq |B|^2 by parts, as `overlap` returns it.
        norm_sq: (batch, 1, 1) float64, from `norm_and_weight`.
        target_norm: gamma sqrt(m n), the norm of b B.
        guard: the share of the momentum's squared norm below which the residual is rounding noise.
    """
    out = torch.empty(len(X_scale), 1, 1, dtype=torch.float32, device=X_scale.device)
    sums = [x.contiguous() for x in (X_sq, NU_sq, B_sq)]
    counts = [x[0].numel() for x in sums]
    blocks = [power_of_two(n) for n in counts]
    _muon_gain[(len(X_scale),)](
        sums[0], X_scale, sums[1], sums[2], norm_sq, out, *counts, target_norm, guard, X_PARTS=blocks[0],
        NU_PARTS=blocks[1], B_PARTS=blocks[2], num_warps=1,
    )  # fmt: skip
    return out


@jit
def _number(pointer, value, in_memory):
    """Return a number from memory (in_memory > 0) or the one that the host passed, in float64."""
    zero = tl.full((), 0.0, dtype=tl.float64)
    return tl.where(zero + in_memory > 0, tl.load(pointer), zero + value)


@jit(unaligned=("lr_ptr", "decay_ptr"))
def _update_coefficients(
    p, bu, b_ptr, row_gain, grad_max, other_sq, b_sq, norm_sq, lr_ptr, decay_ptr, thin, coefficients, m, r, part_stride,
    b_batch_stride, other_count, b_count, target_norm, lr_value, lr_in_memory, decay_value, decay_in_memory,
    BLOCK: tl.constexpr, R: tl.constexpr, B_GIVEN: tl.constexpr, THIN: tl.constexpr, ROW_GAIN: tl.constexpr,
    NORMALIZE: tl.constexpr, OTHER_PARTS: tl.constexpr, B_PARTS: tl.constexpr,
):  # fmt: skip
    """Write decay and gain = lr s b / norm of a matrix, and BLOCK rows of thin = g (gain BU - lr s P)."""
    block, batch = tl.program_id(0), tl.program_id(1)
    lr_s, decay = _number(lr_ptr, lr_value, lr_in_memory), _number(decay_ptr, decay_value, decay_in_memory)
    b, square = tl.full((), 1.0, dtype=tl.float64), tl.load(norm_sq + batch)
    if B_GIVEN:
        b = tl.load(b_ptr + batch * b_batch_stride).to(tl.float64)
    lr_s = tl.where(tl.load(grad_max + batch) > 0, lr_s, 0.0)
    if NORMALIZE:
        total = tl.full((), 0.0, dtype=tl.float64)
        if B_PARTS > 0:
            total += b * b * sum_parts(b_sq, batch, b_count, B_PARTS) / square
        if OTHER_PARTS > 0:
            total += sum_parts(other_sq, batch, other_count, OTHER_PARTS)
        lr_s = lr_s * _norm_gain(total, target_norm)
    gain = (b * lr_s / tl.sqrt(square)).to(tl.float32)
    if block == 0:
        tl.store(coefficients + batch * 2, decay.to(tl.float32))
        tl.store(coefficients + batch * 2 + 1, gain)
    if THIN:
        row, col = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, R)
        base = batch.to(tl.int64) * m * r
        value = tl.zeros((BLOCK, R), dtype=tl.float32)
        value -= lr_s.to(tl.float32) * load_thin(p + base, row, col, m, r)
        value += gain * load_thin(bu + base, row, col, m, r)
        if ROW_GAIN:
            value = value * tl.load(row_gain + batch * m + row, mask=row < m, other=0.0)[:, None]
        at = thin + (batch.to(tl.int64) * m + row[:, None]) * R + col[None, :]
        store_bfloat16_parts(at, part_stride, value, row[:, None] < m)


def update_coefficients(
    b: Tensor | None, norm_sq: Tensor, lr: float | Tensor, decay: float | Tensor, grad_max: Tensor, *,
    P: Tensor | None = None, BU: Tensor | None = None, row_gain: Tensor | None = None, B_sq: Tensor | None = None,
    other_sq: Tensor | None = None, target_norm: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the two arguments of `update_`: its coefficients, and the thin part of the update.

    The coefficients are decay and gain = lr s b / norm of each matrix, (batch, 2). The thin part g (gain BU - lr s P)
    is in bfloat16 parts (2, batch, m, R), or None without P and BU.

    Args:
        b: the gain of the Muon half from `muon_gain`, (batch or 1, 1, 1); None for 1.
        norm_sq: (batch, 1, 1) float64, from `norm_and_weight`.
        lr, decay: numbers, or float64 scalars on the device.
        grad_max: the largest |entry| of each gradient (batch,); if 0, lr counts as 0.
        P, BU: the SOAP half in the basis, and B U from `overlap` (norm times that of B), (batch, m, r); or both None.
        row_gain: g (batch, m, 1), None for 1; not needed without P.
        B_sq: norm_sq |B|^2 by parts, None for 0.
        other_sq: the squared norm of the other part of the direction by parts, None for 0.
        target_norm: s = target_norm / sqrt(b^2 B_sq / norm_sq + other_sq), or s = 1 if target_norm is 0.
    """
    m, r = (1, 16) if P is None else P.shape[1:]
    R, device = power_of_two(r), norm_sq.device
    block = thin_rows(R)
    thin = None if P is None else torch.empty(2, len(norm_sq), m, R, dtype=torch.bfloat16, device=device)
    coefficients = torch.empty(len(norm_sq), 2, dtype=torch.float32, device=device)
    sums = [norm_sq if x is None else x.contiguous() for x in (other_sq, B_sq)]
    counts = [x[0].numel() for x in sums]
    sizes = [0 if x is None else power_of_two(count) for x, count in zip((other_sq, B_sq), counts, strict=True)]
    (lr_pointer, *lr_value), (decay_pointer, *decay_value) = _as_argument(lr, norm_sq), _as_argument(decay, norm_sq)
    _update_coefficients[(-(-m // block), len(norm_sq))](
        _or(P, norm_sq), _or(BU, norm_sq), _or(b, norm_sq), _or(row_gain, norm_sq), grad_max, *sums, norm_sq,
        lr_pointer, decay_pointer, _or(thin, norm_sq), coefficients, m, r, 0 if thin is None else thin.stride(0),
        int(b is not None and b.numel() > 1), *counts, target_norm, *lr_value, *decay_value, BLOCK=block, R=R,
        B_GIVEN=b is not None, THIN=P is not None, ROW_GAIN=row_gain is not None, NORMALIZE=target_norm != 0.0,
        OTHER_PARTS=sizes[0], B_PARTS=sizes[1], num_warps=4,
    )  # fmt: skip
    return coefficients, thin


def _as_argument(x: float | Tensor, like: Tensor) -> tuple[Tensor, float, float]:
    """Return the three arguments of `_number`: pointer, value, and 1 if the kernel should read the pointer."""
    if isinstance(x, Tensor) and x.device == like.device:
        return x.double(), 0.0, 1.0
    return like, float(x), 0.0


def _or(x: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return x, or any tensor for an argument that the kernel does not read."""
    return placeholder if x is None else x
