"""What a run writes: config.json, metrics.jsonl, summary.json, and optional TensorBoard and W&B logs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.data import TokenSource
from cosmos_lab.io import atomic_write, explained, nan_to_none, require, write_json
from cosmos_lab.models import Decoder
from cosmos_lab.provenance import commit, versions
from cosmos_lab.results.reading import CONFIG, METRICS, SUMMARY, read_metrics


def about(
    config: RunConfig, model: Decoder, optimizer: torch.optim.Optimizer, source: TokenSource, val_source: TokenSource,
    settings: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return the content of config.json; ``settings`` are the optimizer's, defaults included."""
    text = {"tokens": len(source), "fingerprint": source.fingerprint, "val_fingerprint": val_source.fingerprint}
    return {
        "name": config.run_name,
        **{name: config.get(name) for name in ("recipe", "model", "optimizer", "lr", "adam_lr", "seed")},
        "data": {**text, "vocab_size": source.vocab_size},
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": versions(),
        "config": config.flat(),
        "settings": settings,
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": state_bytes(optimizer),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of optimizer state on this process."""
    return int(optimizer.state_bytes())  # type: ignore[attr-defined]


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(nan_to_none(record), allow_nan=False) + "\n"


def _truncate(folder: Path, step: int) -> None:
    """Drop the records of a run folder that were logged after ``step``."""
    kept = [_line(record) for record in read_metrics(folder) if record["step"] <= step]
    with atomic_write(folder / METRICS) as out:
        out.write("".join(kept).encode())


class RunLog:
    """Appends records to a run folder, and to TensorBoard and W&B if asked; made by `open`."""

    def __init__(self, folder: Path, file: TextIO, board: Any = None, wandb_run: Any = None) -> None:
        self.folder = folder
        self._file, self._board, self._wandb = file, board, wandb_run

    @classmethod
    def open(cls, config: RunConfig, about: Mapping[str, Any], *, resumed_at: int = 0) -> RunLog:
        """Make the run folder ready to train on after step ``resumed_at``, and open its log.

        Makes the folder, writes ``about`` as config.json, removes a summary.json (it could not be read, or the run
        would be finished), and drops the records of later steps, because these steps are repeated.
        """
        folder, tensorboard, wandb, board, run = config.folder, None, None, None, None
        if config.logging.tensorboard:
            message = "--tensorboard needs the package tensorboard: pip install tensorboard"
            tensorboard = require("torch.utils.tensorboard", message)
        if config.logging.wandb:
            wandb = require("wandb", "--wandb needs the package wandb: pip install wandb")
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / CONFIG, about)
            (folder / SUMMARY).unlink(missing_ok=True)
            _truncate(folder, resumed_at)
            file = (folder / METRICS).open("a", encoding="utf-8")
        if tensorboard is not None:
            board = tensorboard.SummaryWriter(str(folder / "tensorboard"))
        if wandb is not None:
            project, name = config.logging.wandb, config.run_name
            run = wandb.init(project=project, name=name, dir=str(folder), config=config.flat(), resume="allow")
        return cls(folder, file, board, run)

    def write(self, record: Mapping[str, Any]) -> None:
        with explained(self.folder / METRICS):
            self._file.write(_line(record))
            self._file.flush()
        if self._board is None and self._wandb is None:
            return
        clean = nan_to_none(record)
        scalars = {name: value for name, value in clean.items() if isinstance(value, (int, float)) and name != "step"}
        for matrix, values in clean.get("diagnostics", {}).items():
            scalars |= {f"diagnostics/{name}/{matrix}": v for name, v in values.items() if v is not None}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=record["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished."""
        with explained(self.folder / SUMMARY):
            write_json(self.folder / SUMMARY, summary)

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been reported
            self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
