"""The compiled model of the last run, kept for the next one.

Compiling a model can take as long as training it, and the runs of a grid share their graphs. If the graphs of the last
run fit, its model is used again with the weights of a fresh one, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.models import Decoder, ModelConfig
from cosmos_lab.run import build, distributed

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Network:
    """A model and the form of it that the loop calls; ``key`` is what its graphs depend on (None: not for reuse)."""

    model: Decoder
    runner: nn.Module
    key: tuple[Any, ...] | None


_stored: list[Network] = []  # at most one: the last run's


def network(config: RunConfig, shape: ModelConfig, world: distributed.World, bf16: bool) -> Network:
    """Return the model of a run, with weights drawn from the seed, and what the loop calls."""
    key = _graph_key(config, shape, world, bf16)
    stored = _take(key)
    world.free_memory(graphs=stored is None)
    model = build.build_model(config, shape, world.device)
    if stored is None:
        return Network(model, build.wrap(model, config, world, bf16), key)
    _copy_into(stored.model, model)
    return stored


def store(network: Network) -> None:
    """Offer the network of a finished run to the next one; the caller must not use it any more."""
    if network.key is not None:
        network.model.zero_grad(set_to_none=True)
        _stored[:] = [network]


def clear() -> None:
    """Free the stored network and its graphs, which refer to it."""
    if _stored:
        _stored.clear()
        torch.compiler.reset()


def _take(key: tuple[Any, ...] | None) -> Network | None:
    """Remove and return the stored network if it fits, so that two runs at a time never share one."""
    if _stored and _stored[0].key == key and not _has_hooks(_stored[0].model):
        return _stored.pop()
    clear()
    return None


def _graph_key(config: RunConfig, shape: ModelConfig, world: distributed.World, bf16: bool) -> tuple[Any, ...] | None:
    """Return what a compiled graph depends on, except for the settings of torch that its guards check."""
    how = build.pick_compile(config.training.compile, world.device)
    if world.sharding != "none" or how == "off":
        return None
    sizes = (shape, build.micro_batch(config, world.size), config.data.seq_len, how)
    types = (bf16, config.training.weights)  # graphs for weights of one type read those of another wrongly
    return (*sizes, *types, config.model.checkpointing, world.device, config.training.deterministic)


def _has_hooks(model: nn.Module) -> bool:
    """Tell whether the model has a hook, which graphs made before it would not call."""
    on_modules = (getattr(module, kind) for module in model.modules() for kind in _MODULE_HOOKS)
    on_tensors = (getattr(parameter, kind) for parameter in model.parameters() for kind in _TENSOR_HOOKS)
    return any(on_modules) or any(on_tensors)


@torch.no_grad()
def _copy_into(model: nn.Module, fresh: nn.Module) -> None:
    """Make a used model equal to a fresh one in place, because graphs are bound to its tensors."""
    model.train(fresh.training)
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        old.grad = None
        old.requires_grad_(new.requires_grad).copy_(new)
    for table, new_table in zip(model.buffers(), fresh.buffers(), strict=True):
        table.copy_(new_table)
