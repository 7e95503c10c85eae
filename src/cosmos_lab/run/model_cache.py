"""The compiled model of the last run, kept for the next one: the runs of a grid share their graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.models import Decoder, ModelConfig
from cosmos_lab.run import build, launch

_AFTER_GRADIENT = "_post_accumulate_grad_hooks"


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
    model = build.build_model(config, shape, world.device)
    if kept is None:
        return Network(model, build.wrap(model, config, world, bf16), key)
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
    sizes = (shape, build.micro_batch(config, world.size), config.data.seq_len, how)
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
