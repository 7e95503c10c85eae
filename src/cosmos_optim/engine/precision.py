"""The precision of the matrix products in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute float32 products in full precision inside, and restore the caller's settings afterwards.

    TF32 or autocast would lose the small eigenvalues. Torch has one switch for all products and one for each
    backend. If a backend's switch was set, reading the common one may raise an error. A backend
    set to "none" follows the common switch again.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = None
        for backend in backends:
            backend.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        for backend, own in zip(backends, before, strict=True):
            backend.fp32_precision = "none"
            if backend.fp32_precision != own:
                backend.fp32_precision = own
