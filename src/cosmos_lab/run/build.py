"""From a config to the objects of a run: tokens, model, wrapped and compiled model."""

from __future__ import annotations

import os
import random
from typing import cast

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.data import Split, TokenSource, open_data, validation_windows
from cosmos_lab.models import Decoder, ModelConfig, build, resolve
from cosmos_lab.optimizers import WEIGHTS
from cosmos_lab.run import distributed

_TOKENS_PER_PASS = 32_768  # enough to fill a large GPU, little enough for the logits of a 32k vocabulary


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed every process alike, for the same weights; allow only bit-stable kernels if ``deterministic``."""
    random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when its handle is made
    torch.use_deterministic_algorithms(deterministic)


def model_config(config: RunConfig, *sources: TokenSource) -> ModelConfig:
    """Return the preset with the sizes of ``config``, and a vocabulary that holds the tokens of ``sources``.

    The vocabulary is the config's. Without one it is the preset's, or the tokenizer's if the tokens exceed the preset's
    or are the embedded text.
    """
    preset = resolve(config.model.model)
    sizes = {name: getattr(config.model, name) for name in ("width", "depth", "mlp", "vocab_size")}
    if config.data.seq_len > preset.max_seq_len:
        sizes["max_seq_len"] = config.data.seq_len
    shards = [shard for source in sources for shard in source.shards]
    if config.model.vocab_size is None:
        own = max((source.vocab_size for source in sources if source.vocabulary.known), default=0)
        beyond = any(shard.max_id >= preset.vocab_size for shard in shards)
        if own and (beyond or config.data.data == "embedded"):
            sizes["vocab_size"] = own
    shape = resolve(preset, **{name: size for name, size in sizes.items() if size is not None})
    for shard in shards:
        shard.check_vocabulary(shape.vocab_size)
    return shape


def load_source(config: RunConfig, split: Split) -> TokenSource:
    """Open the tokens of one split."""
    return open_data(config.data.data, split, cache_dir=config.data.cache_dir)


def open_text(config: RunConfig) -> tuple[TokenSource, TokenSource, ModelConfig]:
    """Open the tokens to train on and to validate with, and return them with the shape of the model that reads them.

    A missing or damaged shard, a text shorter than a sequence and a vocabulary that is too small are ValueErrors.
    """
    train, val = load_source(config, "train"), load_source(config, "val")
    for source in (train, val):
        validation_windows(source, config.data.seq_len)
    return train, val, model_config(config, train, val)


def build_model(config: RunConfig, shape: ModelConfig, device: torch.device) -> Decoder:
    """Build the model, with its weights drawn in float32 on its device and then turned into the run's type."""
    model = build(shape, device=device)
    model.checkpointing = config.model.checkpointing
    cast_weights(model, WEIGHTS[config.training.weights])
    return model


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn the parameters into this type; buffers, such as rotary tables, stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def pick_bf16(precision: str, device: torch.device) -> bool:
    """Tell whether to autocast; "auto" is on a GPU."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def pick_compile(how: str, device: torch.device) -> str:
    """Return how to compile, "on", "blocks" or "off"; "auto" is the whole model on a GPU."""
    return how if how != "auto" else "on" if device.type == "cuda" else "off"


def wrap(model: Decoder, config: RunConfig, world: distributed.World, bf16: bool) -> nn.Module:
    """Return the model as the loop calls it: sharded or replicated over the processes, and compiled."""
    how = pick_compile(config.training.compile, world.device)
    if how != "off":
        # A sweep builds many models in one process; stale ones count against the recompile limit.
        torch.compiler.reset()
    if how != "off" and world.sharding == "fsdp":
        for block in model.blocks:
            block.compile()
        how = "off"  # the rest is not for torch.compile
    if how == "blocks":
        model.compile_parts()
    runner = distributed.distribute(model, world, bf16)
    return cast(nn.Module, torch.compile(runner, dynamic=False)) if how == "on" else runner


def micro_batch(config: RunConfig, processes: int) -> int:
    """Return the sequences per forward pass: the config's, or the largest divisor of the share up to 32k tokens."""
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
