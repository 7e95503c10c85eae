"""Cut a parameter into matrices (its blocks), and allocate its state.

A `Layout` cuts any tensor shaped like the parameter into 2-D views, and allocates and cuts the state that a rule asks
for. A `Location` says where the matrices of a stack are, and runs a rule there. These classes handle whole tensors;
`sharding` has those for shards. Examples of how a parameter is cut:

    stored shape    group settings                       matrices (out, in)    blocks (m, n), as the rule gets them
    (6, 8)                                               (6, 8)                (6, 8)
    (4, 6, 8)       (a stack, such as experts)           4 of (6, 8)           4 of (6, 8)
    (6, 2, 3, 3)    layout="conv"                        (6, 18)               (6, 18)
    (2, 6, 3, 3)    layout="conv_in_out"                 (2, 54), stored       (54, 2), transposed ("flipped")
    (8, 6)          layout="in_out"                      (6, 8)                (6, 8)
    (6, 8)          split_sizes=(3, 2, 1)                (6, 8)                (3, 8), (2, 8), (1, 8)
    (6, 8)          split_sizes=4, split_side="input"    (6, 8)                2 of (6, 4)
    (6, 8)          side="smaller"                       (6, 8)                (8, 6), transposed ("flipped")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.rule import M_SCALE, Rule, Settings, Slot

TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("matrix", "conv", "in_out", "conv_in_out")
SPLIT_SIDES = ("output", "input")
CORRECTION = "correction"  # the state that `weight_correction` adds

# Devices with memory worth saving: state of their parameters may be in host memory instead (`offload="cpu"`).
OFFLOADED_FROM = ("cuda",)
# A state tensor with smaller blocks stays on the device: a copy of it costs more time than its memory is worth.
OFFLOAD_BYTES = 64 << 10

Tensors = dict[str, Tensor]
# take_step(algebra, G, state, t, slice of the stack's matrices) -> (D, new state)
TakeStep = Callable[[Algebra, Tensor, Tensors, Tensor, slice], tuple[Tensor, Tensors]]
Job = Callable[[], None]


class Location:
    """Where the matrices of a stack are: whole, on one device. Blocks of equal location and shape may share a stack."""

    stack_bytes: int | None = None  # bytes of gradients in a stack; None for the device's default
    team: object = None  # the processes with which a stack exchanges messages

    def after(self, others: int) -> Location:
        """Return the location to use after `others` matrices have been assigned to processes."""
        return self

    def numel(self, p: Tensor) -> int:
        """Return the elements of a block, to bound the size of a stack; equal on every process."""
        return p.numel()

    def algebra(self, m: int, n: int) -> Algebra:
        """Return the algebra for blocks of this global shape."""
        return Algebra(m, n)

    def run(self, take_step: TakeStep, alg: Algebra, G: Tensor, state: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        """Call `take_step` on the matrices in the form that the rule needs: whole or sharded."""
        return take_step(alg, G, state, t, slice(None))

    def run_jobs(self, jobs: Sequence[Job], device: torch.device) -> None:
        """Run the jobs of all stacks of one team."""
        for job in jobs:
            job()


LOCAL = Location()


class Layout:
    """Matrix views of one whole parameter, according to its group's settings.

    Settings:
        layout: "matrix" (out, in), with any batch in the dimensions before these; "conv", which is flattened to
            (out, in * kernel); "in_out", which stores the transpose; or "conv_in_out", a transposed convolution
            (in, out, kernel), which is flattened to (in, out * kernel) and is also the transpose.
        side: the side of the tracked basis: "input" (columns), "smaller" (the shorter side), or "auto" (see `flips`).
        split_sizes: the size of each block of a fused weight, or one number for blocks of equal size (heads).
        split_side: the side that `split_sizes` cuts, in any `layout`: "output" (rows) or "input" (columns).

    Attributes, of which an elementwise rule has only `flipped` and `is_transposed`:
        is_transposed: whether this is a transposed convolution. Where others have (out, in), it has (in, out * kernel).
        batch: the number of (out, in) matrices.
        splits: the size of each block; None if a matrix is one block.
        split_dim: the dimension of the (out, in) matrix that `splits` cuts: 0 or 1.
        flipped: whether the rule gets each block transposed, because of `side` or `is_transposed`, but not of both.
        split_axis: the side that `splits` cuts in the blocks that the rule gets, "m" or "n".
        sizes_mn: (m, n) of each block of one matrix, as the rule gets it.
        blocks_mn: (m, n) of each block of all matrices on this process.
    """

    is_sharded = False
    offloads = False  # whether large state is in host memory if the parameter is on a GPU
    cut_sides: Set[str] = frozenset()  # the sides, "m" or "n", that are cut over processes
    largest_whole_state = 0  # elements of the largest state tensor of a matrix that is replicated
    first_element = (0, 0)  # (row, column) where this process's part begins; a row is along the last dimension

    def __init__(self, name: str, p: Tensor, rule: Rule, group: dict[str, Any]) -> None:
        self.name, self.rule, self.shape, self.dtype = name, rule, tuple(p.shape), p.dtype
        self.kind: str = group.get("layout", "matrix")
        self.is_transposed = self.kind == "conv_in_out"
        if self.is_transposed:
            self.kind = "conv"
        check_trainable(name, p)
        check_correction(name, p, group)
        if rule.elementwise:
            self.flipped = False
            return
        if p.dim() < 2:
            raise ValueError(
                f"parameter {name!r} of shape {self.shape} is not a matrix, so rule {rule.name!r} cannot update it: "
                "give the optimizer the model, or param_groups(model), so that AdamW gets vectors; or put it in a "
                "group with rule='adam'"
            )
        self.batch = 1 if self.kind == "conv" else math.prod(self.shape[:-2])
        self.split_dim = int((group.get("split_side", "output") == "input") != self.is_transposed)
        self.splits = self._check_splits(group.get("split_sizes"), self._matrix_shape()[self.split_dim])
        self.flipped = self.flips(group)
        self.split_axis = self._as_rule_sees("n" if self.split_dim else "m")
        sizes = self._block_sizes()
        self.sizes_mn = [(columns, rows) for rows, columns in sizes] if self.flipped else sizes
        self.blocks_mn = self.sizes_mn * self.batch

    def flips(self, group: Settings) -> bool:
        """Return whether the rule gets the transpose of what is stored, because of a group's `side` or `is_transposed`.

        A `side` other than "input" may put the basis on the side of the rows. "auto" does if there are fewer rows than
        the basis would have columns, and the rule asks for it (`Rule.transposes_few_rows`). `side` has no effect on a
        rule that does not track one side, and none on blocks of different sizes: their bases could differ in width.
        """
        if not self.rule.one_sided or len(set(self._block_sizes())) > 1:
            return self.is_transposed
        rows, columns = self._block_sizes()[0]
        if self.is_transposed:
            rows, columns = columns, rows
        side = group.get("side", "auto")
        if side == "auto":
            side_flips = self.rule.transposes_few_rows and rows < min(group["rank"], columns)
        else:
            side_flips = side == "smaller" and rows < columns
        return side_flips != self.is_transposed

    def _as_rule_sees(self, axes: str) -> str:
        """Return axes of an (out, in) matrix, "m" for rows and "n" for columns, as axes of what the rule gets."""
        return axes.translate(str.maketrans("mn", "nm")) if self.flipped else axes

    def _matrix_shape(self) -> tuple[int, int]:
        """Return (out, in), the shape of each matrix before it is cut into blocks."""
        if self.kind == "conv":
            return self.shape[0], math.prod(self.shape[1:])
        return (self.shape[-1], self.shape[-2]) if self.kind == "in_out" else (self.shape[-2], self.shape[-1])

    def _block_sizes(self) -> list[tuple[int, int]]:
        """Return the rows and columns of each block of an (out, in) matrix."""
        rows, columns = self._matrix_shape()
        if self.splits is None:
            return [(rows, columns)]
        return [(rows, size) if self.split_dim else (size, columns) for size in self.splits]

    def _check_splits(self, sizes: int | Sequence[int] | None, length: int) -> tuple[int, ...] | None:
        side = "input columns" if self.split_dim != self.is_transposed else "output rows"
        if isinstance(sizes, (int, Integral)):  # Integral: also numpy's
            if sizes < 1 or length % sizes:
                raise ValueError(
                    f"split_sizes={sizes} does not divide the {length} {side} of parameter {self.name!r} of shape "
                    f"{self.shape}: give the size of one block, or a list of the size of each"
                )
            sizes = [sizes] * (length // sizes)
        if not sizes:
            return None
        if self.batch != 1:
            raise ValueError(
                f"split_sizes={list(sizes)} cannot cut parameter {self.name!r} of shape {self.shape}, a stack of "
                "matrices: leave split_sizes out, or make its blocks separate parameters"
            )
        if sum(sizes) != length or min(sizes) < 1:
            raise ValueError(
                f"split_sizes={list(sizes)} do not cut parameter {self.name!r} of shape {self.shape}: "
                f"they must be positive and add up to its {length} {side}"
            )
        return tuple(map(int, sizes))

    def check_dtypes(self, settings: Settings) -> None:
        """Raise ValueError if the parameter cannot have state of these dtypes; one that is whole can have any."""

    # -- tensors shaped like the parameter ----------------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor on this process."""
        return tensor

    def gradient(self, grad: Tensor) -> Tensor:
        """Return a gradient with the placement of its parameter."""
        return grad

    @property
    def flattens(self) -> bool:
        """Whether several dimensions are merged, which requires contiguous memory."""
        return not self.rule.elementwise and (self.kind == "conv" or len(self.shape) > 3)

    def blocks(self, tensor: Tensor) -> list[Tensor]:
        """Return the (m, n) matrices of a local tensor shaped like the parameter, as views if it is contiguous."""
        cut = self._matrices(tensor)
        if self.splits:
            cut = self.split(cut[0], self.split_dim)
        return [x.mT for x in cut] if self.flipped else cut

    def _matrices(self, tensor: Tensor) -> list[Tensor]:
        """Return the (out, in) matrices of a local tensor, before they are cut into blocks."""
        if self.kind == "conv":
            return [tensor.flatten(1)]
        x = tensor.mT if self.kind == "in_out" else tensor
        return list(x.flatten(0, -3).unbind(0)) if x.dim() > 2 else [x]

    def stacked_blocks(self, tensor: Tensor) -> Tensor | None:
        """Return the blocks of a fused weight as one view (blocks, rows, columns); None if they differ or are empty."""
        (x,), dim = self._matrices(tensor), self.split_dim
        shapes = {block.shape for block in self.split(x, dim)}
        if len(shapes) > 1 or not x.numel():
            return None
        return x.unflatten(dim, (len(self.sizes_mn), -1)).movedim(dim, 0)

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the blocks of a fused weight, or of its state, that this process stores, whole or in part."""
        assert self.splits is not None
        return list(x.split(self.splits, dim))

    # -- one number for each block ------------------------------------------------------------------------------------

    @cached_property
    def count(self) -> int:
        """Number of blocks that this process stores, whole or in part; 1 for an elementwise rule."""
        return 1 if self.rule.elementwise else len(self.blocks_mn)

    @cached_property
    def block_names(self) -> list[str]:
        """The name of each local block: the parameter's, with the number among all blocks if there are several."""
        total = len(self.sizes_mn) * self.batch
        numbers = self.select_local_blocks(torch.arange(total, dtype=torch.int64, device="cpu")).tolist()
        return [f"{self.name}[{number}]" for number in numbers] if total > 1 else [self.name]

    def expand_to_all_blocks(self, values: Tensor) -> Tensor:
        """Expand one number per local block to one per block of the parameter, with 0 for the others."""
        return values

    def select_local_blocks(self, values: Tensor) -> Tensor:
        """Select the numbers of the local blocks from one number per block of the parameter."""
        return values

    # -- state --------------------------------------------------------------------------------------------------------

    def slots(self, settings: Settings) -> dict[str, Slot]:
        """Return the slots of the parameter's state: the rule's slots for one block, extended to all blocks.

        After them comes the correction of weights of 24 bits (`linalg.weight24`), which no rule sees.
        """
        correction = {CORRECTION: Slot("*", self.shape, torch.int8)} if settings.get("weight_correction") else {}
        return self.rule_slots(settings) | correction

    def rule_slots(self, settings: Settings) -> dict[str, Slot]:
        """Return the slots of the rule's state."""
        if self.rule.elementwise:
            slots = self.rule.slots(math.prod(self.shape[:-1]), self.width, settings)
            return {name: self._elementwise_slot(slot) for name, slot in slots.items()}
        each = [self.rule.slots(m, n, settings) for m, n in self.sizes_mn]
        return {name: self._slot_of_all(name, [slots[name] for slots in each], settings) for name in each[0]}

    @property
    def width(self) -> int:
        """The elements of a row; a row is along the last dimension."""
        return self.shape[-1] if self.shape else 1

    def _elementwise_slot(self, slot: Slot) -> Slot:
        """Return a slot of the parameter's shape, or one with the slot's columns instead of the parameter's."""
        if slot.axes == "*":
            return self._slot("*", self.shape, slot.dtype)
        lead = self.shape[:-1]
        return self._slot("b" * len(lead) + slot.axes[-1], (*lead, slot.shape[-1]), slot.dtype)

    def _slot(self, axes: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Slot:
        return Slot(axes, shape, dtype or torch.promote_types(self.dtype, torch.float32))

    def _slot_of_all(self, name: str, slots: list[Slot], settings: Settings) -> Slot:
        """Return the slot of the state `name` of all blocks, given the slot of each block of a matrix.

        M (m, n) of COSMOS has the parameter's shape, "*". Its basis U (n, r), axes "nr", becomes

            4 experts               "bnr"    (4, n, r)
            3 blocks of rows        "knr"    (3, n, r)               each has its own basis
            3 blocks of columns     "nr"     (n1 + n2 + n3, r)       concatenated
        """
        first = slots[0]
        if first.axes == "mn":
            return self._slot("*", self.shape, first.dtype)
        if self.splits is None:
            lead = () if self.kind == "conv" else self.shape[:-2]
            return self._slot("b" * len(lead) + first.axes, (*lead, *first.shape), first.dtype)
        concatenated = self._is_concatenated(first)
        if len({s.shape[1:] if concatenated else s.shape for s in slots}) > 1:
            raise ValueError(
                f"parameter {self.name!r} of shape {self.shape}: split_sizes={list(self.splits)} give its blocks state "
                f"{name!r} of different widths; {self._advice(name, settings)}"
            )
        if concatenated:
            return self._slot(first.axes, (sum(s.shape[0] for s in slots), *first.shape[1:]), first.dtype)
        return self._slot("k" + first.axes, (len(slots), *first.shape), first.dtype)

    def _is_concatenated(self, slot: Slot) -> bool:
        """Return whether blocks of a fused weight have concatenated state: its first axis is what `splits` cuts."""
        return slot.axes.startswith(self.split_axis)

    def _advice(self, name: str, settings: Settings) -> str:
        """Return how to keep a weight with blocks of different sizes, if their state does not fit together."""
        if name == M_SCALE:
            return "give its group momentum_dtype=torch.bfloat16, or blocks of equal size"
        smallest = min(min(size) for size in self.sizes_mn)
        if settings.get("rank", 0) > smallest:
            try:
                self.rule_slots({**settings, "rank": smallest})
                return f"lower rank to at most {smallest}, the smallest block"
            except ValueError:  # the width does not depend on the rank alone
                pass
        one_sided = ", give its group two_sided=False" if name in ("K", "O") else ""
        needs = f"rule {self.rule.name!r} needs blocks of equal size here"
        return f"{needs}: give equal sizes{one_sided}, or leave split_sizes out"

    def allocate(self, p: Tensor, settings: Settings) -> Tensors:
        """Allocate zero state for the parameter."""
        return {name: self.zeros(p, slot) for name, slot in self.slots(settings).items()}

    def zeros(self, p: Tensor, slot: Slot) -> Tensor:
        """Allocate one state tensor, in the parameter's memory order if shapes match and views remain possible.

        It is on the parameter's device, or in pinned host memory if it is offloaded.
        """
        device, pinned = ("cpu", p.is_cuda) if self._is_offloaded(p, slot) else (p.device, False)
        if slot.axes == "*":
            order = self._memory_order
            return torch.zeros_like(p, dtype=slot.dtype, memory_format=order, device=device, pin_memory=pinned)
        return torch.zeros(slot.shape, dtype=slot.dtype, device=device, pin_memory=pinned)

    @property
    def _memory_order(self) -> torch.memory_format:
        return torch.contiguous_format if self.flattens else torch.preserve_format

    def _is_offloaded(self, p: Tensor, slot: Slot) -> bool:
        """Return whether a state tensor is in host memory: a large one, with blocks (not of columns) without gaps."""
        if not self.offloads or p.device.type not in OFFLOADED_FROM:
            return False
        like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        if like.numel() * like.element_size() < OFFLOAD_BYTES * self.count:
            return False
        if self.rule.elementwise or slot.axes != "*":
            return True
        like = torch.zeros_like(p, dtype=slot.dtype, memory_format=self._memory_order, device="meta")
        return all(x.is_contiguous() or x.mT.is_contiguous() for x in self.blocks(like))

    def check_loaded(self, value: Any) -> None:
        """Raise ValueError if a loaded state tensor cannot be adopted."""

    def adopt(self, value: Tensor, p: Tensor, slot: Slot | None) -> Tensor:
        """Copy a state tensor to where this layout keeps it; `slot` is None for a replicated number."""
        if slot is None:
            return value.to(p.device, copy=True)
        return self.zeros(p, slot).copy_(value)

    def state_blocks(self, state: Tensors, settings: Settings) -> list[Tensors]:
        """Return the state of each block as views, in the order of `blocks`."""
        cut: dict[str, list[Tensor]] = {}
        for name, slot in self.slots(settings).items():
            tensor = self.local(state[name])
            if slot.axes == "*":
                cut[name] = self.blocks(tensor)
            elif self.splits is None:
                lead = slot.axes.count("b")
                cut[name] = list(tensor.flatten(0, lead - 1).unbind(0)) if lead else [tensor]
            else:
                cut[name] = self.split(tensor, 0) if self._is_concatenated(slot) else list(tensor.unbind(0))
        return [{name: views[i] for name, views in cut.items()} for i in range(len(self.blocks_mn))]

    def location(self, i: int) -> Location:
        """Return where block i is."""
        return LOCAL


def check_trainable(name: str, p: Tensor) -> None:
    """Raise ValueError for a parameter that no rule can train: complex, of few bits, or sparse."""
    if p.dtype not in TRAINED:
        narrow = f"has dtype {p.dtype}, which cannot be trained: freeze it and leave it out, or optimize a wider copy"
        hint = "is complex: split it into two real parameters" if p.is_complex() else narrow
        raise ValueError(f"parameter {name!r} of shape {tuple(p.shape)} {hint}")
    if p.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} of shape {tuple(p.shape)} is sparse: call to_dense() first")


def check_correction(name: str, p: Tensor, group: Settings) -> None:
    """Raise ValueError if a group has `weight_correction` and this parameter is not bfloat16."""
    if group.get("weight_correction") and p.dtype is not torch.bfloat16:
        raise ValueError(
            f"weight_correction=True adds 8 bits to a bfloat16 weight, but parameter {name!r} of shape "
            f"{tuple(p.shape)} has dtype {p.dtype}: convert it with .bfloat16(), or give its group "
            "weight_correction=False"
        )


def refuse_four_dimensions(name: str, p: Tensor, rule: Rule) -> None:
    """Raise ValueError for four dimensions: usually a convolution's kernel, not a stack of stacks."""
    if p.dim() > 3:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(p.shape)} may be a convolution's kernel or a stack of matrices, so "
            f"rule {rule.name!r} cannot tell how to cut it: use param_groups(model), or give its group layout='conv' "
            "(transposed: 'conv_in_out'), or layout='matrix' for matrices in its last two dimensions"
        )
