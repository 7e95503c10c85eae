"""The comparison of kernels with the definition that a device makes before it relies on them."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda import precompile, self_check, step, support
from cosmos_optim.rules import RULES
from tests.cuda.step_problems import INTERPRETED
from tests.cuda.test_support import batch_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SOUND = 5e-3  # half of `CLOSE`, so that the check does not fail for rounding; measured 2.0e-3
CUT_OFF = 7e-3  # the same for bfloat16, which the interpreter cuts off instead of rounding; measured 5.1e-3

interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")


@interpreted
@pytest.mark.parametrize(("rule", "rank", "m", "n"), [
    ("cosmos", 8, 24, 20), ("cosmos", 32, 40, 36), ("muon", 1, 24, 20), ("normuon", 1, 20, 24),
])  # fmt: skip
def test_good_kernels_are_close_to_the_definition(rule: str, rank: int, m: int, n: int) -> None:
    """The error is at most half of what the check allows."""
    assert self_check.step_error(RULES[rule], rank, m, n, CPU, torch.float32) < SOUND


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16])
def test_weights_and_momentum_are_compared_in_their_own_types(
    dtype: torch.dtype, momentum_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for these types write the user's weights. Their rounding is well within the bound."""
    stored: list[torch.dtype] = []
    real = step.SCHEDULES["cosmos"]

    def schedule(W: Any, G: Any, state: Any, *args: Any, **more: Any) -> Any:
        stored.extend((W.dtype, G.dtype, state.M.dtype))
        return real(W, G, state, *args, **more)

    monkeypatch.setitem(step.SCHEDULES, "cosmos", schedule)
    assert self_check.step_error(RULES["cosmos"], 8, 24, 20, CPU, dtype, momentum_dtype) < CUT_OFF
    assert stored == [dtype, dtype, momentum_dtype or torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 512), (512, 1371), (2048, 1104)])
@pytest.mark.parametrize(("rule", "rank"), [
    ("cosmos", 8), ("cosmos", 32), ("cosmos", 64), ("cosmos", 256), ("muon", 1), ("normuon", 1),
])  # fmt: skip
def test_the_kernels_of_this_gpu_work(rule: str, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A warning would be raised as an error here."""
    p = torch.empty(shape, dtype=dtype, device=CUDA)
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert self_check.kernels_work(p, RULES[rule], rank)


def first_rows_wrong(result: Any) -> Any:
    """Return what a kernel returned with the upper half of the rows of its first result a tenth too large."""
    X: Tensor = result[0] if isinstance(result, tuple) else result
    X[..., : X.shape[-2] // 2, :] *= 1.1
    return result


@interpreted
@pytest.mark.parametrize("kernel", ["project_transposed", "momentum_", "soap_half", "residual"])
def test_a_wrong_kernel_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows of its result are a tenth too large, which is 2.4e-2 to 6.9e-2 of the step or the state."""
    real = getattr(step, kernel)
    monkeypatch.setattr(step, kernel, lambda *args, **more: first_rows_wrong(real(*args, **more)))
    assert self_check.step_error(RULES["cosmos"], 8, 24, 20, CPU, torch.float32) > self_check.CLOSE


@interpreted
@pytest.mark.parametrize(("rule", "rank"), [("cosmos", 8), ("muon", 1), ("normuon", 1)])
def test_a_wrong_kernel_of_equal_rows_is_found(rule: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a step with the option launches it, so such a step is compared; a kernel that does nothing shows too."""

    def error() -> float:
        return self_check.step_error(RULES[rule], rank, 24, 20, CPU, torch.float32, equal_rows=True)

    assert error() < SOUND
    real = step.equalize_rows_

    def upper_rows_too_large(X: Tensor, norm_sq: Tensor) -> Tensor:
        new_norm_sq = real(X, norm_sq)
        first_rows_wrong(X)
        return new_norm_sq

    for wrong in (upper_rows_too_large, lambda X, norm_sq: norm_sq):
        monkeypatch.setattr(step, "equalize_rows_", wrong)
        assert error() > self_check.CLOSE


@interpreted
def test_wrong_eigenvectors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_check.eigh_error(8, CPU) < 2e-6  # measured 2.5e-7
    real = self_check.eigh
    monkeypatch.setattr(self_check, "eigh", lambda A: (real(A)[0], first_rows_wrong(real(A)[1])))
    assert self_check.eigh_error(8, CPU) > self_check.CLOSE


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all results of the check, so that each is computed; eigenvectors are good."""
    monkeypatch.setattr(self_check, "_results", {})
    monkeypatch.setattr(self_check, "eigh_error", lambda *args: 0.0)


def trouble(kind: str) -> float:
    """Return a wrong result, or raise what a compiler raises."""
    if kind == "raises":
        raise RuntimeError("out of shared memory")
    return {"wrong": 0.3, "nan": math.inf}[kind]


@pytest.mark.parametrize(("kind", "shown"), [
    ("wrong", "error 3.0e-01"), ("nan", "error inf"), ("raises", "error inf: RuntimeError: out of shared memory"),
])  # fmt: skip
@pytest.mark.parametrize("comparison", ["step_error", "eigh_error"])
@pytest.mark.usefixtures("unasked")
def test_kernels_that_do_not_work_are_reported_once(
    kind: str, shown: str, comparison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the rule, the device and the reason; from then on the answer is no."""
    monkeypatch.setattr(self_check, "step_error", lambda *args: 0.0)
    monkeypatch.setattr(self_check, comparison, lambda *args: trouble(kind))
    p, rule = torch.empty(40, 24), RULES["cosmos"]
    with pytest.warns(UserWarning, match="the kernels of rule 'cosmos' do not work on cpu") as warned:
        assert not self_check.kernels_work(p, rule, 8)
    assert len(warned) == 1 and shown in str(warned[0].message)
    with warnings.catch_warnings(action="error"):
        assert not self_check.kernels_work(p, rule, 8)


def test_nan_counts_as_an_infinite_error() -> None:
    """Comparisons with NaN are false, so that it would pass any bound."""
    y = torch.ones(3)
    assert self_check.relative_error(y * math.nan, y) == math.inf
    assert self_check.relative_error(1.5 * y, y) == pytest.approx(0.5)


@pytest.mark.usefixtures("unasked")
def test_each_kind_of_matrix_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds differ by rule, rank up to the next power of two, dtypes, width, orientation, alignment and equal rows."""
    asked: list[tuple[Any, ...]] = []

    def step_error(rule: Any, rank: int, m: int, n: int, device: torch.device, *types: Any) -> float:
        asked.append((rule.name, rank, m, n, *types))
        return 0.0

    monkeypatch.setattr(self_check, "step_error", step_error)
    cosmos, muon = RULES["cosmos"], RULES["muon"]
    for _ in range(2):
        for shape in ((640, 512), (512, 512), (1024, 1024)):  # one kind
            assert self_check.kernels_work(torch.empty(shape), cosmos, 32)
        assert self_check.kernels_work(torch.empty(640, 512), cosmos, 20)  # rounded up to 32 columns
    assert asked == [("cosmos", 32, 320, 272, torch.float32, None, False, False)]
    self_check.kernels_work(torch.empty(512, 640), cosmos, 32)
    self_check.kernels_work(torch.empty(640, 517), cosmos, 32)
    self_check.kernels_work(torch.empty(2048, 2048), cosmos, 32)
    self_check.kernels_work(torch.empty(640, 512), cosmos, 256)
    self_check.kernels_work(torch.empty(640, 512, dtype=torch.bfloat16), cosmos, 32)
    self_check.kernels_work(torch.empty(640, 512), muon, 1)
    self_check.kernels_work(torch.empty(640, 512), muon, 1, torch.bfloat16)
    self_check.kernels_work(torch.empty(640, 512, dtype=torch.bfloat16), cosmos, 32, corrected=True)
    self_check.kernels_work(torch.empty(640, 512), muon, 1, equal_rows=True)
    assert asked[1:] == [
        ("cosmos", 32, 272, 320, torch.float32, None, False, False),
        ("cosmos", 32, 320, 273, torch.float32, None, False, False),
        ("cosmos", 32, 1088, 1040, torch.float32, None, False, False),
        ("cosmos", 255, 320, 272, torch.float32, None, False, False),
        ("cosmos", 32, 320, 272, torch.bfloat16, None, False, False),
        ("muon", 1, 320, 272, torch.float32, None, False, False),
        ("muon", 1, 320, 272, torch.float32, torch.bfloat16, False, False),
        ("cosmos", 32, 320, 272, torch.bfloat16, None, True, False),
        ("muon", 1, 320, 272, torch.float32, None, False, True),
    ]


@pytest.mark.usefixtures("unasked")
def test_kernels_are_not_judged_while_launches_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were not launched wrote nothing: the comparison waits until they can be."""
    monkeypatch.setattr(self_check, "step_error", lambda *args: 1e3 if precompile.launches_disabled() else 0.0)
    p, rule = torch.empty(40, 24), RULES["cosmos"]
    with precompile._disable_launches():
        assert self_check.kernels_work(p, rule, 8)
    assert self_check._results == {} and not precompile.launches_disabled()
    assert self_check.kernels_work(p, rule, 8)
    assert list(self_check._results.values()) == [True]


def test_the_comparison_leaves_the_random_generator_alone() -> None:
    """A run must not depend on whether its kernels were compared before."""
    before = torch.get_rng_state()
    rule = RULES["cosmos"]
    self_check.random_state(rule, {**rule.defaults, "rank": 4}, 24, 20, CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.usefixtures("unasked")
def test_a_batch_is_not_supported_if_its_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch runs it instead, with a warning."""
    real = step.residual
    monkeypatch.setattr(step, "residual", lambda *args: first_rows_wrong(real(*args)))
    with pytest.warns(UserWarning, match="plain torch runs instead, more slowly"):
        assert not support.supported(batch_of(CUDA, (320, 272)))
