"""The layout of a DTensor parameter: views of its local part, and state that is sharded as the parameter is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cosmos_optim.engine.layout import LOCAL, Layout, Location
from cosmos_optim.rules.rule import Rule, Slot
from cosmos_optim.sharding import collectives
from cosmos_optim.sharding.location import ShardedLocation, owner_location, sharded_location
from cosmos_optim.sharding.mesh import WORKS, Cut, agreeing, cuts_of, whole

# Which sides of a matrix may be cut for a rule that says so.
SIDES = {"both": "mn", "rows": "m", "none": ""}


class ShardedLayout(Layout):
    """Views of the local part of a parameter that is divided over a mesh.

    Every state tensor is a DTensor on the parameter's mesh: what has the parameter's rows or columns is cut as they
    are, the rest is replicated. Where the rule wants whole matrices, all of it is cut over all the ranks.
    """

    is_sharded = True

    def __init__(self, name: str, p: DTensor, rule: Rule, group: dict[str, Any]) -> None:
        self.mesh, self.placements = p.device_mesh, tuple(p.placements)
        if p.device_mesh.get_coordinate() is None:
            raise ValueError(f"parameter {name!r} lies on {p.device_mesh}, of which this rank is no part")
        super().__init__(name, p, rule, group)
        try:
            self.cuts = cuts_of(self.shape, self.mesh, self.placements)
            self._check_parts(p)
            if not rule.elementwise:
                self._assign_roles(group)
        except ValueError as error:
            raise ValueError(
                f"parameter {name!r} of shape {self.shape} with placements {self.placements} on {self.mesh}: {error}"
            ) from None

    def _check_parts(self, p: DTensor) -> None:
        here = tuple(p.to_local().shape)
        expected = tuple(self._part(cut)[1] for cut in self.cuts)
        if here != expected:
            raise ValueError(f"its part on this rank has shape {here}, not the {expected} of torch.chunk. {WORKS}")
        for dim in range(self.mesh.ndim):
            group = self.mesh.get_group(dim)
            if self.mesh.size(dim) > 1 and not p.is_meta and not collectives.reaches(p.device, group):
                raise ValueError(
                    f"it is on {p.device}, but the mesh talks over {self.mesh.device_type}: CPU offload needs process "
                    "groups for both, init_process_group('cpu:gloo,cuda:nccl')"
                )

    def _part(self, cut: Cut) -> tuple[int, int]:
        return cut.part(self.mesh.shape, self.mesh.get_coordinate() or ())

    # -- roles of the parameter's dimensions --------------------------------------------------------------------------

    def _role(self, dim: int) -> str:
        """What a dimension of the stored tensor is: "m" rows, "n" columns, or "b" a batch of matrices."""
        last = len(self.shape) - 1
        if self.kind == "conv":
            role = "m" if dim == 0 else "n"
        elif self.kind == "in_out":
            role = {last - 1: "n", last: "m"}.get(dim, "b")
        else:
            role = {last - 1: "m", last: "n"}.get(dim, "b")
        return {"m": "n", "n": "m", "b": "b"}[role] if self.flipped else role

    def _assign_roles(self, group: dict[str, Any]) -> None:
        roles = [self._role(dim) for dim in range(len(self.shape))]
        if self.kind == "conv" and any(cut.over for cut in self.cuts[1:]):
            raise ValueError("a convolution can be cut along its output channels (Shard(0)) only")
        self.by_role = {role: self.cuts[dim] for dim, role in enumerate(roles) if role != "b"}
        if self.kind == "conv":
            self.by_role["n" if not self.flipped else "m"] = whole(self._matrix_shape()[1])
        self.stack = [cut for cut, role in zip(self.cuts, roles, strict=True) if role == "b"]
        self.blocks_mn = self.sizes_mn * math.prod(self._part(cut)[1] for cut in self.stack)
        self.divided = {role for role in "mn" if self.by_role[role].over}
        self.owned = not self.divided <= set(SIDES[self.rule.shardable])
        self.state_cuts = {name: (slot, cuts_of(slot.shape, self.mesh, self.placements_of(slot)))
                           for name, slot in self.slots(group).items()}  # fmt: skip
        matrix = [(slot.shape[self._lead(slot) :], cuts[self._lead(slot) :])
                  for slot, cuts in self.state_cuts.values() if slot.axes != "*"]  # fmt: skip
        whole_ones = (math.prod(shape) for shape, cuts in matrix if not any(cut.over for cut in cuts))
        self.undivided = max(whole_ones, default=0)

    @cached_property
    def locations(self) -> list[Location]:
        """Where each block lies. Groups of processes that are missing are made: all ranks must ask together."""
        return [self._location_of_block(i) if self.divided else LOCAL for i in range(len(self.sizes_mn))]

    def _rows(self, i: int, cut: Cut | None = None) -> Cut:
        """The cut of the rows of block i."""
        cut = cut or self.by_role["m"]
        return cut.block(sum(self.splits[:i]), sum(self.splits[: i + 1])) if self.splits else cut

    def _location_of_block(self, i: int) -> ShardedLocation:
        rows, cols = self._rows(i), self.by_role["n"]
        if not self.owned:
            return sharded_location(self.mesh, rows, cols)
        state: list[tuple[str, tuple[Cut, ...]]] = []
        for name, (slot, whole_cuts) in self.state_cuts.items():
            cuts = [rows, cols] if slot.axes == "*" else whole_cuts[self._lead(slot) :]
            if self.splits and slot.axes.startswith("m"):
                cuts[0] = self._rows(i, cuts[0])
            state.append((name, tuple(cuts)))
        return owner_location(self.mesh, rows, cols, tuple(state))

    def location(self, i: int) -> Location:
        """Where block i lies."""
        return self.locations[i % len(self.locations)]

    # -- tensors shaped like the parameter ----------------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is stored here."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gradient(self, grad: Tensor) -> Tensor:
        """A gradient with the placement of its parameter: sequence parallelism leaves some as sums yet to be made."""
        if not isinstance(grad, DTensor):
            raise ValueError(
                f"parameter {self.name!r} is a DTensor with placements {self.placements}, but its gradient is a plain "
                f"tensor of shape {tuple(grad.shape)}: make it one by DTensor.from_local"
            )
        if tuple(grad.placements) == self.placements:
            return grad
        return grad.redistribute(self.mesh, self.placements)

    def zero_gradient(self, p: Tensor) -> Tensor:
        """Zeros in place of a gradient that is None, without asking the other ranks."""
        zeros = torch.zeros_like(self.local(p))
        return DTensor.from_local(zeros, self.mesh, self.placements, run_check=False, shape=p.shape, stride=p.stride())

    def split_rows(self, x: Tensor) -> list[Tensor]:
        """Row blocks of a fused weight, as far as they are stored here."""
        return list(x.split([self._part(self._rows(i))[1] for i in range(len(self.sizes_mn))], dim=0))

    # -- numbers of the blocks ----------------------------------------------------------------------------------------

    def expand_to_all_blocks(self, values: Tensor) -> Tensor:
        """A number for each block here as a number for each block of the parameter, 0 for those of other processes."""
        if not any(cut.over for cut in self.stack):
            return values
        everywhere = values.new_zeros([cut.size for cut in self.stack])
        here = self._here(everywhere)
        here.copy_(values.view(here.shape))
        return everywhere.flatten()

    def select_local_blocks(self, values: Tensor) -> Tensor:
        """Of a number for each block of the parameter those of the blocks here."""
        if not any(cut.over for cut in self.stack):
            return values
        return self._here(values.view([cut.size for cut in self.stack])).flatten()

    def _here(self, everywhere: Tensor) -> Tensor:
        for dim, cut in enumerate(self.stack):
            everywhere = everywhere.narrow(dim, *self._part(cut))
        return everywhere

    # -- state --------------------------------------------------------------------------------------------------------

    def _lead(self, slot: Slot) -> int:
        """Leading dimensions of a state tensor that count matrices: a batch, or the blocks of a fused weight."""
        if self.splits:
            return 0 if slot.axes.startswith("m") else 1
        return len(slot.axes) - len(slot.axes.lstrip("b"))

    def placements_of(self, slot: Slot) -> tuple[Placement, ...]:
        """How a state tensor lies on the parameter's mesh."""
        if slot.axes == "*":
            return self.placements
        found: list[Placement] = []
        for placement in self.placements:
            axis = self._axis_for(placement, slot)
            if axis is None:
                found.append(Replicate())
            elif isinstance(placement, _StridedShard):
                found.append(_StridedShard(axis, split_factor=placement.split_factor))
            else:
                found.append(Shard(axis))
        return tuple(found)

    def _axis_for(self, placement: Placement, slot: Slot) -> int | None:
        """The dimension of a state tensor that a mesh dimension cuts, if any."""
        if not isinstance(placement, (Shard, _StridedShard)):
            return None
        dim = placement.dim % len(self.shape)
        role = self._role(dim)
        if role == "b":
            return dim
        lead = self._lead(slot)
        axis = slot.axes.find(role, lead)
        if axis >= 0 or not self.owned:
            return axis if axis >= 0 else None
        return next((a for a in range(lead, len(slot.axes)) if slot.axes[a] not in "mn"), lead)

    def zeros(self, p: Tensor, slot: Slot, dtype: torch.dtype) -> Tensor:
        """One zero state tensor on the parameter's mesh."""
        if slot.axes == "*":
            return super().zeros(p, slot, dtype)
        local = torch.zeros(self._local_shape(slot), dtype=dtype, device=p.device)
        return self._as_dtensor(local, slot)

    def _local_shape(self, slot: Slot) -> list[int]:
        return [self._part(cut)[1] for cut in cuts_of(slot.shape, self.mesh, self.placements_of(slot))]

    def _as_dtensor(self, local: Tensor, slot: Slot) -> DTensor:
        stride = torch.empty(slot.shape, dtype=torch.float32, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements_of(slot), run_check=False, shape=torch.Size(slot.shape), stride=stride
        )

    def adopt(self, value: Tensor, p: Tensor, slot: Slot | None) -> Tensor:
        """A copy of a loaded state tensor, placed as this layout places it; a whole tensor is cut."""
        if slot is None:
            return super().adopt(self.local(value), p, slot)
        placements = self.placements_of(slot)
        if isinstance(value, DTensor) and value.device_mesh == self.mesh:
            return value.redistribute(self.mesh, placements).to(p.device, copy=True)
        plain = value.full_tensor() if isinstance(value, DTensor) else value
        for dim, cut in enumerate(cuts_of(slot.shape, self.mesh, placements)):
            plain = plain.narrow(dim, *self._part(cut))
        if slot.axes == "*":
            copy = super().zeros(p, slot, value.dtype)
            self.local(copy).copy_(plain)
            return copy
        return self._as_dtensor(plain.to(p.device, copy=True).contiguous(), slot)


def prepare(layouts: Sequence[Layout]) -> None:
    """Make the process groups of these parameters, here where all ranks are and not in the middle of a step.

    All ranks must be able to agree: of the meshes, one must hold the ranks of every other.
    """
    sharded = [x for x in layouts if isinstance(x, ShardedLayout)]
    if not sharded:
        return
    widest = max(sharded, key=lambda x: x.mesh.size())
    ranks = set(widest.mesh.mesh.flatten().tolist())
    for other in sharded:
        if not ranks >= set(other.mesh.mesh.flatten().tolist()):
            raise ValueError(
                f"parameters {widest.name!r} (placements {widest.placements} on {widest.mesh}) and {other.name!r} "
                f"(placements {other.placements} on {other.mesh}) lie on meshes of different ranks, so that the ranks "
                "cannot agree on a step: use one optimizer for each mesh"
            )
    for layout in sharded:
        if not layout.rule.elementwise:
            _ = layout.locations


def widest_groups(layouts: Sequence[object]) -> list[dist.ProcessGroup]:
    """Groups that reach, one after the other, all ranks that share these parameters; none on one process."""
    sharded = [x for x in layouts if isinstance(x, ShardedLayout)]
    return agreeing(max((x.mesh for x in sharded), key=lambda mesh: mesh.size())) if sharded else []
