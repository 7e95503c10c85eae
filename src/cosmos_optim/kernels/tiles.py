"""What the thin kernels share: where a matrix of a list begins, and a product of nearly single precision.

x = x1 + x2 + ... with bfloat16 parts x1 = bf16(x), x2 = bf16(x - x1), ...: two parts hold 16 bits of x, three hold 24.
A product keeps the terms that matter: x1 y2 + x2 y1 + x1 y1 with two parts (relative error about 2^-17), and
x1 y3 + x2 y2 + x3 y1 more with three (2^-23). Tensor cores take bfloat16 at full rate and sum in float32, so this is
several times as fast as float32 arithmetic, and bfloat16 keeps float32's range: no gradient over- or underflows.
"""

from __future__ import annotations

from cosmos_optim.kernels.backend import jit, tl


@jit
def matrix(x, batch, stride, TABLE: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first element of matrix `batch`: from a table of addresses, or at a fixed stride."""
    if TABLE:
        start = tl.load(x + batch).to(tl.pointer_type(ELEMENT))
        if ALIGNED:
            start = tl.multiple_of(start, 16)
    else:
        start = x + batch.to(tl.int64) * stride
    return start


@jit
def part(x):  # type: ignore[no-untyped-def]
    """The leading bfloat16 part of x and what is left."""
    lead = x.to(tl.bfloat16)
    return lead, x - lead.to(tl.float32)


@jit
def mac(a, b, acc, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a b; the interpreter multiplies bfloat16 wrongly, so it gets float32."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@jit
def mac_parts(a, b, step, mask, acc, PARTS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a b for float32 a and pre-split b, whose parts lie `step` apart.

    PARTS = 1: a is a half-precision matrix already and b has one part of the same type.
    """
    b1 = tl.load(b, mask=mask, other=0.0)
    if PARTS == 1:
        return mac(a, b1, acc, WIDE)
    a1, rest = part(a.to(tl.float32))
    a2, rest = part(rest)
    b2 = tl.load(b + step, mask=mask, other=0.0)
    if PARTS == 3:
        a3 = rest.to(tl.bfloat16)
        acc = mac(a3, b1, acc, WIDE)
        acc = mac(a1, tl.load(b + 2 * step, mask=mask, other=0.0), acc, WIDE)
        acc = mac(a2, b2, acc, WIDE)
    acc = mac(a2, b1, acc, WIDE)
    acc = mac(a1, b2, acc, WIDE)
    return mac(a1, b1, acc, WIDE)


@jit
def mac_left(b, a, step, mask, acc, PARTS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + b'a for pre-split b and float32 a: the same product seen from the other side."""
    b1 = tl.trans(tl.load(b, mask=mask, other=0.0))
    if PARTS == 1:
        return mac(b1, a, acc, WIDE)
    a1, rest = part(a.to(tl.float32))
    a2, rest = part(rest)
    b2 = tl.trans(tl.load(b + step, mask=mask, other=0.0))
    if PARTS == 3:
        a3 = rest.to(tl.bfloat16)
        acc = mac(b1, a3, acc, WIDE)
        acc = mac(tl.trans(tl.load(b + 2 * step, mask=mask, other=0.0)), a1, acc, WIDE)
        acc = mac(b2, a2, acc, WIDE)
    acc = mac(b1, a2, acc, WIDE)
    acc = mac(b2, a1, acc, WIDE)
    return mac(b1, a1, acc, WIDE)


@jit
def add_outer(acc, p1, p2, u, step, mask, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + P U' of thin blocks split in two, (BM, R) and (BN, R)."""
    u1 = tl.trans(tl.load(u, mask=mask, other=0.0))
    u2 = tl.trans(tl.load(u + step, mask=mask, other=0.0))
    acc = mac(p2, u1, acc, WIDE)
    acc = mac(p1, u2, acc, WIDE)
    return mac(p1, u1, acc, WIDE)


@jit
def tile(start, i, j, m, n, si, sj):  # type: ignore[no-untyped-def]
    """The entries (i, j) of a matrix in float32, 0 outside."""
    inside = (i[:, None] < m) & (j[None, :] < n)
    return tl.load(start + i[:, None] * si + j[None, :] * sj, mask=inside, other=0.0).to(tl.float32)
