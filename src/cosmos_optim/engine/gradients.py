"""Check the gradients before anything is written: whether they are finite, and which are a parameter's first.

One pass over all gradients gives the largest |g| of each matrix (`grad_max`); everything else follows from these. A
parameter has started once it has had a non-zero gradient. When all have, the numbers stay on the GPU, and the host does
not wait.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cosmos_optim.engine.batching import Entry, by_group
from cosmos_optim.engine.capture import is_capturing

# Positions of entries, and a function: the elementwise maximum of a vector over the processes that share these entries.
# The first function is over all processes that share any.
MaxOverRanks = Sequence[tuple[list[int], Callable[[Tensor], Tensor]]]
# What `agree` finds on any process: a gradient that is not finite, or gradients of different matrices.
NOT_FINITE, DIFFERENT_MATRICES = 1, 2


@dataclass(frozen=True, eq=False)
class GradientCheck:
    """The result of `check_gradients`.

    grad_max: the largest |g| of each block of each entry, on the device, over all processes that share the block.
    started: for each entry, whether it has had a non-zero gradient by now.
    fresh: for each entry, whether this gradient is its first.
    skip_on_host: the host knows that this step must be skipped.
    skip: whether to skip, as a boolean scalar on the device, if only the device knows it; else None.
    not_finite: the first entry with a gradient that is not finite on this process, if the host knows.
    """

    entries: Sequence[Entry]
    grad_max: Tensor
    started: list[bool]
    fresh: list[bool]
    skip_on_host: bool = False
    skip: Tensor | None = None
    not_finite: Entry | None = None

    @cached_property
    def grad_max_by_parameter(self) -> dict[Tensor, list[Tensor]]:
        """The largest |g| of each block of each parameter."""
        values = iter(self.grad_max.unbind())
        return {e.p: list(itertools.islice(values, e.layout.count)) for e in self.entries}


def check_gradients(
    entries: Sequence[Entry], started: set[Tensor], max_over_ranks: MaxOverRanks | None
) -> GradientCheck:
    """Return the largest |g| of each block, and whether to skip the step.

    Args:
        started: parameters that have had a non-zero gradient before; `find_started` may add others.
        max_over_ranks: maxima over the processes that share parameters; None for a single process.
    """
    had_started = find_started(entries, started)
    grad_max = block_max(entries)
    device = grad_max.device
    may_raise = any(e.group["nonfinite"] == "raise" for e in entries)
    on_several_devices = any(e.p.device != device for e in entries)  # kernels cannot read a flag on another device
    on_host = device.type != "cuda" or not all(had_started) or may_raise or on_several_devices
    if on_host and is_capturing(device):
        raise RuntimeError(
            "a CUDA graph is being captured, but this step must look at the gradients on the host: take one step with "
            "real gradients before the capture (every basis then exists), and use nonfinite='skip'"
        )
    limit = largest_allowed(entries)
    any_bad = (grad_max.amax() if len(grad_max) else grad_max.new_zeros(())) > limit
    host_asks = may_raise or not all(had_started)  # which entry is not finite, or which has its first gradient
    max_of_entries = entry_max(entries, grad_max) if host_asks else None
    if max_over_ranks is not None:
        problem, max_of_entries, grad_max = agree(
            entries, had_started, any_bad, max_of_entries, grad_max, max_over_ranks
        )
        any_bad = problem > 0
        if on_host and bool(problem == DIFFERENT_MATRICES):
            raise RuntimeError(
                "the ranks have gradients of different matrices, so their shards cannot be put together; nothing was "
                "changed. Use the same modules on every rank, or give a group missing='zero' (see docs/distributed.md)"
            )
    none = [False] * len(entries)
    if not on_host:
        return GradientCheck(entries, grad_max, had_started, none, skip=any_bad)
    if bool(any_bad):
        if max_of_entries is not None:
            _raise_if_asked(itertools.compress(entries, (max_of_entries > limit).tolist()))
        first = next(itertools.compress(entries, (entry_max(entries, grad_max) > limit).tolist()), None)
        return GradientCheck(entries, grad_max, had_started, none, skip_on_host=True, not_finite=first)
    fresh = none
    if max_of_entries is not None:
        is_nonzero = (max_of_entries > 0).tolist()
        fresh = [now and not before for now, before in zip(is_nonzero, had_started, strict=True)]
    has_started = [before or is_fresh for before, is_fresh in zip(had_started, fresh, strict=True)]
    return GradientCheck(entries, grad_max, has_started, fresh)


def find_started(entries: Sequence[Entry], started: set[Tensor]) -> list[bool]:
    """Return for each entry whether it has had a non-zero gradient before this step.

    An entry that is not in `started` may have a step count above 0, because other code has loaded its state. Add it.
    """
    known = [e.p in started for e in entries]
    if all(known) or is_capturing(entries[0].p.device):
        return known
    new = [e for e, is_known in zip(entries, known, strict=True) if not is_known]
    counts = torch.stack([e.layout.local(e.state["step"]).to(new[0].p.device) for e in new]).tolist()
    started.update(e.p for e, count in zip(new, counts, strict=True) if count > 0)
    return [e.p in started for e in entries]


def largest_allowed(entries: Sequence[Entry]) -> float:
    """Return the largest |g| for which twice the sum of squares of a matrix fits into its second moment.

    Twice, because S + S' and Householder's QR of SOAP's L U need as much.

    The limit is one for all entries: that of float32, unless all of them have gradients and state in float64. In
    float64, rules without a second moment have it too, because no wider type holds the norms that they divide by.
    """
    narrow = [e for e in entries if not _is_float64(e)]
    limit = torch.finfo(torch.float32 if narrow else torch.float64).max
    most = 0.0
    for members in by_group(narrow or entries):
        betas = members[0].group.get("betas")
        if betas is not None or not narrow:
            weight = 1.0 if betas is None else 1 - betas[1]
            numel = 1 if members[0].rule.elementwise else max(e.p.numel() for e in members)
            most = max(most, 1.0, 2 * weight * numel)
    return math.sqrt(limit / most) if most else limit


def _is_float64(e: Entry) -> bool:
    """Return whether the gradient and the state of an entry are in float64."""
    if e.p.dtype is not torch.float64 or e.grad.dtype is not torch.float64:
        return False
    return e.group.get("momentum_dtype") is None and e.group.get("adam_dtype") is None


def entry_max(entries: Sequence[Entry], grad_max: Tensor) -> Tensor:
    """Return the largest |g| of each entry, from that of each block."""
    counts = [e.layout.count for e in entries]
    if all(count == 1 for count in counts):
        return grad_max
    zero = grad_max.new_zeros(())
    return torch.stack([part.amax() if len(part) else zero for part in grad_max.split(counts)])


def agree(
    entries: Sequence[Entry], had_started: Sequence[bool], any_bad: Tensor, max_of_entries: Tensor | None,
    grad_max: Tensor, max_over_ranks: MaxOverRanks,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return the three results as all processes that share an entry see them: the maximum over these processes.

    `any_bad` becomes the largest problem of all processes: 0, NOT_FINITE or DIFFERENT_MATRICES (of the matrices that
    all of them share). `max_of_entries` and `grad_max` change only for shards. There is one message for each item of
    `max_over_ranks`, a vector of which the processes get the maximum:

        [h | -h | problem | max_of_entries, of the entries in `asked` | grad_max, of blocks of the entries in `shared`]

    h is a hash of the names of the matrices: if these differ, the maxima of h and -h do not add up to 0, except for one
    in 17 million pairs of lists. If the lists differ in length, messages may not fit together, and the backend ends or
    waits. The message to all processes is the last, so that it can tell all what others have found.

    asked: all entries of the message if the host asks for the maximum of one of them, as in `check_gradients`; else
        none.
    shared: entries with matrices that are cut over processes, if their rule must know which gradients are zero.

    Length and dtype are equal on all processes of a message, because they depend only on entries that they share. Their
    other entries may differ: experts of other processes get tokens at other steps.
    """
    layouts = [e.layout for e in entries]
    maxima = [] if max_of_entries is None else list(max_of_entries.split(1))
    parts = list(grad_max.split([layout.count for layout in layouts]))
    problem = any_bad.to(grad_max.dtype).view(1)  # True is NOT_FINITE
    for number, (members, maximum) in reversed(list(enumerate(max_over_ranks))):
        host_asks = any(not had_started[i] or entries[i].group["nonfinite"] == "raise" for i in members)
        asked = members if host_asks else []
        shared = [i for i in members if entries[i].rule.constant_size and layouts[i].cut_sides]
        is_to_all = number == 0  # all processes learn the problem from it
        if not is_to_all and not asked and not shared:
            continue
        blocks = [layouts[i].expand_to_all_blocks(parts[i]) for i in shared]
        matrices = "\n".join(layouts[i].name for i in members if not entries[i].rule.elementwise)
        names = float(zlib.crc32(matrices.encode()) >> 8)  # 24 bits, which float32 holds
        hashes = [problem.new_full((1,), names), problem.new_full((1,), -names)]
        message = [*hashes, problem, *(maxima[i] for i in asked), *blocks]
        vector = torch.cat(message).to(max_dtype(entries[i] for i in members))
        highest, minus_lowest, problem, *agreed = maximum(vector).split([len(x) for x in message])
        problem = problem.maximum(DIFFERENT_MATRICES * (highest + minus_lowest != 0).to(problem.dtype))
        for i, value in zip(asked, agreed[: len(asked)], strict=True):
            maxima[i] = value
        for i, value in zip(shared, agreed[len(asked) :], strict=True):
            parts[i] = layouts[i].select_local_blocks(value)
    return problem.view(()), torch.cat(maxima) if maxima else max_of_entries, torch.cat(parts)


def block_max(entries: Sequence[Entry]) -> Tensor:
    """Return max |g| of each block of each gradient as one vector, float32 or wider; inf if it is not finite."""
    device, wide = entries[0].p.device, max_dtype(entries)
    blocks, stacks = _blocks_and_stacks(entries)
    found = _each_max(blocks, device, wide)
    if stacks:  # put the maxima of each stack where its blocks belong
        first, *others = found.tensor_split([before for before, _ in stacks])
        maxima = [_matrix_max(stack).to(device, wide) for _, stack in stacks]
        found = torch.cat([first, *(x for pair in zip(maxima, others, strict=True) for x in pair)])
    return torch.nan_to_num(found, nan=float("inf"), posinf=float("inf"))


def max_dtype(entries: Iterable[Entry]) -> torch.dtype:
    """Return the dtype that holds the maxima of these entries: float32, or float64 if one of the gradients is.

    It depends on the global gradients: a rank without a local part must send the same dtype as the others.
    """
    return torch.float64 if any(e.grad.dtype is torch.float64 for e in entries) else torch.float32


def _blocks_and_stacks(entries: Sequence[Entry]) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
    """Return the blocks to read one by one, and the stacks of blocks, each with the number of such blocks before it."""
    blocks: list[Tensor] = []
    stacks: list[tuple[int, Tensor]] = []
    for e in entries:
        g, count = e.layout.local(e.grad), e.layout.count
        if count == 1:
            blocks.append(g)
        elif not e.layout.splits:
            if count:
                stacks.append((len(blocks), g.flatten(0, -3)))
        elif (together := e.layout.stacked_blocks(g)) is None:
            blocks += e.layout.blocks(g)
        else:  # blocks of columns would each cost a launch, because they are not dense
            stacks.append((len(blocks), together))
    return blocks, stacks


def _each_max(blocks: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return max |x| of each tensor as one vector; 0 for an empty one."""
    not_empty = [x for x in blocks if x.numel()]
    if device.type == "cpu":  # ten times as fast there as the foreach norm
        found = [torch.maximum(-low, high) for low, high in map(torch.aminmax, not_empty)]
    else:
        found = list(torch._foreach_norm(not_empty, float("inf"))) if not_empty else []
    found = [x if x.dtype is dtype and x.device == device else x.to(device, dtype) for x in found]
    if len(not_empty) < len(blocks):
        values, zero = iter(found), torch.zeros((), device=device, dtype=dtype)
        found = [next(values) if x.numel() else zero for x in blocks]
    return torch.stack(found) if found else torch.zeros(0, device=device, dtype=dtype)


def _matrix_max(stack: Tensor) -> Tensor:
    """Return max |x| of each matrix of a stack; 0 if no part of it is on this rank."""
    if not stack.numel():
        return stack.new_zeros(len(stack))
    if stack.device.type == "cpu":
        return torch.maximum(-stack.amin((1, 2)), stack.amax((1, 2)))
    maxima: Tensor = torch.linalg.vector_norm(stack, float("inf"), dim=(1, 2))
    return maxima


def _raise_if_asked(not_finite: Iterable[Entry]) -> None:
    """Raise FloatingPointError for the first gradient that is not finite in a group with nonfinite='raise'."""
    for entry in not_finite:
        if entry.group["nonfinite"] == "raise":
            raise FloatingPointError(
                f"the gradient of parameter {entry.layout.name!r} (shape {tuple(entry.p.shape)}) is not finite, or its "
                "square is not; nothing was changed by this step. Use nonfinite='skip' to skip such steps instead"
            )
