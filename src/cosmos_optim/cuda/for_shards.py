"""The two parts of a schedule that sharded matrices use: orthonormal columns, and Newton-Schulz on whole matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import syrk, thin_qr
from cosmos_optim.cuda.kernels.launch import available
from cosmos_optim.cuda.self_check import kernels_work
from cosmos_optim.linalg import cholesky_qr
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.linalg.newton_schulz import newton_schulz as plain_newton_schulz
from cosmos_optim.rules import RULES


def orthonormalize(Y: Tensor, fallback: Tensor) -> Tensor:
    """Return orthonormal columns with the span of Y (batch, n, r), by a kernel if it supports r columns."""
    r = Y.shape[-1]
    able = Y.dtype is torch.float32 and thin_qr.supports(r) and available(Y.device)
    if able and kernels_work(Y[0], RULES["cosmos"], r):
        return thin_qr.orthonormalize(Y, fallback)
    return cholesky_qr.orthonormalize(Y, lambda A, B: A.mT @ B, fallback)


def newton_schulz(X: Tensor, ns: NewtonSchulz) -> Tensor:
    """Run Newton-Schulz on whole matrices (batch, m, n), with half the work for symmetric products if supported."""
    is_wide = X.shape[-2] < X.shape[-1]
    tall = X.mT.contiguous() if is_wide else X
    able = available(X.device) and syrk.supports(tall) and kernels_work(tall[0], RULES["muon"], 1)
    B = plain_newton_schulz(tall, ns, syrk.SymmetricProducts() if able else None)
    return B.mT if is_wide else B
