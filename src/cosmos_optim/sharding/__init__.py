"""Sharded parameters: told from whole ones here, and by nothing but themselves.

    comm      the messages, all of them, counted
    shards    placements of a DTensor -> which part lies where
    owners    whole matrices on one rank, and back
    algebra   the sums of a rule over ranks
    place     a stack of sharded matrices and how its rule runs
    sharded   views and state of a sharded parameter
    lanes     messages of one stack while another computes

Nothing here knows a rule by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.engine.layout import Layout
from cosmos_optim.rules.rule import Rule
from cosmos_optim.sharding import overlap as lanes


def layout_of(name: str, p: Tensor, rule: Rule, group: dict[str, Any]) -> Layout:
    """The layout of a parameter, read from the parameter."""
    _refuse_flat(name, p)
    if _is_dtensor(p):
        from cosmos_optim.sharding.sharded_layout import ShardedLayout

        return ShardedLayout(name, p, rule, group)  # type: ignore[arg-type]
    return Layout(name, p, rule, group)


def prepare(layouts: Sequence[Layout]) -> None:
    """Make the process groups that a step needs; ValueError where its ranks could not agree. All ranks call it."""
    if "torch.distributed.tensor" in sys.modules:
        from cosmos_optim.sharding import sharded_layout as sharded

        sharded.prepare(layouts)


def agree(values: Tensor, layouts: Sequence[Any]) -> Tensor:
    """The largest of each value over all processes that share these parameters.

    Replicas without a mesh (DDP) have equal gradients and need no message.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return values
    from cosmos_optim.sharding import collectives as comm
    from cosmos_optim.sharding.sharded_layout import widest_groups

    for group in widest_groups(layouts):
        values = comm.largest(values, group)
    return values


def run(jobs: Sequence[tuple[object, lanes.Job]], device: torch.device) -> None:
    """All jobs, each with the team whose messages it needs; on a GPU two of one team at a time.

    Only jobs of one team share lanes: its ranks all have the same ones, so that they take the same turns.
    """
    overlap = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    for team in dict.fromkeys(team for team, _ in jobs):
        mine = [job for other, job in jobs if other is team]
        lanes.run(mine, device, width=2 if overlap and team is not None else 1)


def _is_dtensor(p: Tensor) -> bool:
    """A DTensor cannot exist before its module is imported, which takes seconds: do not import it to look."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(p, module.DTensor)


def _refuse_flat(name: str, p: Tensor) -> None:
    """FSDP1 and ZeRO leave flat parts of matrices, in which neither rows nor columns can be told."""
    for mark, engine in (("_fsdp_flattened", "FSDP1"), ("_is_flat_param", "FSDP1"), ("ds_id", "DeepSpeed ZeRO")):
        if hasattr(p, mark):
            raise ValueError(
                f"parameter {name!r} of shape {tuple(p.shape)} is a flat partition made by {engine} (placement: 1-D): "
                "its rows and columns cannot be told. Shard the model by torch.distributed.fsdp.fully_shard (FSDP2), "
                "by tensor parallelism, or not at all (DDP)"
            )
