"""Thin factors from where they live to stacks and back: all factors of a chunk in one launch, by address tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import jit, never, tl
from cosmos_optim.cuda.kernels.tiles import matrix
from cosmos_optim.cuda.pointer_list import addresses

# Factors that one launch moves; COSMOS has three, four with a second moment of rows.
MOST = 4
BLOCK = 4096


@jit(unaligned=("skip",))
def _move(  # type: ignore[no-untyped-def]
    a, b, c, d, home_a, home_b, home_c, home_d, size_a, size_b, size_c, size_d, skip, batch,
    BLOCK: tl.constexpr, WRITE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    which, index = tl.program_id(1) // batch, tl.program_id(1) % batch
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    write = tl.load(skip) == 0
    if which == 0:
        _copy(a, home_a, size_a, index, at, write, WRITE, ALIGNED)
    elif which == 1:
        _copy(b, home_b, size_b, index, at, write, WRITE, ALIGNED)
    elif which == 2:
        _copy(c, home_c, size_c, index, at, write, WRITE, ALIGNED)
    else:
        _copy(d, home_d, size_d, index, at, write, WRITE, ALIGNED)


@jit
def _copy(stack, home, size, index, at, write, WRITE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of one matrix, from the stack to its home (WRITE) or from there."""
    there, here = matrix(home, index, tl.float32, ALIGNED) + at, stack + index.to(tl.int64) * size + at
    if WRITE:
        tl.store(there, tl.load(here, mask=at < size, other=0.0), mask=(at < size) & write)
    else:
        tl.store(here, tl.load(there, mask=at < size, other=0.0), mask=at < size)


def movable(tensors: Sequence[Tensor]) -> bool:
    """Whether these are float32 without gaps."""
    return all(x.dtype is torch.float32 and x.is_contiguous() for x in tensors)


def gather(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each list of equal tensors as a stack."""
    stacks = [x[0].new_empty(len(x), *x[0].shape) for x in lists]
    _launch(stacks, lists, None, write=False)
    return stacks


def scatter_(lists: Sequence[Sequence[Tensor]], stacks: Sequence[Tensor], skip: Tensor | None) -> None:
    """Write stacks to the tensors that the lists name; nothing where `skip` holds."""
    _launch([x.contiguous() for x in stacks], lists, skip, write=True)


def _launch(stacks: Sequence[Tensor], lists: Sequence[Sequence[Tensor]], skip: Tensor | None, *, write: bool) -> None:
    for first in range(0, len(stacks), MOST):
        here, there = list(stacks[first : first + MOST]), lists[first : first + MOST]
        homes, sizes, spare = [addresses(x) for x in there], [x[0].numel() for x in here], MOST - len(here)
        batch, block = len(here[0]), launch.TARGET.block(BLOCK)
        aligned = all(t.data_ptr() % 16 == 0 for x in there for t in x)
        _move[(-(-max(sizes) // block), len(here) * batch)](
            *here, *(here[:1] * spare), *homes, *(homes[:1] * spare), *sizes, *([0] * spare),
            never(here[0].device) if skip is None else skip, batch, BLOCK=block, WRITE=write, ALIGNED=aligned,
            num_warps=4,
        )  # fmt: skip
