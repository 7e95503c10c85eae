"""What the kernel tests share: tolerances with their reasons, relative errors, random bases."""

import torch
from torch import Tensor

from cosmos_optim.cuda.pointer_list import MatrixList
from tests.interpreter import interpreted

INTERPRETED = interpreted()

FLOAT32 = 2e-6  # a few float32 roundings; products of two float16 parts hold 22 bits and add no more than that
FLOAT16 = 5e-4  # one rounding to float16, 11 bits
# Two bfloat16 parts hold 16 bits on a GPU, which rounds; the interpreter truncates and holds 15.
BFLOAT16_PARTS = 1e-4 if INTERPRETED else 1e-5
BFLOAT16 = 1e-2 if INTERPRETED else 5e-3  # one rounding to bfloat16, 8 bits; the interpreter truncates


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return |x - exact| / |exact| in double precision."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())


def orthonormal_columns(n: int, r: int, device: torch.device) -> Tensor:
    """Return two random orthonormal bases (2, n, r)."""
    return torch.linalg.qr(torch.randn(2, n, r))[0].contiguous().to(device)


def stacked(X: MatrixList, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a copy of a list of matrices as one tensor (B, m, n)."""
    return torch.stack([x.to(dtype) for x in X.tensors])


def add_parts(parts: Tensor) -> Tensor:
    """Add a sum by parts (B, ...): (B, 1, 1) in double precision."""
    return parts.flatten(1).sum(1, dtype=torch.float64).view(-1, 1, 1)


def sum_of_parts(parts: Tensor, r: int) -> Tensor:
    """Return the sum of two half-precision parts (2, B, k, R) without padding, (B, k, r) in double precision."""
    return parts.double().sum(0)[..., :r]
