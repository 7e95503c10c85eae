"""Train one run of the comparison, with two held-out texts: one to choose by, one to report."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.comparison import Comparison, Run
from benchmarks.kept_runs import Result, texts_of
from benchmarks.sweep_options import Options
from cosmos_lab.config import RunConfig
from cosmos_lab.data import TokenSource, open_data, validation_batches
from cosmos_lab.io import read_json, write_json
from cosmos_lab.results.reading import CONFIG, read_metrics
from cosmos_lab.run.distributed import pick_device
from cosmos_lab.run.train import Trainer
from cosmos_lab.run.train import train as lab_train

TEXTS = ("val", "test")
FINAL = "final.json"  # in the folder of a run: what a result has that the lab's summary lacks
LARGEST = 700.0  # a loss above has no perplexity in floating point, and counts as diverged


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


def check_tokens(name: str, asked: int, found: int, epochs: int) -> None:
    """Raise a ValueError if a run would see a token too often."""
    if asked >= found * epochs:
        advice = "add a shard, or leave this regime out (--regimes)"
        raise ValueError(f"{name}: {asked:,} tokens asked for, {found:,} found, epochs {epochs}: {advice}")


def check_texts(comparison: Comparison, options: Options, runs: Sequence[Run], results: Iterable[Result]) -> None:
    """Raise a ValueError if the texts cannot be opened or cut, do not suffice for these runs, or are other ones.

    Other ones: than those of an earlier run of the same model and regime, to which these would be compared.
    """
    text = open_data(options.data, "train", cache_dir=options.cache)
    held_out = split(open_data(options.data, "val", cache_dir=options.cache), comparison.cut, options.cache)
    for run in runs:
        check_tokens(run.id, comparison.tokens(run), len(text), comparison.regimes[run.regime].epochs)
    texts, kinds = tuple(one.fingerprint for one in (text, *held_out)), {(run.model, run.regime) for run in runs}
    for r in results:
        if (r["model"], r["regime"]) in kinds and texts_of(r) != texts:
            raise ValueError(
                f"{options.data} is not the text of {r['id']}: fingerprints {', '.join(texts)}, there "
                f"{', '.join(texts_of(r))}. Runs of a regime must see the same text: give its shards"
            )


class TwoTextTrainer(Trainer):
    """The lab's trainer with a validation text and a test text; it writes the losses on all of both to FINAL."""

    def __init__(self, comparison: Comparison, epochs: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.block, self.epochs = comparison.block, epochs
        self.texts = dict(zip(TEXTS, split(self.val_source, comparison.cut, self.config.data.cache_dir), strict=True))
        self.earlier = {"continued_at": self.state.step, "earlier_s": self.state.seconds}

    def run(self) -> dict[str, Any]:
        """Train, if no token would be seen too often."""
        tokens = self.config.training.steps * self.config.training.batch * self.config.data.seq_len
        folder = self.config.folder
        check_tokens(folder.name, tokens, read_json(folder / CONFIG)["data"]["tokens"], self.epochs)
        return super().run()

    def _finish(self) -> dict[str, Any]:
        """Write FINAL before the summary, which marks the run as finished."""
        self.world.synchronize()
        self.clock.stop()
        groups = [
            {"rule": g["rule"], "tensors": len(g["params"]), "numbers": sum(p.numel() for p in g["params"]),
             "peak_lr": lr} for g, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True)
        ]  # fmt: skip
        fingerprints = {f"{name}_fingerprint": source.fingerprint for name, source in self.texts.items()}
        final = {"groups": groups, "fingerprints": fingerprints, "final": self.final(), **self.earlier}
        write_json(self.config.folder / FINAL, final)
        return super()._finish()

    @torch.no_grad()
    def read(self, source: TokenSource, tokens: int) -> list[float]:
        """Return the mean loss of each batch of the first tokens; only whole batches, so that nothing recompiles."""
        length = self.config.data.seq_len
        whole = self.micro_batch * length
        tokens = max(1, min(tokens, len(source) - 1) // whole) * whole
        found = []
        for x, y, _ in validation_batches(source, self.micro_batch, length, tokens):
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
        batches = max(1, self.block // (self.micro_batch * self.config.data.seq_len))
        for name, source in self.texts.items():
            values = self.read(source, (len(source) - 1) // self.block * self.block)
            loss = statistics.fmean(values)
            diverged = not loss < LARGEST  # nan too
            found[f"{name}_loss"] = None if diverged else round(loss, 6)
            found[f"{name}_ppl"] = None if diverged else math.exp(round(loss, 6))
            found[f"{name}_tokens"] = len(values) * self.micro_batch * self.config.data.seq_len
            groups = (values[i : i + batches] for i in range(0, len(values), batches))
            found[f"{name}_blocks"] = [_rounded(statistics.fmean(group)) for group in groups]
        return found


def train(comparison: Comparison, options: Options, run: Run) -> Result:
    """Train one run, or continue it from its checkpoint, and return its result."""
    began = time.monotonic()
    config = comparison.config(run).replace(
        data=options.data, cache_dir=options.cache, out=str(options.unfinished), device=options.device,
        compile=options.compile,
    )  # fmt: skip
    if not options.checkpoints:
        shutil.rmtree(config.folder, ignore_errors=True)
    epochs = comparison.regimes[run.regime].epochs
    summary = lab_train(config, make=functools.partial(TwoTextTrainer, comparison, epochs))
    return result(config, options, run, summary | read_json(config.folder / FINAL), time.monotonic() - began)


def result(config: RunConfig, options: Options, run: Run, summary: Mapping[str, Any], seconds: float) -> Result:
    """Return the result of a finished run from its folder and its summary; `seconds` are those of this process."""
    about, curves = read_json(config.folder / CONFIG), read_curves(config)
    final = summary["final"]
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
        "data": about["data"] | summary["fingerprints"],
        "device": torch.cuda.get_device_name() if pick_device(options.device).type == "cuda" else "cpu",
        "wall_s": round(max(seconds + summary["earlier_s"], summary["time"]), 2), "train_s": round(summary["time"], 2),
        "continued_at": summary["continued_at"],
        **{name: summary[name] for name in ("step_ms", "optimizer_ms", "tokens_per_s", "peak_memory_gb")},
        "train_loss": _rounded(summary["final_train_loss"]), **final, **curves,
    }  # fmt: skip


def read_curves(config: RunConfig) -> dict[str, Any]:
    """Return the held-out losses and the training losses that a run has logged."""
    records = list(read_metrics(config.folder))
    curve = [
        [r["step"], r["tokens"], *(_rounded(r[f"{name}_loss"]) for name in TEXTS)] for r in records if "val_loss" in r
    ]
    train_curve = [[r["step"], _rounded(r["loss"])] for r in records if "loss" in r]
    return {
        "curve_columns": ["step", "tokens", "val_loss", "test_loss"], "curve_tokens": config.logging.val_tokens,
        "curve": curve, "train_curve": train_curve,
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)
