"""Group the matrices of a step: a batch has equal shapes and location; a stack is a part of it of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cosmos_optim.engine.layout import CORRECTION, Layout, Location, Tensors
from cosmos_optim.rules import RULES, Rule

# Bytes of gradients in a stack: enough to fill a GPU, but few compared to the model; on a CPU, what fits its cache.
DEVICE_STACK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
# Settings that decide which kernels run. Others are numbers that a step reads (lr, weight_decay, maximize), or keys of
# other code, which may change at every step.
KERNEL_SETTINGS = frozenset((
    "rule", "nonfinite", "missing", "stochastic_rounding", "weight_correction", "side", "split_sizes", "split_side",
    "layout",
)).union(*(rule.defaults for rule in RULES.values()))  # fmt: skip


class Entry(NamedTuple):
    """A parameter with a gradient in this step. A tuple, because hundreds are created before the GPU can start."""

    p: Tensor
    grad: Tensor
    state: Tensors
    layout: Layout
    group: dict[str, Any]
    rule: Rule

    @property
    def correction(self) -> Tensor | None:
        """This process's part of the correction of the parameter, if its group has `weight_correction`."""
        return self.layout.local(self.state[CORRECTION]) if self.group.get("weight_correction") else None


@dataclass(frozen=True, eq=False)
class Matrix:
    """Block number `index` of an entry: 2-D views of its parameter, gradient and state, the correction included."""

    name: str
    index: int
    entry: Entry
    p: Tensor
    grad: Tensor
    state: Tensors


@dataclass(frozen=True, eq=False)
class Batch:
    """Matrices of one group with equal shape, dtypes, device and location.

    m, n: their global shape.
    fresh: whether this is their first non-zero gradient, so that their first bases must be taken.
    """

    m: int
    n: int
    rule: Rule
    group: dict[str, Any]
    location: Location
    device: torch.device
    fresh: bool
    matrices: list[Matrix]

    @property
    def params(self) -> list[Tensor]:
        return [x.p for x in self.matrices]

    @property
    def grads(self) -> list[Tensor]:
        return [x.grad for x in self.matrices]

    @property
    def steps(self) -> list[Tensor]:
        return [x.entry.state["step"] for x in self.matrices]

    @property
    def corrections(self) -> list[Tensor] | None:
        """The correction of each parameter, if the group has `weight_correction`."""
        return [x.state[CORRECTION] for x in self.matrices] if self.group.get("weight_correction") else None

    def state(self) -> dict[str, list[Tensor]]:
        """Return a list of tensors for each name of the rule's state."""
        names = [name for name in self.matrices[0].state if name != CORRECTION]
        return {name: [x.state[name] for x in self.matrices] for name in names}

    def split(self, size: int) -> Iterator[Batch]:
        """Cut the batch into parts of at most `size` matrices, as even as possible."""
        total = len(self.matrices)
        count = -(-total // size)
        for i in range(count):
            yield replace(self, matrices=self.matrices[i * total // count : (i + 1) * total // count])

    def stacks(self) -> Iterator[Batch]:
        """Cut the batch into stacks with gradients of at most `DEVICE_STACK_BYTES`, or the location's own limit."""
        first = self.matrices[0]
        bound = self.location.stack_bytes or DEVICE_STACK_BYTES.get(self.device.type, 64 << 20)
        elements = max(1, self.location.numel(first.p), first.entry.layout.largest_whole_state)
        return self.split(max(1, bound // (elements * 4)))


def by_group(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries of each parameter group, in the order they were collected."""
    return [list(members) for _, members in groupby(entries, key=lambda e: id(e.group))]


def batches(entries: Sequence[Entry], fresh: set[Tensor], copies: list[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    """Return all matrices of the entries, those of equal group, shape, dtype and location together.

    Args:
        fresh: parameters that have their first non-zero gradient.
        copies: receives (parameter, copy) if the memory order allows no matrix views (channels-last); the caller must
            write the copies back after the step.
    """
    for members in by_group(entries):
        found: dict[Any, list[Matrix]] = defaultdict(list)
        for e in members:
            is_fresh = e.p in fresh
            for x in _matrices(e, copies):
                (m, n), location = e.layout.blocks_mn[x.index], e.layout.location(x.index)
                found[m, n, location, x.p.device, is_fresh, x.p.shape, x.p.dtype, x.grad.dtype].append(x)
        for (m, n, location, device, is_fresh, *_), matrices in found.items():
            yield Batch(m, n, members[0].rule, members[0].group, location, device, is_fresh, matrices)


def _matrices(e: Entry, copies: list[tuple[Tensor, Tensor]]) -> Iterator[Matrix]:
    """Return each block of an entry."""
    layout = e.layout
    stored = layout.local(e.p)
    flat = stored.contiguous() if layout.flattens else stored  # blocks must be views of it
    if flat is not stored:
        copies.append((stored, flat))
    views = (layout.blocks(flat), layout.blocks(layout.local(e.grad)), layout.state_blocks(e.state, e.group))
    for i, (p, grad, state) in enumerate(zip(*views, strict=True)):
        yield Matrix(layout.block_names[i], i, e, p, grad, state)


def decay_of(group: dict[str, Any]) -> float | Tensor:
    """Return 1 - lr * weight_decay, a number or a tensor as lr is, but at least float32: bfloat16 would round to 1."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.to(torch.promote_types(lr.dtype, torch.float32))
    return 1 - lr * group["weight_decay"] if group["weight_decay"] else 1.0


def signed_lr(group: dict[str, Any]) -> float | Tensor:
    """Return lr, or -lr for maximize, which is enough because every rule is odd in the gradient."""
    return -group["lr"] if group["maximize"] else group["lr"]


def settings_key(group: dict[str, Any]) -> Hashable:
    """Return a key of the `KERNEL_SETTINGS` of a group.

    It has each value's text, or the address of a tensor that a kernel reads from memory.
    """
    values = {key: value for key, value in group.items() if key in KERNEL_SETTINGS}
    return tuple((k, v.data_ptr() if isinstance(v, Tensor) and v.is_cuda else repr(v)) for k, v in values.items())
