"""How a parameter is seen as matrices, and where its state lies.

A parameter is one matrix, a stack of them (3-D experts), a flattened convolution, a transposed weight ((in, out)
storage), or row blocks of a fused weight. A `Layout` cuts any tensor shaped like the parameter into 2-D views, and
allocates and cuts the state that a rule's slots ask for. This class is the whole-tensor form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.rule import Hyper, Rule, Slot, State

LAYOUTS = ("matrix", "conv", "in_out")

# step(algebra, G, state, t, which of the matrices these are) -> (D, new state)
Step = Callable[[Algebra, Any, State, Tensor, slice], tuple[Any, State]]


class Place:
    """Where the matrices of a stack lie: whole, on one device. Blocks of equal place and shape may share a stack."""

    # Bytes of gradients in a stack; None leaves it to the device.
    stack_bytes: int | None = None

    @property
    def team(self) -> object:
        """The processes whose messages a stack needs, if any."""
        return None

    def after(self, others: int) -> Place:
        """The same place where `others` matrices have been given to processes before these."""
        return self

    def numel(self, p: Tensor) -> int:
        """Elements of a block that count for the size of a stack, the same on every process."""
        return p.numel()

    def algebra(self, m: int, n: int, *, skip: Tensor | None, local: type[Algebra]) -> Algebra:
        """The algebra for blocks of this global shape; `local` is what to use on one device."""
        return local(m, n, skip=skip)

    def run(self, step: Step, alg: Algebra, G: Any, state: State, t: Tensor) -> tuple[Any, State]:
        """Take the rule's step wherever the matrices must be for it."""
        return step(alg, G, state, t, slice(None))


HERE = Place()


class Layout:
    """Views of one whole parameter.

    layout: "matrix" (rows are outputs; leading dimensions of a 3-D or larger tensor are a batch), "conv" (flattened to
    (out, in * kernel)), "in_out" (the stored matrix is the transpose). side: "input", or "smaller" to put the basis on
    the shorter side. split_sizes: rows of each block of a fused weight.
    """

    divided: Set[str] = frozenset()  # of "m" and "n", what is cut over processes
    undivided = 0  # elements of the largest state tensor of one matrix that every process has whole

    def __init__(self, name: str, p: Tensor, rule: Rule, group: dict[str, Any]) -> None:
        self.name, self.rule, self.shape = name, rule, tuple(p.shape)
        self.kind: str = group.get("layout", "matrix")
        self.dtype = p.dtype
        if rule.elementwise:
            return
        if p.dim() < 2:
            raise ValueError(
                f"parameter {name!r} of shape {self.shape} is not a matrix, so rule {rule.name!r} cannot update it: "
                "use param_groups(model), which gives vectors to Adam, or put it in a group with rule='adam'"
            )
        rows, n = self._matrix_shape()
        self.batch = 1 if self.kind == "conv" else math.prod(self.shape[:-2])
        self.splits = self._check_splits(group.get("split_sizes"), rows)
        sizes = self.splits or (rows,)
        self.flipped = group.get("side", "input") == "smaller" and self.splits is None and rows < n
        self.sizes_mn = [((n, m) if self.flipped else (m, n)) for m in sizes]
        self.blocks_mn = self.sizes_mn * self.batch

    def _matrix_shape(self) -> tuple[int, int]:
        if self.kind == "conv":
            return self.shape[0], math.prod(self.shape[1:])
        return (self.shape[-1], self.shape[-2]) if self.kind == "in_out" else (self.shape[-2], self.shape[-1])

    def _check_splits(self, sizes: Sequence[int] | None, rows: int) -> tuple[int, ...] | None:
        if not sizes:
            return None
        if self.batch != 1:
            raise ValueError(
                f"split_sizes={list(sizes)} cannot cut parameter {self.name!r} of shape {self.shape}, a stack of "
                "matrices: leave split_sizes out, or keep its blocks as parameters of their own"
            )
        if sum(sizes) != rows or min(sizes) < 1:
            raise ValueError(
                f"split_sizes={list(sizes)} do not cut parameter {self.name!r} of shape {self.shape}: "
                f"they must be positive and add up to its {rows} output rows"
            )
        return tuple(sizes)

    # -- tensors shaped like the parameter ----------------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is stored here."""
        return tensor

    def gradient(self, grad: Tensor) -> Tensor:
        """A gradient with the placement of its parameter."""
        return grad

    def no_gradient(self, p: Tensor) -> Tensor:
        """Zeros in place of a gradient that is None."""
        return torch.zeros_like(p)

    def flat(self, tensor: Tensor) -> Tensor:
        """A local tensor whose blocks are views of it: itself, or a copy where its strides forbid (channels-last)."""
        return tensor.contiguous() if self.flattens else tensor

    @property
    def flattens(self) -> bool:
        """Whether several dimensions become one, which only contiguous memory allows."""
        return not self.rule.elementwise and (self.kind == "conv" or len(self.shape) > 3)

    def blocks(self, tensor: Tensor) -> list[Tensor]:
        """(m, n) matrices of a local tensor shaped like the parameter; views of it where it is `flat`."""
        if self.kind == "conv":
            cut = [tensor.flatten(1)]
        else:
            x = tensor.mT if self.kind == "in_out" else tensor
            cut = list(x.flatten(0, -3).unbind(0)) if x.dim() > 2 else [x]
        if self.splits:
            return self.split_rows(cut[0])
        return [x.mT for x in cut] if self.flipped else cut

    def split_rows(self, x: Tensor) -> list[Tensor]:
        """Row blocks of a fused weight, as far as they are stored here."""
        assert self.splits is not None
        return list(x.split(self.splits, dim=0))

    # -- numbers of the blocks ----------------------------------------------------------------------------------------

    @cached_property
    def count(self) -> int:
        """Blocks that are stored here, in whole or in part; 1 for a rule that knows none."""
        return 1 if self.rule.elementwise else len(self.blocks_mn)

    def to_all(self, values: Tensor) -> Tensor:
        """A number for each block here as a number for each block of the parameter, 0 for those of other processes."""
        return values

    def from_all(self, values: Tensor) -> Tensor:
        """Of a number for each block of the parameter those of the blocks here."""
        return values

    # -- state --------------------------------------------------------------------------------------------------------

    def slots(self, h: Hyper) -> dict[str, Slot]:
        """The parameter's state, a slot a tensor: the rule's slots of one block, widened to all blocks."""
        if self.rule.elementwise:
            return {k: Slot("*", self.shape, s.dtype) for k, s in self.rule.slots(math.prod(self.shape), 1, h).items()}
        each = [self.rule.slots(m, n, h) for m, n in self.sizes_mn]
        return {name: self._widen(name, [slots[name] for slots in each]) for name in each[0]}

    def _widen(self, name: str, slots: list[Slot]) -> Slot:
        first = slots[0]
        if first.axes == "mn":
            return Slot("*", self.shape, first.dtype)
        if self.splits is None:
            lead = () if self.kind == "conv" else self.shape[:-2]
            return Slot("b" * len(lead) + first.axes, (*lead, *first.shape), first.dtype)
        rows = first.axes.startswith("m")
        if any(s.shape[1:] != first.shape[1:] or (not rows and s.shape != first.shape) for s in slots):
            raise ValueError(
                f"parameter {self.name!r}: split_sizes={list(self.splits)} give its blocks state {name!r} of different "
                "widths; lower rank to at most the smallest block"
            )
        if rows:
            return Slot(first.axes, (sum(s.shape[0] for s in slots), *first.shape[1:]), first.dtype)
        return Slot("k" + first.axes, (len(slots), *first.shape), first.dtype)

    def allocate(self, p: Tensor, h: Hyper) -> dict[str, Tensor]:
        """Zero state for the parameter, on its device."""
        wide = torch.promote_types(p.dtype, torch.float32)
        return {name: self.zeros(p, slot, slot.dtype or wide) for name, slot in self.slots(h).items()}

    def zeros(self, p: Tensor, slot: Slot, dtype: torch.dtype) -> Tensor:
        """One zero state tensor; what is shaped as the parameter has its memory order too, unless that hides views."""
        if slot.axes == "*":
            order = torch.contiguous_format if self.flattens else torch.preserve_format
            return torch.zeros_like(p, dtype=dtype, memory_format=order)
        return torch.zeros(slot.shape, dtype=dtype, device=p.device)

    def adopt(self, value: Tensor, p: Tensor, slot: Slot | None) -> Tensor:
        """A copy of a loaded state tensor where the parameter is; no slot: a number that every process keeps."""
        if slot is None:
            return value.to(p.device, copy=True)
        return self.zeros(p, slot, value.dtype).copy_(value)

    def state_blocks(self, state: dict[str, Tensor], h: Hyper) -> list[dict[str, Tensor]]:
        """The state of each block: views, in the order of `blocks`."""
        cut: dict[str, list[Tensor]] = {}
        for name, slot in self.slots(h).items():
            tensor = self.local(state[name])
            if slot.axes == "*":
                cut[name] = self.blocks(tensor)
            elif self.splits is None:
                lead = tensor.dim() - len(slot.axes.lstrip("b"))
                cut[name] = list(tensor.flatten(0, lead - 1).unbind(0)) if lead else [tensor]
            else:
                cut[name] = self.split_rows(tensor) if slot.axes.startswith("m") else list(tensor.unbind(0))
        return [{name: views[i] for name, views in cut.items()} for i in range(len(self.blocks_mn))]

    def place(self, i: int) -> Place:
        """Where block i lies."""
        return HERE


def refuse_deep(params: Any, rule: Rule) -> None:
    """Four dimensions are a convolution's kernel far more often than a stack of stacks of matrices."""
    for item in [params] if isinstance(params, Tensor) else params:
        p = item[1] if isinstance(item, tuple) else item
        if isinstance(p, Tensor) and p.dim() > 3:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} may be a convolution's kernel or a stack of matrices, so rule "
                f"{rule.name!r} does not know how to cut it: use param_groups(model), or give its group layout='conv', "
                "or layout='matrix' for matrices in its last two dimensions"
            )
