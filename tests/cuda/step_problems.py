"""One step by a schedule of kernels and by the definition, from the same numbers, and how far they are apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_optim.cuda.kernels import launch
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.cuda.precompile import compile_in_parallel
from cosmos_optim.cuda.step import SCHEDULES
from cosmos_optim.rules import RULES
from cosmos_optim.rules.rule import Rule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Not 1, because a factor that is applied twice, or never, would not show. Exact in float32, which kernels get.
LR, DECAY, STEP = 2**-7, 1 - 2**-7, 5.0

Stacks = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One step of `batch` matrices (m, n).

    options: settings of the rule that are not its defaults.
    gradient: "random" (independent entries), the same "tiny" (times 1e-12) or "huge" (times 1e12), "rank 5", or
        "condition 1e6" (singular values over six decades).
    weights, grads, momentum: dtypes as stored.
    memory: how W and G are stored: "rows" (contiguous), "columns" (transposed), "odd" (not aligned to 16 bytes).
    """

    rule: str
    m: int
    n: int
    options: dict[str, Any] = field(default_factory=dict)
    gradient: str = "random"
    weights: torch.dtype = torch.float32
    grads: torch.dtype = torch.float32
    momentum: torch.dtype = torch.float32
    memory: str = "rows"
    batch: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the rule, as a parameter group has them."""
        gamma = {"gamma": 0.25} if self.rule == "cosmos" else {}
        return {**RULES[self.rule].defaults, **gamma, **self.options}


@dataclass
class Problem:
    """What a step starts from, in the dtypes in which it is stored: lists W and G, and lists of state by name."""

    W: list[Tensor]
    G: list[Tensor]
    state: dict[str, list[Tensor]]

    def copy(self) -> Problem:
        """Return the same in other memory, with the same strides and alignment."""
        state = {name: [x.clone() for x in tensors] for name, tensors in self.state.items()}
        return Problem([like(x) for x in self.W], [like(x) for x in self.G], state)


def like(x: Tensor) -> Tensor:
    """Return a copy with the strides of x that begins as far from a multiple of 16 bytes."""
    offset = x.data_ptr() % 16 // x.element_size()
    memory = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    return memory.as_strided(x.shape, x.stride(), offset).copy_(x)


def stored(stack: Tensor, dtype: torch.dtype, memory: str = "rows") -> list[Tensor]:
    """Return the matrices of a stack, each in separate memory."""
    if memory == "columns":
        return [x.mT.contiguous().mT for x in stack.to(dtype)]
    pieces = [torch.empty(x.numel() + (memory == "odd"), dtype=dtype, device=x.device) for x in stack]
    return [piece[memory == "odd" :].view(x.shape).copy_(x) for piece, x in zip(pieces, stack, strict=True)]


def problem(case: Case, device: torch.device) -> Problem:
    """Return gradients and a state some way into training: the same at every call, on every device.

    U is one power step away from random columns, and S is what these gradients have in it. The momentum has the row
    space of the gradient, so that a gradient of low rank gives a step of low rank.
    """
    generator, (m, n) = torch.Generator().manual_seed(0), (case.m, case.n)
    slots = RULES[case.rule].slots(m, n, case.settings)

    def draw(*shape: int) -> Tensor:
        return torch.randn(case.batch, *shape, generator=generator, dtype=torch.float64).to(device)

    if case.gradient == "rank 5":
        G = draw(m, 5) @ draw(5, n)
    elif case.gradient == "condition 1e6":
        left, right = (torch.linalg.qr(draw(x, min(m, n)))[0] for x in (m, n))
        G = (left * torch.logspace(0, -6, min(m, n), dtype=torch.float64, device=device)) @ right.mT
    else:
        G = draw(m, n) * {"random": 1.0, "tiny": 1e-12, "huge": 1e12}[case.gradient]
    state = {"M": 0.5 * G + 0.3 * draw(m, m) @ G / m**0.5}
    if "U" in slots:
        U = torch.linalg.qr(G.mT @ (G @ draw(*slots["U"].shape)))[0]
        V = (0.5 + draw(*slots["V"].shape).abs()) * G.square().mean()
        state |= {"U": U, "S": (G @ U).mT @ (G @ U), "V": V}
    if "v" in slots:
        state["v"] = 0.5 + draw(m, 1).abs()
    lists = {name: stored(X, case.momentum if name == "M" else torch.float32) for name, X in state.items()}
    return Problem(stored(draw(m, n), case.weights, case.memory), stored(G, case.grads, case.memory), lists)


def run_schedule(case: Case, at: Problem, **more: Any) -> Stacks:
    """Take one step of the case's schedule in the memory of a problem; return W and the new state, stacked."""
    rule: Rule = RULES[case.rule]
    thin = {name: torch.stack(tensors) for name, tensors in at.state.items() if name != "M"}
    t = torch.full((len(at.W), 1, 1), STEP, device=at.W[0].device)
    grad_max = torch.stack([g.abs().max().float() for g in at.G])
    given: dict[str, Any] = {"lr": LR, "decay": DECAY, "grad_max": grad_max} | more
    state = rule.State(M=MatrixList.of(at.state["M"]), **thin)
    take_step = SCHEDULES[case.rule]
    new = take_step(MatrixList.of(at.W), MatrixList.of(at.G), state, t, **given, **rule.arguments(case.settings))
    found = {name: getattr(new, name) for name in thin}
    return {"W": torch.stack(at.W), "M": torch.stack(at.state["M"]), **found}


def schedule(case: Case, start: Problem, **more: Any) -> Stacks:
    """Return W and the new state after one step of the case's schedule; on a GPU its kernels are compiled first."""
    compile_in_parallel(start.W[0].device, [lambda: run_schedule(case, start.copy(), **more)])
    return run_schedule(case, start.copy(), **more)


def definition(case: Case, start: Problem, dtype: torch.dtype = torch.float64) -> Stacks:
    """Return W and the new state after one step of the case's `direction` in `dtype`, Newton-Schulz in float64."""
    rule: Rule = RULES[case.rule]
    G = torch.stack(start.G).to(dtype)
    state = rule.State(**{name: torch.stack(tensors).to(dtype) for name, tensors in start.state.items()})
    t = torch.full((len(start.G), 1, 1), STEP, dtype=dtype, device=G.device)
    D, new = rule.direction(G, state, t, **rule.arguments({**case.settings, "ns_dtype": torch.float64}))
    W = DECAY * torch.stack(start.W).double() - LR * D.double()
    return {"W": W, **{name: x for name, x in new._asdict().items() if x is not None}}


def errors(found: Stacks, exact: Stacks, start: Problem) -> dict[str, float]:
    """Return relative errors by name.

    update: of W - decay W_old. soap: of the same inside the basis. size: of its root mean square. M, U, S, V, v: of the
    new state.
    """
    old = DECAY * torch.stack(start.W).double()
    step, expected = found["W"].double() - old, exact["W"].double() - old
    sizes = [x.square().mean((1, 2)).sqrt() for x in (step, expected)]
    result = {"update": relative(step, expected), "size": float((sizes[0] / sizes[1] - 1).abs().max())}
    if "U" in exact:
        U = exact["U"].double()
        result["soap"] = relative(step @ U, expected @ U)
    return result | {name: relative(found[name], exact[name]) for name in exact if name != "W"}


def relative(x: Tensor, y: Tensor) -> float:
    """Return the largest |x - y| / |y| of the matrices of a stack."""
    x, y = x.double().flatten(1), y.double().flatten(1)
    return float(((x - y).norm(dim=1) / y.norm(dim=1)).max())


def to_bfloat16(x: Tensor) -> Tensor:
    """Return what a kernel stores as bfloat16: rounded to nearest on a GPU, cut off by Triton's interpreter."""
    if not INTERPRETED:
        return x.bfloat16()
    return (x.float().contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def use_large_tiles(monkeypatch: pytest.MonkeyPatch, size: int = 128) -> None:
    """Let the interpreter work on tiles of up to `size` rows: few calls for matrices that are many small tiles."""
    if INTERPRETED:
        monkeypatch.setattr(launch, "TARGET", replace(launch.TARGET, max_tile=size))


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Return whether two lists of tensors are equal bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
