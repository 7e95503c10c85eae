"""From a config to the objects of a run: tokens, network, wrapped and compiled network, and what identifies them."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from cosmos_lab import checkpoint, launch, runlog
from cosmos_lab.config import RunConfig
from cosmos_lab.data import TokenSource, open_data
from cosmos_lab.data.files import read_json
from cosmos_lab.models import Decoder, ModelConfig, build, resolve

_TOKENS_PER_PASS = 32_768  # enough to fill a large GPU, little enough for the logits of a 32k vocabulary


def seed_everything(seed: int, deterministic: bool) -> None:
    """The same weights on every process; only bit-stable kernels if asked for."""
    random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when its handle is made
    torch.use_deterministic_algorithms(deterministic)


def model_config(config: RunConfig) -> ModelConfig:
    """The preset with the config's sizes in place of its own."""
    sizes = {name: getattr(config.model, name) for name in ("width", "depth", "mlp", "vocab_size")}
    if config.data.seq_len > resolve(config.model.model).max_seq_len:
        sizes["max_seq_len"] = config.data.seq_len
    return resolve(config.model.model, **{name: size for name, size in sizes.items() if size is not None})


def load_source(config: RunConfig, split: Literal["train", "val"]) -> TokenSource:
    """The tokens of one split, checked against the vocabulary of the model."""
    own = config.data.data == "embedded" and config.model.vocab_size is None
    vocab = None if own else model_config(config).vocab_size
    return open_data(config.data.data, split, vocab_size=vocab, cache_dir=config.data.cache_dir)


def build_model(config: RunConfig, source: TokenSource, device: torch.device) -> Decoder:
    """The network, drawn on its device; embedded text brings its own vocabulary."""
    own = config.data.data == "embedded" and config.model.vocab_size is None
    shape = model_config(config)
    model = build(resolve(shape, vocab_size=source.vocab_size) if own else shape, device=device)
    model.set_checkpointing(config.model.checkpointing)
    return model


def wrap(model: Decoder, config: RunConfig, world: launch.World, bf16: bool) -> nn.Module:
    """The model as the loop calls it: sharded or replicated over the processes, and compiled."""
    choice = config.training.compile
    compiled = choice == "on" or (choice == "auto" and world.cuda)
    if compiled:
        # A sweep builds many models in one process; stale ones count against the recompile limit.
        torch.compiler.reset()
    if compiled and world.sharding == "fsdp":
        for block in model.blocks:
            block.compile()
    runner = launch.replicate(launch.shard(model, world, bf16), world)
    if compiled and world.sharding != "fsdp":
        runner = cast(nn.Module, torch.compile(runner, dynamic=False))
    return runner


def micro_batch(config: RunConfig, processes: int) -> int:
    """Sequences per forward pass: the config's, or the largest divisor of the process's share up to 32k tokens."""
    share, rest = divmod(config.training.batch, processes)
    if rest:
        raise ValueError(f"--batch {config.training.batch} does not divide over {processes} processes")
    asked = config.training.micro_batch
    if asked is not None:
        if share % asked:
            raise ValueError(f"--micro-batch {asked} does not divide the {share} sequences of each process")
        return asked
    most = max(1, _TOKENS_PER_PASS // config.data.seq_len)
    return next(size for size in range(min(most, share), 0, -1) if share % size == 0)


def identity(config: RunConfig, model: Decoder, source: TokenSource) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued."""
    return {
        "model": {"name": config.model.model, **dataclasses.asdict(model.config)},
        "optimizer": config.optimizer.optimizer,
        "rank": config.optimizer.rank,
        "data": source.fingerprint,
        "seq_len": config.data.seq_len,
        "batch": config.training.batch,
        "seed": config.training.seed,
    }


def header(
    config: RunConfig, model: Decoder, optimizer: torch.optim.Optimizer, source: TokenSource
) -> dict[str, Any]:
    """config.json of the run folder."""
    return {
        "name": config.run_name,
        "recipe": config.logging.recipe,
        "model": config.model.model,
        "optimizer": config.optimizer.optimizer,
        "lr": config.optimizer.lr,
        "adam_lr": config.optimizer.adam_lr,
        "seed": config.training.seed,
        "data": {"tokens": len(source), "fingerprint": source.fingerprint, "vocab_size": source.vocab_size},
        "commit": runlog.commit(),
        "versions": runlog.versions(),
        "config": config.flat(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": state_bytes(optimizer),
    }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state on this process."""
    return int(optimizer.state_bytes())  # type: ignore[attr-defined]


def load_trained(run: Path) -> Decoder:
    """The model of a run folder, with the weights of its newest checkpoint."""
    if not run.is_dir():
        raise ValueError(f"there is no run folder {run}")
    newest = checkpoint.latest(run / "checkpoints")
    if newest is None:
        raise ValueError(f"{run} has no checkpoint; train with --checkpoint-every above 0")
    meta = read_json(newest / "meta.json")
    if meta["sharded"]:
        raise ValueError(f"{newest} is sharded (fsdp): join it with torch's dcp_to_torch_save first")
    fields = {name: value for name, value in meta["identity"]["model"].items() if name != "name"}
    model = build(ModelConfig(**fields))
    model.load_state_dict(torch.load(newest / "state.pt", map_location="cpu", weights_only=True)["model"])
    return model
