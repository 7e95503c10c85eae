"""The paper's two profiling tables, and the speed of the lab itself.

memory      peak memory and time of one iteration at a fixed batch and accumulation (paper: 10 and 25)
throughput  the largest batch that fits under a memory cap (paper: 80 GB), and samples per second at it
mfu         model FLOP utilization at the best micro-batch, at least 256k tokens a step, optimizer included
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cosmos_lab.formatting import format_table
from cosmos_lab.io import explained, write_json
from cosmos_lab.profile.config import ProfileConfig
from cosmos_lab.profile.profiler import Profiler, check_rows
from cosmos_lab.provenance import commit, versions
from cosmos_lab.run.meters import GIB, mfu

Row = dict[str, Any]
Log = Callable[[str], None]

_WARM_UP = 5  # iterations: the first compiles and takes first bases; a step on a GPU is recorded once it has settled


def profile(config: ProfileConfig, log: Log = print) -> dict[str, Any]:
    """Make the tables ``config`` asks for; ``log`` gets lines about the progress and the finished tables.

    Returns {"config", "versions", "device", <table>: [row, ...]}; rows hold seconds, GiB, samples or tokens per second.
    """
    config.check()
    check_rows(config)
    profiler = Profiler(config)
    device = profiler.device
    result: dict[str, Any] = {
        "config": {k: v for k, v in asdict(config).items() if k != "out"},
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "parameters": profiler.model.num_parameters(),
    }
    for table in config.tables:
        result[table] = []
        for row in _TABLES[table](profiler, log):
            result[table].append(row)
            log(f"{table}: {row['optimizer']} measured ({len(result[table])} of {len(config.optimizers)})")
            if config.out:
                with explained(Path(config.out)):
                    write_json(Path(config.out), result)  # at once, in case the machine is taken away
        log(f"\n{_TITLES[table].format(**result['config'])}\n{format_rows(result[table])}")
    profiler.remove_optimizer()
    return result


def _timed(profiler: Profiler, size: int, accumulation: int) -> Row:
    """Warm up, then measure time and memory of iterations."""
    for _ in range(_WARM_UP):
        profiler.iterate(size, min(2, accumulation))
    passes, update = profiler.time(size, accumulation)
    speed = size * accumulation * profiler.config.seq_len / (passes + update)
    return {
        **_memory(profiler, size),
        "seconds": passes + update,
        "forward_backward_s": passes,
        "optimizer_s": update,
        "tokens_per_s": speed,
        "mfu": mfu(speed, profiler.flops_per_token, profiler.device),
    }


def _memory(profiler: Profiler, size: int) -> Row:
    held, taken = profiler.peak_gb(size)
    found = {"peak_gb": held, "reserved_gb": taken, "state_gb": profiler.state_bytes() / GIB}
    on_host = profiler.host_state_bytes()
    return found | {"host_state_gb": on_host / GIB} if on_host else found


def _timed_if_room(profiler: Profiler, size: int, accumulation: int, log: Log) -> Row:
    """Return a timed row, or on a CPU without enough memory a row of estimated memory."""
    if why := profiler.missing_memory(size):
        log(f"  batch {size} is not timed: {why}; try a smaller model, --seq-len, --batch or --memory-cap-gb")
        return _memory(profiler, size)
    return _timed(profiler, size, accumulation)


def memory_rows(profiler: Profiler, log: Log) -> Iterator[Row]:
    """Measure peak memory and time of one iteration at a fixed batch."""
    for name in profiler.config.optimizers:
        profiler.set_optimizer(name)
        yield {"optimizer": name, **_timed_if_room(profiler, profiler.config.batch, profiler.config.accumulation, log)}


def throughput_rows(profiler: Profiler, log: Log) -> Iterator[Row]:
    """Find the largest batch under the cap, and samples per second at it with the same accumulation.

    The search runs on one graph for all batch sizes, since each would take a minute to compile; the timing does not.
    With `--compile blocks` it takes seconds. Each row begins at the last row's size, which is usually near.
    """
    near = profiler.config.batch
    for name in profiler.config.optimizers:
        log(f"  {name}")
        profiler.set_optimizer(name)
        profiler.recompile(dynamic=True)
        size = largest_batch(profiler, log, near)
        near = size or near
        profiler.recompile(dynamic=False)
        size, found = _timed_under_the_cap(profiler, size, log)
        speed = found["tokens_per_s"] / profiler.config.seq_len if "tokens_per_s" in found else None
        yield {"optimizer": name, "largest_batch": size, "samples_per_s": speed, **found}


def _timed_under_the_cap(profiler: Profiler, size: int, log: Log) -> tuple[int, Row]:
    """Find the first batch from ``size`` down of which whole iterations fit; return it and its row, or 0 and no row."""
    while size:
        try:
            with profiler.capped():
                return size, _timed_if_room(profiler, size, profiler.config.accumulation, log)
        except torch.cuda.OutOfMemoryError:
            log(f"  batch {size}: too large for whole iterations")
            size -= 1
    return 0, {}


def largest_batch(profiler: Profiler, log: Log, near: int = 1) -> int:
    """Find the largest batch that fits under the cap; 0 if not even one sequence does.

    The distance from ``near`` doubles until one size fits and a larger one does not. Bisection does the rest.
    """

    def check(size: int) -> bool:
        fits = profiler.fits(size)
        log(f"  batch {size}: {'fits' if fits else 'too large'}")
        return fits

    low, high, distance = 0, near, 1
    if check(near):
        low, high = near, near + 1
        while check(high):
            distance *= 2
            low, high = high, high + distance
    else:
        while high - distance > 0 and not check(high - distance):
            high -= distance
            distance *= 2
        low = max(0, high - distance)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if check(middle) else (low, middle)
    return low


def mfu_rows(profiler: Profiler, log: Log) -> Iterator[Row]:
    """Measure whole steps at the best micro-batch, which is the same for all optimizers."""
    profiler.remove_optimizer()
    profiler.set_weights(torch.float32)  # the larger ones: what fits with them fits every row
    sequences = max(1, profiler.config.tokens_per_step // profiler.config.seq_len)
    speeds: dict[int, float] = {}
    for size in profiler.config.micro_batches:
        speed = profiler.pass_speed(size, max(1, min(4, sequences // size))) if size <= sequences else None
        if speed is None:
            break
        speeds[size] = speed
        log(f"  micro-batch {size}: {speed:,.0f} tokens/s without the optimizer")
    best = max(speeds, key=lambda size: speeds[size], default=1)
    accumulation = -(-sequences // best)
    for name in profiler.config.optimizers:
        profiler.set_optimizer(name)
        found = _timed_if_room(profiler, best, accumulation, log)
        yield {"optimizer": name, "micro_batch": best, "accumulation": accumulation, **found}


_TABLES = {"memory": memory_rows, "throughput": throughput_rows, "mfu": mfu_rows}
_TITLES = {
    "memory": "Memory and time of one iteration of {model}: batch {batch}, accumulation {accumulation}",
    "throughput": "Largest batch of {model} under {memory_cap_gb:g} GiB, and its speed: accumulation {accumulation}",
    "mfu": "Steps of {model} of at least {tokens_per_step:,} tokens",
}
_HEADINGS = {
    "peak_gb": "peak GiB", "reserved_gb": "reserved GiB", "state_gb": "state GiB",
    "host_state_gb": "of it on the host", "seconds": "iteration s", "forward_backward_s": "forward + backward s",
    "optimizer_s": "optimizer s", "tokens_per_s": "tokens/s",
    "mfu": "MFU", "largest_batch": "largest batch", "samples_per_s": "samples/s", "micro_batch": "micro-batch",
}  # fmt: skip


def _show(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "mfu":
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return str(value)


def format_rows(rows: list[Row]) -> str:
    """Format rows as an aligned table, with headings in words."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    return format_table(
        [_HEADINGS.get(name, name) for name in head], [[_show(name, row.get(name)) for name in head] for row in rows]
    )
