"""The paper's two profiling tables, and the speed of the lab itself.

memory      peak memory and time of one iteration at a fixed batch and accumulation (paper: 10 and 25)
throughput  the largest batch that fits under a memory cap (paper: 80 GB), and samples per second at it
mfu         model FLOP utilization at the best micro-batch, at least 256k tokens a step, optimizer included

Needs neither tyro nor rich.
"""

from __future__ import annotations

import datetime
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from cosmos_lab.config import OptimizerOptions, parse_options
from cosmos_lab.display import format_table
from cosmos_lab.io import finite, write_json
from cosmos_lab.models import resolve
from cosmos_lab.optimizers import optimizer_class
from cosmos_lab.profile.profiler import Profiler
from cosmos_lab.run import run_log
from cosmos_lab.run.launch import pick_bf16, pick_compile, pick_device
from cosmos_lab.run.meters import GB, mfu

Table = Literal["memory", "throughput", "mfu"]
Row = dict[str, Any]
Log = Callable[[str], None]

_WARM_UP = 5  # iterations: the first compiles and takes first bases; a step on a GPU is recorded once it has settled


@dataclass(frozen=True)
class ProfileConfig:
    """What to profile."""

    model: str = "llama-1b"
    """Preset name."""
    optimizers: tuple[str, ...] = ("adam", "soap", "muon", "cosmos")
    """Optimizers, in the order of the table."""
    tables: tuple[Table, ...] = ("memory", "throughput")
    """Which tables to make."""
    batch: int = 10
    """Sequences in one forward pass."""
    accumulation: int = 25
    """Forward passes in one iteration."""
    seq_len: int = 1024
    """Tokens in a sequence."""
    memory_cap_gb: float = 80.0
    """Memory cap of the throughput table, in GiB."""
    tokens_per_step: int = 262_144
    """Tokens of one step in the mfu table."""
    micro_batches: tuple[int, ...] = (8, 16, 32, 64)
    """Micro-batches tried for the mfu table, up to the first that does not fit."""
    iterations: int = 3
    """Timed iterations; the median of their passes counts."""
    updates: int = 10
    """Timed steps of the optimizer; the mean counts, because its work differs from step to step."""
    rank: int | None = None
    """Rank of COSMOS and GaLore (None: the optimizer's default)."""
    options: tuple[str, ...] = ()
    """Further keyword arguments of every optimizer, as name=value."""
    vocab_size: int | None = None
    """Rows of the embedding (None: the preset's)."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Autocast type (auto: bf16 on a GPU)."""
    compile: Literal["auto", "on", "blocks", "off"] = "auto"
    """torch.compile the model (auto: on a GPU); blocks: one block for all, in a fraction of the time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""
    out: str | None = None
    """JSON file for the result."""

    def check(self) -> None:
        """Raise a ValueError naming the field if a value makes no sense."""
        resolve(self.model)
        for name in self.optimizers:
            optimizer_class(name)
        for name in ("batch", "accumulation", "seq_len", "memory_cap_gb", "tokens_per_step", "iterations", "updates"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                must = "be positive and finite" if value > 0 else "be positive"
                raise ValueError(f"--{name.replace('_', '-')} must {must}; got {value}")
        if min(self.micro_batches, default=1) < 1:
            raise ValueError(f"--micro-batches must be positive; got {min(self.micro_batches)}")
        for table in self.tables:
            if table not in _TABLES:
                raise ValueError(f"--tables takes {', '.join(_TABLES)}; got {table!r}")
        parse_options(self.options)


PAPER = ("adam", "soap", "muon", "cosmos-paper")


def profile_memory() -> ProfileConfig:
    """Measure peak memory and time of an iteration of LLaMA-1B at batch 10, accumulation 25.

    Paper, on an A100: AdamW 62.75 GB, 34.73 s; SOAP 72.58, 39.51; Muon 58.25, 35.56; COSMOS 58.47, 35.75.
    """
    return ProfileConfig(tables=("memory",), optimizers=PAPER)


def profile_throughput() -> ProfileConfig:
    """Find the largest batch and samples per second of LLaMA-1B under 80 GB.

    Paper, on an A100: AdamW 13, 7.24; SOAP 10, 6.33; Muon 14, 7.23; COSMOS 14, 7.07.
    """
    return ProfileConfig(tables=("throughput",), optimizers=PAPER)


def profile_mfu() -> ProfileConfig:
    """Measure the model FLOP utilization of training steps of 256k tokens."""
    return ProfileConfig(tables=("mfu",), optimizers=("adam", "cosmos"))


PROFILES: dict[str, Callable[[], ProfileConfig]] = {
    "profile-memory": profile_memory,
    "profile-throughput": profile_throughput,
    "profile-mfu": profile_mfu,
}


def profile(config: ProfileConfig, log: Log = print) -> dict[str, Any]:
    """Make the tables ``config`` asks for.

    Args:
        config: what to profile.
        log: called with lines about the progress and the finished tables.

    Returns {"config", "versions", "device", <table>: [row, ...]}; rows hold seconds, GiB, samples or tokens per second.
    """
    config.check()
    device = pick_device(config.device)
    gpu = device.type == "cuda"
    sizes = {} if config.vocab_size is None else {"vocab_size": config.vocab_size}
    profiler = Profiler(
        config.model,
        seq_len=config.seq_len,
        device=device,
        compiled=pick_compile(config.compile, device),
        bf16=pick_bf16(config.precision, device),
        **sizes,
    )
    result: dict[str, Any] = {
        "config": {k: v for k, v in asdict(config).items() if k != "out"},
        "date": datetime.date.today().isoformat(),
        "commit": run_log.commit(),
        "versions": run_log.versions(),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "parameters": profiler.model.num_parameters(),
    }
    for table in config.tables:
        result[table] = []
        for row in _TABLES[table](profiler, config, log):
            result[table].append(row)
            log(f"{table}: {_line(row)}")
            if config.out:
                write_json(Path(config.out), finite(result))  # at once, in case the machine is taken away
        log(format_rows(result[table]))
    profiler.remove_optimizer()
    return result


def _set_optimizer(profiler: Profiler, config: ProfileConfig, name: str) -> None:
    rank = config.rank if "rank" in inspect.signature(optimizer_class(name)).parameters else None
    profiler.set_optimizer(OptimizerOptions(optimizer=name, rank=rank, options=config.options))


def _timed(profiler: Profiler, config: ProfileConfig, size: int, accumulation: int) -> Row:
    """Warm up, then measure time and memory of iterations."""
    for _ in range(_WARM_UP):
        profiler.iterate(size, min(2, accumulation))
    profiler.sync()
    profiler.reset_peak()
    passes, update = profiler.time(size, accumulation, config.iterations, config.updates)
    speed = size * accumulation * config.seq_len / (passes + update)
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
    return {"peak_gb": held, "reserved_gb": taken, "state_gb": profiler.state_bytes() / GB}


def _timed_if_room(profiler: Profiler, config: ProfileConfig, size: int, accumulation: int, log: Log) -> Row:
    """Return a timed row, or on a CPU without enough memory a row of estimated memory."""
    if why := profiler.missing_memory(size):
        log(f"  batch {size} is not timed: {why}; try a smaller model, --seq-len, --batch or --memory-cap-gb")
        return _memory(profiler, size)
    return _timed(profiler, config, size, accumulation)


def memory_rows(profiler: Profiler, config: ProfileConfig, log: Log) -> Iterator[Row]:
    """Measure peak memory and time of one iteration at a fixed batch."""
    for name in config.optimizers:
        _set_optimizer(profiler, config, name)
        yield {"optimizer": name, **_timed_if_room(profiler, config, config.batch, config.accumulation, log)}


def throughput_rows(profiler: Profiler, config: ProfileConfig, log: Log) -> Iterator[Row]:
    """Find the largest batch under the cap, and samples per second at it with the same accumulation.

    The search runs on one graph for all batch sizes, since each would take a minute to compile; the timing does not.
    With `--compile blocks` it takes seconds.
    """
    for name in config.optimizers:
        log(f"  {name}")
        profiler.recompile(dynamic=True)
        _set_optimizer(profiler, config, name)
        size = largest_batch(profiler, config, log)
        profiler.recompile(dynamic=False)
        size, found = _timed_under_the_cap(profiler, config, size, log)
        speed = found["tokens_per_s"] / config.seq_len if "tokens_per_s" in found else None
        yield {"optimizer": name, "largest_batch": size, "samples_per_s": speed, **found}


def _timed_under_the_cap(profiler: Profiler, config: ProfileConfig, size: int, log: Log) -> tuple[int, Row]:
    """Find the first batch from ``size`` down of which whole iterations fit; return it and its row, or 0 and no row."""
    while size:
        try:
            with profiler.capped(config.memory_cap_gb):
                return size, _timed_if_room(profiler, config, size, config.accumulation, log)
        except torch.cuda.OutOfMemoryError:
            log(f"  batch {size}: too large for whole iterations")
            size -= 1
    return 0, {}


def largest_batch(profiler: Profiler, config: ProfileConfig, log: Log) -> int:
    """Find the largest batch that fits under the cap; 0 if not even one sequence does.

    Activations grow by the same amount with every sequence, so the line through two peaks gives a first guess.
    """

    def check(size: int) -> bool:
        fits = profiler.fits(size, config.memory_cap_gb)
        log(f"  batch {size}: {'fits' if fits else 'too large'}")
        return fits

    if not check(1):
        return 0
    low, high, step = 1, 0, 1  # high 0: nothing too large was seen yet
    guess = _straight_line_guess(profiler, config)
    while high - low != 1:
        if check(guess):
            low, guess = guess, guess + step
        else:
            high, guess = guess, guess - step
        if high and not low < guess < high:
            guess = (low + high) // 2
        step *= 2
    return low


def _straight_line_guess(profiler: Profiler, config: ProfileConfig) -> int:
    """Return the batch at which the line through the peaks of two small batches reaches the cap."""
    peaks = []
    small, large = 2, 4
    for size in (small, large):
        profiler.free()
        profiler.reset_peak()
        if profiler.device.type == "cuda":
            try:
                profiler.iterate(size, 2)
            except torch.cuda.OutOfMemoryError:
                return 1
            profiler.sync()
        peaks.append(profiler.peak_gb(size)[1])
    slope = max((peaks[1] - peaks[0]) / (large - small), 1e-6)
    return max(1, int(large + (config.memory_cap_gb - peaks[1]) / slope))


def mfu_rows(profiler: Profiler, config: ProfileConfig, log: Log) -> Iterator[Row]:
    """Measure whole steps at the best micro-batch, which is the same for all optimizers."""
    profiler.remove_optimizer()
    sequences = max(1, config.tokens_per_step // config.seq_len)
    speeds: dict[int, float] = {}
    for size in config.micro_batches:
        speed = profiler.pass_speed(size, max(1, min(4, sequences // size))) if size <= sequences else None
        if speed is None:
            break
        speeds[size] = speed
        log(f"  micro-batch {size}: {speed:,.0f} tokens/s without the optimizer")
    best = max(speeds, key=lambda size: speeds[size], default=1)
    accumulation = -(-sequences // best)
    for name in config.optimizers:
        _set_optimizer(profiler, config, name)
        found = _timed_if_room(profiler, config, best, accumulation, log)
        yield {"optimizer": name, "micro_batch": best, "accumulation": accumulation, **found}


_TABLES: dict[str, Callable[[Profiler, ProfileConfig, Log], Iterator[Row]]] = {
    "memory": memory_rows,
    "throughput": throughput_rows,
    "mfu": mfu_rows,
}


def _show(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "mfu":
        return f"{100 * value:.1f} %"
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return str(value)


def _line(row: Row) -> str:
    return ", ".join(f"{name} {_show(name, value)}" for name, value in row.items())


def format_rows(rows: list[Row]) -> str:
    """Format rows as an aligned table."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    return format_table(head, [[_show(name, row.get(name)) for name in head] for row in rows])
