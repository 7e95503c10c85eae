"""Sharded parameters, recognized by their type. Most other files are imported only if a parameter is sharded.

    mesh               which part of a tensor is on which rank, from a DTensor's placements
    collectives        the messages between processes
    overlap            send messages of one stack while another computes
    owner_exchange     send shards to one rank, as whole matrices, and back
    sharded_algebra    the operations of a rule, summed over ranks
    location           where a stack of sharded matrices is, and how its rule runs
    sharded_layout     views and state of a sharded parameter
    agreement          do all ranks build the same optimizer?
    other_engines      what FSDP, DeepSpeed and ZeroRedundancyOptimizer do to parameters and groups

The arithmetic here depends on no rule. `sharded_layout` also sees to it that no block of 8-bit state is cut.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cosmos_optim.engine.layout import Layout
from cosmos_optim.rules.rule import Rule
from cosmos_optim.sharding.other_engines import refuse_flat

if TYPE_CHECKING:
    from cosmos_optim.sharding.agreement import Description

# Seconds that a rank waits for the others when it builds an optimizer, and at its first step if they had not come: half
# of the time after which NCCL usually ends a job.
BUILD_S, STEP_S = 10.0, 300.0


def layout_of(name: str, p: Tensor, rule: Rule, group: dict[str, Any], *, offloads: bool = False) -> Layout:
    """Return the layout of a parameter. Raise ValueError for a flat partition of a matrix.

    offloads: whether large state is in host memory if the parameter is on a GPU. Raise ValueError for a shard then.
    """
    refuse_flat(name, p, is_piece=p.dim() < 2 and not rule.elementwise)
    # Importing DTensor takes seconds; if nothing has imported it, no parameter is a DTensor.
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not isinstance(p, tensors.DTensor):
        layout = Layout(name, p, rule, group)
        layout.offloads = offloads
        return layout
    from cosmos_optim.sharding.sharded_layout import ShardedLayout

    sharded = ShardedLayout(name, p, rule, group)
    if offloads:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(p.shape)} is sharded, and offload='cpu' supports whole parameters "
            "only: leave offload out. To keep shards in host memory, give fully_shard(..., "
            "offload_policy=CPUOffloadPolicy()), which moves parameters, gradients and state"
        )
    return sharded


class Agreement:
    """Compare the groups of an optimizer with those that the other ranks of its sharded parameters build.

    name: the class of the optimizer.
    waiting: groups that are not compared yet, because some rank has not built them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.waiting: list[Description] = []

    def add(
        self, groups: Mapping[int, Mapping[str, Any]], settings: Collection[str], layouts: Mapping[Tensor, Layout]
    ) -> None:
        """Add groups, by number, to compare in these settings. Do nothing if no parameter is sharded."""
        if any(layout.is_sharded for layout in layouts.values()):
            from cosmos_optim.sharding import agreement

            self.waiting.append(agreement.describe(groups, settings, layouts))

    def compare(self, layouts: Mapping[Tensor, Layout], seconds: float) -> None:
        """Raise ValueError on all ranks if they differ. Warn if some rank has not come after this many seconds."""
        if not self.waiting:
            return
        from cosmos_optim.sharding import agreement

        ranks = agreement.ranks_of(list(layouts.values()))
        while self.waiting and agreement.compare(self.waiting[0], ranks, seconds):
            self.waiting.pop(0)
        if self.waiting:
            warnings.warn(
                f"{self._name}: not all ranks that share these parameters built it within {seconds:.0f} s of this one. "
                "The next step compares them; if this repeats, start the same optimizer on every rank",
                stacklevel=2,
            )


def prepare(layouts: Sequence[Layout]) -> None:
    """Make the process groups that a step needs. All ranks must call it. Raise ValueError if they cannot agree."""
    if any(layout.is_sharded for layout in layouts):
        from cosmos_optim.sharding import sharded_layout

        sharded_layout.prepare(layouts)


def max_over_ranks(layouts: Sequence[Layout]) -> list[tuple[list[int], Callable[[Tensor], Tensor]]]:
    """Return the positions of layouts on the same ranks, and a function: the elementwise maximum over these ranks.

    The first function is over the ranks of all layouts. At least one layout must be sharded; positions of others are
    left out: replicas without a mesh (DDP) have equal gradients and need no message.
    """
    from cosmos_optim.sharding import collectives, sharded_layout

    def over(groups: Sequence[Any]) -> Callable[[Tensor], Tensor]:
        return lambda values: reduce(collectives.maximum, groups, values)

    return [(members, over(groups)) for members, groups in sharded_layout.by_ranks(layouts)]
