"""Weights of 24 bits in a kernel: functions for tiles that other kernels call. `linalg.weight24` has the format."""

from __future__ import annotations

from cosmos_optim.cuda.kernels.launch import jit, tl


@jit
def split_weight(x):
    """Return the bfloat16 and the int8 correction of a tile of float32."""
    bits24 = (tl.where(x == x, x, float("nan")).to(tl.int32, bitcast=True) + 128) >> 8
    bits16 = (bits24 + 128) >> 8
    p = bits16.to(tl.int16).to(tl.bfloat16, bitcast=True)
    is_finite = (bits16 & 0x7FFF) < 0x7F80
    return p, tl.where(is_finite, bits24 - (bits16 << 8), 0).to(tl.int8)


@jit
def join_weight(p, correction):
    """Return the float32 of a tile of bfloat16 and its int8 corrections."""
    bits16, correction = p.to(tl.int16, bitcast=True).to(tl.int32), correction.to(tl.int32)
    magnitude = bits16 & 0x7FFF
    holds = (magnitude < 0x7F80) & ((magnitude != 0) | (correction >= 0))
    return (((bits16 << 8) + tl.where(holds, correction, 0)) << 8).to(tl.float32, bitcast=True)
