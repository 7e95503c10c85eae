"""Laws that hold for any gradients. The table `LAWS` says which rule obeys which law; the tests run those pairs.

A law is a function of a rule and a problem, and its name is the name in `LAWS`. Short laws draw their problems from
hypothesis (shapes from 1 to 40, a batch, several steps, options of the rule), in fp64, and call `rule.direction`. Long
laws run 1,000 steps in fp32 on ill-conditioned gradients. Some laws also run on the optimizer classes.

Shapes: G (steps, batch, m, n) gradients, D of the same shape directions, U (batch, n, r) basis, S (batch, r, r).
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from cosmos_optim import OPTIMIZERS
from cosmos_optim.rules import RULES
from cosmos_optim.rules.rule import Rule
from tests.law_problems import Problem, advance, default_hyper, initial_state, problems, random, run

EXACT = 1e-7  # fp64, but a law compares two roundings of the first basis, and hypothesis may draw a small gap
ROUNDING = 1e-12  # fp64, no cancellation: a norm against a norm
ORTHONORMAL = 1e-5  # fp32 over 1,000 steps (a Gram matrix of unit columns rounds to about 1e-6)
SECOND_MOMENT = 1e-6  # negative eigenvalues of S, relative to its trace
LONG_STEPS = 1000
EXAMPLES = 60  # of each pair of a rule and a law: all take about 20 s of one core


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative Frobenius distance of corresponding matrices; between two zero matrices it is 0."""
    gap = torch.linalg.matrix_norm(actual - expected)
    return float((gap / torch.linalg.matrix_norm(expected).clamp(min=1e-300)).max())


def row_permutation(rule: Rule, problem: Problem) -> None:
    """Assert direction(P G) = P direction(G) for a permutation P."""
    h, G = problem.hyper(rule), problem.gradients(rule)
    order = torch.randperm(G.shape[-2], generator=torch.Generator().manual_seed(problem.seed))
    assert distance(run(rule, G[..., order, :], h)[0], run(rule, G, h)[0][..., order, :]) < EXACT


def odd(rule: Rule, problem: Problem) -> None:
    """Assert direction(-G) = -direction(G)."""
    h, G = problem.hyper(rule), problem.gradients(rule)
    assert distance(run(rule, -G, h)[0], -run(rule, G, h)[0]) < EXACT


def scale_invariance(rule: Rule, problem: Problem) -> None:
    """Assert direction(c G) = direction(G) for c > 0 and eps = 0, also for gradients with zero rows (0/0 is 0).

    c is a power of two, so that both sides round equally: without epsilon a rule may divide noise by noise.
    """
    h = problem.hyper(rule, eps=0.0)
    G = problem.gradients(rule).clone()
    if G.shape[-2] > 2:
        G[..., 0, :] = 0
    c = 2.0 ** (problem.seed % 121 - 60)
    D = run(rule, G, h)[0]
    assert torch.isfinite(D).all()
    assert distance(run(rule, c * G, h)[0], D) < EXACT


def unit_rms(rule: Rule, problem: Problem) -> None:
    """Assert that the direction has root mean square 1, or is 0 if the gradient has always been 0."""
    h = problem.hyper(rule, **({"normalize": True} if rule.name == "muon" else {}))
    rms = run(rule, problem.gradients(rule), h)[0].square().mean(dim=(-2, -1)).sqrt()
    assert (rms - 1).abs().max() < ROUNDING
    assert not run(rule, torch.zeros_like(problem.gradients(rule)), h)[0].any()


def residual_orthogonal(rule: Rule, problem: Problem) -> None:
    """Assert that the Muon half has no part in the one-sided basis, and the SOAP half has no part outside it."""
    h, G = problem.hyper(rule), problem.gradients(rule)
    D, state = run(rule, G, h | {"gamma": 1e12})  # the Muon half exceeds the other by far, unless the guard removes it
    U = state.U
    outside = D[-1] - D[-1] @ U @ U.mT
    held = torch.linalg.matrix_norm(outside) > 0.5 * torch.linalg.matrix_norm(D[-1])
    guarded = torch.linalg.matrix_norm(outside) < EXACT * torch.linalg.matrix_norm(D[-1])
    assert (held | guarded).all()
    assert (torch.linalg.matrix_norm(D[-1] @ U)[held] < EXACT * torch.linalg.matrix_norm(D[-1])[held]).all()
    D, state = run(rule, G, h | {"gamma": 0.0})
    U = state.U
    assert distance(D[-1] @ U @ U.mT, D[-1]) < EXACT


def batched_equals_single(rule: Rule, problem: Problem) -> None:
    """Assert that a stack of matrices has the directions of its matrices alone."""
    h, G = problem.hyper(rule), problem.gradients(rule)
    D, _ = run(rule, G, h)
    for i in range(G.shape[1]):
        assert distance(run(rule, G[:, i : i + 1], h)[0], D[:, i : i + 1]) < EXACT


def deterministic(rule: Rule, problem: Problem) -> None:
    """Assert that the same call gives the same bits, and never writes to the gradient or the old state."""
    h, G = problem.hyper(rule), problem.gradients(rule)
    state = run(rule, G[:-1], h)[1] if len(G) > 1 else initial_state(rule, G[0], h)
    given = [x for x in (G, *state) if x is not None]
    kept = [x.clone() for x in given]
    (first, one), (second, two) = (advance(rule, G[-1], state, len(G), h) for _ in range(2))
    assert torch.equal(first, second)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(given, kept, strict=True))


@cache
def long_run(name: str) -> list[dict[str, Tensor]]:
    """Return states of 1,000 fp32 steps, every 50, on gradients of condition 1e6 with changing singular vectors."""
    rule, (m, n) = RULES[name], (48, 32)
    h = default_hyper(rule, rank=8) | {"ns_steps": 1}  # the bases do not depend on Newton-Schulz
    strength = torch.logspace(0, -6, n)
    frames = [torch.linalg.qr(random(i, m if i % 2 else n, n))[0].float() for i in range(40)]
    state, samples = None, []
    for step in range(1, LONG_STEPS + 1):
        G = (frames[2 * (step * 7 % 20) + 1] * strength @ frames[2 * (step * 3 % 20)].mT).unsqueeze(0)
        state = state or initial_state(rule, G, h)
        _, state = advance(rule, G, state, step, h)
        if step % 50 == 0 or step < 5:
            samples.append({k: v for k, v in state._asdict().items() if k in "UOPSR"})
    return samples


def orthonormal_basis(rule: Rule) -> None:
    """Assert U'U = I, and the same for O and P, in all samples."""
    bases = [s[k] for s in long_run(rule.name) for k in "UOP" if k in s]
    assert bases
    for U in bases:
        assert (U.mT @ U - torch.eye(U.shape[-1])).abs().max() < ORTHONORMAL


def psd_second_moment(rule: Rule) -> None:
    """Assert that S and R are symmetric, bit for bit, and have no negative eigenvalue, to 1e-6 of the trace."""
    moments = [s[k].double() for s in long_run(rule.name) for k in "SR" if k in s]
    assert moments
    for S in moments:
        trace = S.diagonal(dim1=-2, dim2=-1).sum()
        assert trace > 0
        assert torch.equal(S, S.mT)
        assert torch.linalg.eigvalsh(S).min() >= -SECOND_MOMENT * trace


SHORT_LAWS: dict[str, Callable[[Rule, Problem], None]] = {
    law.__name__: law
    for law in (
        row_permutation,
        odd,
        scale_invariance,
        unit_rms,
        residual_orthogonal,
        batched_equals_single,
        deterministic,
    )
}
LONG_LAWS: dict[str, Callable[[Rule], None]] = {law.__name__: law for law in (orthonormal_basis, psd_second_moment)}


EVERY_RULE = {"scale_invariance", "batched_equals_single", "deterministic", "odd"}
COSMOS = EVERY_RULE | {"row_permutation", "unit_rms", "orthonormal_basis", "psd_second_moment"}
LAWS: dict[str, set[str]] = {
    "cosmos": COSMOS | {"residual_orthogonal"},
    "cosmos-two-sided": COSMOS,
    "muon": EVERY_RULE | {"row_permutation", "unit_rms"},
    "normuon": EVERY_RULE | {"row_permutation", "unit_rms"},
    # Not "row_permutation": if G has fewer than n directions, Adam divides noise by noise in the others.
    "soap": EVERY_RULE | {"orthonormal_basis"},
    "soap-two-sided": EVERY_RULE | {"orthonormal_basis"},
    "galore": EVERY_RULE | {"row_permutation"},
    "adam-mini": EVERY_RULE | {"row_permutation"},
    "adam": EVERY_RULE | {"row_permutation"},
}


def laws_of_rules(laws: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (rule, law) pairs to run."""
    return [(name, law) for name in RULES for law in sorted(LAWS[name]) if law in laws]


def test_every_rule_and_every_law_is_in_the_table() -> None:
    """A rule without laws, or a law with a spelling error, would silently not run."""
    assert LAWS.keys() == RULES.keys()
    assert set().union(*LAWS.values()) == SHORT_LAWS.keys() | LONG_LAWS.keys()


@pytest.mark.parametrize(("name", "law"), laws_of_rules(SHORT_LAWS))
@settings(max_examples=EXAMPLES)
@given(problem=problems())
def test_every_rule_obeys_its_laws(name: str, law: str, problem: Problem) -> None:
    """Run each law of the table on the problems that hypothesis draws."""
    SHORT_LAWS[law](RULES[name], problem)


@pytest.mark.parametrize("name", ["cosmos", "cosmos-two-sided"])
@settings(max_examples=EXAMPLES)
@given(problem=problems())
def test_cosmos_rotates_with_the_input_space(name: str, problem: Problem) -> None:
    """Compare direction(G Q) with direction(G) Q for an orthogonal Q: no coordinate of the inputs is special."""
    rule, G = RULES[name], problem.gradients(RULES[name])
    h = problem.hyper(rule)
    Q = torch.linalg.qr(random(problem.seed + 1, G.shape[-1], G.shape[-1]))[0]
    assert distance(run(rule, G @ Q, h)[0], run(rule, G, h)[0] @ Q) < EXACT


@pytest.mark.parametrize(("name", "law"), laws_of_rules(LONG_LAWS))
def test_every_rule_obeys_its_laws_over_many_steps(name: str, law: str) -> None:
    """Run each law of the table that needs many steps."""
    LONG_LAWS[law](RULES[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_not_change_gradients_and_is_deterministic(name: str) -> None:
    """Run the optimizer classes: `p.grad` keeps its object and bits, and two runs end in the same bits."""
    ends = []
    for _ in range(2):
        p = torch.nn.Parameter(random(0, 10, 6).float())
        opt = OPTIMIZERS[name]([("w", p)], lr=1e-2, weight_decay=0.1)
        for step in range(3):
            gradient = random(step + 1, 10, 6).float()
            p.grad = kept = gradient.clone()
            opt.step()
            assert p.grad is kept
            assert torch.equal(kept, gradient)
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


UNIT_RMS = {name: {} for name, made in OPTIMIZERS.items() if "unit_rms" in LAWS[made.rule]}


@pytest.mark.parametrize(("name", "options"), (UNIT_RMS | {"muon": {"normalize": True}}).items())
def test_the_root_mean_square_of_an_update_is_lr(name: str, options: dict[str, Any]) -> None:
    """Run the optimizer classes; a zero gradient must not change the weights."""
    p = torch.nn.Parameter(random(0, 10, 6))
    opt = OPTIMIZERS[name]([("w", p)], lr=1e-2, **options)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p, before)
    for step in range(3):
        before = p.detach().clone()
        p.grad = random(step + 1, 10, 6)
        opt.step()
        assert abs(float((p.detach() - before).square().mean().sqrt()) / 1e-2 - 1) < EXACT
