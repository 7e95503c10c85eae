"""The flags of each command beside a run's own, as dataclasses: their docstrings are the help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cosmos_lab.config import RunConfig


@dataclass(frozen=True)
class CompareOptions:
    """Which runs of the recipe's grid."""

    optimizers: str | None = None
    """Only these, separated by commas."""
    lrs: str | None = None
    """Rates in place of the recipe's: 1e-3,2e-3 for all, or adam=1e-3,2e-3;cosmos=5e-4 by name."""
    seeds: str = "0"
    """Seeds, separated by commas."""
    only: str | None = None
    """Only these rows of the grid: rank-32,nesterov for either, rank-32+gamma-0.5 for both at once."""
    extra: str | None = None
    """More by optimizer: soap:frequency=10;cosmos:rank=64,nesterov=False; one that occurs twice runs in both ways."""
    parallel: int = 1
    """Runs at a time; with GPUs each has one of its own."""
    minutes: float = 0.0
    """Start no run that would end later than this; the same command goes on (0: no limit)."""
    report: bool = True
    """Write the report at the end."""


@dataclass(frozen=True)
class CompareCommand:
    """A grid of runs."""

    compare: CompareOptions = field(default_factory=CompareOptions)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True)
class ReportCommand:
    """Where the report goes."""

    out: str = "report"
    """Folder of the page and its figures."""
    title: str = "Pre-training report"
    """Heading of the page."""


@dataclass(frozen=True)
class PrepareCommand:
    """How text becomes shards."""

    out: str = "data"
    """Folder of the shards."""
    tokenizer: str | None = None
    """t5, gpt2, a tokenizer.json or a name on the hub (None: t5 for C4, else gpt2)."""
    max_tokens: int | None = None
    """Stop after so many training tokens."""
    max_val_tokens: int = 10_000_000
    """Most validation tokens."""
    val_fraction: float = 0.01
    """Share of documents kept for validation where the source has no validation split."""
    shard_tokens: int = 100_000_000
    """Most tokens in a shard."""
    unit: Literal["file", "blank-lines", "articles"] = "file"
    """What a document is in a text file: all of it, what stands between blank lines, or a WikiText article."""
    field: str = "text"
    """Key of the text in .jsonl lines."""


@dataclass(frozen=True)
class ExportCommand:
    """Where the exported model goes."""

    out: str = "exported"
    """Folder for transformers' from_pretrained."""
    tokenizer: str | None = None
    """A tokenizer.json to put beside the weights."""


@dataclass(frozen=True)
class EvaluateCommand:
    """On what, and where the numbers go."""

    data: str | None = None
    """Other shards than a run was trained with."""
    tokens: int | None = None
    """Validation tokens (None: as many as in training)."""
    seq_len: int | None = None
    """Length of the context (None: as in training)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    out: str | None = None
    """A JSON file for the numbers."""
