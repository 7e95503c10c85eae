"""The paper's two profiling tables, and the lab's own speed.

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
from cosmos_lab.profile.profiler import Rig
from cosmos_lab.run import run_log
from cosmos_lab.run.launch import pick_bf16, pick_compile, pick_device
from cosmos_lab.run.meters import GB, mfu

Table = Literal["memory", "throughput", "mfu"]
Row = dict[str, Any]
Say = Callable[[str], None]

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
    """Timed iterations, of whose passes the median counts."""
    updates: int = 10
    """Timed steps of the optimizer, whose work may come in turns: the mean counts."""
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
    """Where."""
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


def profile(config: ProfileConfig, say: Say = print) -> dict[str, Any]:
    """Make the tables ``config`` asks for.

    Args:
        config: what to profile.
        say: called with lines of progress and the finished tables.

    Returns {"config", "versions", "device", <table>: [row, ...]}; rows hold seconds, GiB, samples or tokens per second.
    """
    config.check()
    device = pick_device(config.device)
    gpu = device.type == "cuda"
    sizes = {} if config.vocab_size is None else {"vocab_size": config.vocab_size}
    rig = Rig(
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
        "parameters": rig.model.num_parameters(),
    }
    for table in config.tables:
        result[table] = []
        for row in _TABLES[table](rig, config, say):
            result[table].append(row)
            say(f"{table}: {_line(row)}")
            if config.out:
                write_json(Path(config.out), finite(result))  # at once: the machine may be taken away
        say(format_rows(result[table]))
    rig.unmount()
    return result


def _mount(rig: Rig, config: ProfileConfig, name: str) -> None:
    rank = config.rank if "rank" in inspect.signature(optimizer_class(name)).parameters else None
    rig.mount(OptimizerOptions(optimizer=name, rank=rank, options=config.options))


def _timed(rig: Rig, config: ProfileConfig, size: int, accumulation: int) -> Row:
    """Warm up, then time and weigh iterations."""
    for _ in range(_WARM_UP):
        rig.iterate(size, min(2, accumulation))
    rig.sync()
    rig.reset_peak()
    passes, update = rig.time(size, accumulation, config.iterations, config.updates)
    speed = size * accumulation * config.seq_len / (passes + update)
    return {
        **_weighed(rig, size),
        "seconds": passes + update,
        "forward_backward_s": passes,
        "optimizer_s": update,
        "tokens_per_s": speed,
        "mfu": mfu(speed, rig.flops_per_token, rig.device),
    }


def _weighed(rig: Rig, size: int) -> Row:
    held, taken = rig.peak_gb(size)
    return {"peak_gb": held, "reserved_gb": taken, "state_gb": rig.state_bytes() / GB}


def _timed_if_room(rig: Rig, config: ProfileConfig, size: int, accumulation: int, say: Say) -> Row:
    """A timed row; on a CPU without the memory for it one of counts alone."""
    if why := rig.lack(size):
        say(f"  batch {size} is not timed: {why}; try a smaller model, --seq-len, --batch or --memory-cap-gb")
        return _weighed(rig, size)
    return _timed(rig, config, size, accumulation)


def memory_rows(rig: Rig, config: ProfileConfig, say: Say) -> Iterator[Row]:
    """Peak memory and time of one iteration at a fixed batch."""
    for name in config.optimizers:
        _mount(rig, config, name)
        yield {"optimizer": name, **_timed_if_room(rig, config, config.batch, config.accumulation, say)}


def throughput_rows(rig: Rig, config: ProfileConfig, say: Say) -> Iterator[Row]:
    """The largest batch under the cap, and samples per second at it with the same accumulation.

    The search runs on one graph for all batch sizes, since each would take a minute to compile; the timing does not.
    `--compile blocks` makes that seconds.
    """
    for name in config.optimizers:
        say(f"  {name}")
        rig.recompile(dynamic=True)
        _mount(rig, config, name)
        size = largest_batch(rig, config, say)
        rig.recompile(dynamic=False)
        size, found = _timed_under_the_cap(rig, config, size, say)
        speed = found["tokens_per_s"] / config.seq_len if "tokens_per_s" in found else None
        yield {"optimizer": name, "largest_batch": size, "samples_per_s": speed, **found}


def _timed_under_the_cap(rig: Rig, config: ProfileConfig, size: int, say: Say) -> tuple[int, Row]:
    """The first batch from ``size`` down whose whole iterations fit, and its row; 0 and no row if none does."""
    while size:
        try:
            with rig.capped(config.memory_cap_gb):
                return size, _timed_if_room(rig, config, size, config.accumulation, say)
        except torch.cuda.OutOfMemoryError:
            say(f"  batch {size}: too large for whole iterations")
            size -= 1
    return 0, {}


def largest_batch(rig: Rig, config: ProfileConfig, say: Say) -> int:
    """The largest batch that fits under the cap; 0 if not even one sequence does.

    Activations grow by the same amount with every sequence, so the line through two peaks says where to look.
    """

    def check(size: int) -> bool:
        fits = rig.fits(size, config.memory_cap_gb)
        say(f"  batch {size}: {'fits' if fits else 'too large'}")
        return fits

    if not check(1):
        return 0
    low, high, step = 1, 0, 1  # high 0: nothing too large was seen yet
    guess = _straight_line_guess(rig, config)
    while high - low != 1:
        if check(guess):
            low, guess = guess, guess + step
        else:
            high, guess = guess, guess - step
        if high and not low < guess < high:
            guess = (low + high) // 2
        step *= 2
    return low


def _straight_line_guess(rig: Rig, config: ProfileConfig) -> int:
    """Where the line through the peaks at two small batches reaches the cap."""
    peaks = []
    small, large = 2, 4
    for size in (small, large):
        rig.free()
        rig.reset_peak()
        if rig.device.type == "cuda":
            try:
                rig.iterate(size, 2)
            except torch.cuda.OutOfMemoryError:
                return 1
            rig.sync()
        peaks.append(rig.peak_gb(size)[1])
    slope = max((peaks[1] - peaks[0]) / (large - small), 1e-6)
    return max(1, int(large + (config.memory_cap_gb - peaks[1]) / slope))


def mfu_rows(rig: Rig, config: ProfileConfig, say: Say) -> Iterator[Row]:
    """A whole step at the best micro-batch, which is the same for all: the optimizer has no part in it."""
    rig.unmount()
    sequences = max(1, config.tokens_per_step // config.seq_len)
    speeds: dict[int, float] = {}
    for size in config.micro_batches:
        speed = rig.pass_speed(size, max(1, min(4, sequences // size))) if size <= sequences else None
        if speed is None:
            break
        speeds[size] = speed
        say(f"  micro-batch {size}: {speed:,.0f} tokens/s without the optimizer")
    best = max(speeds, key=lambda size: speeds[size], default=1)
    accumulation = -(-sequences // best)
    for name in config.optimizers:
        _mount(rig, config, name)
        found = _timed_if_room(rig, config, best, accumulation, say)
        yield {"optimizer": name, "micro_batch": best, "accumulation": accumulation, **found}


_TABLES: dict[str, Callable[[Rig, ProfileConfig, Say], Iterator[Row]]] = {
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
    """Rows as an aligned table."""
    head = list(dict.fromkeys(name for row in rows for name in row))
    return format_table(head, [[_show(name, row.get(name)) for name in head] for row in rows])
