"""The schedules of `cuda/step.py` equal the definitions in `rules`, over every option that the kernels support."""

from functools import cache

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.engine.rounding import stochastic_bfloat16
from cosmos_optim.linalg.newton_schulz import GRAM_ASPECT
from tests.cuda.step_cases import BF16, LARGE, SLOW, SMALL
from tests.cuda.step_problems import (
    DECAY,
    INTERPRETED,
    LR,
    Case,
    Problem,
    Stacks,
    definition,
    equal,
    errors,
    problem,
    relative,
    schedule,
    to_bfloat16,
    use_large_tiles,
)

# Relative errors of one step against the definition in float64; "measured" is the worst case under the interpreter and
# on an H200.
# The update's error is that of Newton-Schulz in float16, which keeps 11 bits and amplifies small singular values.
UPDATE = 4.5e-3  # measured 2.0e-3
UPDATE_OF_FEW_COLUMNS = 8e-3  # less averages out in 24 columns than in 640; measured 3.7e-3
# Few columns of two harder kinds: a wide residual N - N U U' is of rank n - r, nearly square, and has small singular
# values; and from an aspect of 1.5 on rounding grows while the Gram matrix is carried through three iterations.
UPDATE_OF_FEW_HARD_COLUMNS = 1.8e-2  # measured 8.0e-3
# Condition 1e6: most singular values are near or below the rounding of float16.
UPDATE_ILL = 1.2e-2  # measured 4.9e-3
UPDATE_ILL_OF_FEW_COLUMNS = 5e-2  # measured 2.2e-2
UPDATE_BF16 = 8e-3  # the step continues from the momentum as stored, the definition rounds at its end; measured 3.7e-3
UPDATE_WITHOUT_MUON = 6e-5  # no Newton-Schulz in it; measured 2.9e-5
SIZE = 4.5e-5  # RMS of a normalized update; two bfloat16 parts hold 16 bits, cut by the interpreter; measured 2.0e-5
SIZE_OF_B = 2e-3  # Muon without normalization: the error of |B|; measured 9.3e-4
SOAP = 5.5e-4  # the update inside the basis; with row_beta2 each row's factor depends on B; measured 2.3e-4
SOAP_ALONE = 9e-5  # the same without row_beta2; measured 3.6e-5
SOAP_OF_256 = 3.5e-4  # at rank 256 the tensor cores cut long sums; measured 1.6e-4
SOAP_BF16 = 5e-3  # measured 2.0e-3
M_ERROR = 7e-8  # one float32 multiply-add; measured 2.8e-8
M_ERROR_BF16 = 5e-3  # 8 bits: 2^-7 / sqrt(3), cut off by the interpreter; a GPU rounds, half of it; measured 3.3e-3
U_ERROR = 1.8e-6  # products with 22 bits of each factor, then CholeskyQR; measured 7.1e-7
U_ERROR_OF_SMALL_GAPS = 3.5e-5  # rounding / gap, for nearly all columns or few over six decades; measured 1.5e-5
S_ERROR = 1.8e-6  # measured 7.5e-7
V_ERROR = 7e-7  # measured 2.9e-7
ROWS = 1.5e-4  # v holds squares of B, summed over a row, which averages their rounding; measured 6.6e-5
# On a GPU the same source may be contracted to multiply-adds differently for another dtype.
ROUNDED_APART = 0.0 if INTERPRETED else 1e-4


def bounds(case: Case) -> dict[str, float]:
    """Return the bound of each error of a case."""
    h, ill, bf16 = case.settings, case.gradient == "condition 1e6", case.momentum is BF16
    few = min(case.m, case.n) < 128
    hard = case.m < case.n or case.m >= GRAM_ASPECT * case.n
    if h.get("gamma") == 0:
        update = UPDATE_WITHOUT_MUON
    elif ill:
        update = UPDATE_ILL_OF_FEW_COLUMNS if few else UPDATE_ILL
    elif few and hard:
        update = UPDATE_OF_FEW_HARD_COLUMNS
    elif bf16:
        update = UPDATE_BF16
    else:
        update = UPDATE_OF_FEW_COLUMNS if few else UPDATE
    soap = SOAP if h.get("row_beta2") is not None else SOAP_OF_256 if h.get("rank", 0) > 128 else SOAP_ALONE
    small_gaps = (ill and few) or h.get("rank", 0) > 0.9 * case.n
    return {
        "update": update,
        "size": SIZE_OF_B if case.rule == "muon" and not h["normalize"] else SIZE,
        "soap": SOAP_BF16 if bf16 else soap,
        "M": M_ERROR_BF16 if bf16 else M_ERROR,
        "U": U_ERROR_OF_SMALL_GAPS if small_gaps else U_ERROR,
        "S": S_ERROR,
        "V": V_ERROR,
        "v": ROWS,
    }


def check(found: dict[str, float], case: Case) -> None:
    """Assert that every error is within its bound; show all of them if one is not."""
    limits = bounds(case)
    print(" ".join(f"{name} {value:.1e}" for name, value in found.items()))  # pytest -rP: what to record above
    too_large = {name: f"{value:.1e} > {limits[name]:.1e}" for name, value in found.items() if not value < limits[name]}
    assert not too_large, (too_large, found)


CASES = [
    *SMALL,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, marks=pytest.mark.gpu) for name in LARGE),
]


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_definition(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update, and every part of the state, from the same numbers."""
    case = {**SMALL, **SLOW, **LARGE}[name]
    if case.settings.get("rank", 0) >= 64:
        use_large_tiles(monkeypatch, 128 if name in SLOW else 32)
    start = problem(case, device)
    check(errors(schedule(case, start), definition(case, start), start), case)


# -- gradients of low rank --------------------------------------------------------------------------------------------

LOW_RANK = Case("cosmos", 37, 29, {"rank": 8}, gradient="rank 5")


def test_a_gradient_of_low_rank_gives_the_step_of_the_definition(device: torch.device) -> None:
    """Three of eight columns hold rounding only, and so does the residual: both are left out of the update.

    The definition runs in float32 here, because what counts as rounding noise depends on the dtype.
    """
    start = problem(LOW_RANK, device)
    found = errors(schedule(LOW_RANK, start), definition(LOW_RANK, start, torch.float32), start)
    check(found, LOW_RANK)
    assert found["update"] < UPDATE_WITHOUT_MUON


def test_without_the_guard_a_gradient_of_low_rank_gives_a_finite_step_of_full_size(device: torch.device) -> None:
    """The update then holds normalized rounding noise, which nothing can be compared with; the state can be."""
    case = Case("cosmos", 37, 29, {"rank": 8, "residual_guard": 0.0}, gradient="rank 5")
    start = problem(case, device)
    found = schedule(case, start)
    apart = errors(found, definition(case, start, torch.float32), start)
    assert all(x.isfinite().all() for x in found.values())
    check({name: apart[name] for name in ("M", "U", "S", "V", "size")}, case)


# -- bfloat16 parameters ----------------------------------------------------------------------------------------------


NARROW = Case("cosmos", 20, 17, {"rank": 4}, weights=BF16, grads=BF16, batch=2)


@cache
def float32_step(device: torch.device) -> tuple[Problem, Tensor]:
    """Return a problem with bfloat16 parameters, and W after its step if the same numbers are stored in float32."""
    start = problem(NARROW, device)
    wide = Problem([w.float() for w in start.W], start.G, start.state)
    return start, schedule(NARROW, wide)["W"]


def share_apart(a: Tensor, b: Tensor) -> float:
    """Return the share of elements that are not equal."""
    return float((a != b).double().mean())


def test_a_bfloat16_parameter_is_the_float32_result_rounded(device: torch.device) -> None:
    """Nothing before the last rounding depends on the parameter's dtype."""
    start, exact = float32_step(device)
    found = schedule(NARROW, start)["W"]
    assert found.dtype is BF16
    assert share_apart(found, to_bfloat16(exact)) <= ROUNDED_APART


def test_stochastic_rounding_draws_what_the_cpu_draws(device: torch.device) -> None:
    """The same hash of element and seed as `stochastic_bfloat16`; each matrix has its seed."""
    seeds = torch.tensor([3, 70000], dtype=torch.int32, device=device)
    start, exact = float32_step(device)
    found = schedule(NARROW, start, seeds=seeds)["W"]
    expected = torch.stack([stochastic_bfloat16(w, seed) for w, seed in zip(exact, seeds, strict=True)])
    assert share_apart(found, expected) <= ROUNDED_APART
    assert share_apart(found, to_bfloat16(exact)) > 0.1  # it was not rounded to nearest


# -- one small step of each kind, in other ways -----------------------------------------------------------------------

KINDS = {
    "cosmos": Case("cosmos", 20, 17, {"rank": 4}, batch=2),
    "cosmos without rows": Case("cosmos", 17, 20, {"rank": 4, "row_beta2": None}, batch=2),
    "muon": Case("muon", 20, 17, batch=2),
    "muon, normalized": Case("muon", 17, 20, {"normalize": True}, batch=2),
    "normuon": Case("normuon", 20, 17, batch=2),
}


@cache
def plain_step(name: str, device: torch.device) -> tuple[Problem, Stacks]:
    """Return a problem, and the step that others are compared with."""
    start = problem(KINDS[name], device)
    return start, schedule(KINDS[name], start)


@pytest.mark.parametrize("name", ["cosmos", "muon", "normuon"])
def test_a_skipped_step_writes_nothing(name: str, device: torch.device) -> None:
    """W and M keep every bit; the thin state is returned, and `scatter_` skips it."""
    start, _ = plain_step(name, device)
    found = schedule(KINDS[name], start, skip=torch.tensor(True, device=device))
    assert equal(list(found["W"]), start.W)
    assert equal(list(found["M"]), start.state["M"])


@pytest.mark.parametrize("name", ["cosmos", "muon, normalized", "normuon"])
def test_rate_and_decay_on_the_device_give_the_same_step_as_on_the_host(name: str, device: torch.device) -> None:
    """Bit for bit: learning rate and decay as float64 scalars, and a skip flag that is false."""
    start, plain = plain_step(name, device)
    lr, decay = (torch.tensor(x, dtype=torch.float64, device=device) for x in (LR, DECAY))
    found = schedule(KINDS[name], start, lr=lr, decay=decay, skip=torch.tensor(False, device=device))
    assert equal([*found.values()], [*plain.values()])


@pytest.mark.parametrize("name", ["cosmos", "muon", "muon, normalized", "normuon"])
def test_a_matrix_without_a_gradient_is_only_decayed(name: str, device: torch.device) -> None:
    """Its momentum decays; its neighbour takes the step that it takes beside any other matrix, bit for bit."""
    case, (start, plain) = KINDS[name], plain_step(name, device)
    still = Problem(start.W, [start.G[0], torch.zeros_like(start.G[1])], start.state)
    found = schedule(case, still)
    torch.testing.assert_close(found["W"][1], DECAY * start.W[1], rtol=1e-6, atol=0)
    beta = case.settings["betas"][0] if case.rule == "cosmos" else case.settings["momentum"]
    torch.testing.assert_close(found["M"][1], beta * start.state["M"][1], rtol=1e-6, atol=0)
    assert all(torch.equal(found[key][0], plain[key][0]) for key in found)


def test_a_matrix_without_any_gradient_so_far_stays_finite(device: torch.device) -> None:
    """Zero gradient, zero momentum, zero moments: nothing but decay happens, and the basis stays."""
    case = KINDS["cosmos"]
    start = problem(case, device)
    for tensors in (start.G, *(start.state[name] for name in "MSVv")):
        for x in tensors:
            x.zero_()
    found = schedule(case, start)
    assert all(x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found["W"], DECAY * torch.stack(start.W), rtol=1e-6, atol=0)
    torch.testing.assert_close(found["U"], torch.stack(start.state["U"]), rtol=0, atol=U_ERROR)


def test_a_negative_learning_rate_moves_the_other_way(device: torch.device) -> None:
    """It is what `maximize` passes. |W| is a hundred times the step, so W's rounding shows."""
    start, plain = plain_step("cosmos", device)
    old = DECAY * torch.stack(start.W).double()
    up = schedule(KINDS["cosmos"], start, lr=-LR)["W"] - old
    assert relative(up, old - plain["W"]) < 3e-5


def test_equal_factors_for_all_rows_give_the_step_without_factors(device: torch.device) -> None:
    """With beta 1 v stays 1, so that all rows have one factor; |D|^2 is then summed by another kernel."""
    plain = KINDS["cosmos without rows"]
    case = Case("cosmos", plain.m, plain.n, {**plain.options, "row_beta2": 1.0}, batch=2)
    start, expected = plain_step("cosmos without rows", device)
    ones = [torch.ones(plain.m, 1, device=device) for _ in start.W]
    found = schedule(case, Problem(start.W, start.G, start.state | {"v": ones}))
    old = DECAY * torch.stack(start.W).double()
    assert relative(found["W"] - old, expected["W"] - old) < SIZE
    assert equal(list(found["v"]), ones)
