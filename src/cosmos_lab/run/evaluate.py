"""Validation loss of a trained run by position: where in its context a model predicts better than another.

Early positions show what a model takes from the words just before, late ones what it can use from far back (a name
seen two hundred tokens ago).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cosmos_lab.config import RunConfig
from cosmos_lab.data import TokenSource, validation_batches
from cosmos_lab.formatting import format_table
from cosmos_lab.models import Decoder
from cosmos_lab.run import build
from cosmos_lab.run.checkpoint import load_trained
from cosmos_lab.run.distributed import pick_device
from cosmos_lab.run.run_folder import read_config

_LOGITS = 2**27  # elements of the logits at a time: half a gigabyte in float32


def evaluate(
    run: str | Path, *, data: str | None = None, tokens: int | None = None, seq_len: int | None = None,
    step: int | None = None, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Compute the loss of a run's newest checkpoint, or of that of ``step``, in total and by position.

    ``data`` are other shards than those of training; ``tokens`` and ``seq_len`` are as in training if None.

    Returns {"run", "step", "tokens", "val_loss", "positions": [{"first", "last", "loss"}, ...]}, positions from 1 on.
    """
    for name, value in (("tokens", tokens), ("seq-len", seq_len)):
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be positive; got {value}; leave it out to use the run's")
    folder = Path(run)
    trained = load_trained(folder, step)
    config = read_config(folder)
    config = config.replace(**{k: v for k, v in (("data", data), ("seq_len", seq_len)) if v is not None})
    if (seq_len or 0) > (positions := trained.model.config.max_seq_len):
        raise ValueError(f"--seq-len {seq_len} is longer than the {positions} positions of this model")
    source = build.load_source(config, "val")
    before = trained.conditions.get("validation data", source.fingerprint)
    if data is None and source.fingerprint != before:
        hashes = f"its hash was {before}, and is {source.fingerprint} now"
        warnings.warn(f"{source.name} has changed since {folder} was trained ({hashes})", stacklevel=2)
    config = config.replace(val_tokens=tokens or config.logging.val_tokens)
    means, windows = _by_position(trained.model, source, config, pick_device(device))
    length = len(means)
    edges = [*itertools.takewhile(lambda edge: edge < length, (4**i for i in itertools.count())), length]
    parts = [(a, b) for a, b in itertools.pairwise([0, *edges]) if b > a]
    return {
        "run": folder.name,
        "step": trained.step,
        "tokens": windows * length,
        "val_loss": sum(means) / length,
        "positions": [{"first": a + 1, "last": b, "loss": sum(means[a:b]) / (b - a)} for a, b in parts],
    }


@torch.no_grad()
def _by_position(
    model: Decoder, source: TokenSource, config: RunConfig, device: torch.device
) -> tuple[list[float], int]:
    """Return the mean loss at each position of a window, and the number of windows."""
    vocabulary, length = model.config.vocab_size, config.data.seq_len
    for shard in source.shards:
        shard.check_vocabulary(vocabulary)
    model.to(device)
    bf16 = build.pick_bf16(config.training.precision, device)
    batch = max(1, _LOGITS // (length * vocabulary))
    sums, windows = torch.zeros(length, dtype=torch.float64, device=device), 0
    for x, y, count in validation_batches(source, batch, length, config.logging.val_tokens):
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            logits = model(x.to(device))
        nll = F.cross_entropy(logits.float().flatten(0, 1), y.to(device).flatten(), reduction="none")
        sums += nll.view(len(x), length).sum(0, dtype=torch.float64)
        windows += count
    return (sums / windows).tolist(), windows


def format_positions(results: Sequence[Mapping[str, Any]]) -> str:
    """Format a table with a column for each run and a line for each range of positions."""
    ranges = list(dict.fromkeys((part["first"], part["last"]) for result in results for part in result["positions"]))
    losses = [{(part["first"], part["last"]): part["loss"] for part in result["positions"]} for result in results]
    lines = [
        (f"{first:,} to {last:,}" if last > first else f"{first:,}",
         *(f"{row[first, last]:.4f}" if (first, last) in row else "-" for row in losses))
        for first, last in sorted(ranges)
    ]  # fmt: skip
    lines.append(("all", *(f"{result['val_loss']:.4f}" for result in results)))
    return format_table(("position", *(str(result["run"]) for result in results)), lines, left=(0,))
