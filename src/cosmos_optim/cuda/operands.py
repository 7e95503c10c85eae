"""The m x n operands of the fused algebra: they only remember what is asked for until a kernel can answer it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.reductions import added
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE, split, split_both
from cosmos_optim.cuda.pointer_list import Matrices


class Basis:
    """A thin factor (B, n, r) and its parts, made when first asked for."""

    def __init__(self, U: Tensor) -> None:
        self.U, self.r = U, U.shape[-1]
        self._half: Tensor | None = None
        self._wide: Tensor | None = None

    @property
    def half(self) -> Tensor:
        """float16 parts, for products with a matrix."""
        if self._half is None:
            self._half = split(self.U, torch.float16, scale=BASIS_SCALE)
        return self._half

    @property
    def wide(self) -> Tensor:
        """bfloat16 parts, for outer products."""
        if self._wide is None:
            self._wide = split(self.U, torch.bfloat16)
        return self._wide

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """`half` and `wide`, in one launch if there is neither."""
        if self._half is None and self._wide is None:
            self._half, self._wide = split_both(self.U)
        return self.half, self.wide


@dataclass(frozen=True, eq=False)
class Scaled:
    """A thin factor that is only multiplied: float16 parts (2, B, k, R) with this largest |entry| (B,)."""

    parts: Tensor
    peak: Tensor
    r: int


@dataclass(eq=False)
class Mean:
    """M + w (G - M), written to M in place by the first kernel that reads it."""

    M: Matrices
    G: Matrices
    w: float
    peak: Tensor | None = None  # block maxima of M and G; None until M is written
    products: dict[Basis, tuple[Tensor, Tensor]] = field(default_factory=dict)  # U -> (G U, M U)


@dataclass(frozen=True, eq=False)
class Blend:
    """a M + b G."""

    a: float
    mean: Mean
    b: float


@dataclass(eq=False)
class Residual:
    """N + P U' (P with its sign) for N a mean or a blend, in a work buffer once `buffer` is set."""

    N: Blend
    P: Tensor | None = None
    basis: Basis | None = None
    buffer: Tensor | None = None
    square: Tensor | None = None  # |buffer|^2 by parts (B, parts)
    factor: Tensor | None = None  # buffer = factor X


@dataclass(eq=False)
class Polar:
    """B = (buffer - (buffer U) U') / norm: the directions that X does not have are taken out of its rounding noise."""

    buffer: Tensor
    square: Tensor  # norm^2
    basis: Basis | None = None
    BU: Tensor | None = None
    left: Tensor | None = None  # |buffer - (buffer U) U'|^2 by parts (B, parts)
    rows: Tensor | None = None  # the same by rows (B, m)

    @property
    def parts(self) -> Tensor:
        """norm^2 |B|^2 by parts."""
        if self.left is None:
            self.left = torch.linalg.vector_norm(self.buffer, dim=(1, 2), dtype=torch.float64).square()[:, None]
        return self.left

    @property
    def energy(self) -> Tensor:
        """|B|^2."""
        return added(self.parts) / self.square


@dataclass(frozen=True, eq=False)
class Rows:
    """A factor for each row of an update, g (B, m, 1), and |g D|^2 by parts (B, parts)."""

    gain: Tensor
    energy: Tensor


@dataclass(frozen=True, eq=False)
class Direction:
    """s (b B + P U'), b = 1 for None, `rows` a factor for each row; `unit`: then brought to RMS 1."""

    b: Tensor | None
    B: Polar
    P: Tensor | None
    basis: Basis | None
    s: Tensor | None = None
    unit: bool = False
    rows: Rows | None = None
    dtype: torch.dtype = torch.float32
