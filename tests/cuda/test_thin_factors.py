"""The arithmetic on thin factors: one kernel for each line of the algorithm, against its formula in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.basis_second_moment import second_moment
from cosmos_optim.cuda.kernels.gains import muon_gain, norm_and_weight, update_coefficients
from cosmos_optim.cuda.kernels.gather import can_gather, gather, scatter_
from cosmos_optim.cuda.kernels.power_step import power_sum, scale_for_power_step
from cosmos_optim.cuda.kernels.reductions import norm_sq_and_max
from cosmos_optim.cuda.kernels.soap_half import soap_half
from cosmos_optim.cuda.kernels.split_precision import split_both
from cosmos_optim.cuda.kernels.thin_qr import MAX_COLUMNS, orthonormalize, thin_product_parts
from tests.cuda.reference import BFLOAT16_PARTS, FLOAT32, add_parts, orthonormal_columns, relative_error, sum_of_parts

# Rows and columns of a thin factor: less than a block, more than one, a rank that is not a power of two.
SHAPES = [(20, 4), (75, 9), (70, 16)]
GPU_SHAPES = [(700, 64), (517, 80), (300, 128), (300, 200)]
# Ranks above 128, for which three of the wrappers run in torch.
RANKS = [8, 256]
SIZES = [1e-15, 1.0, 1e15]  # squares of the tracked columns stay float32 numbers, as those of S and V must
GUARD = 1e-5  # above 0: entries and columns of rounding noise do not count


@pytest.fixture(params=range(4))
def shape(request: pytest.FixtureRequest, device: torch.device) -> tuple[int, int]:
    """Return (k, r), small for the interpreter."""
    shapes = SHAPES if device.type == "cpu" else GPU_SHAPES
    if request.param >= len(shapes):
        pytest.skip("the GPU has one shape more")
    return shapes[request.param]


@pytest.fixture
def size(shape: tuple[int, int]) -> float:
    """Return the scale of the numbers, another one for each shape: all pairs would take a minute."""
    shapes = SHAPES if shape in SHAPES else GPU_SHAPES
    return SIZES[shapes.index(shape) % len(SIZES)]


def random_moment(r: int, size: float, device: torch.device) -> Tensor:
    """Return two second moments (2, r, r) with eigenvalues over four decades."""
    Q = torch.linalg.qr(torch.randn(2, r, r))[0]
    return ((Q * torch.logspace(0, -4, r)) @ Q.mT * size**2).contiguous().to(device)


def norm_sq(X: Tensor) -> Tensor:
    """Return |X|^2 of each matrix in double precision."""
    return X.double().square().sum((1, 2))


def test_scale_for_power_step_divides_by_the_scale_of_the_power_step(
    shape: tuple[int, int], size: float, device: torch.device
) -> None:
    """Return Y / c in the parts that `project_transposed` multiplies, and c, which is 1 for a zero matrix."""
    k, r = shape
    Y, S = torch.randn(2, k, r).to(device) * size, random_moment(r, size, device)
    Y[1], S[1] = 0, 0
    parts, y_max, c = scale_for_power_step(Y, S, *norm_sq_and_max(Y))
    exact_c = (norm_sq(Y) + S.double().diagonal(dim1=-2, dim2=-1).sum(-1)).sqrt()[0]
    assert relative_error(c[0], exact_c) < FLOAT32
    assert float(c[1]) == 1
    value = torch.ldexp(sum_of_parts(parts, r), torch.frexp(y_max.view(-1, 1, 1)).exponent - 10)
    assert relative_error(value[0], Y[0].double() / exact_c) < FLOAT32
    assert not parts[:, 1].any()
    assert not parts[..., r:].any()
    assert relative_error(y_max[0], Y[0].double().abs().max() / exact_c) < FLOAT32


def check_power_sum(k: int, r: int, size: float, device: torch.device) -> None:
    """Assert that the sum equals its formula, and that the norms of its columns make the same basis."""
    U, S = orthonormal_columns(k, r, device), random_moment(r, size, device)
    HU, c = torch.randn(2, k, r).to(device) * size, torch.tensor([1.0, 3.0], device=device).view(2, 1, 1) * size
    Y, columns = power_sum(U, S, HU, c, 0.9)
    u, s, hu, scale = (x.double() for x in (U, S, HU, c))
    exact = 0.9 * u @ (s / scale**2) + 0.1 * hu / scale
    assert relative_error(Y, exact) < FLOAT32
    assert (columns is None) == (r > MAX_COLUMNS)
    # Norms summed in another order differ by rounding, which moves entries of at most 1.
    torch.testing.assert_close(orthonormalize(Y, U, columns), orthonormalize(Y, U), rtol=0, atol=1e-6)


def test_power_sum_equals_its_formula_in_float64(shape: tuple[int, int], size: float, device: torch.device) -> None:
    """Compute beta U S / c^2 + (1 - beta) HU / c."""
    check_power_sum(*shape, size, device)


@pytest.mark.parametrize("r", [6, 130])
def test_power_sum_takes_rounding_noise_in_S_for_zero(r: int, device: torch.device) -> None:
    """A diagonal entry far below the trace, and products far below the two columns that they are of."""
    U, S = orthonormal_columns(40 + r, r, device), torch.eye(r, device=device).repeat(2, 1, 1)
    S[:, 1, 1], S[:, 1, 2], S[:, 2, 1], S[:, 0, 3], S[:, 3, 0] = 1e-12, 1e-7, 1e-7, 1e-6, 1e-6
    S[:, 4, 4], S[:, 4, 5], S[:, 5, 4] = 1e-4, 1e-6, 1e-6  # small, but real
    expected = S.clone()
    expected[:, 1], expected[:, :, 1], expected[:, 0, 3], expected[:, 3, 0] = 0, 0, 0, 0
    Y, _ = power_sum(U, S, torch.zeros_like(U), torch.ones(2, 1, 1, device=device), 0.9)
    assert relative_error(Y, 0.9 * U.double() @ expected.double()) < FLOAT32
    assert not Y[..., 1].any()


def test_scale_for_power_step_takes_rounding_noise_for_zero(device: torch.device) -> None:
    """An entry far below the largest of its row; rows may be of any size."""
    Y = torch.randn(2, 70, 6).to(device) * torch.logspace(0, -12, 70).to(device)[:, None]
    Y[:, :, 2] = 1e-6 * Y.abs().amax(-1)
    Y[:, ::2, 4] = 1e-4 * Y[:, ::2].abs().amax(-1)
    parts, _, _ = scale_for_power_step(Y, torch.zeros(2, 6, 6, device=device), *norm_sq_and_max(Y))
    assert not parts[..., 2].any()
    assert bool((parts[0, :, :2, 4] != 0).any())


@pytest.mark.parametrize("r", RANKS)
def test_power_sum_takes_every_rank_up_to_256(r: int, device: torch.device) -> None:
    """Kernels take 128 columns, torch takes more."""
    check_power_sum(r + 20, r, 1.0, device)


def check_second_moment(k: int, r: int, size: float, device: torch.device) -> None:
    """Assert that S in the new basis equals its formula and is symmetric to the last bit."""
    U, U_old = orthonormal_columns(k, r, device), orthonormal_columns(k, r, device)
    S, GU = random_moment(r, size, device), torch.randn(2, k + 3, r).to(device) * size
    C, E = thin_product_parts(U, U_old), thin_product_parts(GU, GU, gain=1 - 0.95)
    found, tracked = second_moment(S, C, E, 0.95, GUARD)
    C, gu = U.double().mT @ U_old.double(), GU.double()
    assert relative_error(found, 0.95 * C @ S.double() @ C.mT + 0.05 * gu.mT @ gu) < FLOAT32
    assert torch.equal(found, found.mT)
    assert tracked.shape == (2, 1, r)
    assert tracked.all()


def test_second_moment_equals_its_formula_in_float64(shape: tuple[int, int], size: float, device: torch.device) -> None:
    """Compute beta C S C' + (1 - beta) (GU)'GU with C = U'U_old."""
    check_second_moment(*shape, size, device)


@pytest.mark.parametrize("r", RANKS)
def test_second_moment_takes_every_rank_up_to_256(r: int, device: torch.device) -> None:
    """Kernels take 128 columns, torch takes more."""
    check_second_moment(r + 20, r, 1.0, device)


@pytest.mark.parametrize("r", [5, 130])
def test_a_column_is_tracked_if_past_or_present_gradients_reach_it(r: int, device: torch.device) -> None:
    """A guard of 0 tracks every column."""
    U = orthonormal_columns(r + 30, r, device)
    past = torch.tensor([1.0, 1e-3, 1e-14, 1e-14, 0.0] + [1.0] * (r - 5))
    now = torch.tensor([1e-3, 0.0, 1e-5, 1e-12, 0.0] + [1.0] * (r - 5)) / r
    S = torch.diag_embed(past).repeat(2, 1, 1).to(device)
    GU = torch.randn(2, 40, r).to(device) * now.to(device)
    grams = thin_product_parts(U, U), thin_product_parts(GU, GU, gain=0.5)
    tracked = second_moment(S, *grams, 0.5, GUARD)[1]
    if r == 5:
        assert tracked[0, 0].tolist() == [1, 1, 1, 0, 0]
    else:  # after one large gradient the third column is too small a share of this one
        assert tracked[0, 0, :5].tolist() == [1, 1, 0, 0, 0]
        assert tracked[0, 0, 5:].all()
    assert second_moment(S, *grams, 0.5, 0.0)[1].all()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("extra", [0.0, 1.0])
def test_soap_half_equals_adam_in_float64(
    shape: tuple[int, int], inside: bool, extra: float, device: torch.device
) -> None:
    """V, P, -N U in parts and both squared norms, with eps in both places and with Nesterov's extra step."""
    k, r = shape
    V, GU, NU = torch.rand(2, k, r).to(device), torch.randn(2, k, r).to(device), torch.randn(2, k, r).to(device)
    tracked = (torch.arange(r, device=device) % 3 > 0).float().expand(2, 1, r).contiguous()
    t = torch.tensor([1.0, 300.0], device=device).view(2, 1, 1)
    found, P, minus_NU, norm_sq_parts = soap_half(
        V, GU, NU, tracked, t, betas=(0.9, 0.9999), eps=1e-4, eps_inside_root=inside, extra_steps=extra, guard=GUARD
    )
    exact = 0.9999 * V.double() + 0.0001 * GU.double().square()
    steps = t.double()
    c1, c2 = 1 - 0.9 ** (steps + extra), 1 - 0.9999**steps
    root = ((exact + 1e-4) / c2).sqrt() if inside else (exact / c2).sqrt() + 1e-4
    assert relative_error(found, exact) < FLOAT32
    assert relative_error(P, NU.double() / c1 / root * tracked.double()) < FLOAT32
    for x, parts in zip((P, NU), norm_sq_parts, strict=True):
        assert relative_error(parts.sum(1), norm_sq(x)) < FLOAT32
    assert torch.equal(minus_NU, split_both(-NU)[1])


@pytest.mark.parametrize(("guard", "kept"), [(GUARD, False), (0.0, True)])
def test_soap_half_leaves_out_rounding_noise_unless_there_is_no_guard(
    guard: float, kept: bool, device: torch.device
) -> None:
    """An entry that has been far below the largest of its row in every step."""
    GU = torch.randn(2, 30, 8).to(device) * torch.logspace(0, -9, 30).to(device)[:, None]
    GU[:, :, 3] = 1e-7 * GU.abs().amax(-1)
    tracked, t = torch.ones(2, 1, 8, device=device), torch.ones(2, 1, 1, device=device)
    given = {"betas": (0.9, 0.98), "eps": 0.0, "eps_inside_root": False, "extra_steps": 0.0, "guard": guard}
    _, P, _, _ = soap_half(torch.zeros_like(GU), GU, 0.1 * GU, tracked, t, **given)
    assert bool((P[..., 3] != 0).all() if kept else (P[..., 3] == 0).all())
    assert float((P.abs() - 1)[..., [0, 1, 2, 4, 5, 6, 7]].abs().max()) < 1e-4


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_soap_half_without_eps_returns_0_for_0_divided_by_0(size: float, device: torch.device) -> None:
    """beta1 = 0 is an average of one step."""
    GU, NU = torch.randn(2, 20, 4).to(device) * size, torch.randn(2, 20, 4).to(device) * size
    V, tracked, t = torch.zeros_like(GU), torch.ones(2, 1, 4, device=device), torch.ones(2, 1, 1, device=device)
    GU[:, :5], NU[:, :3] = 0, 0
    given = {"betas": (0.0, 0.98), "eps": 0.0, "eps_inside_root": False, "extra_steps": 0.0, "guard": 0.0}
    found, P, _, _ = soap_half(V, GU, NU, tracked, t, **given)
    assert relative_error(found, 0.02 * GU.double().square()) < FLOAT32
    assert relative_error(P[:, 5:], NU[:, 5:].double() / GU[:, 5:].double().abs()) < FLOAT32
    assert not P[:, :5].any()


def test_the_parts_of_a_squared_norm_add_up_beyond_the_range_of_float32(device: torch.device) -> None:
    """The squares of 1e-30 and 1e20 are not float32 numbers."""
    X = torch.randn(3, 90, 5).to(device) * torch.tensor([1e-30, 1.0, 1e20], device=device).view(3, 1, 1)
    norm_sq_parts, max_abs_parts = norm_sq_and_max(X)
    assert device.type == "cuda" or norm_sq_parts.shape[1] > 1
    assert float((norm_sq_parts.sum(1) / norm_sq(X) - 1).abs().max()) < FLOAT32
    assert torch.equal(max_abs_parts.amax(1), X.abs().amax((1, 2)))


def test_norms_of_zero_matrices_are_the_least_allowed(device: torch.device) -> None:
    """Compute the squared norm and the weight of two matrices and of zeros."""
    parts = torch.rand(3, 21).to(device)
    parts[1] = 0
    found, weight = norm_and_weight(parts, 1024.0, 1e-30)
    exact = parts.double().sum(1).clamp_min(1e-30).view(3, 1, 1)
    torch.testing.assert_close(found, exact, rtol=FLOAT32, atol=0)
    torch.testing.assert_close(weight, (1024 / exact).float(), rtol=FLOAT32, atol=0)


def test_muon_gain_is_zero_for_a_residual_of_noise_and_for_a_zero_factor(device: torch.device) -> None:
    """The first matrix has neither: it gets target_norm / |B|."""
    X_sq = torch.tensor([4.0, 1e-7, 1.0], device=device).double().view(3, 1, 1)
    X_scale = torch.tensor([2.0, 1.0, 0.5], device=device).view(3, 1, 1)
    NU_sq, B_sq = torch.rand(3, 20).to(device).double() + 0.1, torch.rand(3, 7).to(device)
    B_sq[2] = 0
    gain = muon_gain(X_sq, X_scale, NU_sq, B_sq, torch.full((3, 1, 1), 5.0, device=device).double(), 3.0, 1e-5)
    assert relative_error(gain[0], 3 * (B_sq[0].double().sum() / 5).rsqrt()) < FLOAT32
    assert gain[1:].flatten().tolist() == [0, 0]


def exact_coefficients(
    b: Tensor | None, norm_sq: Tensor, lr: float | Tensor, decay: float | Tensor, grad_max: Tensor, *,
    P: Tensor | None = None, BU: Tensor | None = None, row_gain: Tensor | None = None, B_sq: Tensor | None = None,
    other_sq: Tensor | None = None, target_norm: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the coefficients (B, 2) and the thin part (B, m, r) of an update in double precision."""
    one = torch.ones_like(norm_sq)
    gain, size = one if b is None else b.double() * one, float(lr) * one * (grad_max > 0).view(-1, 1, 1)
    if target_norm:
        D_sq = 0 if B_sq is None else gain.square() * add_parts(B_sq) / norm_sq
        D_sq = D_sq if other_sq is None else D_sq + add_parts(other_sq)
        size = size * target_norm / D_sq.sqrt()
    gain = gain * size / norm_sq.sqrt()
    coefficients = torch.cat([one * float(decay), gain], dim=-1).view(-1, 2)
    if P is None or BU is None:
        return coefficients, None
    return coefficients, (gain * BU - size * P) * (1 if row_gain is None else row_gain)


@pytest.mark.parametrize("case", ["cosmos", "numbers", "rows", "muon", "norm", "normuon", "no gradient"])
def test_update_coefficients_equal_their_formula_in_float64(
    case: str, shape: tuple[int, int], device: torch.device
) -> None:
    """Coefficients and the thin part of an update, from tensors and from numbers, with and without its parts."""
    k, r = shape
    P, BU = torch.randn(2, k, r).to(device), torch.randn(2, k, r).to(device)
    b, norm_sq = torch.tensor([0.3, 0.0], device=device).view(2, 1, 1), torch.rand(2, 1, 1).to(device).double() + 1
    sums = {"B_sq": torch.rand(2, 7).to(device), "other_sq": torch.rand(2, 33).to(device).double(), "target_norm": 9.0}
    lr, decay = (torch.tensor(x, dtype=torch.float64, device=device) for x in (0.01, 0.9))
    grad_max, some_zero = lr.new_tensor([2.0, 3.0]).float(), lr.new_tensor([0.0, 3.0]).float()
    row_gain = torch.rand(2, k, 1).to(device) + 0.5
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "cosmos": ((b, norm_sq, lr, decay, grad_max), {"P": P, "BU": BU, **sums}),
        "numbers": ((b, norm_sq, 0.01, 0.9, grad_max), {"P": P, "BU": BU, **sums}),
        "rows": ((b, norm_sq, 0.01, 0.9, grad_max), {"P": P, "BU": BU, "row_gain": row_gain, **sums, "B_sq": None}),
        "muon": ((torch.full((1, 1, 1), 3.0, device=device), norm_sq, torch.tensor(0.01), 1.0, grad_max), {}),
        "norm": ((None, norm_sq, lr.float(), 0.9, grad_max), {"B_sq": sums["B_sq"], "target_norm": 9.0}),
        "normuon": ((None, norm_sq, 0.01, 0.9, grad_max), {"other_sq": sums["other_sq"], "target_norm": 9.0}),
        "no gradient": ((b + 1, norm_sq, lr, decay, some_zero), {"P": P, "BU": BU, **sums}),
    }
    args, more = arguments[case]
    (found, parts), (exact, thin) = update_coefficients(*args, **more), exact_coefficients(*args, **more)
    assert relative_error(found, exact) < FLOAT32
    assert (parts is None) == (thin is None)
    if parts is not None and thin is not None:
        assert relative_error(sum_of_parts(parts, r), thin) < BFLOAT16_PARTS
    if case == "no gradient":
        assert parts is not None and found[0].tolist() == [pytest.approx(0.9), 0.0] and not parts[:, 0].any()


@pytest.mark.parametrize("count", [1, 3, 4])
def test_factors_return_unchanged_from_stacks_unless_the_step_is_skipped(count: int, device: torch.device) -> None:
    """One launch copies up to four factors."""
    lists = [[torch.randn(k, 5).to(device) for _ in range(2)] for k in (70, 3, 20, 33)[:count]]
    stacks = gather(lists)
    assert all(torch.equal(s, torch.stack(x)) for s, x in zip(stacks, lists, strict=True))
    for skip in (torch.tensor(True, device=device), torch.tensor(False, device=device), None):
        targets = [[torch.zeros_like(t) for t in x] for x in lists]
        scatter_(targets, stacks, skip)
        skipped = skip is not None and bool(skip)
        assert all(torch.equal(torch.stack(x), 0 * s if skipped else s) for x, s in zip(targets, stacks, strict=True))


def test_only_contiguous_float32_factors_can_be_copied(device: torch.device) -> None:
    """The kernel reads entries one after the other."""
    x = torch.randn(7, 5, device=device)
    assert can_gather([x])
    assert not can_gather([x.mT])
    assert not can_gather([x.bfloat16()])
