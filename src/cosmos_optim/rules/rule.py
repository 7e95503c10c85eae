"""What a rule is: the state it keeps for one m x n matrix, and the direction it takes.

A rule is pure. It knows nothing of parameters, devices, processes or kernels: it gets stacked tensors (any leading
batch dimensions) and an `Algebra`, and returns the direction `D` of the step `W <- W - lr D` with its new state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra

Hyper = Mapping[str, Any]
State = dict[str, Any]
Probe = Callable[..., None]


@dataclass(frozen=True)
class Slot:
    """One state tensor of an m x n matrix.

    `axes` has one letter a dimension: "m" and "n" are the matrix's rows and columns and are sharded as the parameter
    is, every other letter is replicated. "*" alone means: shaped as the parameter, whatever its shape.
    `dtype` None is the parameter's dtype, but at least float32.
    """

    axes: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class Direction(Protocol):
    """`direction(G, state, t, h=..., alg=...) -> (D, new state)`; t (..., 1, 1) counts real gradients from 1."""

    def __call__(
        self, G: Any, state: State, t: Tensor, *, h: Hyper, alg: Algebra, probe: Probe | None = None
    ) -> tuple[Any, State]: ...


class Start(Protocol):
    """`start(G, state, h=..., alg=...) -> state`: what must be taken from the first non-zero gradient."""

    def __call__(self, G: Any, state: State, *, h: Hyper, alg: Algebra) -> State: ...


def no_check(h: Hyper) -> None:
    """A rule without hyper-parameters of its own has nothing to check."""


@dataclass(frozen=True)
class Rule:
    """A named update rule.

    name: what a parameter group's "rule" says.
    hyper: its hyper-parameters with their defaults.
    slots: (m, n, hyper) -> the state of one matrix. For an elementwise rule m is the number of elements, n is 1.
    direction: the update, see `Direction`.
    start: the first basis, where the rule has one.
    check: raises ValueError for wrong hyper-parameters.
    laws: names of the laws in tests/test_laws.py which the rule obeys.
    lazy: touches m x n operands only through the Algebra, so that fused kernels may stand in for plain tensors.
    elementwise: takes parameters of any shape and no Algebra.
    constant_size: the update is as large as ever while the momentum dies away, so that a matrix whose gradient is zero
        must be left where it is (but for weight decay).
    shardable: which sides of a matrix may be cut over processes: "both", "rows" (columns whole) or "none".
    fused: an in-place kernel over lists of whole tensors that does the same as `direction` and the step.
    """

    name: str
    hyper: Hyper
    slots: Callable[[int, int, Hyper], dict[str, Slot]]
    direction: Direction
    start: Start | None = None
    check: Callable[[Hyper], None] = no_check
    laws: frozenset[str] = field(default_factory=frozenset)
    lazy: bool = False
    elementwise: bool = False
    constant_size: bool = False
    fused: Callable[..., None] | None = None
    shardable: str = "both"


def two_sided(rule: str) -> str:
    """The rule of that name with a basis on each side."""
    return f"{rule}-two-sided"


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise the ValueError for a hyper-parameter out of its range."""
    if not condition:
        raise ValueError(f"{name}={value!r} is not valid: {wanted}")


def require_number(name: str, value: object, *, flag: bool = False) -> None:
    """Raise the ValueError for what should be a number and is not; a `flag` may be yes or no, too."""
    hint = " (YAML reads 5e-4 as text, and 5.0e-4 as a number)" if isinstance(value, str) else ""
    answer = type(value).__name__ in ("bool", "bool_")  # numpy's, too
    right = flag if answer else isinstance(value, (Real, Tensor))
    require(right, name, value, f"give {'True or False, or ' if flag else ''}a number{hint}")


def check_betas(h: Hyper) -> None:
    """Both averages must be contractions."""
    betas = h["betas"]
    require(isinstance(betas, (tuple, list)) and len(betas) == 2, "betas", betas, "give two numbers (beta1, beta2)")
    for i, beta in enumerate(betas):
        require_number(f"betas[{i}]", beta)
        require(0.0 <= beta < 1.0, f"betas[{i}]", beta, "it must lie in [0, 1)")


def check_eps(h: Hyper) -> None:
    """Zero is legal: a vanishing quotient 0/0 counts as 0."""
    require(h["eps"] >= 0.0, "eps", h["eps"], "it must be 0 or positive")
