"""One Adam step of a list of tensors: dequantize both moments, update them and the parameter, quantize them again.

    m = m + (1 - b1) (g - m),  v = b2 v + (1 - b2) g^2,  p = decay p - a m / (sqrt(v) c + eps)

with a = lr / (1 - b1^t) and c = 1 / sqrt(1 - b2^t). Format and rounding are those of `linalg.int8_adam`. A program
takes a few blocks of a row (units): it reads each element once, keeps it in registers and writes it once. If `skip` is
True, nothing is written. The same kernel takes moments in float32 (QUANTIZED = False), and parameters of 24
bits (CORRECTED, see `linalg.weight24`), for which torch has no fused kernel.

Shapes: p, g, codes (m, n), contiguous; scales (m, ceil(n / BLOCK)), for each tensor of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import false_flag, jit, tl
from cosmos_optim.cuda.kernels.tiles import float32_bits, matrix_start, rounded_scale
from cosmos_optim.cuda.kernels.update import dither
from cosmos_optim.cuda.kernels.weight24_tiles import join_weight, split_weight
from cosmos_optim.cuda.pointer_list import ELEMENT_TYPES, addresses
from cosmos_optim.linalg import int8_adam
from cosmos_optim.linalg.int8_momentum import BLOCK
from cosmos_optim.rules.adam import has_codes

# Blocks of a program, and its warps: 2048 elements, 16 for each thread.
UNITS, WARPS = 16, 4
# The format of `linalg.int8_adam`, and its noise.
LARGEST_CODE, LARGEST_ROOT_CODE = tl.constexpr(int8_adam.LARGEST_CODE), tl.constexpr(int8_adam.LARGEST_ROOT_CODE)
LEAST_ROOT_CODE = tl.constexpr(int8_adam.LEAST_ROOT_CODE)
LARGEST_SCALE, SCALE_UNIT = float32_bits(int8_adam.LARGEST_SCALE), tl.constexpr(1 << int8_adam.CLEARED_BITS)
NOISE_SHIFT, NOISE_VALUES = tl.constexpr(32 - int8_adam.NOISE_BITS), tl.constexpr(1 << int8_adam.NOISE_BITS)
ELEMENT_MIX, STEP_MIX = tl.constexpr(int8_adam.ELEMENT_MIX), tl.constexpr(int8_adam.STEP_MIX)
ROOT_STEP_MIX = tl.constexpr(int8_adam.ROOT_STEP_MIX)


@jit
def _codes(x, inverse, bits, LARGEST: tl.constexpr):
    """Return the codes of x >= 0: sqrt(x / scale), rounded by the upper NOISE_BITS of the noise's bits."""
    noise = (((bits >> NOISE_SHIFT) & (NOISE_VALUES - 1)).to(tl.float32) + 0.5) * (1.0 / NOISE_VALUES)
    squares = x * inverse
    low = tl.floor(tl.sqrt(squares))
    low = tl.where(low * low > squares, low - 1.0, low)
    up = noise * (2.0 * low + 1.0) < squares - low * low
    return tl.minimum(tl.where(up, low + 1.0, low), LARGEST)


@jit(unaligned=("p", "g"), unspecialized=("m", "row", "column"))
def _adam(
    p, g, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, correction, coefficients, steps, skip, m, n, blocks,
    row, column, width, w, b2, eps, P: tl.constexpr, G: tl.constexpr, QUANTIZED: tl.constexpr,
    CORRECTED: tl.constexpr, SEEDED: tl.constexpr, ALIGNED: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step UNITS blocks. (row, column) is the place of the first element in a larger tensor of `width` columns."""
    batch = tl.program_id(1)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    i, first = unit // blocks, (unit % blocks) * BLOCK
    j = first[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = (i < m)[:, None] & (j < n)
    at = i.to(tl.int64)[:, None] * n + j
    decay, a, c = (tl.load(coefficients + batch * 3), tl.load(coefficients + batch * 3 + 1),
                   tl.load(coefficients + batch * 3 + 2))  # fmt: skip
    step = tl.load(steps + batch)
    write = tl.load(skip) == 0
    at_p = matrix_start(p, batch, P, ALIGNED) + at
    grad = tl.load(matrix_start(g, batch, G, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZED:
        at_m = matrix_start(exp_avg, batch, tl.int8, ALIGNED) + at
        at_v = matrix_start(exp_avg_sq, batch, tl.uint8, ALIGNED) + at
        at_m_scale = matrix_start(exp_avg_scale, batch, tl.float32, False) + unit
        at_v_scale = matrix_start(exp_avg_sq_scale, batch, tl.float32, False) + unit
        code = tl.load(at_m, mask=inside, other=0).to(tl.float32)
        old_m = code * tl.abs(code) * tl.load(at_m_scale, mask=i < m, other=0.0)[:, None]
        code = tl.load(at_v, mask=inside, other=0).to(tl.float32)
        root = code * code * tl.load(at_v_scale, mask=i < m, other=0.0)[:, None]
        old_v = root * root
    else:
        at_m = matrix_start(exp_avg, batch, tl.float32, ALIGNED) + at
        at_v = matrix_start(exp_avg_sq, batch, tl.float32, ALIGNED) + at
        old_m, old_v = tl.load(at_m, mask=inside, other=0.0), tl.load(at_v, mask=inside, other=0.0)
    new_m = old_m + w * (grad - old_m)
    new_v = b2 * old_v + (1.0 - b2) * grad * grad
    root = tl.sqrt(new_v)
    divisor = root * c + eps
    change = tl.where(divisor > 0.0, new_m / tl.where(divisor > 0.0, divisor, 1.0), 0.0)

    weight = tl.load(at_p, mask=inside, other=0.0)
    if CORRECTED:
        at_c = matrix_start(correction, batch, tl.int8, ALIGNED) + at
        value = join_weight(weight, tl.load(at_c, mask=inside, other=0)) * decay - a * change
        weight, rest = split_weight(value)
        tl.store(at_c, rest, mask=inside & write)
        tl.store(at_p, weight, mask=inside & write)
    else:
        value = weight.to(tl.float32) * decay - a * change
        if SEEDED:
            value = dither(value, i[:, None] * n + j, step)
        tl.store(at_p, value.to(P), mask=inside & write)

    if QUANTIZED:
        index = (i[:, None] + row) * width + (j + column)
        bits = index * ELEMENT_MIX + step * STEP_MIX
        root_bits = index * ELEMENT_MIX + step * ROOT_STEP_MIX
        size = tl.abs(new_m)
        m_scale = rounded_scale(tl.max(size, axis=1) / LARGEST_CODE**2, LARGEST_SCALE, SCALE_UNIT)
        v_scale = rounded_scale(tl.max(root, axis=1) / LARGEST_ROOT_CODE**2, LARGEST_SCALE, SCALE_UNIT)
        m_code = _codes(size, (1.0 / m_scale)[:, None], bits, LARGEST_CODE)
        v_code = _codes(root, (1.0 / v_scale)[:, None], root_bits, LARGEST_ROOT_CODE)
        v_code = tl.where(new_v > 0.0, tl.maximum(v_code, LEAST_ROOT_CODE), 0.0)
        # Every thread has read its block's scales for the maxima, which the scales to store depend on.
        tl.debug_barrier()
        tl.store(at_m, tl.where(new_m < 0.0, -m_code, m_code).to(tl.int8), mask=inside & write)
        tl.store(at_v, v_code.to(tl.uint8), mask=inside & write)
        tl.store(at_m_scale, m_scale, mask=(i < m) & write)
        tl.store(at_v_scale, v_scale, mask=(i < m) & write)
    else:
        tl.store(at_m, new_m, mask=inside & write)
        tl.store(at_v, new_v, mask=inside & write)


def adam_(
    params: Sequence[Tensor], grads: Sequence[Tensor], state: Mapping[str, Sequence[Tensor]], coefficients: Tensor,
    steps: Tensor, *, betas: tuple[float, float], eps: float, skip: Tensor | None,
    corrections: Sequence[Tensor] | None = None, seeded: bool = False, first: tuple[int, int] = (0, 0),
    width: int | None = None,
) -> None:  # fmt: skip
    """Step tensors of one shape and one kind in place. All are contiguous; the last dimension is a row.

    Args:
        state: `exp_avg` and `exp_avg_sq`, in float32, or as codes with `exp_avg_scale` and `exp_avg_sq_scale`.
        coefficients: (batch, 3) float32: decay, a and c of each tensor.
        steps: (batch,) int32, the step counts.
        skip: a boolean scalar on the device, or None; if True, nothing is written.
        corrections: int8 corrections of bfloat16 parameters of 24 bits, or None.
        seeded: round bfloat16 parameters stochastically.
        first, width: the place of the tensors in larger ones, as `int8_adam.element_index` takes it.
    """
    like, quantized = params[0], has_codes(state)
    n = like.shape[-1] if like.dim() else 1
    m, blocks, units = like.numel() // n, -(-n // BLOCK), launch.TARGET.block(UNITS)
    p, g, exp_avg, exp_avg_sq = (addresses(x) for x in (params, grads, state["exp_avg"], state["exp_avg_sq"]))
    scales = [addresses(state[f"{name}_scale"]) if quantized else p for name in ("exp_avg", "exp_avg_sq")]
    rest = () if corrections is None else corrections
    aligned = all(x.data_ptr() % 16 == 0 for x in (*params, *grads, *state["exp_avg"], *state["exp_avg_sq"], *rest))
    _adam[(-(-m * blocks // units), len(params))](
        p, g, exp_avg, scales[0], exp_avg_sq, scales[1], p if corrections is None else addresses(corrections),
        coefficients, steps, false_flag(like.device) if skip is None else skip, m, n, blocks, *first,
        n if width is None else width, 1 - betas[0], betas[1], eps,
        P=getattr(tl, ELEMENT_TYPES[like.dtype]), G=getattr(tl, ELEMENT_TYPES[grads[0].dtype]), QUANTIZED=quantized,
        CORRECTED=corrections is not None, SEEDED=seeded and like.dtype is torch.bfloat16, ALIGNED=aligned,
        UNITS=units, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
