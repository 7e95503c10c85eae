"""The flags of each command, as dataclasses with the help in their docstrings, and how they are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cosmos_lab.config import RunConfig, parse_options
from cosmos_lab.data.prepare import Settings
from cosmos_lab.io import require

T = TypeVar("T")
# What other training scripts call our flags.
_OTHER_NAMES = {
    "batch-size": "batch", "block-size": "seq-len", "context-length": "seq-len", "dataset": "data",
    "dtype": "precision", "grad-clip": "clip", "learning-rate": "lr", "learning-rates": "lrs",
    "lr-scheduler": "schedule", "max-grad-norm": "clip", "max-iters": "steps", "max-seq-length": "seq-len",
    "max-steps": "steps", "output-dir": "out", "save-every": "checkpoint-every", "eval-every": "val-every",
    "warmup-steps": "warmup", "wd": "weight-decay",
}  # fmt: skip
_NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class CompareOptions:
    """Which runs of the recipe's grid to make."""

    optimizers: str | None = None  # Only these optimizers, separated by commas.
    lrs: str | None = None  # Rates instead of the recipe's: 1e-3,2e-3 for all, or adam=1e-3,2e-3;cosmos=5e-4 by name.
    seeds: str = "0"  # Seeds, separated by commas.
    only: str | None = None  # Only these runs: rank-32,nesterov for either, rank-32+gamma-0.5 for both at once.
    extra: str | None = None
    """More fields by optimizer: soap:frequency=10;cosmos:rank=64,nesterov=False. One named twice runs both ways."""
    parallel: int = 1  # How many runs train at the same time; on GPUs, each has its own.
    minutes: float = 0.0  # Start no run that would end later than this; the same command continues (0: no limit).
    report: bool = True  # Write the report at the end.


@dataclass(frozen=True)
class CompareCommand:
    """Train a grid of runs."""

    compare: CompareOptions = field(default_factory=CompareOptions)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True)
class ReportCommand:
    """Write one HTML page about the runs in these folders."""

    out: str = "report"  # Folder of the page and its figures.
    title: str = "Pre-training report"  # Heading of the page.


@dataclass(frozen=True)
class PrepareCommand:
    """Turn text into shards of tokens, which `cosmos-lab train --data` reads."""

    settings: Settings = field(default_factory=Settings)
    out: str = "data"  # Folder of the shards.
    tokenizer: str | None = None
    """t5, gpt2, a tokenizer.json, a name on the hub, or train:4096 to train one on the text (None: gpt2; t5 for C4)."""
    prefix: str | None = None  # First part of the shards' names (None: SOURCE_TOKENIZER).


@dataclass(frozen=True)
class ExportCommand:
    """Write a checkpoint for transformers, with the tokenizer of the data."""

    out: str = "exported"  # Folder for transformers' from_pretrained.
    tokenizer: str | None = None  # A tokenizer.json to put beside the weights (None: that of the data trained on).
    step: int | None = None  # Export the checkpoint of this step (None: the newest).


@dataclass(frozen=True)
class EvaluateCommand:
    """Compute the validation loss of trained runs, by position in the context."""

    data: str | None = None  # Validate on these shards instead of the run's own.
    tokens: int | None = None  # Validation tokens (None: as many as in training).
    seq_len: int | None = None  # Length of the context (None: as in training).
    step: int | None = None  # Evaluate the checkpoint of this step (None: the newest).
    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device to compute on.
    out: str | None = None  # JSON file to write the numbers to.


def parse(default: T, arguments: Sequence[str], *, prog: str, description: str | None = None) -> T:
    """Apply the flags in ``arguments`` to the dataclass ``default``; nested dataclasses give flat flags.

    Without a ``description``, the help shows the docstring of the dataclass.
    """
    if not any(word in ("-h", "--help") or word.startswith("--tyro-") for word in arguments):
        _check(default, arguments, f"`{prog} --help` lists the flags")
    tyro = require("tyro", "the commands need the package tyro: pip install tyro, or '.[lab]' in the source folder")
    flat = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    parsed: T = tyro.cli(
        type(default), default=default, args=list(arguments), prog=prog, description=description, config=flat
    )
    return parsed


def _check(default: Any, arguments: Sequence[str], advice: str) -> None:
    """Raise a ValueError with one line for a mistake that tyro would show as a box."""
    types = dict(_types(default))
    for flag, *values in _grouped(arguments):
        name = flag.removeprefix("--").replace("_", "-")
        if not flag and values:
            raise ValueError(f"{values[0]!r} is not a flag; {advice}")
        if flag and name not in types:
            bare = name.lstrip("-")
            meant = _OTHER_NAMES.get(bare, bare)
            close = [meant] if meant in types else difflib.get_close_matches(bare, types, n=2)
            hint = f"; did you mean {' or '.join(f'--{found}' for found in close)}?" if close else ";"
            raise ValueError(f"there is no flag {flag.replace('_', '-')}{hint} {advice}")
        kind = types.get(name, bool)
        if kind is bool and values:
            base = name.removeprefix("no-")
            raise ValueError(f"{flag} takes no value; got {values[0]!r}: give --{base} or --no-{base}")
        if kind is not bool and get_origin(kind) is not tuple and len(values) != 1:
            raise ValueError(f"{flag} takes one value; got {' '.join(values) or 'none'}; {advice}")
        for value in values:
            _check_value(flag, kind, value)


def _check_value(flag: str, kind: Any, value: str) -> None:
    """Raise a ValueError if ``value`` is not of the type ``kind``, or of its elements if that is a tuple."""
    parts = get_args(kind)
    none = NoneType in parts
    if none or get_origin(kind) is tuple:
        kind = parts[0]
    if none and value == "None":
        return
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ValueError(f"{flag} must be one of {', '.join(get_args(kind))}; got {value!r}")
    if kind in _NUMBERS and not _is_number(value, kind):
        raise ValueError(f"{flag} takes {_NUMBERS[kind]}{' or None' if none else ''}; got {value!r}")


def _types(default: Any) -> Iterator[tuple[str, Any]]:
    """Yield the flags that the fields of a dataclass, and of those within it, become, each with its type."""
    for name, kind in get_type_hints(type(default)).items():
        flag, value = name.replace("_", "-"), getattr(default, name)
        yield from _types(value) if is_dataclass(value) else [(flag, kind)]
        if kind is bool:
            yield f"no-{flag}", kind


def _grouped(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag and the values after it; the first list has the values before any flag.

    >>> list(_grouped(["--lr=1e-3", "--options", "a=1", "b=2", "--clip", "-1"]))
    [[''], ['--lr', '1e-3'], ['--options', 'a=1', 'b=2'], ['--clip', '-1']]
    """
    group = [""]
    for word in arguments:
        if word.startswith("-") and not _is_number(word):
            yield group
            flag, given, value = word.partition("=")
            group = [flag, value] if given else [flag]
        else:
            group.append(word)
    yield group


def _is_number(text: str, kind: Callable[[str], Any] = float) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def parse_lrs(text: str | None) -> dict[str, list[float]] | list[float] | None:
    """Read the rates of ``--lrs``.

    >>> parse_lrs("1e-3,2e-3"), parse_lrs("adam=2e-3;cosmos=5e-4,1e-3")
    ([0.001, 0.002], {'adam': [0.002], 'cosmos': [0.0005, 0.001]})
    """
    if text is None:
        return None
    if "=" not in text:
        return numbers(text, float, "--lrs")
    pairs = (part.partition("=") for part in text.split(";") if part)
    return {name.strip(): numbers(rates, float, "--lrs") for name, _, rates in pairs}


def numbers(text: str, kind: Callable[[str], Any], flag: str) -> list[Any]:
    """Read ``1,2,3`` as numbers of one type."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(f"{flag} takes {whole}numbers separated by commas; got {text!r}") from None


def parse_extra(text: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Read ``--extra``: the fields to set for each optimizer.

    >>> parse_extra("soap:frequency=10;cosmos:;cosmos:rank=32,side=smaller")
    [('soap', {'frequency': 10}), ('cosmos', {}), ('cosmos', {'rank': 32, 'side': 'smaller'})]
    """
    found = []
    for part in (text or "").split(";"):
        if not part.strip():
            continue
        name, colon, fields = part.partition(":")
        if not colon:
            raise ValueError(f"--extra takes optimizer:name=value, for example soap:frequency=10; got {part!r}")
        found.append((name.strip(), parse_options(tuple(f.strip() for f in fields.split(",") if f.strip()), "--extra")))
    return found
