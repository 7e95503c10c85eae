"""Looking at the gradients before anything is written: is one non-finite, is one the first that is not zero?

One pass over all gradients gives their largest magnitudes; everything else is about those few numbers. On a GPU they
stay there once every parameter has started, so that a step costs no host synchronization.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_optim import sharding as distributed
from cosmos_optim.engine.entries import Entry, by_group


@dataclass(frozen=True)
class Found:
    """skip_all: nothing may change. skip: the same as a boolean scalar on the device, unless known on the host.
    started: for each entry, whether it has had a non-zero gradient by now. fresh: whether this one is the first.
    peaks: the largest |g| of each block of each entry, on the device: as held here where all of the block is."""

    skip_all: bool
    skip: Tensor | None
    started: list[bool]
    fresh: list[bool]
    peaks: Tensor | None = None


class Skips:
    """Counts the steps that changed nothing: those of which a GPU alone knows are counted there."""

    def __init__(self) -> None:
        self._known = 0
        self._there: Tensor | None = None

    def note(self, found: Found, device: torch.device) -> None:
        """A step has looked at its gradients."""
        self._known += found.skip_all
        if device.type != "cuda":
            return
        elsewhere = self._there is None or self._there.device != device
        if elsewhere and not torch.cuda.is_current_stream_capturing():  # captured zeros would be zeros at every replay
            self._known, self._there = self.total(), torch.zeros((), dtype=torch.int64, device=device)
        if found.skip is not None and self._there is not None and self._there.device == device:
            self._there.add_(found.skip)

    def total(self) -> int:
        """Their number; waits for the GPU."""
        return self._known + (0 if self._there is None else int(self._there))


def inspect(entries: Sequence[Entry], started: set[Tensor], found_inf: Tensor | None) -> Found:
    """Magnitudes of all gradients, and what follows from them."""
    old = [e.p in started for e in entries]
    here = magnitudes(entries)
    device = here.device
    raising = any(e.group["nonfinite"] == "raise" for e in entries)
    # A flag on one device cannot steer the others.
    several = any(e.p.device != device for e in entries)
    on_host = device.type != "cuda" or not all(old) or raising or several
    if on_host and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, but this step must look at the gradients on the host: take one step with "
            "real gradients before the capture (every basis then exists), and use nonfinite='skip'"
        )
    # While parameters are still waiting for their first gradient the ranks must agree on each one, later on the worst.
    peaks, here = _agreed(entries, here, each=not all(old) or raising, found_inf=found_inf)
    bad = peaks > largest(entries)
    if not on_host:
        return Found(False, bad.any(), old, [False] * len(entries), here)
    flags = bad.tolist()
    if any(flags):
        _raise_if_asked(entries, flags)
        return Found(True, None, old, [False] * len(entries))
    positive = (peaks > 0).tolist() if not all(old) else [True] * len(entries)
    now = [a or b for a, b in zip(old, positive, strict=True)]
    return Found(False, None, now, [n and not o for n, o in zip(now, old, strict=True)], here)


def largest(entries: Sequence[Entry]) -> float:
    """The largest |g| whose squares, summed over any one matrix, still fit the float32 second moments."""
    most = 0.0
    for held in by_group(entries):
        wide = [e.p.numel() for e in held if e.p.dtype is not torch.float64]
        if wide and "betas" in held[0].group:
            fresh = 1 - held[0].group["betas"][1]
            most = max(most, 1.0, fresh * (1 if held[0].rule.elementwise else max(wide)))
    top = torch.finfo(torch.float32).max
    return math.sqrt(top / most) if most else top


def _agreed(
    entries: Sequence[Entry], here: Tensor, *, each: bool, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """By one message: the largest |g| of each entry or of all of them, and of every block that processes share.

    What a gradient scaler has found on one of them counts for all.
    """
    layouts = [e.layout for e in entries]
    shared = [i for i, e in enumerate(entries) if e.rule.constant_size and e.layout.divided]
    counts = [x.count for x in layouts] if shared or each else []
    parts = list(here.split(counts)) if counts else []
    if not each:
        peaks = here.amax().view(1) if len(here) else here.new_zeros(1)
    elif all(count == 1 for count in counts):
        peaks = here.clone()  # a message may write to what it is given
    else:
        peaks = torch.stack([part.amax() if len(part) else here.new_zeros(()) for part in parts])
    if found_inf is not None:
        peaks = torch.where(found_inf.to(here.device).view(()) != 0, float("inf"), peaks)
    if not shared:
        return distributed.agree(peaks, layouts), here
    blocks = [layouts[i].to_all(parts[i]) for i in shared]
    agreed = distributed.agree(torch.cat([peaks, *blocks]), layouts)
    peaks, *blocks = agreed.split([len(peaks), *map(len, blocks)])
    for i, block in zip(shared, blocks, strict=True):
        parts[i] = layouts[i].from_all(block)
    return peaks, torch.cat(parts)


def magnitudes(entries: Sequence[Entry]) -> Tensor:
    """max |g| of each block of each gradient as one vector, float32 or wider; inf where it is not finite (or NaN)."""
    device = entries[0].p.device
    grads: list[Tensor] = []
    stacks: list[tuple[int, Tensor]] = []  # with the number of single blocks before them
    for e in entries:
        g, count = e.layout.local(e.grad), e.layout.count
        if count == 1:
            grads.append(g)
        elif e.layout.splits:
            grads += e.layout.blocks(g)
        elif count:
            stacks.append((len(grads), g.flatten(0, -3)))
    held = [g for g in grads if g.numel()]
    if device.type == "cpu":  # ten times as fast there as the foreach norm
        norms = [torch.maximum(-low, high) for low, high in map(torch.aminmax, held)]
    else:
        norms = list(torch._foreach_norm(held, float("inf"))) if held else []
    # By the gradients, not by what is held of them: ranks without a part must send what the others send.
    wide = torch.float64 if any(e.grad.dtype is torch.float64 for e in entries) else torch.float32
    norms = [x if x.dtype is wide and x.device == device else x.to(device, wide) for x in norms]
    if len(held) < len(grads):
        rest, zero = iter(norms), torch.zeros((), device=device, dtype=wide)
        norms = [next(rest) if g.numel() else zero for g in grads]
    peaks = torch.stack(norms) if norms else torch.zeros(0, device=device, dtype=wide)
    if stacks:
        first, *others = peaks.tensor_split([before for before, _ in stacks])
        found = [_of_each(stack).to(device, wide) for _, stack in stacks]
        peaks = torch.cat([first, *(x for pair in zip(found, others, strict=True) for x in pair)])
    return torch.nan_to_num(peaks, nan=float("inf"), posinf=float("inf"))


def _of_each(stack: Tensor) -> Tensor:
    """max |x| of each matrix of a stack; 0 for those of which nothing is held."""
    if not stack.numel():
        return stack.new_zeros(len(stack))
    if stack.device.type == "cpu":
        return torch.maximum(-stack.amin((1, 2)), stack.amax((1, 2)))
    peaks: Tensor = torch.linalg.vector_norm(stack, float("inf"), dim=(1, 2))
    return peaks


def _raise_if_asked(entries: Sequence[Entry], flags: Sequence[bool]) -> None:
    if len(flags) != len(entries):
        return
    for entry, flag in zip(entries, flags, strict=True):
        if flag and entry.group["nonfinite"] == "raise":
            raise FloatingPointError(
                f"the gradient of parameter {entry.layout.name!r} (shape {tuple(entry.p.shape)}) is not finite, or its "
                "square is not; nothing was changed by this step. Use nonfinite='skip' to skip such steps instead"
            )
