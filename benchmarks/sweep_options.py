"""What the flags of benchmarks/sweep.py ask for: options of the queue, single runs, and phases of the protocol."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.comparison import Run
from benchmarks.protocol import STAGES, Phase, Protocol
from benchmarks.variants import VARIANTS


@dataclasses.dataclass(frozen=True)
class Filters:
    """Which runs may begin; an empty tuple allows all."""

    variants: tuple[str, ...] = ()  # With names here, only these; "none" is a run without a variant.
    seeds: tuple[int, ...] = ()

    def allow(self, run: Run) -> bool:
        """Return whether a run may begin."""
        named = (run.variant or "none") in self.variants or not self.variants
        return named and (run.seed in self.seeds or not self.seeds)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run the queue."""

    data: str  # Shards, as the lab's --data.
    out: Path
    known: tuple[Path, ...] = ()  # Bundles of earlier results.
    seconds: float = math.inf
    parallel: int = 1
    beside: int = 0  # Runs of another queue on the same GPU.
    mps: bool = False
    device: str = "auto"
    compile: str = "auto"
    cache: str | None = None
    commit: str | None = None
    checkpoints: Path | None = None  # Folder for runs that the deadline cuts off, so that they can be continued.
    keep: Filters = Filters()
    runs: tuple[Run, ...] = ()  # Only these, instead of those that the search asks for.

    @property
    def at_a_time(self) -> int:
        """Return how many runs share the GPU."""
        return self.parallel + self.beside

    @property
    def unfinished(self) -> Path:
        """Return the folder of the runs that have begun."""
        return self.checkpoints or self.out / "unfinished"


def check_names(a: argparse.Namespace, protocol: Protocol) -> None:
    """Raise a ValueError if a flag names something that the comparison does not have."""
    known: dict[str, Iterable[Any]] = {
        "variants": ("none", *VARIANTS), "regimes": protocol.regimes, "only": protocol.entries,
        "seeds": (*protocol.seeds, *protocol.more_seeds),
    }  # fmt: skip
    for flag, values in known.items():
        names = [str(value) for value in values]
        if unknown := [str(value) for value in getattr(a, flag) or () if str(value) not in names]:
            raise ValueError(f"--{flag}: unknown: {', '.join(unknown)}; there are {', '.join(names)}")


def chosen_phases(a: argparse.Namespace, protocol: Protocol) -> list[Phase]:
    """Return the phases that --regimes, --only and --stages leave; a ValueError if nothing is left."""
    phases = []
    for regime, entries, stages in protocol.phases:
        entries = tuple(entry for entry in entries if entry in (a.only or protocol.entries))
        stages = tuple(stage for stage in stages if stage in (a.stages or STAGES))
        if regime in (a.regimes or protocol.regimes) and entries and stages:
            phases.append((regime, entries, stages))
    if not phases and not a.at:
        raise ValueError("no phase of the comparison has these --only, --regimes and --stages; --at needs no phase")
    return phases


def runs_at(model: str, a: argparse.Namespace) -> tuple[Run, ...]:
    """Return single runs at the setting of --at, for the rows, regimes, seeds and variants of the command line."""
    values = {name: float(value) for name, _, value in (item.partition("=") for item in a.at)}
    if not {"lr", "adam_lr"} <= set(values) <= {"lr", "adam_lr", "beta2"} or not (a.only and a.regimes):
        raise ValueError("--at takes lr=, adam_lr= and, if not 0.98, beta2=; it needs --only and --regimes")
    variants = ["" if name == "none" else name for name in a.variants] or [""]
    return tuple(
        Run(model, regime, entry, **values, seed=seed, variant=variant)
        for seed in a.seeds or [0] for regime in a.regimes for entry in a.only for variant in variants
    )  # fmt: skip


def queue_options(model: str, a: argparse.Namespace) -> Options:
    """Return the options of the queue."""
    return Options(
        data=a.data, out=a.out, known=tuple(a.known), seconds=a.seconds, parallel=a.parallel, beside=a.beside,
        mps=a.mps, device=a.device, compile=a.compile, cache=a.cache, commit=a.commit,
        checkpoints=a.checkpoints,
        keep=Filters(variants=tuple(a.variants), seeds=tuple(a.seeds)), runs=runs_at(model, a) if a.at else (),
    )  # fmt: skip
