"""The least time of a COSMOS step: flops and bytes counted from shapes, divided by rates measured in the same run.

Shapes: a matrix is m x n, `long` and `short` are its sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.measure import median_time
from benchmarks.shapes import Llama
from cosmos_optim.linalg.coefficients import MergedIterations
from cosmos_optim.linalg.newton_schulz import NewtonSchulz, choose_gram_steps, merge_first_iterations


def newton_schulz_flops(m: int, n: int, steps: int = 5, *, merged: bool) -> float:
    """Return the flops of Newton-Schulz in float16 for one matrix, with half of each symmetric product.

    merged: with the first iterations merged (`MergedIterations`), as a step does for residuals of random gradients,
        which have no leading direction.
    """
    long, short = max(m, n), min(m, n)
    coefficients = NewtonSchulz(steps).coefficients_of_steps()
    gram_steps = choose_gram_steps(long, short, coefficients, torch.float16)
    iterations: Sequence[Any] = coefficients
    if merged:
        iterations, gram_steps = merge_first_iterations(coefficients, gram_steps)
    square, gram, full = short**3, long * short**2, 2 * long * short**2
    # Every iteration computes Z. One that forms R from X also computes R = X'X and, later, X <- X Q; any other one
    # computes R <- R Z Z and Q <- Q Z.
    factors = sum(len(step.squares) if isinstance(step, MergedIterations) else 1 for step in iterations)
    updates = len(iterations) - len(gram_steps)
    return float(factors * square + 3 * updates * square + len(gram_steps) * (gram + full))


def cosmos_flops(model: Llama, rank: int = 32, steps: int = 5) -> dict[str, float]:
    """Return the flops of a step: Newton-Schulz, and thin products counted as one product each, not as three parts."""
    shapes = model.matrices()
    thin = sum(2.0 * m * n * rank * 7 for m, n in shapes)
    return {"newton_schulz": sum(newton_schulz_flops(m, n, steps, merged=True) for m, n in shapes), "thin": thin}


def cosmos_bytes(model: Llama, itemsize: int, momentum_bytes: int = 4) -> float:
    """Return the least bytes of a step: G once for the check and three times for products; M, X, B and W as needed.

    `itemsize` is the size of an element of the parameters and of their gradients.
    """
    elements = sum(m * n for m, n in model.matrices())
    others = sum(torch.Size(s).numel() for s in model.others())
    # G four times, M read twice and written, X written, B read twice, W read and written.
    hidden = 4 * itemsize + 3 * momentum_bytes + 2 + 2 + 2 + 2 * itemsize
    # The gradient for the check and for the step, the parameter and two float32 moments read and written.
    return elements * hidden + others * (2 * itemsize + 2 * itemsize + 16)


def rates(device: torch.device) -> dict[str, float]:
    """Measure the flops per second of large half-precision products, and the bytes per second of a large copy."""
    large = device.type == "cuda"
    batch, size = (16, 2048) if large else (1, 512)
    dtype = torch.float16 if large else torch.float32
    A = torch.randn(batch, size, size, device=device).to(dtype)
    out = torch.empty_like(A)
    product = median_time(lambda: [torch.bmm(A, A, out=out) for _ in range(10)], device)
    x = torch.randn(1 << 28 if large else 1 << 24, device=device)
    y = torch.empty_like(x)
    copy = median_time(lambda: [y.copy_(x) for _ in range(4)], device)
    return {"flops": 20 * batch * size**3 / product * 1e3, "bytes": 8 * x.numel() * 4 / copy * 1e3}


def roofline(model: Llama, rate: dict[str, float], itemsize: int) -> dict[str, float]:
    """Return the milliseconds of arithmetic, of memory traffic, and of both one after the other."""
    flops = sum(cosmos_flops(model).values()) / rate["flops"] * 1e3
    traffic = cosmos_bytes(model, itemsize) / rate["bytes"] * 1e3
    return {"arithmetic_ms": flops, "traffic_ms": traffic, "sum_ms": flops + traffic}
