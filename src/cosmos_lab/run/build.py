"""From a config to the objects of a run: tokens, network, wrapped and compiled network, and what identifies them."""

from __future__ import annotations

import dataclasses
import datetime
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.data import TokenSource, open_data
from cosmos_lab.models import Decoder, ModelConfig, build, resolve
from cosmos_lab.run import checkpoint, launch, run_log

_AFTER_GRADIENT = "_post_accumulate_grad_hooks"
_TOKENS_PER_PASS = 32_768  # enough to fill a large GPU, little enough for the logits of a 32k vocabulary


def seed_everything(seed: int, deterministic: bool) -> None:
    """The same weights on every process; only bit-stable kernels if asked for."""
    random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when its handle is made
    torch.use_deterministic_algorithms(deterministic)


def model_config(config: RunConfig, *sources: TokenSource) -> ModelConfig:
    """The preset with the config's sizes in place of its own, and a vocabulary that holds the tokens of ``sources``.

    The vocabulary is the config's; without one that of the embedded text, else the preset's, or where the tokens go
    beyond that, their tokenizer's.
    """
    preset = resolve(config.model.model)
    sizes = {name: getattr(config.model, name) for name in ("width", "depth", "mlp", "vocab_size")}
    if config.data.seq_len > preset.max_seq_len:
        sizes["max_seq_len"] = config.data.seq_len
    if config.model.vocab_size is None:
        own = max((source.vocab_size for source in sources if source.vocabulary.known), default=0)
        beyond = any(shard.max_id >= preset.vocab_size for source in sources for shard in source.shards)
        if own and (beyond or config.data.data == "embedded"):
            sizes["vocab_size"] = own
    shape = resolve(preset, **{name: size for name, size in sizes.items() if size is not None})
    for shard in (shard for source in sources for shard in source.shards):
        shard.check_vocabulary(shape.vocab_size)
    return shape


def load_source(config: RunConfig, split: Literal["train", "val"]) -> TokenSource:
    """The tokens of one split."""
    return open_data(config.data.data, split, cache_dir=config.data.cache_dir)


def build_model(config: RunConfig, shape: ModelConfig, device: torch.device) -> Decoder:
    """The network, drawn on its device."""
    model = build(shape, device=device)
    model.set_checkpointing(config.model.checkpointing)
    return model


@dataclass(frozen=True)
class Network:
    """A model and the form of it that the loop calls; ``key`` is what its graphs depend on (None: not for reuse)."""

    model: Decoder
    runner: nn.Module
    key: tuple[Any, ...] | None


_kept: list[Network] = []  # at most one: the last run's


def network(config: RunConfig, shape: ModelConfig, world: launch.World, bf16: bool) -> Network:
    """The model of a run, drawn from the seed, and what the loop calls.

    To compile a model can take as long as to train it, and the runs of a grid share their graphs: where the last run's
    would come out the same, its model serves again with the weights of a fresh one, bit for bit.
    """
    key = _graph_key(config, shape, world, bf16)
    kept = _take(key)
    world.forget(graphs=kept is None)
    model = build_model(config, shape, world.device)
    if kept is None:
        return Network(model, wrap(model, config, world, bf16), key)
    _renew(kept.model, model)
    return kept


def keep(made: Network) -> None:
    """Offer the network of a finished run to the next one; nobody else may use it from here on."""
    if made.key is not None:
        made.model.zero_grad(set_to_none=True)
        _kept[:] = [made]


def release() -> None:
    """Let go of the network that is kept, and of its graphs, which hold on to it."""
    if _kept:
        _kept.clear()
        torch.compiler.reset()


def _take(key: tuple[Any, ...] | None) -> Network | None:
    """The network that is kept if it fits, taken out, so that two runs at a time never share one; else None."""
    if _kept and _kept[0].key == key and not _hooked(_kept[0].model):
        return _kept.pop()
    release()
    return None


def _graph_key(config: RunConfig, shape: ModelConfig, world: launch.World, bf16: bool) -> tuple[Any, ...] | None:
    """What a compiled graph depends on, beside the settings of torch that its own guards watch."""
    how = launch.pick_compile(config.training.compile, world.device)
    if world.sharding != "none" or how == "off":
        return None
    sizes = (shape, micro_batch(config, world.size), config.data.seq_len, how)
    return (*sizes, config.model.checkpointing, world.device, bf16, config.training.deterministic)


def _hooked(model: nn.Module) -> bool:
    """Whether somebody hung a hook on the model, which graphs made before would not call."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = (getattr(module, kind) for module in model.modules() for kind in kinds)
    on_tensors = (getattr(p, kind) for p in model.parameters() for kind in ("_backward_hooks", _AFTER_GRADIENT))
    return any(on_modules) or any(on_tensors)


@torch.no_grad()
def _renew(model: nn.Module, fresh: nn.Module) -> None:
    """Make a used model equal to a fresh one in place, since graphs are bound to its tensors."""
    model.train(fresh.training)
    for mine, new in zip(model.parameters(), fresh.parameters(), strict=True):
        mine.grad = None
        mine.requires_grad_(new.requires_grad).copy_(new)
    for table, new_table in zip(model.buffers(), fresh.buffers(), strict=True):
        table.copy_(new_table)


def wrap(model: Decoder, config: RunConfig, world: launch.World, bf16: bool) -> nn.Module:
    """The model as the loop calls it: sharded or replicated over the processes, and compiled."""
    how = launch.pick_compile(config.training.compile, world.device)
    if how != "off":
        # A sweep builds many models in one process; stale ones count against the recompile limit.
        torch.compiler.reset()
    if how != "off" and world.sharding == "fsdp":
        for block in model.blocks:
            block.compile()
        how = "off"  # the rest is not for torch.compile
    if how == "blocks":
        model.compile_parts()
    runner = launch.replicate(launch.shard(model, world, bf16), world)
    return cast(nn.Module, torch.compile(runner, dynamic=False)) if how == "on" else runner


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


def identity(
    config: RunConfig, model: Decoder, source: TokenSource, val_source: TokenSource, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a checkpoint must agree with to be continued; settings: the optimizer's, of which rates may change."""
    return {
        "model": {"name": config.model.model, **dataclasses.asdict(model.config)},
        "optimizer": config.optimizer.optimizer,
        "rank": config.optimizer.rank,
        "data": source.fingerprint,
        "validation data": val_source.fingerprint,
        "seq_len": config.data.seq_len,
        "batch": config.training.batch,
        "seed": config.training.seed,
        **{name: value for name, value in settings.items() if not name.endswith(".lr")},
    }


def header(
    config: RunConfig,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    source: TokenSource,
    val_source: TokenSource,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json of the run folder; settings: the optimizer's, defaults included."""
    text = {"tokens": len(source), "fingerprint": source.fingerprint, "val_fingerprint": val_source.fingerprint}
    return {
        "name": config.run_name,
        "recipe": config.logging.recipe,
        "model": config.model.model,
        "optimizer": config.optimizer.optimizer,
        "lr": config.optimizer.lr,
        "adam_lr": config.optimizer.adam_lr,
        "seed": config.training.seed,
        "data": {**text, "vocab_size": source.vocab_size},
        "date": datetime.date.today().isoformat(),
        "commit": run_log.commit(),
        "versions": run_log.versions(),
        "config": config.flat(),
        "settings": settings,
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
        if not (run / "config.json").is_file():
            raise ValueError(f"{run} is not a run folder, which has a config.json: give one of those inside")
        raise ValueError(f"{run} has no checkpoint; train with --checkpoint-every above 0")
    meta = checkpoint.read_meta(newest)
    if meta["sharded"]:
        raise ValueError(f"{newest} is sharded (fsdp): join it with torch's dcp_to_torch_save first")
    fields = {name: value for name, value in meta["identity"]["model"].items() if name != "name"}
    model = build(ModelConfig(**fields))
    model.load_state_dict(checkpoint.read_tensors(newest / "state.pt", torch.device("cpu"))["model"])
    return model
