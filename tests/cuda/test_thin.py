"""Products of matrices with thin factors, and the passes over momentum, residual and parameters."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.correlate import correlate, correlate_torch
from cosmos_optim.cuda.kernels.launch import INTERPRET
from cosmos_optim.cuda.kernels.momentum import momentum_, momentum_torch
from cosmos_optim.cuda.kernels.project import overlap, project, project_torch
from cosmos_optim.cuda.kernels.reductions import added
from cosmos_optim.cuda.kernels.residual import residual, residual_torch
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE, split, split_torch
from cosmos_optim.cuda.kernels.update import update_, update_torch
from cosmos_optim.cuda.pointer_list import Matrices, addresses, uniform
from cosmos_optim.engine.rounding import stochastic_bfloat16

EXACT = 1e-6  # two float16 parts hold 22 bits; the sum is float32's
PARTS = 1e-4 if INTERPRET else 1e-5  # two bfloat16 parts hold 16 bits; the interpreter cuts where a GPU rounds
HALF = 5e-4  # float16 holds 11 bits
BF16 = 1e-2 if INTERPRET else 5e-3  # one bfloat16 rounding (cut, in the interpreter)
LERP = 1e-6

# rows, columns, dtype, view: rows of 16-byte multiples, of odd lengths, fewer than a tile, transposed storage.
CASES = [
    (24, 32, torch.float32, "plain"),
    (35, 21, torch.float32, "plain"),
    (18, 38, torch.float32, "plain"),
    (20, 24, torch.float32, "transposed"),
    (20, 19, torch.bfloat16, "plain"),
]
SIZES = [1e-30, 1.0, 1e18]


def rel(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def matrices(m: int, n: int, dtype: torch.dtype, view: str, device: torch.device, size: float = 1.0) -> list[Tensor]:
    """Two matrices, stored as they are or by columns."""
    shape = (m, n) if view == "plain" else (n, m)
    drawn = [(torch.randn(shape) * size).to(device, dtype) for _ in range(2)]
    return drawn if view == "plain" else [x.mT for x in drawn]


def basis(n: int, r: int, device: torch.device) -> Tensor:
    """Two orthonormal bases."""
    return torch.linalg.qr(torch.randn(2, n, r))[0].contiguous().to(device)


def halves(U: Tensor) -> Tensor:
    """A basis as the products want it."""
    return split(U, torch.float16, scale=BASIS_SCALE)


def tops(X: Matrices, known: bool) -> Tensor | None:
    """The largest entries, if they are to be known."""
    return X.stacked().abs().amax((1, 2)) if known else None


def test_parts_add_up(device: torch.device) -> None:
    """c U = U1 + U2 to 22 and 16 bits, as in plain torch; with a peak, c brings it to [2^9, 2^10)."""
    U = torch.randn(2, 19, 5).to(device) * 1e-3
    for dtype, bound in ((torch.float16, 2**-20), (torch.bfloat16, 2**-14)):
        parts = split(U, dtype, scale=256.0)
        assert parts.shape == (2, 2, 19, 16)
        assert rel(parts.float().sum(0)[..., :5], 256 * U) < bound
        assert not parts[..., 5:].any()
    peak = U.abs().amax((1, 2))
    parts = split(U, torch.float16, peak=peak)
    assert torch.equal(parts, split_torch(U, torch.float16, peak=peak))
    assert all(2**9 <= top < 2**10 for top in parts.float().sum(0).abs().amax((1, 2)).tolist())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("known", [True, False])
def test_project(case: tuple[int, int, torch.dtype, str], known: bool, device: torch.device) -> None:
    """X U, whatever the rows look like in memory."""
    X = Matrices.of(matrices(*case, device))
    U = basis(X.shape[1], 9, device)
    found = project(X, halves(U), 9, tops(X, known))
    assert rel(found, X.stacked(torch.float64) @ U.double()) < EXACT
    assert rel(found, project_torch(X.stacked(), U)) < EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("known", [True, False])
def test_correlate(case: tuple[int, int, torch.dtype, str], known: bool, device: torch.device) -> None:
    """X'Y, for Y of any size."""
    X = Matrices.of(matrices(*case, device))
    Y = torch.randn(2, X.shape[0], 9).to(device) * 1e-7
    peak = Y.abs().amax((1, 2))
    found = correlate(X, split(Y, torch.float16, peak=peak), peak, 9, tops(X, known))
    assert rel(found, X.stacked(torch.float64).mT @ Y.double()) < EXACT
    assert rel(found, correlate_torch(X.stacked(), Y)) < EXACT


@pytest.mark.parametrize("size", SIZES)
def test_sizes_at_the_ends_of_the_range(size: float, device: torch.device) -> None:
    """Neither 1e-30 nor 1e18 is lost: X U, the residual and its energy."""
    X = Matrices.of(matrices(20, 18, torch.float32, "plain", device, size))
    M = Matrices.of(matrices(20, 18, torch.float32, "plain", device, size))
    U = basis(18, 4, device)
    exact = X.stacked(torch.float64)
    assert rel(project(X, halves(U), 4), exact @ U.double()) < EXACT
    _, MU, peak = momentum_(M, X, 0.1, (halves(U), split(U, torch.bfloat16)), 4, None)
    minus = split(MU, torch.bfloat16, scale=-1.0)
    buffer, square, factor = residual(M, X, 1.0, 0.0, minus, split(U, torch.bfloat16), peak, torch.float16)
    N = M.stacked(torch.float64)
    expected = N - (N @ U.double()) @ U.double().mT
    assert rel(buffer.double() / factor.double(), expected) < HALF
    assert rel(added(square) / factor.double().square(), expected.square().sum((1, 2), keepdim=True)) < PARTS


@pytest.mark.parametrize("case", CASES)
def test_momentum(case: tuple[int, int, torch.dtype, str], device: torch.device) -> None:
    """M in place, G U and M U, the largest entries; the average alone gives the same M."""
    G, M, alone = (Matrices.of(matrices(*case, device)) for _ in range(3))
    for x, y in zip(alone.tensors, M.tensors, strict=True):
        x.copy_(y)
    before, gradient, U = M.stacked(), G.stacked(), basis(G.shape[1], 9, device)
    GU, MU, peak = momentum_(M, G, 0.1, (halves(U), split(U, torch.bfloat16)), 9, None, tops(G, True))
    expected, _, _ = momentum_torch(before, gradient, 0.1, U)
    assert rel(M.stacked(), expected) < (LERP if M.dtype is torch.float32 else BF16)
    assert rel(GU, gradient.double() @ U.double()) < EXACT
    assert rel(MU, M.stacked(torch.float64) @ U.double()) < PARTS
    assert torch.equal(peak.amax(1), torch.maximum(gradient.abs().amax((1, 2)), M.stacked().abs().amax((1, 2))))
    momentum_(alone, G, 0.1, None, 1, None)
    assert torch.equal(alone.stacked(), M.stacked())


def test_skip_leaves_everything(device: torch.device) -> None:
    """The flag is read on the device; nothing is written where it holds."""
    skip = torch.tensor(True, device=device)
    G, M, W = (Matrices.of(matrices(20, 18, torch.float32, "plain", device)) for _ in range(3))
    before = [M.stacked(), W.stacked()]
    U = basis(18, 4, device)
    momentum_(M, G, 0.1, (halves(U), split(U, torch.bfloat16)), 4, skip)
    update_(W, torch.ones(2, 20, 24, dtype=torch.float16, device=device)[:, :, :18], None, None,
            torch.ones(2, 2, device=device), skip)  # fmt: skip
    assert torch.equal(M.stacked(), before[0])
    assert torch.equal(W.stacked(), before[1])


@pytest.mark.parametrize("case", CASES[:4])
@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.9, 0.1)])
def test_residual(case: tuple[int, int, torch.dtype, str], a: float, b: float, device: torch.device) -> None:
    """c (a M + b G + P U'), tall whatever the matrix is, with its energy."""
    M, G = Matrices.of(matrices(*case, device)), Matrices.of(matrices(*case, device))
    (m, n), U = M.shape, basis(M.shape[1], 9, device)
    N = a * M.stacked() + b * G.stacked()
    P, peak = -(N @ U), torch.maximum(M.stacked().abs().amax((1, 2)), G.stacked().abs().amax((1, 2)))[:, None]
    parts = split(P, torch.bfloat16), split(U, torch.bfloat16)
    buffer, square, factor = residual(M, G, a, b, *parts, peak, torch.float16)
    expected = residual_torch(N, P, U)
    assert buffer.shape == (2, max(m, n), min(m, n))
    assert buffer.stride(1) % 8 == 0
    assert rel((buffer if m >= n else buffer.mT).float() / factor, expected) < HALF
    assert rel(added(square) / factor.double().square(), expected.double().square().sum((1, 2), keepdim=True)) < PARTS


@pytest.mark.parametrize("case", CASES)
def test_update(case: tuple[int, int, torch.dtype, str], device: torch.device) -> None:
    """W <- decay W - b B + P U'."""
    W = Matrices.of(matrices(*case, device))
    m, n = W.shape
    before, U, P = W.stacked(), basis(n, 9, device), torch.randn(2, m, 9).to(device)
    B = torch.randn(2, max(m, n), 48, device=device).half()[:, :, : min(m, n)]
    coefficients = torch.tensor([[0.9, 0.5], [0.8, -2.0]], device=device)
    update_(W, B, split(P, torch.bfloat16), split(U, torch.bfloat16), coefficients, None)
    decay, b = coefficients[:, 0].view(2, 1, 1), coefficients[:, 1].view(2, 1, 1)
    expected = update_torch(before, (B if m >= n else B.mT).float(), P, U, decay, b)
    assert rel(W.stacked(), expected) < (PARTS if W.dtype is torch.float32 else BF16)


def test_update_rounds_stochastically_as_everywhere(device: torch.device) -> None:
    """The same draws as `rounding`, so that a parameter does not depend on who rounds it."""
    W = Matrices.of([torch.randn(20, 18).to(device, torch.bfloat16) for _ in range(2)])
    before = W.stacked()
    B = torch.randn(2, 20, 24, device=device).half()[:, :, :18]
    update_(W, B, None, None, torch.tensor([[1.0, 0.01]] * 2, device=device), None,
            torch.tensor([3, 4], dtype=torch.int32, device=device))  # fmt: skip
    for i, seed in enumerate((3, 4)):
        expected = stochastic_bfloat16(before[i] - 0.01 * B[i].float(), torch.tensor(seed, device=device))
        # A fused multiply-add may differ from two roundings in the last bit, which then draws differently.
        assert (W.tensors[i] == expected).float().mean() > 0.99


@pytest.mark.parametrize("wide", [False, True])
def test_overlap(wide: bool, device: torch.device) -> None:
    """B U to half precision and what is left of |B|^2 outside U."""
    B = torch.randn(2, 37, 24, device=device).half()[:, :, :20]
    X = B.mT if wide else B
    U = basis(X.shape[2], 5, device)
    BU, left = overlap(X, halves(U), 5)
    exact = X.double() @ U.double()
    assert rel(BU, exact) < HALF
    expected = X.double().square().sum((1, 2), keepdim=True) - exact.square().sum((1, 2), keepdim=True)
    assert rel(added(left), expected) < HALF


@pytest.mark.gpu
@pytest.mark.parametrize("r", [5, 16, 32, 64, 128])
@pytest.mark.parametrize("wide", [False, True])
def test_overlap_is_the_same_every_time(wide: bool, r: int) -> None:
    """Of matrices with many tiles, some of which are on their way while others are multiplied."""
    device = torch.device("cuda")
    B = torch.randn(3, 1024, 512, device=device).half()
    X = B.mT if wide else B
    U = torch.linalg.qr(torch.randn(3, X.shape[2], r, device=device))[0].contiguous()
    first = overlap(X, halves(U), r)
    assert rel(first[0], X.double() @ U.double()) < HALF
    for _ in range(30):
        assert all(torch.equal(x, y) for x, y in zip(overlap(X, halves(U), r), first, strict=True))


def test_lists_that_kernels_can_take(device: torch.device) -> None:
    """Equal shapes, dtypes and strides, one stride 1."""
    x = torch.randn(6, 8, device=device)
    assert uniform([x, x.clone()])
    assert uniform([x.mT, x.clone().mT])
    assert not uniform([x, x.clone().mT.contiguous().mT])
    assert not uniform([x, x.bfloat16()])
    assert not uniform([x[:, ::2]])
    assert not uniform([x.double()])


def test_a_table_belongs_to_its_addresses(device: torch.device) -> None:
    """Other matrices never rewrite a table that a captured graph may read."""
    xs, ys = [torch.randn(4, 4, device=device) for _ in range(3)], [torch.randn(4, 4, device=device) for _ in range(3)]
    first = addresses(xs)
    second = addresses(ys)
    assert first.tolist() == [x.data_ptr() for x in xs]
    assert second.tolist() == [y.data_ptr() for y in ys]
    assert first.data_ptr() != second.data_ptr()
    if device.type == "cuda":
        assert addresses(xs) is first
