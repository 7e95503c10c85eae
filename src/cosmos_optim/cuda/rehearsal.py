"""Chunks of a new kind run through before their first step, so that their kernels are compiled side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.precompile import compile_ahead
from cosmos_optim.engine.batching import Matrix, Moving, Tops, run_chunk, start_chunk


class Rehearsal:
    """Chunks of a new kind run through once with matrices of no content and no kernel launched, for its compilation.

    Without it the first steps would compile one kernel after the other, and the step that is recorded a few more.
    """

    _known: set[Hashable] = set()

    def __init__(self, skip: Tensor | None, tops: Tops) -> None:
        self.skip, self.tops = skip, tops
        self.new: dict[torch.device, list[Callable[[], None]]] = defaultdict(list)

    def add(self, chunk: list[Matrix], m: int, n: int, made: Hashable, *, start: bool) -> None:
        """A chunk for the kernels, for its first bases or for a step; `made` are the settings of its group."""
        x = chunk[0]
        memory = [(name, t.dtype, t.shape, t.stride()) for name, t in (("", x.p), ("G", x.grad), *x.state.items())]
        kind = (x.p.device, x.entry.rule.name, start, *memory, len(chunk), made)
        if kind not in self._known:
            self._known.add(kind)
            self.new[x.p.device].append(partial(self._run, chunk, m, n, start))

    def run(self) -> None:
        """Compile what the chunks added need, and let go of them: their gradients must be free before the next step."""
        while self.new:
            compile_ahead(*self.new.popitem())

    def _run(self, chunk: list[Matrix], m: int, n: int, start: bool) -> None:
        """As it will be run: for a first basis, or as ever and under a recording."""
        x, device = chunk[0], chunk[0].p.device
        state = {name: _hollow(t) for name, t in x.state.items()}
        hollow = replace(x, p=_hollow(x.p), grad=_hollow(x.grad), state=state, fresh=False)
        stack = [hollow] * len(chunk)
        if start:
            start_chunk(stack, m, n, self.skip, self.tops)
            return
        number = torch.zeros((), dtype=torch.float64, device=device)
        table = torch.full((len(chunk),), hollow.grad.data_ptr(), dtype=torch.int64, device=device)
        for moving in (None, Moving(table, number, number)):
            run_chunk(stack, x.place, m, n, self.skip, None, FusedAlgebra, self.tops, moving)


def _hollow(x: Tensor) -> Tensor:
    """A tensor like x with memory of its own and nothing in it."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
