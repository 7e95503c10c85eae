"""Compare the schedules with their definition before their first use on a device.

One step of a small problem runs by kernels and by plain torch, from the same numbers, and the eigenvectors of a first
basis are checked. If something is wrong, or a kernel does not compile, this warns, and plain torch does the work.
Kernels are compiled for each kind of matrix, so there is one comparison for each kind: by rule, rank (rounded up to a
power of two), width, orientation, alignment, the types of weights and momentum, and whether rows get equal norm.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.kernels.jacobi import MAX_COLUMNS, eigh
from cosmos_optim.cuda.kernels.launch import on_device, power_of_two
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.cuda.precompile import compile_in_parallel, launches_disabled
from cosmos_optim.cuda.step import SCHEDULES
from cosmos_optim.engine.run import stacked_state
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.weight24 import join_weight
from cosmos_optim.rules.rule import M_SCALE, Rule, as_stored, stored_momentum

# A wrong kernel has a far larger error. Tests check tighter bounds.
CLOSE = 1e-2
# Symmetric products up to this width use another tile shape.
NARROW = 1024

_results: dict[Hashable, bool] = {}


def kernels_work(
    p: Tensor, rule: Rule, rank: int, momentum_dtype: torch.dtype | None = None, corrected: bool = False,
    equal_rows: bool = False,
) -> bool:  # fmt: skip
    """Return whether the schedule of a rule works for matrices like p (m, n); run the comparison once per kind.

    corrected: whether the weights have 24 bits.
    equal_rows: whether rows get equal norm before Newton-Schulz, by a kernel that no other step launches.
    """
    (m, n), rank = p.shape, min(rank, 255)
    is_narrow, is_wide, is_odd = min(m, n) <= NARROW, m < n, bool(max(p.stride()) * p.element_size() % 16)
    kind = (momentum_dtype, corrected, equal_rows)
    key = (p.device, rule.name, power_of_two(rank), p.dtype, is_narrow, is_wide, is_odd, *kind)
    if key not in _results:
        if launches_disabled():  # a kernel that was not launched cannot be compared
            return True
        short = 272 if is_narrow else 1040
        m, n = (short, short + 48 + is_odd) if is_wide else (short + 48, short + is_odd)
        works = [partial(step_error, rule, rank, m, n, p.device, p.dtype, *kind)]
        if rule.start is not None and rank <= MAX_COLUMNS:
            works.append(partial(eigh_error, rank, p.device))
        compile_in_parallel(p.device, works)
        _results[key] = all(within_bound(work, rule, p.device) for work in works)
    return _results[key]


def step_error(
    rule: Rule, rank: int, m: int, n: int, device: torch.device, dtype: torch.dtype,
    momentum_dtype: torch.dtype | None = None, corrected: bool = False, equal_rows: bool = False,
) -> float:  # fmt: skip
    """Return the largest relative error of update and state after one step by kernels."""
    ranked = {"rank": rank, "gamma": 0.25} if "rank" in rule.defaults else {}
    settings = {**rule.defaults, **ranked, "momentum_dtype": momentum_dtype, "equal_rows": equal_rows}
    arguments, t = rule.arguments(settings), torch.full((2, 1, 1), 3.0, dtype=torch.float32, device=device)
    G, state = random_state(rule, settings, m, n, device)
    # In float32: the error of plain torch in float16 can exceed the bound, 1.3e-2 if the basis has most columns.
    exact = rule.arguments({**settings, "ns_dtype": torch.float32})
    D, expected = rule.direction(G, state, t, alg=Algebra(m, n), **exact)

    W, grads = ([x.clone() for x in y.to(dtype)] for y in (torch.zeros_like(G), G))
    corrections = [torch.zeros_like(x, dtype=torch.int8) for x in W] if corrected else None
    stored = {name: [x.clone() for x in stack] for name, stack in stored_momentum(state.M, momentum_dtype).items()}
    thin = {k: v for k, v in state._asdict().items() if k != "M"}
    found = SCHEDULES[rule.name](
        MatrixList.weights(W, corrections), MatrixList.of(grads), rule.State(M=MatrixList.momentum(stored), **thin), t,
        lr=1.0, decay=0.0, grad_max=G.abs().amax((1, 2)), **arguments,
    )  # fmt: skip
    moved = torch.stack(W).float() if corrections is None else join_weight(torch.stack(W), torch.stack(corrections))
    pairs = [(moved, -D), (stacked_state(stored, torch.float32)["M"], expected.M)]
    pairs += [(getattr(found, k), getattr(expected, k)) for k, v in thin.items() if v is not None]
    return max(relative_error(x, y) for x, y in pairs)


def eigh_error(rank: int, device: torch.device) -> float:
    """Return the relative error of A = V diag(w) V' by the kernel that only first bases use."""
    X = torch.randn(2, rank, rank, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    A = (X @ X.mT).to(device)
    values, V = eigh(A)
    return relative_error((V * values[:, None, :]) @ V.mT, A)


def random_state(rule: Rule, settings: dict[str, Any], m: int, n: int, device: torch.device) -> tuple[Tensor, Any]:
    """Return two gradients and a state as in mid-training, without using the global random generator."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    G = draw(m, n).bfloat16().float()  # exact in every dtype
    state = {name: draw(*slot.shape).abs() for name, slot in rule.slots(m, n, settings).items()}
    state.pop(M_SCALE, None)
    state["M"] = as_stored(0.5 * G + 0.3 * draw(m, n), settings["momentum_dtype"])
    if "U" in state:
        r = state["U"].shape[-1]
        state["U"] = torch.linalg.qr(G.mT @ (G @ draw(n, r)))[0].contiguous()
        state["S"] = torch.eye(r, dtype=torch.float32, device=device).expand(2, -1, -1).contiguous()
    return G, rule.State(**state)


def relative_error(x: Tensor, y: Tensor) -> float:
    """Return |x - y| / |y|, infinite for NaN."""
    error = float((x.double() - y.double()).norm() / y.double().norm())
    return error if math.isfinite(error) else math.inf


def within_bound(work: partial[float], rule: Rule, device: torch.device, bound: float = CLOSE) -> bool:
    """Run the comparison, and warn if the kernels are wrong or cannot run."""
    try:
        with on_device(device):
            error, reason = work(), ""
    except Exception as failure:  # anything that the compiler or the driver raises
        error, reason = math.inf, f": {type(failure).__name__}: {str(failure)[:200]}"
    if error < bound:
        return True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    warnings.warn(
        f"the kernels of rule {rule.name!r} do not work on {name} (relative error {error:.1e}{reason}); plain torch "
        "runs instead, more slowly. Please report this with the versions of torch and triton",
        stacklevel=2,
    )
    return False
