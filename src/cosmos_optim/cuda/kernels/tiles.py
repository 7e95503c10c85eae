"""What the thin kernels share: where a matrix of a list begins, and products of nearly single precision.

A float32 number is split in two half-precision parts, x = x1 + x2 with x1 = half(x), x2 = half(x - x1), and a product
keeps x1 y1 + x1 y2 + x2 y1. Tensor cores multiply the parts at full rate and sum in float32; that is several times as
fast as float32 arithmetic. Two kinds of half serve:

- float16 parts hold 22 bits, but only numbers of moderate size: a power of two first brings the largest entry near
  2^10, the matrix's where it is known, else the tile's. Error about 2^-22: for all that tracks the eigenbasis.
- bfloat16 parts hold 16 bits of any number. Error about 2^-17: for the momentum, and for adding P U' to a matrix.

Each tile's product starts a sum of its own, because tensor cores cut what falls off the end of a long sum instead of
rounding it.
"""

from __future__ import annotations

from cosmos_optim.cuda.kernels.launch import jit, tl


@jit
def matrix(x, batch, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first element of matrix `batch` of a table of addresses."""
    start = tl.load(x + batch).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@jit
def lead(row, pitch, ELEMENT: tl.constexpr, CLASSES: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many columns of this row lie before the first multiple of 16 bytes."""
    if CLASSES == 1:
        return 0
    width: tl.constexpr = 128 // ELEMENT.primitive_bitwidth  # elements in 16 bytes
    return (width - (row * pitch) % width) % width


@jit
def class_rows(start, first, before, pitch, ELEMENT: tl.constexpr, CLASSES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the rows of a class begin, each at its first aligned column, and how far apart they lie."""
    begin, apart = start + (first * pitch + before), CLASSES * pitch
    if CLASSES > 1:  # hints hold for values made here, not for arguments
        begin, apart = tl.multiple_of(begin, 16), tl.multiple_of(apart, 128 // ELEMENT.primitive_bitwidth)
    return begin, apart


@jit
def whole(start, q, j, rows, pitch, sn):  # type: ignore[no-untyped-def]
    """A tile without column mask: rows q of a class, `pitch` apart."""
    return tl.load(start + q[:, None] * pitch + j[None, :] * sn, mask=q[:, None] < rows, other=0.0)


@jit
def tile(start, i, j, m, n, si, sj):  # type: ignore[no-untyped-def]
    """The entries (i, j) of a matrix, 0 outside."""
    inside = (i[:, None] < m) & (j[None, :] < n)
    return tl.load(start + i[:, None] * si + j[None, :] * sj, mask=inside, other=0.0)


@jit
def thin_rows(x, row, col, k, r):  # type: ignore[no-untyped-def]
    """Rows of a contiguous thin factor (k, r), 0 outside."""
    return tl.load(x + row[:, None] * r + col[None, :], mask=(row[:, None] < k) & (col[None, :] < r), other=0.0)


@jit
def halves(x):  # type: ignore[no-untyped-def]
    """The two float16 parts of x."""
    lead = x.to(tl.float16)
    return lead, (x - lead.to(tl.float32)).to(tl.float16)


@jit
def mac(a, b, acc, FLOAT32_DOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a b; the interpreter multiplies bfloat16 wrongly, so it gets float32."""
    if FLOAT32_DOTS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@jit
def exponent(peak):  # type: ignore[no-untyped-def]
    """The biased exponent of a largest entry, kept where both powers of two below are normal numbers."""
    return tl.maximum((peak.to(tl.int32, bitcast=True) >> 23) & 0xFF, 10)


@jit
def bring(e):  # type: ignore[no-untyped-def]
    """The power of two that brings numbers of exponent e to [2^9, 2^10)."""
    return ((263 - e) << 23).to(tl.float32, bitcast=True)


@jit
def undo(e):  # type: ignore[no-untyped-def]
    """Its inverse."""
    return ((e - 9) << 23).to(tl.float32, bitcast=True)


@jit
def mac_tile(a, e, b1, b2, acc, NARROW: tl.constexpr, LEFT: tl.constexpr, FLOAT32_DOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a b, or acc + b'a (LEFT), for a float32 tile a of largest exponent e and b in float16 parts.

    NARROW: a was stored in 8 bits of mantissa, so its second part is zero.
    """
    x = a * bring(e)
    a1 = x.to(tl.float16)
    a2 = (x - a1.to(tl.float32)).to(tl.float16)
    return acc + undo(e) * mac_parts(a1, a2, b1, b2, tl.zeros_like(acc), NARROW, LEFT, FLOAT32_DOTS)


@jit
def mac_wide(a, b1, b2, acc, NARROW: tl.constexpr, FLOAT32_DOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a b for a float32 tile a and b in bfloat16 parts."""
    a1 = a.to(tl.bfloat16)
    a2 = (a - a1.to(tl.float32)).to(tl.bfloat16)
    return acc + mac_parts(a1, a2, b1, b2, tl.zeros_like(acc), NARROW, False, FLOAT32_DOTS)


@jit
def mac_parts(a1, a2, b1, b2, acc, NARROW: tl.constexpr, LEFT: tl.constexpr, FLOAT32_DOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a1 b1 + a1 b2 + a2 b1, or the same of b'a."""
    if LEFT:
        b1, b2 = tl.trans(b1), tl.trans(b2)
        if not NARROW:
            acc = mac(b1, a2, acc, FLOAT32_DOTS)
        acc = mac(b2, a1, acc, FLOAT32_DOTS)
        acc = mac(b1, a1, acc, FLOAT32_DOTS)
    else:
        if not NARROW:
            acc = mac(a2, b1, acc, FLOAT32_DOTS)
        acc = mac(a1, b2, acc, FLOAT32_DOTS)
        acc = mac(a1, b1, acc, FLOAT32_DOTS)
    return acc


@jit
def add_outer(acc, p1, p2, u, step, mask, FLOAT32_DOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + P U' of thin blocks split in two, (BM, R) and (BN, R)."""
    u1 = tl.trans(tl.load(u, mask=mask, other=0.0))
    u2 = tl.trans(tl.load(u + step, mask=mask, other=0.0))
    acc = mac(p2, u1, acc, FLOAT32_DOTS)
    acc = mac(p1, u2, acc, FLOAT32_DOTS)
    return mac(p1, u1, acc, FLOAT32_DOTS)
