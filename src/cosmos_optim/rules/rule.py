"""The definition of a rule: the state that it keeps for one m x n matrix, and the direction that it computes.

A rule is pure. It does not depend on parameters, devices, processes or kernels: it gets stacked tensors (any leading
batch dimensions) and an `Algebra`, and returns the direction D of the step W <- W - lr D, and its new state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.linalg.int8_momentum import dequantize, quantize, scale_columns
from cosmos_optim.linalg.newton_schulz import NewtonSchulz

Settings = Mapping[str, Any]
# The scales of an M of 8 bits, which `direction` does not see; and all state of a momentum.
M_SCALE = "M_scale"
MOMENTUM = ("M", M_SCALE)


@dataclass(frozen=True)
class Slot:
    """One state tensor of an m x n matrix.

    axes: one letter for each dimension. "m" and "n" are cut like the matrix's rows and columns; a dimension with any
        other letter is whole on every rank. "*" alone is the shape of the parameter.
    dtype: None for the parameter's dtype, but at least float32.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Rule:
    """A named update rule.

    name: the value of "rule" in a parameter group.
    defaults: default of each hyper-parameter.
    State: the NamedTuple of its state; a field that is None has no tensor.
    slots: (m, n, settings) -> the state of one matrix. An elementwise rule gets the last dimension of the parameter as
        n, and the product of the others as m.
    direction: (G, state, t, *, alg, its own hyper-parameters) -> (D, new state); t (..., 1, 1) counts
        steps since the first non-zero gradient, from 1. An elementwise rule gets no `alg`, and a t of shape ().
    start: (G, state, *, alg) -> the state with the bases from the first gradient, if the rule has any.
    diagnose: (G, D, old state, new state, *, eps, alg) -> numbers for `optimizer.diagnostics()`, (..., 1, 1) each.
    deflates: whether it removes the leading directions of a matrix before Newton-Schulz.
    elementwise: whether it takes parameters of any shape, one at a time.
    one_sided: whether it tracks a basis on one side of a matrix, which a group's `side` chooses.
    transposes_few_rows: what `side="auto"` means. If True, a matrix with fewer rows than its basis would have columns
        is given to the rule transposed, because some columns would hold nothing. If False, no matrix is.
    constant_size: whether the update keeps its size while the momentum decays. A matrix with a zero gradient is then
        only decayed.
    shardable_sides: the sides of a matrix that may be cut over processes: "mn", "m" (rows), or "" for whole matrices.
    """

    name: str
    defaults: Settings
    State: type[Any]
    slots: Callable[[int, int, Settings], dict[str, Slot]]
    direction: Callable[..., tuple[Tensor, Any]]
    start: Callable[..., Any] | None = None
    diagnose: Callable[..., dict[str, Tensor]] | None = None
    deflates: bool = False
    elementwise: bool = False
    one_sided: bool = False
    transposes_few_rows: bool = False
    constant_size: bool = False
    shardable_sides: str = "mn"

    @cached_property
    def _argument_names(self) -> list[str]:
        return [name for name in inspect.signature(self.direction).parameters if name in self.defaults]

    def arguments(self, settings: Settings) -> dict[str, Any]:
        """Return the named arguments of `direction` from a group's settings."""
        named = {name: settings[name] for name in self._argument_names}
        if "ns_steps" in self.defaults:
            named["ns"] = NewtonSchulz.of(settings, deflated=self.deflates)
        return named


def momentum_slots(m: int, n: int, dtype: torch.dtype | None) -> dict[str, Slot]:
    """Return M (m, n), and the scales of its blocks if it is stored as integers."""
    M = {"M": Slot("mn", (m, n), dtype)}
    return M if dtype is not torch.int8 else M | {M_SCALE: Slot("mc", (m, scale_columns(n)), torch.float32)}


def load_momentum(state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the M of this state for computation in `dtype`."""
    M, scales = state["M"], state.get(M_SCALE)
    return M.to(dtype) if scales is None else dequantize(M, scales, dtype)


def stored_momentum(M: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the state that holds M in `dtype`; None keeps that of M."""
    return dict(zip(MOMENTUM, quantize(M), strict=True)) if dtype is torch.int8 else {"M": M.to(dtype or M.dtype)}


def as_stored(M: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return M as its slot will hold it: a step uses the momentum that the next one reads, as the kernels do."""
    return load_momentum(stored_momentum(M, dtype), M.dtype)


TWO_SIDED_SUFFIX = "-two-sided"


def two_sided_name(rule: str) -> str:
    """Return the name of a rule's two-sided form, with a basis on each side."""
    return rule + TWO_SIDED_SUFFIX
