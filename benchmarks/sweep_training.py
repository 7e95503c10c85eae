"""Train one run of the comparison, with two held-out texts: one to choose by, one to report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.comparison import Comparison, Run
from benchmarks.kept_runs import Result
from benchmarks.sweep_flags import Options
from cosmos_lab.data import TokenSource, validation_batches
from cosmos_lab.io import read_json
from cosmos_lab.results.reading import CONFIG
from cosmos_lab.run.launch import pick_device
from cosmos_lab.run.train import Trainer
from cosmos_lab.run.train import train as lab_train

TEXTS = ("val", "test")


def split(source: TokenSource, cut: int, cache_dir: str | None = None) -> tuple[TokenSource, TokenSource]:
    """Cut a text after the first document that ends at token ``cut`` or later: validation text and test text."""
    ends = source.documents[1:]
    index = int(np.searchsorted(ends, cut))
    if len(source.shards) != 1 or index + 1 >= len(ends):
        raise ValueError(f"{source}: the text to cut at token {cut} must be one shard with a document after that")
    (shard,), at = source.shards, int(ends[index])

    def part(tokens: Any, name: str) -> TokenSource:
        digest = hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()
        top = int(tokens.argmax())
        piece = dataclasses.replace(shard, tokens=tokens, sha256=digest, max_id=int(tokens[top]), max_at=top)
        return TokenSource([piece], source.vocabulary, f"{source.name}, {name}", cache_dir)

    return part(shard.tokens[:at], "validation part"), part(shard.tokens[at:], "test part")


class TwoTextTrainer(Trainer):
    """The lab's trainer with a validation text and a test text; its summary has the losses on all of both."""

    def __init__(self, comparison: Comparison, epochs: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.block, self.epochs = comparison.block, epochs
        self.texts = dict(zip(TEXTS, split(self.val_source, comparison.cut, self.config.data.cache_dir), strict=True))

    def run(self) -> dict[str, Any]:
        """Train if no token would be seen too often; return the summary with groups, fingerprints and final losses."""
        tokens = self.config.training.steps * self.config.training.batch * self.config.data.seq_len
        found = read_json(self.config.folder / CONFIG)["data"]["tokens"]
        if tokens >= found * self.epochs:
            raise ValueError(f"{tokens:,} tokens asked for, {found:,} found, epochs {self.epochs}: add a shard")
        summary = super().run()
        groups = [
            {"rule": g["rule"], "tensors": len(g["params"]), "numbers": sum(p.numel() for p in g["params"]),
             "peak_lr": lr} for g, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True)
        ]  # fmt: skip
        fingerprints = {f"{name}_fingerprint": source.fingerprint for name, source in self.texts.items()}
        return {**summary, "groups": groups, "fingerprints": fingerprints, "final": self.final()}

    @torch.no_grad()
    def read(self, source: TokenSource, tokens: int) -> list[float]:
        """Return the mean loss of each batch of the first tokens; only whole batches, so that nothing recompiles."""
        length = self.config.data.seq_len
        whole = self.micro * length
        tokens = max(1, min(tokens, len(source) - 1) // whole) * whole
        found = []
        for x, y in validation_batches(source, self.micro, length, tokens):
            with self._autocast():
                found.append(self.runner(x.to(self.world.device), y.to(self.world.device)).float())
        return [float(loss) for loss in torch.stack(found).tolist()]

    def validate(self) -> dict[str, Any]:
        """Log one point of both curves."""
        record: dict[str, Any] = {"step": self.state.step, "tokens": self.tokens, "time": self.clock.read()}
        for name, source in self.texts.items():
            record[f"{name}_loss"] = statistics.fmean(self.read(source, self.config.logging.val_tokens))
        self._write(record)
        return record

    def final(self) -> dict[str, Any]:
        """Return the losses on both texts, over all their whole blocks and in each block."""
        found: dict[str, Any] = {}
        batches = max(1, self.block // (self.micro * self.config.data.seq_len))
        for name, source in self.texts.items():
            values = self.read(source, (len(source) - 1) // self.block * self.block)
            loss = _finite(statistics.fmean(values))
            found |= {f"{name}_loss": loss, f"{name}_ppl": None if loss is None else math.exp(loss)}
            found[f"{name}_tokens"] = len(values) * self.micro * self.config.data.seq_len
            groups = (values[i : i + batches] for i in range(0, len(values), batches))
            found[f"{name}_blocks"] = [_finite(statistics.fmean(group)) for group in groups]
        return found


def train(comparison: Comparison, options: Options, run: Run) -> Result:
    """Train one run and return its result; the lab's run folder is removed."""
    began = time.monotonic()
    out = options.out / "unfinished" / str(os.getpid())
    shutil.rmtree(out, ignore_errors=True)
    config = comparison.config(run).replace(
        data=options.data, cache_dir=options.cache, out=str(out), device=options.device, compile=options.compile
    )
    curve: list[list[Any]] = []
    train_curve: list[list[Any]] = []

    def note(record: Mapping[str, Any]) -> None:
        if "val_loss" in record:
            values = (_finite(record[f"{name}_loss"]) for name in TEXTS)
            curve.append([record["step"], record["tokens"], *values])
        elif "loss" in record:
            train_curve.append([record["step"], _finite(record["loss"])])

    epochs = comparison.regimes[run.regime].epochs
    summary = lab_train(config, progress=note, make=functools.partial(TwoTextTrainer, comparison, epochs))
    about, final = read_json(config.folder / CONFIG), summary["final"]
    shutil.rmtree(out, ignore_errors=True)
    if summary["status"] != "done":
        final = {name: value if name.endswith("_tokens") else None for name, value in final.items()}
    folders = ("out", "name", "cache_dir", "data")
    return {
        "id": run.id, **dataclasses.asdict(run), "status": summary["status"],
        "optimizer": config.optimizer.optimizer, "options": list(config.optimizer.options),
        "steps": summary["steps"], "batch": config.training.batch, "seq_len": config.data.seq_len,
        "tokens": summary["tokens"], "clip": config.training.clip,
        "betas": [config.optimizer.beta1, config.optimizer.beta2], "groups": summary["groups"],
        "settings": about["settings"], "config": {k: v for k, v in config.flat().items() if k not in folders},
        "parameters": about["parameters"], "state_bytes": about["state_bytes"],
        "commit": options.commit or about["commit"], "versions": about["versions"], "date": about["date"],
        "data": about["data"] | summary["fingerprints"], "at_a_time": options.at_a_time,
        "device": torch.cuda.get_device_name() if pick_device(options.device).type == "cuda" else "cpu",
        "wall_s": round(time.monotonic() - began, 2), "train_s": round(summary["time"], 2),
        **{name: summary[name] for name in ("step_ms", "optimizer_ms", "tokens_per_s", "peak_memory_gb")},
        "train_loss": _finite(summary["final_train_loss"]), **final,
        "curve_columns": ["step", "tokens", "val_loss", "test_loss"], "curve_tokens": config.logging.val_tokens,
        "curve": curve, "train_curve": train_curve,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
