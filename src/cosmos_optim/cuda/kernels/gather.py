"""Copy the thin factors of a chunk (U, S, V, v) to stacks and back: all factors in one launch, by tables of addresses.

Shapes: a factor is a list of tensors of one shape; its stack is (batch, *shape).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.kernels.launch import false_flag, jit, tl
from cosmos_optim.cuda.kernels.tiles import matrix_start
from cosmos_optim.cuda.pointer_list import addresses

# Most factors that one launch copies: COSMOS has three, or four with a second moment of rows.
MAX_FACTORS = 4
# Entries that one program copies.
BLOCK = 4096


@jit(unaligned=("skip",))
def _copy_factors(
    a, b, c, d, table_a, table_b, table_c, table_d, size_a, size_b, size_c, size_d, skip, batch,
    BLOCK: tl.constexpr, WRITE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    factor, index = tl.program_id(1) // batch, tl.program_id(1) % batch
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    write = tl.load(skip) == 0
    if factor == 0:
        _copy(a, table_a, size_a, index, at, write, WRITE, ALIGNED)
    elif factor == 1:
        _copy(b, table_b, size_b, index, at, write, WRITE, ALIGNED)
    elif factor == 2:
        _copy(c, table_c, size_c, index, at, write, WRITE, ALIGNED)
    else:
        _copy(d, table_d, size_d, index, at, write, WRITE, ALIGNED)


@jit
def _copy(stack, table, size, index, at, write, WRITE: tl.constexpr, ALIGNED: tl.constexpr):
    """Copy a block of one tensor from the stack to the tensor (WRITE), or from the tensor to the stack."""
    own, stacked = matrix_start(table, index, tl.float32, ALIGNED) + at, stack + index.to(tl.int64) * size + at
    if WRITE:
        tl.store(own, tl.load(stacked, mask=at < size, other=0.0), mask=(at < size) & write)
    else:
        tl.store(stacked, tl.load(own, mask=at < size, other=0.0), mask=at < size)


def can_gather(tensors: Sequence[Tensor]) -> bool:
    """Return whether these tensors are contiguous float32, as `gather` and `scatter_` need them."""
    return all(x.dtype is torch.float32 and x.is_contiguous() for x in tensors)


def gather(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each list of tensors of one shape as a stack."""
    stacks = [x[0].new_empty(len(x), *x[0].shape) for x in lists]
    _launch(stacks, lists, None, write=False)
    return stacks


def scatter_(lists: Sequence[Sequence[Tensor]], stacks: Sequence[Tensor], skip: Tensor | None) -> None:
    """Write stacks to the tensors of the lists; if the device flag `skip` is True, nothing is written."""
    _launch([x.contiguous() for x in stacks], lists, skip, write=True)


def _launch(stacks: Sequence[Tensor], lists: Sequence[Sequence[Tensor]], skip: Tensor | None, *, write: bool) -> None:
    """Copy between stacks and lists, at most MAX_FACTORS of each."""
    tables, sizes, unused = [addresses(x) for x in lists], [x[0].numel() for x in stacks], MAX_FACTORS - len(stacks)
    batch, block = len(stacks[0]), launch.TARGET.block(BLOCK)
    aligned = all(t.data_ptr() % 16 == 0 for x in lists for t in x)
    _copy_factors[(-(-max(sizes) // block), len(stacks) * batch)](
        *stacks, *([stacks[0]] * unused), *tables, *(tables[:1] * unused), *sizes, *([0] * unused),
        false_flag(stacks[0].device) if skip is None else skip, batch, BLOCK=block, WRITE=write, ALIGNED=aligned,
        num_warps=4,
    )  # fmt: skip
