"""What a profile measures, and the paper's profiles of LLaMA-1B."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from cosmos_lab.config import parse_options

Table = Literal["memory", "throughput", "mfu"]


@dataclass(frozen=True)
class ProfileConfig:
    """What to profile."""

    model: str = "llama-1b"  # Preset name.
    optimizers: tuple[str, ...] = ("adam", "soap", "muon", "cosmos")
    """Rows of the table, in order: optimizers, or with options name:option=value+option=value, also weights=bf16."""
    tables: tuple[Table, ...] = ("memory", "throughput")  # Which tables to make.
    batch: int = 10  # Sequences in one forward pass.
    accumulation: int = 25  # Forward passes in one iteration.
    seq_len: int = 1024  # Tokens in a sequence.
    memory_cap_gb: float = 80.0  # Memory cap of the throughput table, in GiB.
    tokens_per_step: int = 262_144  # Tokens of one step in the mfu table.
    micro_batches: tuple[int, ...] = (8, 16, 32, 64)  # Sizes to try for the mfu table, until one does not fit.
    iterations: int = 3  # Timed iterations; the median of their passes counts.
    updates: int = 10  # Timed steps of the optimizer; the mean counts, because its work differs from step to step.
    rank: int | None = None  # Rank of COSMOS and GaLore (None: the optimizer's default).
    options: tuple[str, ...] = ()  # Further keyword arguments of every optimizer, as name=value.
    vocab_size: int | None = None  # Rows of the embedding (None: the preset's).
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # Autocast type (auto: bf16 on a GPU).
    compile: Literal["auto", "on", "blocks", "off"] = "auto"
    """torch.compile the model (auto: on a GPU); blocks: compile one block for all, in a fraction of the time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"  # Where to run.
    out: str | None = None  # JSON file for the result.

    def check(self) -> None:
        """Raise a ValueError naming the field if a value makes no sense."""
        from cosmos_lab.models import resolve  # these bring torch, which takes seconds: a list of profiles needs none
        from cosmos_lab.optimizers import optimizer_class

        resolve(self.model)
        for name in ("optimizers", "tables", "micro_batches"):
            if not getattr(self, name):
                raise ValueError(f"--{name.replace('_', '-')} needs at least one value; leave it out for the default")
        for row in self.optimizers:
            name, options = split_row(row)
            optimizer_class(name)
            parse_options(options, flag=f"--optimizers {name}:")
        for name in ("batch", "accumulation", "seq_len", "memory_cap_gb", "tokens_per_step", "iterations", "updates"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                must = "be positive and finite" if value > 0 else "be positive"
                raise ValueError(f"--{name.replace('_', '-')} must {must}; got {value}")
        if min(self.micro_batches) < 1:
            raise ValueError(f"--micro-batches must be positive; got {min(self.micro_batches)}")
        for table in self.tables:
            if table not in get_args(Table):
                raise ValueError(f"--tables takes {', '.join(get_args(Table))}; got {table!r}")
        parse_options(self.options)


def split_row(row: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of the optimizer of a row, and its options.

    >>> split_row("cosmos:momentum_dtype=int8+rank=16"), split_row("adam")
    (('cosmos', ('momentum_dtype=int8', 'rank=16')), ('adam', ()))
    """
    name, colon, options = row.partition(":")
    return name, tuple(options.split("+")) if colon else ()


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


_BOTH_INT8 = "cosmos:momentum_dtype=int8+adam_dtype=int8"
_ALL_SMALL = f"{_BOTH_INT8}+weights=bf16+weight_correction=true"
FORMS = (
    "adam", "adam:adam_dtype=int8", "soap", "muon", "cosmos", "cosmos:momentum_dtype=bfloat16",
    "cosmos:momentum_dtype=int8", _BOTH_INT8, _ALL_SMALL, f"{_BOTH_INT8}+offload=cpu", f"{_ALL_SMALL}+offload=cpu",
)  # fmt: skip


def profile_forms() -> ProfileConfig:
    """Measure every form of optimizer state at LLaMA-1B: peak memory, largest batch under 80 GiB and its speed."""
    return ProfileConfig(tables=("memory", "throughput"), optimizers=FORMS)


_MAKERS = (profile_memory, profile_throughput, profile_mfu, profile_forms)
PROFILES = {make.__name__.replace("_", "-"): make for make in _MAKERS}
