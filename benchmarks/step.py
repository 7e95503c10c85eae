"""Measure the step of optimizers: `python -m benchmarks.step --model llama-1b --against adamw,muon-torch`.

All optimizers are measured in the same process, one after the other. Each has three numbers: the first steps, which
compile kernels and capture the CUDA graph; the first step of a second optimizer, which computes bases but compiles
nothing; and the median of many later steps. "resident" is the GPU memory of state and work buffers. "transfer" is the
time to copy the state that is in host memory to the GPU and as much back, at once, at the bandwidth measured here.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.optimizers import BUILDERS
from benchmarks.roofline import cosmos_bytes, cosmos_flops, rates, roofline
from benchmarks.shapes import MODELS, parameters
from cosmos_lab.provenance import commit

GIB = 2**30
# Steps until a step always costs the same: the first computes the bases, two run eagerly, the fourth is captured as a
# CUDA graph, the fifth launches it.
WARM_UP = 5


class Stepper:
    """One or two optimizers over the parameters of a model; a call runs one step of each."""

    def __init__(self, name: str, model: str, device: torch.device, dtype: torch.dtype) -> None:
        self.build = BUILDERS[name]
        self.hidden, self.rest = parameters(MODELS[model], device, dtype)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Replace the optimizers by new ones without state."""
        self.optimizers = []
        gc.collect()
        self.optimizers = self.build(self.hidden, self.rest)

    def __call__(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def measure_optimizer(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return all numbers of one optimizer."""
    step = Stepper(name, args.model, device, getattr(torch, args.dtype))
    warm_up = sum(measure.time_once(step, device) for _ in range(WARM_UP)) / 1e3
    step.rebuild()
    first = measure.time_once(step, device)
    for _ in range(args.warm):
        step()
    times = sorted(measure.time_once(step, device) for _ in range(args.steps))
    host = statistics.median(_host_time(step, device) for _ in range(5))
    result: dict[str, Any] = {
        "name": name, "median_ms": statistics.median(times), "min_ms": times[0], "max_ms": times[-1],
        "first_ms": first, "warm_up_s": warm_up, "host_ms": host, "state_bytes": measure.state_bytes(step.optimizers),
        "transient_bytes": measure.transient_bytes(step, device), "graph_bytes": measure.graph_bytes(step.optimizers),
        "syncs": measure.synchronizations(step, device),
    }  # fmt: skip
    on_device = measure.state_bytes(step.optimizers, device)
    result["resident_bytes"] = on_device + result["graph_bytes"] + (result["transient_bytes"] or 0)
    result["transfer_ms"] = measure.transfer_ms(result["state_bytes"] - on_device, device)
    if args.profile:
        with measure.without_cuda_graphs(step.optimizers):
            result["profile"] = measure.profile(step, device)
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _host_time(step: Any, device: torch.device) -> float:
    """Return the milliseconds until the call returns."""
    measure.synchronize(device)
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def table(rows: list[dict[str, Any]], bound: dict[str, float]) -> str:
    """Format the rows as a text table."""
    widths = (9, 9, 9, 9, 9, 8, 8, 11, 8, 10, 10, 6)
    heads = (
        "median", "min", "max", "first", "warm-up", "host", "state", "transient", "graph", "resident", "transfer",
        "syncs",
    )  # fmt: skip
    units = ("ms", "ms", "ms", "ms", "s", "ms", "GiB", "GiB", "GiB", "GiB", "ms", "")
    lines = [
        f"{'optimizer':<20}" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)),
        f"{'':<20}" + "".join(f"{u:>{w}}" for u, w in zip(units, widths, strict=True)),
    ]
    for r in rows:
        transient = "-" if r["transient_bytes"] is None else f"{r['transient_bytes'] / GIB:.2f}"
        transfer = "-" if r["transfer_ms"] is None else f"{r['transfer_ms']:.2f}"
        syncs = "-" if r["syncs"] is None else str(r["syncs"])
        lines.append(
            f"{r['name']:<20}{r['median_ms']:>9.2f}{r['min_ms']:>9.2f}{r['max_ms']:>9.2f}{r['first_ms']:>9.1f}"
            f"{r['warm_up_s']:>9.1f}{r['host_ms']:>8.1f}{r['state_bytes'] / GIB:>8.2f}{transient:>11}"
            f"{r['graph_bytes'] / GIB:>8.2f}{r['resident_bytes'] / GIB:>10.3f}{transfer:>10}{syncs:>6}"
        )
    lines.append(
        f"{'roofline (cosmos)':<20}{bound['sum_ms']:>9.2f}   arithmetic {bound['arithmetic_ms']:.2f}, "
        f"traffic {bound['traffic_ms']:.2f}"
    )
    return "\n".join(lines)


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of torch, Triton and Python, and the device."""
    try:
        import triton

        compiler = triton.__version__
    except ImportError:
        compiler = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {"torch": torch.__version__, "triton": compiler, "python": platform.python_version(), "device": name}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure all optimizers, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-1b", choices=MODELS)
    parser.add_argument("--rows", default="cosmos,cosmos-4,cosmos-bf16,muon", help="this library's optimizers")
    parser.add_argument("--against", default="adamw,muon-torch", help="other optimizers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="add the device time by kind of kernel to the JSON")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    names = [name for name in f"{args.rows},{args.against}".split(",") if name]
    unknown = sorted(set(names) - set(BUILDERS))
    if unknown:
        parser.error(f"unknown optimizers {unknown}: choose from {sorted(BUILDERS)}")
    rate = rates(device)
    rows = []
    for name in names:
        rows.append(measure_optimizer(name, args, device))
        print(f"{name}: {rows[-1]['median_ms']:.2f} ms", flush=True)
    model, itemsize = MODELS[args.model], getattr(torch, args.dtype).itemsize
    bound = roofline(model, rate, itemsize)
    print(table(rows, bound))
    result = {
        "date": datetime.date.today().isoformat(), "commit": commit(), "model": args.model, "dtype": args.dtype,
        "versions": versions(device), "rows": rows, "rates": rate, "roofline": bound,
        "flops": cosmos_flops(model), "bytes": cosmos_bytes(model, itemsize),
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
