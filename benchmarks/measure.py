"""Measure the time, memory and kernels of an optimizer's step, on a GPU or a CPU. Times are wall-clock times."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(f: Callable[[], Any], device: torch.device) -> float:
    """Return the milliseconds of one call, with the device idle before and after."""
    synchronize(device)
    begin = time.perf_counter()
    f()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def median_time(f: Callable[[], Any], device: torch.device, repeat: int = 10, warm: int = 3) -> float:
    """Return the median of several calls in milliseconds."""
    for _ in range(warm):
        f()
    return statistics.median(time_once(f, device) for _ in range(repeat))


def state_bytes(optimizers: list[torch.optim.Optimizer], device: torch.device | None = None) -> int:
    """Return the bytes of all storages that the states hold, or of those on a kind of device, each counted once."""
    storages = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and (device is None or value.device.type == device.type):
                    storage = value.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def transient_bytes(step: Callable[[], Any], device: torch.device) -> int | None:
    """Return the most memory that a step allocates in addition to what exists before it, or None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def transfer_ms(size: int, device: torch.device, part: int = 64 << 20) -> float | None:
    """Return the milliseconds to copy `size` bytes to the GPU and as many back at the same time, or None on a CPU.

    Pinned memory is copied in parts, on one stream for each direction.
    """
    if device.type != "cuda" or not size:
        return None
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    on_host = [torch.zeros(part, dtype=torch.uint8, pin_memory=True) for _ in streams]
    on_device = [torch.zeros(part, dtype=torch.uint8, device=device) for _ in streams]
    pairs = list(zip(streams, (on_device[0], on_host[1]), (on_host[0], on_device[1]), strict=True))

    def copy() -> None:
        for begin in range(0, size, part):
            length = min(part, size - begin)
            for stream, target, source in pairs:
                with torch.cuda.stream(stream):
                    target[:length].copy_(source[:length], non_blocking=True)

    return median_time(copy, device, repeat=5, warm=1)


def graph_bytes(optimizers: list[torch.optim.Optimizer]) -> int:
    """Return the GPU memory that CUDA graphs keep for their work buffers between steps."""
    return sum(o.cuda_graph.bytes for o in optimizers if hasattr(o, "cuda_graph"))


@contextmanager
def without_cuda_graphs(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Disable CUDA graphs inside: in a graph, the profiler shows 1.5 times the real time of a kernel."""
    graphs = [(o.cuda_graph, o.cuda_graph.enabled) for o in optimizers if hasattr(o, "cuda_graph")]
    for graph, _ in graphs:
        graph.enabled = False
    try:
        yield
    finally:
        for graph, enabled in graphs:
            graph.enabled = enabled


def synchronizations(step: Callable[[], Any], device: torch.device) -> int | None:
    """Return how often a step makes the host wait for the device, or None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in seen)


# Kinds of kernels, each with parts of kernel names. The first match wins: "_momentum" is a thin product, other names
# with "_moment" are not.
KINDS = {
    "symmetric products": ("_symmetric",),
    "small products": ("f32f32_f32f32", "sgemm"),
    "full products": ("gemm", "nvjet", "cutlass", "sm90_xmma"),
    "thin products": ("_project", "_momentum", "_overlap", "_split"),
    "thin factors": (
        "_second_moment",
        "_soap_half",
        "_scale_for_power_step",
        "_power_sum",
        "_norm_sq_and_max",
        "_update_coefficients",
        "_muon_gain",
        "_norm_and_weight",
        "_row_gains",
        "_row_norm_sq",
        "_copy_factors",
        "_eigh",
    ),
    "residual and update": ("_residual", "_update"),
    "adam": ("FusedAdam", "fused_adam", "_adam"),
    "magnitudes of the gradients": ("LpNorm", "lpnorm"),
    "orthonormal columns": (
        "_column_norms",
        "_gram",
        "_inverse_factor",
        "_apply_factor",
        "potrf",
        "trsm",
        "cholesky",
        "trtri",
    ),
}


def profile(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return milliseconds of device time by kind of kernel, and of the 40 largest kernels. Kernels may overlap."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step()
    synchronize(device)
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as result:
        step()
        synchronize(device)
    kernels: dict[str, list[float]] = {}
    for event in result.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("cosmos", "Optimizer")):
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    kinds = dict.fromkeys([*KINDS, "small kernels"], 0.0)
    for name, times in kernels.items():
        kinds[kind_of(name)] += sum(times)
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:40]
    return {
        "kinds_ms": {kind: round(ms, 3) for kind, ms in kinds.items()},
        "launches": sum(map(len, kernels.values())),
        "kernels": [{"name": name[:120], "count": len(t), "ms": round(sum(t), 3)} for name, t in largest],
    }


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    for kind, marks in KINDS.items():
        if any(mark in kernel for mark in marks):
            return kind
    return "small kernels"
