"""Step all parameters with plain torch: matrices in stacks by their rule, the rest elementwise.

`cuda.gpu_run` does the same on a GPU, with kernels for the matrices that they support.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from cosmos_optim.engine.batching import Batch, Entry, Matrix, batches, decay_of, signed_lr
from cosmos_optim.engine.elementwise import run_elementwise
from cosmos_optim.engine.gradients import GradientCheck
from cosmos_optim.engine.layout import Job, Location, Tensors
from cosmos_optim.engine.rounding import read_weight, write_
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules.rule import MOMENTUM, load_momentum, stored_momentum

Diagnostics = dict[str, dict[str, float]]
LocatedJob = tuple[Batch, Job]


def run(entries: Sequence[Entry], check: GradientCheck, diagnostics: Diagnostics | None) -> None:
    """Take one step of every entry. Entries without a non-zero gradient so far are only decayed."""
    live, fresh = advance(entries, check)
    copies: list[tuple[Tensor, Tensor]] = []
    assigned: Counter[object] = Counter()
    jobs: list[LocatedJob] = []
    for batch in batches([e for e in live if not e.rule.elementwise], fresh, copies):
        for stack, location in located_stacks(batch, assigned):
            jobs.append((stack, partial(run_stack, stack, location, check, diagnostics)))
    run_jobs(jobs)
    run_elementwise(live, check.skip)
    write_back(copies)


def advance(entries: Sequence[Entry], check: GradientCheck) -> tuple[list[Entry], set[Tensor]]:
    """Advance the step count of every entry that has had a non-zero gradient, and decay the others.

    Return the advanced entries, and the parameters with their first non-zero gradient.
    """
    live = [e for e, started in zip(entries, check.started, strict=True) if started]
    fresh = {e.p for e, first in zip(entries, check.fresh, strict=True) if first}
    steps = [e.state["step"] for e in live]
    if live and check.skip is None:
        torch._foreach_add_(steps, 1.0)
    elif live:
        zero_if_skipped = 1.0 - check.skip.float()  # type: ignore[union-attr]
        torch._foreach_add_(steps, zero_if_skipped, alpha=1.0)  # without alpha, torch would read the tensor on the host
    for e, started in zip(entries, check.started, strict=True):
        if not started and e.group["weight_decay"]:
            decay_(e)
    return live, fresh


def decay_(e: Entry) -> None:
    """Multiply a parameter by its group's decay."""
    p, correction = e.layout.local(e.p), e.correction
    if correction is None:
        p.mul_(decay_of(e.group))
    else:
        write_(p, read_weight(p, torch.float32, correction) * decay_of(e.group), correction=correction)


def located_stacks(batch: Batch, assigned: Counter[object]) -> Iterator[tuple[Batch, Location]]:
    """Return the stacks of a batch, each with its location; `assigned` counts the matrices of each team so far."""
    for stack in batch.stacks():
        location = stack.location.after(assigned[stack.location.team])
        assigned[stack.location.team] += len(stack.matrices)
        yield stack, location


def run_jobs(jobs: Sequence[LocatedJob]) -> None:
    """Run all jobs, team by team: all processes of a team have the same jobs in the same order."""
    for team in dict.fromkeys(batch.location.team for batch, _ in jobs):
        together = [(batch, job) for batch, job in jobs if batch.location.team is team]
        first = together[0][0]
        first.location.run_jobs([job for _, job in together], first.device)


def write_back(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy flattened parameters back to where they are stored."""
    for stored, flat in copies:
        stored.copy_(flat)


def run_stack(stack: Batch, location: Location, check: GradientCheck, diagnostics: Diagnostics | None) -> None:
    """Take the step of one stack: load, compute first bases if needed, compute the direction, store, apply."""
    grad_max = stacked_grad_max(stack, check)
    D, new = direction_of(stack, location, grad_max, diagnostics)
    store_(stack.state(), new, check.skip)
    apply_(
        stack.params, D, signed_lr(stack.group), decay_of(stack.group), check.skip,
        grad_max=grad_max if stack.rule.constant_size else None,
        seeds=stack.steps if stack.group["stochastic_rounding"] else None,
        corrections=stack.corrections,
    )  # fmt: skip


def stacked_grad_max(stack: Batch, check: GradientCheck) -> Tensor:
    """Return the largest |g| of each matrix of a stack, (B,)."""
    by_parameter = check.grad_max_by_parameter
    return torch.stack([by_parameter[x.entry.p][x.index] for x in stack.matrices]).to(stack.device)


def direction_of(
    stack: Batch, location: Location, grad_max: Tensor, diagnostics: Diagnostics | None
) -> tuple[Tensor, Tensors]:
    """Return the direction of a stack and its new state, as stacked tensors; write nothing."""
    rule, arguments = stack.rule, stack.rule.arguments(stack.group)
    dtype = torch.promote_types(stack.params[0].dtype, torch.float32)
    t = torch.stack(stack.steps).to(dtype).view(-1, 1, 1)

    def take_step(alg: Algebra, G: Tensor, tensors: Tensors, t: Tensor, mine: slice) -> tuple[Tensor, Tensors]:
        state = rule.State(**tensors)
        if stack.fresh and rule.start is not None:
            state = rule.start(G, state, alg=alg)
        D, new = rule.direction(G, state, t, alg=alg, **arguments)
        if diagnostics is not None:
            values = {} if rule.diagnose is None else rule.diagnose(G, D, state, new, eps=stack.group["eps"], alg=alg)
            values["update_rms"] = update_rms(D, alg, grad_max[mine] if rule.constant_size else None)
            record(diagnostics, stack.matrices[mine], values)
        return D, {name: tensor for name, tensor in new._asdict().items() if tensor is not None}

    G, state = stacked(stack.grads, dtype), stacked_state(stack.state(), dtype)
    return location.run(take_step, location.algebra(stack.m, stack.n), G, state, t)


def update_rms(D: Tensor, alg: Algebra, grad_max: Tensor | None) -> Tensor:
    """Return the root mean square of each direction as it is applied; `grad_max` as for `apply_`."""
    moves = 1.0 if grad_max is None else (grad_max > 0).view(-1, 1, 1)
    return (alg.norm_sq(D) / (alg.m * alg.n) * moves).sqrt()


def record(diagnostics: Diagnostics, matrices: Sequence[Matrix], values: Tensors) -> None:
    """Add the values of each matrix to the diagnostics. The host waits for them."""
    for key, tensor in values.items():
        for matrix, value in zip(matrices, tensor.flatten().tolist(), strict=True):
            diagnostics.setdefault(matrix.name, {})[key] = value


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack matrices of equal shape for computation in `dtype`."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0).to(dtype)
    return torch.stack(list(tensors)).to(dtype)


def stacked_state(state: dict[str, list[Tensor]], dtype: torch.dtype) -> Tensors:
    """Stack all state for computation in `dtype`."""
    stacks = {name: stacked(tensors, dtype) for name, tensors in state.items() if name not in MOMENTUM}
    M = {name: stacked(state[name], state[name][0].dtype) for name in MOMENTUM if name in state}
    return stacks | {"M": load_momentum(M, dtype)} if M else stacks


def store_(state: dict[str, list[Tensor]], new: Tensors, skip: Tensor | None) -> None:
    """Write stacked state back to its tensors, unless `skip` is True."""
    if "M" in state:  # the definition has rounded M already, so this is exact
        new = new | stored_momentum(new["M"], state["M"][0].dtype)
    for name, tensors in state.items():
        value = new[name]
        if skip is not None:
            value = torch.where(skip, stacked(tensors, value.dtype), value)
        torch._foreach_copy_(tensors, list(value.unbind(0)))


def apply_(
    params: Sequence[Tensor], D: Tensor, lr: float | Tensor, decay: float | Tensor, skip: Tensor | None, *,
    grad_max: Tensor | None = None, seeds: Sequence[Tensor] | None = None, corrections: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Update W <- decay W - lr D for each parameter, unless `skip` is True.

    Args:
        grad_max: the largest |g| of each matrix, (B,). If given, a matrix with a zero gradient is only decayed; an
            update of constant size (`Rule.constant_size`) would move it.
        seeds: step counts. If given, bfloat16 parameters are rounded stochastically.
        corrections: if given, W has the 24 bits of a bfloat16 parameter and its correction.
    """
    rates = lr if grad_max is None else (grad_max > 0).to(D.dtype).view(-1, 1, 1) * lr
    D = D * rates
    needs_no_rounding = all(p.dtype == D.dtype for p in params)
    if needs_no_rounding and skip is None and seeds is None:
        if isinstance(decay, Tensor) or decay != 1.0:
            torch._foreach_mul_(list(params), decay)
        torch._foreach_sub_(list(params), list(D.unbind(0)))
        return
    for i, p in enumerate(params):
        correction = None if corrections is None else corrections[i]
        old = read_weight(p, D.dtype, correction)
        new = old * decay - D[i]
        if skip is not None:
            new = torch.where(skip, old, new)
        write_(p, new, None if seeds is None else seeds[i], correction)
