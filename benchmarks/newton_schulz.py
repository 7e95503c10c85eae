"""Measure Newton-Schulz by shape and variant: `python -m benchmarks.newton_schulz`.

A variant is (products, dtype, iterations that form the Gram matrix from X, whether the first three iterations are
merged if that is accurate enough). Errors are against float64, on a random matrix and on one of condition 1e6.
Shapes: X (batch, long, short).
"""

from __future__ import annotations

import argparse
import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.step import versions
from cosmos_lab.provenance import commit
from cosmos_optim.cuda.kernels.syrk import SymmetricProducts, supports
from cosmos_optim.linalg.coefficients import Iteration
from cosmos_optim.linalg.newton_schulz import (
    HALF_SCALE,
    NewtonSchulz,
    Products,
    TorchProducts,
    choose_gram_steps,
    iterate,
    merge_first_iterations,
)

# (batch, long side, short side): the shapes of LLaMA-1B and of the smaller ones.
SHAPES = [(16, 2048, 2048), (8, 5461, 2048), (48, 1024, 1024), (24, 2736, 1024), (48, 768, 768), (24, 2048, 768)]
CPU_SHAPES = [(2, 256, 256), (2, 688, 256)]


def sample_matrices(batch: int, long: int, short: int, device: torch.device) -> dict[str, Tensor]:
    """Return random matrices (float32), and one with singular values over six decades (float64), all of norm 1."""
    flat = torch.randn(batch, long, short, device=device)
    left = torch.linalg.qr(torch.randn(long, short, device=device, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(short, short, device=device, dtype=torch.float64))[0]
    steep = (left * torch.logspace(0, -6, short, device=device, dtype=torch.float64)) @ right.mT
    flat = flat / torch.linalg.vector_norm(flat, dim=(1, 2), keepdim=True)
    return {"random": flat, "steep": (steep / steep.norm())[None]}


Variant = tuple[str, Products, torch.dtype, set[int]]
MERGED = "chosen, after deflation"


def variants(long: int, short: int, ns: NewtonSchulz, device: torch.device) -> list[Variant]:
    """Return name, products, dtype and the iterations that form the Gram matrix from X."""
    always = set(range(ns.steps))
    if device.type != "cuda":
        single = torch.float32
        return [("torch direct", TorchProducts(), single, always), ("torch gram", TorchProducts(), single, {0})]
    half, brain = torch.float16, torch.bfloat16
    chosen = choose_gram_steps(long, short, ns.coefficients_of_steps(), half)
    found: list[Variant] = [
        ("torch direct bf16", TorchProducts(), brain, always), ("torch direct fp16", TorchProducts(), half, always),
    ]  # fmt: skip
    if supports(torch.empty(1, 16, -(-short // 8) * 8, device=device, dtype=half)):
        found += [("halves direct fp16", SymmetricProducts(), half, always),
                 ("halves gram fp16, restart", SymmetricProducts(), half, {0, -(-ns.steps // 2)}),
                 ("halves gram fp16, none", SymmetricProducts(), half, {0}),
                 ("chosen", SymmetricProducts(), half, chosen),
                 (MERGED, SymmetricProducts(), half, chosen)]  # fmt: skip
    return found


def measure_shape(batch: int, long: int, short: int, ns: NewtonSchulz, device: torch.device) -> list[dict[str, Any]]:
    """Return the time and the error of all variants for one shape."""
    found = []
    inputs = sample_matrices(batch, long, short, device)
    coefficients = ns.coefficients_of_steps()
    for name, products, dtype, chosen in variants(long, short, ns, device):
        iterations, gram_steps = list[Iteration](coefficients), chosen
        if name == MERGED:
            iterations, gram_steps = merge_first_iterations(coefficients, chosen)
        scale = HALF_SCALE if dtype is torch.float16 else 1.0
        X = (inputs["random"] * scale).to(dtype)
        run = partial(iterate, iterations=iterations, products=products, scale=scale, gram_steps=gram_steps)
        ms = measure.median_time(partial(run, X), device)
        errors = {}
        for kind, X in inputs.items():
            exact = iterate(X[:1].double(), coefficients, TorchProducts())
            Y = run((X[:1] * scale).to(dtype)).double() / scale
            errors[kind] = float((Y - exact).norm() / exact.norm())
        shape = [batch, long, short]
        found.append({"shape": shape, "variant": name, "ms": ms, "per_matrix_ms": ms / batch, "error": errors})
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure all shapes, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--coefficients", default="ns5")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device, ns = torch.device(args.device), NewtonSchulz(args.steps, args.coefficients)
    rows: list[dict[str, Any]] = []
    print(f"{'batch x shape':<18}{'variant':<28}{'ms':>9}{'per matrix':>12}{'random':>10}{'steep':>10}")
    for shape in SHAPES if device.type == "cuda" else CPU_SHAPES:
        for row in measure_shape(*shape, ns, device):
            rows.append(row)
            e = row["error"]
            print(f"{'x'.join(map(str, shape)):<18}{row['variant']:<28}{row['ms']:>9.2f}{row['per_matrix_ms']:>12.3f}"
                  f"{e['random']:>10.1e}{e['steep']:>10.1e}", flush=True)  # fmt: skip
    result = {
        "date": datetime.date.today().isoformat(), "commit": commit(), "versions": versions(device),
        "steps": args.steps, "coefficients": args.coefficients, "rows": rows,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
