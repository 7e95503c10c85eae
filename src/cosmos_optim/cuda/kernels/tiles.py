"""Device functions that the kernels share: loads of tiles, products of nearly single precision, scales of codes.

**Products.** A float32 number x is split into two half-precision parts, x1 = half(x) and x2 = half(x - x1), and a
product keeps x1 y1 + x1 y2 + x2 y1. Tensor cores multiply the parts at full rate and sum in float32, which is several
times as fast as float32 arithmetic. There are two kinds of parts:

- float16 parts hold 22 bits, but only of numbers of moderate size. So a power of two first scales the largest entry to
  about 2^10. The error is about 2^-22; everything that tracks the eigenbasis uses them.
- bfloat16 parts hold 16 bits of any number. The error is about 2^-17; the momentum and the addition of P U' use them.

The product of each tile starts a new sum, because tensor cores truncate long sums instead of rounding them.

**Alignment classes.** Loads are fastest if they read 16 bytes at an address that is a multiple of 16. If the length of
a row in memory is not a multiple of 16 bytes, the rows begin at different offsets, but every C-th row begins at the
same one (C = ALIGNMENT_CLASSES is 1, 2, 4 or 8). A program then reads rows of one class only, first, first + C, first +
2 C, ...: their first aligned column is the same, and all tiles from there on can be loaded fast.

Shapes: a tile is (BM, BK) of an (m, n) matrix; a thin factor is (k, r), padded with zeros to R columns if it is in
parts.
"""

from __future__ import annotations

import struct
from typing import Any

from cosmos_optim.cuda.kernels.launch import jit, tl
from cosmos_optim.linalg import int8_momentum


def float32_bits(x: float) -> Any:
    """Return the bits of x, a constant for kernels."""
    return tl.constexpr(struct.unpack("i", struct.pack("f", x))[0])


LEAST_SCALE = float32_bits(int8_momentum.LEAST_SCALE)


@jit
def matrix_start(table, batch, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to the first entry of matrix `batch` of a table of addresses."""
    start = tl.load(table + batch).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@jit
def columns_before_alignment(row, row_stride, ELEMENT: tl.constexpr, ALIGNMENT_CLASSES: tl.constexpr):
    """Return the number of columns of this row before the first address that is a multiple of 16 bytes."""
    if ALIGNMENT_CLASSES == 1:
        return 0
    width: tl.constexpr = 128 // ELEMENT.primitive_bitwidth  # elements in 16 bytes
    return (width - (row * row_stride) % width) % width


@jit
def rows_of_class(start, first, skipped, row_stride, ELEMENT: tl.constexpr, ALIGNMENT_CLASSES: tl.constexpr):
    """Return where row `first` has its first aligned column, and the stride to the next row of its alignment class."""
    begin, class_stride = start + (first * row_stride + skipped), ALIGNMENT_CLASSES * row_stride
    if ALIGNMENT_CLASSES > 1:  # Triton accepts these hints for computed values, not for arguments
        begin = tl.multiple_of(begin, 16)
        class_stride = tl.multiple_of(class_stride, 128 // ELEMENT.primitive_bitwidth)
    return begin, class_stride


@jit
def load_full_columns(begin, q, j, rows, row_stride, col_stride):
    """Load the tile (q, j) of `rows` rows without a column mask: all its columns must exist."""
    return tl.load(begin + q[:, None] * row_stride + j[None, :] * col_stride, mask=q[:, None] < rows, other=0.0)


@jit
def load_tile(start, i, j, m, n, row_stride, col_stride):
    """Load the entries (i, j) of an (m, n) matrix, 0 outside of it."""
    inside = (i[:, None] < m) & (j[None, :] < n)
    return tl.load(start + i[:, None] * row_stride + j[None, :] * col_stride, mask=inside, other=0.0)


@jit
def load_thin(x, row, col, k, r):
    """Load rows of a contiguous thin factor (k, r), 0 outside of it."""
    return tl.load(x + row[:, None] * r + col[None, :], mask=(row[:, None] < k) & (col[None, :] < r), other=0.0)


@jit
def store_thin(y, row, col, k, r, value):
    """Store rows of a contiguous thin factor (k, r)."""
    tl.store(y + row[:, None] * r + col[None, :], value, mask=(row[:, None] < k) & (col[None, :] < r))


@jit
def load_parts(x, part_stride, mask):
    """Load the two parts of a thin block at the pointers x, 0 outside of the mask."""
    return tl.load(x, mask=mask, other=0.0), tl.load(x + part_stride, mask=mask, other=0.0)


@jit
def split_float16(x):
    """Return the two float16 parts of x."""
    x1 = x.to(tl.float16)
    return x1, (x - x1.to(tl.float32)).to(tl.float16)


@jit
def split_bfloat16(x):
    """Return the two bfloat16 parts of x."""
    x1 = x.to(tl.bfloat16)
    return x1, (x - x1.to(tl.float32)).to(tl.bfloat16)


@jit
def store_bfloat16_parts(y, part_stride, x, mask):
    """Store the two bfloat16 parts of x at the pointers y and y + part_stride."""
    x1 = x.to(tl.bfloat16)
    tl.store(y, x1, mask=mask)
    tl.store(y + part_stride, (x - x1.to(tl.float32)).to(tl.bfloat16), mask=mask)


@jit
def dot_add(a, b, acc, FLOAT32_DOTS: tl.constexpr):
    """Return acc + a b (FLOAT32_DOTS: see `launch.Target`)."""
    if FLOAT32_DOTS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@jit
def exponent(x_max):
    """Return the biased exponent of a largest |entry|, at least 10, so that both powers of two below are normal."""
    return tl.maximum((x_max.to(tl.int32, bitcast=True) >> 23) & 0xFF, 10)


@jit
def scale_up(e):
    """Return the power of two that scales numbers of exponent e to [2^9, 2^10)."""
    return ((263 - e) << 23).to(tl.float32, bitcast=True)


@jit
def scale_down(e):
    """Return 1 / scale_up(e)."""
    return ((e - 9) << 23).to(tl.float32, bitcast=True)


@jit
def dot_split_tile(
    a, e, b1, b2, acc, SINGLE_PART: tl.constexpr, TRANSPOSED: tl.constexpr, FLOAT32_DOTS: tl.constexpr
):  # fmt: skip
    """Return acc + a b, or acc + b'a (TRANSPOSED), for a float32 tile a of largest exponent e and b in float16 parts.

    SINGLE_PART: a was stored as bfloat16, 8 bits of mantissa, so its second part is zero.
    """
    a1, a2 = split_float16(a * scale_up(e))
    return acc + scale_down(e) * dot_parts(a1, a2, b1, b2, tl.zeros_like(acc), SINGLE_PART, TRANSPOSED, FLOAT32_DOTS)


@jit
def dot_bfloat16_tile(a, b1, b2, acc, SINGLE_PART: tl.constexpr, FLOAT32_DOTS: tl.constexpr):
    """Return acc + a b for a float32 tile a and b in bfloat16 parts."""
    a1, a2 = split_bfloat16(a)
    return acc + dot_parts(a1, a2, b1, b2, tl.zeros_like(acc), SINGLE_PART, False, FLOAT32_DOTS)


@jit
def dot_parts(
    a1, a2, b1, b2, acc, SINGLE_PART: tl.constexpr, TRANSPOSED: tl.constexpr, FLOAT32_DOTS: tl.constexpr
):  # fmt: skip
    """Return acc + a1 b1 + a1 b2 + a2 b1, or the same of b'a (TRANSPOSED); small terms are added first."""
    if TRANSPOSED:
        b1, b2 = tl.trans(b1), tl.trans(b2)
        if not SINGLE_PART:
            acc = dot_add(b1, a2, acc, FLOAT32_DOTS)
        acc = dot_add(b2, a1, acc, FLOAT32_DOTS)
        acc = dot_add(b1, a1, acc, FLOAT32_DOTS)
    else:
        if not SINGLE_PART:
            acc = dot_add(a2, b1, acc, FLOAT32_DOTS)
        acc = dot_add(a1, b2, acc, FLOAT32_DOTS)
        acc = dot_add(a1, b1, acc, FLOAT32_DOTS)
    return acc


@jit
def add_outer(acc, p1, p2, u, part_stride, mask, FLOAT32_DOTS: tl.constexpr):
    """Return acc + P U' of thin blocks in two parts: P (BM, R) is loaded already, U (BN, R) is at the pointers u."""
    u1, u2 = load_parts(u, part_stride, mask)
    return dot_parts(p1, p2, tl.trans(u1), tl.trans(u2), acc, False, False, FLOAT32_DOTS)


@jit
def rounded_scale(scale, LARGEST: tl.constexpr, UNIT: tl.constexpr):
    """Return the scale as `int8_momentum.rounded_scales` does: at most LARGEST, and a multiple of UNIT, as bits.

    Integers order positive floats, so a scale is bounded and rounded as an integer.
    """
    bits = tl.minimum(tl.maximum(scale.to(tl.int32, bitcast=True), LEAST_SCALE), LARGEST)
    return ((bits + UNIT // 2) & -UNIT).to(tl.float32, bitcast=True)
