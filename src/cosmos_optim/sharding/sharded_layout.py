"""The layout of a DTensor parameter, as FSDP2, HSDP and tensor parallelism make it.

It returns views of this rank's part, and allocates state that is sharded like the parameter. Example: FSDP2 has cut the
rows of an (8, 6) weight over two ranks. The basis of COSMOS has two columns; two-sided SOAP needs whole matrices.

    tensor              letters    placement      part of a rank
    weight (8, 6)       "mn"       Shard(0)       (4, 6)
    COSMOS, M (8, 6)    "*"        Shard(0)       (4, 6)            like the weight
    COSMOS, V (8, 2)    "mr"       Shard(0)       (4, 2)            has the rows m, which are cut
    COSMOS, U (6, 2)    "nr"       Replicate()    (6, 2)            has no rows m
    SOAP, L (6, 6)      "nk"       Shard(1)       (6, 3)            has no rows m; cut only to save memory
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cosmos_optim.engine.layout import LOCAL, Layout, Location
from cosmos_optim.linalg.int8_momentum import BLOCK, scale_columns
from cosmos_optim.rules.rule import M_SCALE, Rule, Settings, Slot
from cosmos_optim.sharding import collectives
from cosmos_optim.sharding.location import ShardedLocation, sharded_location
from cosmos_optim.sharding.mesh import SUPPORTED, Cut, Interval, cuts_of, groups_covering, ranks_in


class ShardedLayout(Layout):
    """Views of the local part of a parameter that is divided over a mesh.

    Every state tensor is a DTensor on the parameter's mesh. Dimensions that are rows or columns of the parameter are
    cut like them; the others are replicated. If the rule needs whole matrices, all state is cut over all ranks.

    A `Cut` divides a dimension over ranks; `splits` divide a fused weight into blocks, which a cut may divide further.

    cuts: the cut of each dimension of the parameter.
    roles: the role of each dimension: "m" rows, "n" columns, "b" a batch.
    batch_cuts, matrix_cuts: the cuts of the dimensions "b", and the cut of the side "m" and of the side "n".
    state_cuts: the slot and the cuts of each state tensor.
    needs_owners: whether a side is cut that the rule needs whole, so that one rank must get the matrix.
    """

    is_sharded = True
    _locations: list[Location] | None = None

    def __init__(self, name: str, p: DTensor, rule: Rule, group: dict[str, Any]) -> None:
        self.mesh, self.placements = p.device_mesh, tuple(p.placements)
        if self.mesh.get_coordinate() is None:
            raise ValueError(
                f"parameter {name!r} of shape {tuple(p.shape)} with placements {self.placements} is on {self.mesh}, "
                "which does not contain this rank: build its optimizer only on the ranks of that mesh"
            )
        super().__init__(name, p, rule, group)
        try:
            self.cuts = cuts_of(self.shape, self.mesh, self.placements)
            self._check_local_part(p)
            if not rule.elementwise:
                self._assign_roles()
                self._cut_state(group)
        except ValueError as error:
            raise self._with_placements(error) from None
        self.check_dtypes(group)

    def _with_placements(self, error: ValueError) -> ValueError:
        """Return the error with the parameter, its placements and its mesh."""
        return ValueError(
            f"parameter {self.name!r} of shape {self.shape} with placements {self.placements} on {self.mesh}: {error}"
        )

    def check_dtypes(self, settings: Settings) -> None:
        """Raise ValueError if state of these settings has 8-bit blocks that two ranks would share."""
        try:
            if self.rule.elementwise:
                self._check_moments(settings)
            else:
                self._check_momentum(settings)
        except ValueError as error:
            raise self._with_placements(error) from None

    def _check_local_part(self, p: DTensor) -> None:
        """Raise ValueError if this rank's part is not where its cuts say, or is where the mesh sends nothing."""
        coordinate = self.mesh.get_coordinate() or ()
        for dim in sorted({dim for cut in self.cuts for dim in cut.mesh_dims}):
            # FSDP2 numbers the parts by the ranks of a process group, which torch sorts; DTensor by the mesh.
            if self.mesh.get_local_rank(dim) != coordinate[dim]:
                raise ValueError(
                    "the ranks of its mesh do not ascend along a dimension that cuts it, and FSDP2 and DTensor then "
                    "disagree about which rank has which part: build the mesh as init_device_mesh does"
                )
        held, expected = tuple(p.to_local().shape), self._part_shape(self.cuts)
        if held != expected:
            raise ValueError(
                f"its part on this rank has shape {held}, but torch.chunk would give {expected}. {SUPPORTED}"
            )
        for dim in range(self.mesh.ndim):
            group = self.mesh.get_group(dim)
            if self.mesh.size(dim) > 1 and not p.is_meta and not collectives.supports(p.device, group):
                raise ValueError(
                    f"it is on {p.device}, but its mesh communicates on {self.mesh.device_type}: CPU offload needs "
                    "process groups for both, init_process_group('cpu:gloo,cuda:nccl')"
                )

    def _check_moments(self, settings: Settings) -> None:
        """Raise ValueError if two ranks would share a block of 8-bit moments: their scales could not be placed."""
        scale_slot = self.slots(settings).get("exp_avg_scale")
        last_is_cut = self.shape and self.cuts[-1].mesh_dims
        if scale_slot is None or not last_is_cut:
            return
        scale_cut = cuts_of(scale_slot.shape, self.mesh, self.placements)[-1]
        for coordinate in product(*(range(size) for size in self.mesh.shape)):
            elements = self.cuts[-1].part(self.mesh.shape, coordinate)
            scales = scale_cut.part(self.mesh.shape, coordinate)
            has_own_scales = (scales.start * BLOCK, scales.length) == (elements.start, scale_columns(elements.length))
            if elements.length and not has_own_scales:
                raise ValueError(
                    f"adam_dtype=torch.int8 has a scale for each {BLOCK} elements of the last dimension, but the ranks "
                    f"cut it elsewhere: shard another dimension, Shard(0) of a matrix, or cut at multiples of {BLOCK}, "
                    "or give its group adam_dtype=torch.float32"
                )

    def _check_momentum(self, settings: Settings) -> None:
        """Raise ValueError if an 8-bit momentum has rows that are cut."""
        if "n" in self.cut_sides and M_SCALE in self.rule_slots(settings):
            raise ValueError(
                "momentum_dtype=torch.int8 has a scale for each block of a row, but the rows are cut, in the matrix as "
                "the rule sees it (layout and side may transpose it): give its group momentum_dtype=torch.bfloat16, or "
                "shard its outputs, Shard(0) of an (out, in) weight, which a transposed convolution does not have"
            )

    @cached_property
    def first_element(self) -> tuple[int, int]:  # type: ignore[override]
        """Row and column of this rank's first element. All dimensions but the last count rows.

        The rounding of 8-bit moments numbers a rank's rows from here. If a dimension in the middle is cut and the rank
        has several parts of rows, such as a half of each expert, rows after the first part are rounded differently
        than on one process. The mean of the rounding stays right.
        """
        *lead, column = [self._part(cut).start for cut in self.cuts] or [0]
        row = 0
        for start, size in zip(lead, self.shape[:-1], strict=True):
            row = row * size + start
        return row, column

    def _part(self, cut: Cut) -> Interval:
        return cut.part(self.mesh.shape, self.mesh.get_coordinate() or ())

    def _part_shape(self, cuts: Sequence[Cut]) -> tuple[int, ...]:
        return tuple(self._part(cut).length for cut in cuts)

    # -- roles of the parameter's dimensions --------------------------------------------------------------------------

    def _assign_roles(self) -> None:
        """Assign a role to each dimension: "bmn" to experts, "mnnn" to a 2-D convolution. Cut batch and matrices."""
        if self.kind == "conv":
            roles = "m" + "n" * (len(self.shape) - 1)
        else:
            roles = "b" * (len(self.shape) - 2) + ("nm" if self.kind == "in_out" else "mn")
        self.roles = self._as_rule_sees(roles)
        self.batch_cuts = [cut for cut, role in zip(self.cuts, self.roles, strict=True) if role == "b"]
        self.batch_is_cut = any(cut.mesh_dims for cut in self.batch_cuts)
        self.blocks_mn = self.sizes_mn * math.prod(self._part_shape(self.batch_cuts))
        self.matrix_cuts = self._cut_matrices()
        self.cut_sides = {side for side, cut in self.matrix_cuts.items() if cut.mesh_dims}
        self.needs_owners = not self.cut_sides <= set(self.rule.shardable_sides)

    def _cut_matrices(self) -> dict[str, Cut]:
        """Return the cut of the rows "m" and of the columns "n" of a matrix."""
        cuts = {role: cut for role, cut in zip(self.roles, self.cuts, strict=True) if role != "b"}
        if self.kind == "conv":  # its columns are several dimensions
            if any(cut.mesh_dims for cut in self.cuts[1:]):
                channels = "input" if self.is_transposed else "output"  # the first dimension of the kernel
                raise ValueError(f"such a convolution can only be cut along its {channels} channels, Shard(0)")
            columns = self._matrix_shape()[1]
            cuts[self._as_rule_sees("n")] = Cut(columns, (), 0, columns)
        return cuts

    def _cut_state(self, group: dict[str, Any]) -> None:
        """Cut the dimensions of each state tensor over the mesh."""
        self.state_cuts = {name: (slot, cuts_of(slot.shape, self.mesh, self.placements_of(slot)))
                           for name, slot in self.rule_slots(group).items()}  # fmt: skip
        whole = [0]
        for slot, cuts in self.state_cuts.values():
            lead = self._lead(slot)
            if slot.axes != "*" and not any(cut.mesh_dims for cut in cuts[lead:]):
                whole.append(math.prod(slot.shape[lead:]))
        self.largest_whole_state = max(whole)

    def locate_blocks(self) -> list[Location]:
        """Return where each block is. The first call creates process groups, so all ranks must make it together."""
        if self._locations is None:
            numbers = range(len(self.sizes_mn))
            self._locations = [self._location_of_block(i) if self.cut_sides else LOCAL for i in numbers]
        return self._locations

    def _block_of(self, whole: Cut, i: int) -> Cut:
        """Return the cut of the rows (or columns) of block i, given that of all rows (or columns)."""
        if not self.splits:
            return whole
        low = sum(self.splits[:i])
        return replace(whole, low=low, high=low + self.splits[i])

    def _location_of_block(self, i: int) -> ShardedLocation:
        """Return where block i of a matrix is, with the cuts of its state if an owner needs it."""
        sides = self.matrix_cuts | {self.split_axis: self._block_of(self.matrix_cuts[self.split_axis], i)}
        rows, cols = sides["m"], sides["n"]
        if not self.needs_owners:
            return sharded_location(self.mesh, rows, cols)
        state: list[tuple[str, tuple[Cut, ...]]] = []
        for name, (slot, all_cuts) in self.state_cuts.items():
            cuts = [rows, cols] if slot.axes == "*" else all_cuts[self._lead(slot) :]
            if self._is_concatenated(slot):
                cuts[0] = self._block_of(cuts[0], i)
            state.append((name, tuple(cuts)))
        return sharded_location(self.mesh, rows, cols, tuple(state))

    def location(self, i: int) -> Location:
        locations = self.locate_blocks()
        return locations[i % len(locations)]  # each matrix of a batch has the same

    # -- tensors shaped like the parameter ----------------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gradient(self, grad: Tensor) -> Tensor:
        """Return a gradient with the placement of its parameter; sequence parallelism leaves some as partial sums."""
        if not isinstance(grad, DTensor):
            raise ValueError(
                f"parameter {self.name!r} is a DTensor with placements {self.placements}, but its gradient is a plain "
                f"tensor of shape {tuple(grad.shape)}: convert it by DTensor.from_local"
            )
        if tuple(grad.placements) == self.placements:
            return grad
        return grad.redistribute(self.mesh, self.placements)

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        cuts = [self._block_of(self.matrix_cuts[self.split_axis], i) for i in range(len(self.sizes_mn))]
        return list(x.split(self._part_shape(cuts), dim))

    # -- one number for each block ------------------------------------------------------------------------------------

    def expand_to_all_blocks(self, values: Tensor) -> Tensor:
        if not self.batch_is_cut:
            return values
        expanded = values.new_zeros([cut.size for cut in self.batch_cuts])
        local = self._narrow(expanded, self.batch_cuts)
        local.copy_(values.view(local.shape))
        return expanded.flatten()

    def select_local_blocks(self, values: Tensor) -> Tensor:
        if not self.batch_is_cut:
            return values
        return self._narrow(values.view([cut.size for cut in self.batch_cuts]), self.batch_cuts).flatten()

    def _narrow(self, whole: Tensor, cuts: Sequence[Cut]) -> Tensor:
        """Return this rank's part of a whole tensor, as a view."""
        for dim, cut in enumerate(cuts):
            whole = whole.narrow(dim, *self._part(cut))
        return whole

    # -- state --------------------------------------------------------------------------------------------------------

    def _lead(self, slot: Slot) -> int:
        """Return how many leading dimensions of a state tensor count matrices: a batch, or blocks of a fused weight."""
        if self.splits:
            return 0 if self._is_concatenated(slot) else 1
        return slot.axes.count("b")

    def placements_of(self, slot: Slot) -> tuple[Placement, ...]:
        """Return the placements of a state tensor on the parameter's mesh."""
        if slot.axes == "*" or self.rule.elementwise:  # each dimension of the state is one of the parameter
            return self.placements
        return tuple(self._placement_of(slot, placement) for placement in self.placements)

    def _placement_of(self, slot: Slot, placement: Placement) -> Placement:
        """Return the placement of a state tensor on the mesh dimension where the parameter has this placement."""
        if not isinstance(placement, (Shard, _StridedShard)):
            return Replicate()
        state_dim = self._state_dim(slot, placement.dim % len(self.shape))
        if state_dim is None:
            return Replicate()
        if isinstance(placement, _StridedShard):
            return _StridedShard(state_dim, split_factor=placement.split_factor)
        return Shard(state_dim)

    def _state_dim(self, slot: Slot, dim: int) -> int | None:
        """Return the dimension of a state tensor to cut over the ranks that cut dimension `dim` of the parameter.

        It is the dimension with the same role. If there is none, the state is replicated (None), because every rank
        computes with all of it. Only owners compute if the rule needs whole matrices. All state is then cut, to save
        memory: if possible in a dimension that is neither "m" nor "n", because another mesh dimension may cut those.
        """
        role, lead = self.roles[dim], self._lead(slot)
        if role == "b":
            return dim
        if role in slot.axes[lead:]:
            return slot.axes.index(role, lead)
        if not self.needs_owners:
            return None
        free = [i for i in range(lead, len(slot.axes)) if slot.axes[i] not in "mn"]
        return free[0] if free else lead

    def zeros(self, p: Tensor, slot: Slot) -> Tensor:
        """Allocate one state tensor on the parameter's mesh."""
        if slot.axes == "*":
            return super().zeros(p, slot)
        placements = self.placements_of(slot)
        shape = self._part_shape(cuts_of(slot.shape, self.mesh, placements))
        return self._as_dtensor(torch.zeros(shape, dtype=slot.dtype, device=p.device), slot, placements)

    def _as_dtensor(self, local: Tensor, slot: Slot, placements: Sequence[Placement]) -> DTensor:
        shape = torch.Size(slot.shape)
        stride = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)

    def check_loaded(self, value: Any) -> None:
        """Raise ValueError for a shard that another rank has saved. Only its mesh, before any operation, tells it."""
        mesh = value.device_mesh if isinstance(value, DTensor) else self.mesh
        if mesh == self.mesh and mesh.get_coordinate() != self.mesh.get_coordinate():
            raise ValueError(
                f"parameter {self.name!r}: the checkpoint has the shards of another rank: load on each rank the file "
                "that it wrote, or use torch.distributed.checkpoint, which needs no file for each rank"
            )

    def adopt(self, value: Tensor, p: Tensor, slot: Slot | None) -> Tensor:
        """Copy a loaded state tensor to the placements of this layout; a whole tensor is cut."""
        if slot is None:
            return super().adopt(self.local(value), p, slot)
        placements = self.placements_of(slot)
        if isinstance(value, DTensor) and value.device_mesh == self.mesh:
            return value.redistribute(self.mesh, placements).to(p.device, copy=True)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        local = self._narrow(whole, cuts_of(slot.shape, self.mesh, placements))
        if slot.axes == "*":
            copy = super().zeros(p, slot)
            self.local(copy).copy_(local)
            return copy
        return self._as_dtensor(local.to(p.device, copy=True).contiguous(), slot, placements)


def prepare(layouts: Sequence[Layout]) -> None:
    """Create the process groups of these parameters while all ranks are together, not during a step.

    Raise ValueError if no mesh contains the ranks of all others: the ranks could not agree on a step.
    """
    sharded = _sharded(layouts)
    largest = _on_largest_mesh(sharded)
    ranks = ranks_in(largest.mesh)
    for other in sharded:
        if not ranks >= ranks_in(other.mesh):
            raise ValueError(
                f"parameters {largest.name!r} (placements {largest.placements} on {largest.mesh}) and {other.name!r} "
                f"(placements {other.placements} on {other.mesh}) are on meshes of different ranks, so the ranks "
                "cannot agree on a step: use one optimizer for each mesh"
            )
    for layout in sharded:
        if not layout.rule.elementwise:
            layout.locate_blocks()


def by_ranks(layouts: Sequence[Layout]) -> list[tuple[list[int], list[dist.ProcessGroup]]]:
    """Return the positions of sharded layouts on the same ranks, and groups that together connect these ranks.

    The ranks of the first are those of all others too (`prepare`).
    """
    largest = _on_largest_mesh(_sharded(layouts)).mesh
    found: dict[DeviceMesh, list[int]] = {largest: []}
    for i, layout in enumerate(layouts):
        if isinstance(layout, ShardedLayout):
            on_all = layout.mesh is largest or layout.mesh.size() == largest.size()
            found.setdefault(largest if on_all else layout.mesh, []).append(i)
    return [(members, groups_covering(mesh)) for mesh, members in found.items()]


def _sharded(layouts: Sequence[Layout]) -> list[ShardedLayout]:
    return [x for x in layouts if isinstance(x, ShardedLayout)]


def _on_largest_mesh(layouts: Sequence[ShardedLayout]) -> ShardedLayout:
    return max(layouts, key=lambda x: x.mesh.size())
