"""The arithmetic on thin factors: one kernel a line of the algorithm against the plain form in double precision."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos, CosmosPaper, Muon, NorMuon
from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.kernels.gains import finish, finish_torch, muon_gain, muon_gain_torch, norms, norms_torch
from cosmos_optim.cuda.kernels.gather import gather, movable, scatter_
from cosmos_optim.cuda.kernels.launch import INTERPRET, never
from cosmos_optim.cuda.kernels.reductions import measure, measure_torch
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE, split, split_both
from cosmos_optim.cuda.pointer_list import addresses
from cosmos_optim.engine import run as execute
from cosmos_optim.engine.batching import Moving, run_chunk
from cosmos_optim.engine.layout import HERE
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.moments import Adam
from tests.cuda.launches import counted

EXACT = 2e-6  # float32, and products of 22 bits
PARTS = 1e-4 if INTERPRET else 1e-5  # two bfloat16 parts hold 16 bits; the interpreter cuts where a GPU rounds

# Rows and columns of a thin factor: less than a block, more than one, a rank that is no power of two.
SHAPES = [(20, 4), (75, 9), (70, 16)]
GPU_SHAPES = [(700, 64), (517, 80), (300, 128), (300, 200)]
SIZES = [1e-15, 1.0, 1e15]  # squares of the tracked columns stay float32 numbers, as those of S and V must
M, N = 40, 24


@pytest.fixture(params=range(4))
def shape(request: pytest.FixtureRequest, device: torch.device) -> tuple[int, int]:
    """(k, r), small for the interpreter."""
    shapes = SHAPES if device.type == "cpu" else GPU_SHAPES
    if request.param >= len(shapes):
        pytest.skip("the GPU has a shape more")
    return shapes[request.param]


@pytest.fixture
def size(shape: tuple[int, int]) -> float:
    """The scale of the numbers, another for each shape: all pairs would take a minute."""
    shapes = SHAPES if shape in SHAPES else GPU_SHAPES
    return SIZES[shapes.index(shape) % len(SIZES)]


def rel(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def basis(k: int, r: int, device: torch.device) -> Tensor:
    """Two orthonormal bases."""
    return torch.linalg.qr(torch.randn(2, k, r))[0].contiguous().to(device)


def moment(r: int, size: float, device: torch.device) -> Tensor:
    """Two second moments over a few decades."""
    Q = torch.linalg.qr(torch.randn(2, r, r))[0]
    return ((Q * torch.logspace(0, -4, r)) @ Q.mT * size**2).contiguous().to(device)


def algebras() -> tuple[FusedAlgebra, Algebra]:
    """Kernels, and what they stand for."""
    return FusedAlgebra(M, N), Algebra(M, N)


def test_scaled(shape: tuple[int, int], size: float, device: torch.device) -> None:
    """Y / c in parts that `correlate` multiplies, and c; 1 for a zero matrix."""
    (k, r), (fused, plain) = shape, algebras()
    Y, S = torch.randn(2, k, r).to(device) * size, moment(r, size, device)
    Y[1], S[1] = 0, 0
    found, c = fused.scaled(Y, S)
    exact, scale = plain.scaled(Y.double(), S.double())
    assert rel(c, scale) < EXACT
    assert float(c[1]) == 1
    value = torch.ldexp(found.parts.float().sum(0)[..., :r], torch.frexp(found.peak.view(-1, 1, 1)).exponent - 10)
    assert rel(value[0], exact[0]) < EXACT
    assert not found.parts[:, 1].any()
    assert not found.parts[..., r:].any()
    assert rel(found.peak, exact.abs().amax((1, 2))) < EXACT


def test_power_sum(shape: tuple[int, int], size: float, device: torch.device) -> None:
    """beta U S / c^2 + (1 - beta)(HU / c + eps U); what it notes makes the same basis."""
    (k, r), (fused, plain) = shape, algebras()
    U, S = basis(k, r, device), moment(r, size, device)
    HU, c = torch.randn(2, k, r).to(device) * size, torch.tensor([1.0, 3.0], device=device).view(2, 1, 1) * size
    Y = fused.power_sum(U, S, HU, c, 0.9)
    assert rel(Y, plain.power_sum(U.double(), S.double(), HU.double(), c.double(), 0.9)) < EXACT
    copy = Y.clone()
    noted, fresh = fused.orthonormalize(Y, fallback=U), fused.orthonormalize(copy, fallback=U)
    torch.testing.assert_close(noted, fresh, rtol=0, atol=1e-6)


def test_second_moment(shape: tuple[int, int], size: float, device: torch.device) -> None:
    """S in the new basis, symmetric to the last bit."""
    (k, r), (fused, plain) = shape, algebras()
    U, old, S = basis(k, r, device), basis(k, r, device), moment(r, size, device)
    GU = torch.randn(2, k + 3, r).to(device) * size
    found, real = fused.second_moment(S, U, old, GU, 0.95, True)
    exact, all_real = plain.second_moment(S.double(), U.double(), old.double(), GU.double(), 0.95, True)
    assert rel(found, exact) < EXACT
    assert torch.equal(found, found.mT)
    assert torch.equal(real.double(), all_real)
    assert real.shape == (2, 1, r)


def test_columns_of_rounding(device: torch.device) -> None:
    """A direction is real by its past or by this gradient; with the guard off all that hold anything are."""
    fused, plain = algebras()
    U = basis(30, 5, device)
    S = torch.diag_embed(torch.tensor([1.0, 1e-3, 1e-14, 1e-14, 0.0])).repeat(2, 1, 1).to(device)
    GU = torch.randn(2, 40, 5).to(device) * torch.tensor([1e-3, 0.0, 1e-5, 1e-12, 0.0], device=device)
    for guard in (True, False):
        found = fused.second_moment(S, U, U, GU, 0.5, guard)[1]
        assert torch.equal(found, plain.second_moment(S, U, U, GU, 0.5, guard)[1])
    assert fused.second_moment(S, U, U, GU, 0.5, True)[1][0, 0].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("ahead", [0.0, 1.0, 4.5])
def test_adapt(shape: tuple[int, int], inside: bool, ahead: float, device: torch.device) -> None:
    """V and P for both places of eps, and what is left of P and N for later."""
    (k, r), (fused, plain) = shape, algebras()
    how = Adam(0.9, 0.9999, 1e-4, inside, ahead)
    V, GU, NU = torch.rand(2, k, r).to(device), torch.randn(2, k, r).to(device), torch.randn(2, k, r).to(device)
    real = (torch.arange(r, device=device) % 3 > 0).float().expand(2, 1, r).contiguous()
    t = torch.tensor([1.0, 300.0], device=device).view(2, 1, 1)
    found, P = fused.adapt(V, GU, NU, real, t, how)
    exact, half = plain.adapt(*(x.double() for x in (V, GU, NU, real, t)), how)
    assert rel(found, exact) < EXACT
    assert rel(P, half) < EXACT
    for x in (P, NU):
        assert rel(fused.energy_m(x), plain.energy_m(x.double())) < EXACT
    assert rel(fused._minus(NU).float().sum(0)[..., :r], -NU) < PARTS
    assert torch.equal(fused._minus(NU), split(NU, torch.bfloat16, scale=-1.0))  # given away once, made anew after


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_adapt_without_eps(size: float, device: torch.device) -> None:
    """0/0 is 0, whatever the size of the rest; beta1 = 0 is an average of one step."""
    fused, plain = algebras()
    how = Adam(0.0, 0.98, 0.0)
    GU, NU = torch.randn(2, 20, 4).to(device) * size, torch.randn(2, 20, 4).to(device) * size
    V, real, t = torch.zeros_like(GU), torch.ones(2, 1, 4, device=device), torch.ones(2, 1, 1, device=device)
    GU[:, :5], NU[:, :3] = 0, 0
    found, P = fused.adapt(V, GU, NU, real, t, how)
    exact, half = plain.adapt(*(x.double() for x in (V, GU, NU, real, t)), how)
    assert rel(found, exact) < EXACT
    assert rel(P, half) < EXACT
    assert not P[:, :5].any()


def test_sums_by_parts(device: torch.device) -> None:
    """The parts of a sum add up to it, beyond the range of float32 squares."""
    X = torch.randn(3, 37, 5).to(device) * torch.tensor([1e-30, 1.0, 1e20], device=device).view(3, 1, 1)
    (squares, peaks), (total, top) = measure(X), measure_torch(X)
    assert float(((squares.sum(1) - total[:, 0]) / total[:, 0]).abs().max()) < EXACT
    assert torch.equal(peaks.amax(1), top[:, 0])


def test_norms(device: torch.device) -> None:
    """The norm and the weight of a matrix and of zeros."""
    squares = torch.rand(3, 21).to(device)
    squares[1] = 0
    for found, exact in zip(norms(squares, 1024.0, 1e-30), norms_torch(squares, 1024.0, 1e-30), strict=True):
        torch.testing.assert_close(found, exact, rtol=EXACT, atol=0)


def test_muon_gain(device: torch.device) -> None:
    """Full, none for a residual of noise, none for a zero factor."""
    square = torch.tensor([4.0, 1e-7, 1.0], device=device).double().view(3, 1, 1)
    factor = torch.tensor([2.0, 1.0, 0.5], device=device).view(3, 1, 1)
    tracked, left = torch.rand(3, 20).to(device).double() + 0.1, torch.rand(3, 7).to(device)
    left[2] = 0
    given = (square, factor, tracked, left, torch.full((3, 1, 1), 5.0, device=device).double(), 3.0, 1e-5)
    found = muon_gain(*given)
    assert rel(found, muon_gain_torch(*given)) < EXACT
    assert (found.flatten() > 0).tolist() == [True, False, False]


@pytest.mark.parametrize("case", ["cosmos", "numbers", "no overlap", "muon", "norm", "one without a gradient"])
def test_finish(case: str, shape: tuple[int, int], device: torch.device) -> None:
    """Coefficients and the thin part of an update, from tensors and from numbers, with and without its pieces."""
    k, r = shape
    P, BU = torch.randn(2, k, r).to(device), torch.randn(2, k, r).to(device)
    b, norm = torch.tensor([0.3, 0.0], device=device).view(2, 1, 1), torch.rand(2, 1, 1).to(device).double() + 1
    sums = {"left": torch.rand(2, 7).to(device), "squares": torch.rand(2, 33).to(device).double(), "root": 9.0}
    rate, decay = (torch.tensor(x, dtype=torch.float64, device=device) for x in (0.01, 0.9))
    arguments = {
        "cosmos": ((b, norm, rate, decay), {"P": P, "BU": BU, **sums}),
        "numbers": ((b, norm, 0.01, 0.9), {"P": P, "BU": BU, "s": 2 * b + 1}),
        "no overlap": ((b, norm, 0.01, decay), {"P": P, **sums}),
        "muon": ((torch.full((1, 1, 1), 3.0, device=device), norm, torch.tensor(0.01), 1.0), {}),
        "norm": ((None, norm, rate.float(), 0.9), {"left": sums["left"], "root": 9.0}),
        "one without a gradient": (
            (b + 1, norm, rate, decay),
            {"P": P, "BU": BU, "top": rate.new_tensor([0.0, 3.0]).float(), **sums},
        ),
    }
    args, more = arguments[case]
    (found, parts), (exact, expected) = finish(*args, **more), finish_torch(*args, **more)
    assert rel(found, exact) < EXACT
    assert (parts is None) == (expected is None)
    if parts is not None and expected is not None:
        assert rel(parts.float().sum(0), expected.float().sum(0)) < PARTS
    if "top" in more:
        assert parts is not None and found[0].tolist() == [pytest.approx(0.9), 0.0] and not parts[:, 0].any()


def test_both_splits_at_once(shape: tuple[int, int], device: torch.device) -> None:
    """The same parts as from two launches."""
    U = basis(*shape, device)
    half, wide = split_both(U)
    assert torch.equal(half, split(U, torch.float16, scale=BASIS_SCALE))
    assert torch.equal(wide, split(U, torch.bfloat16))


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_moves(count: int, device: torch.device) -> None:
    """Any number of factors, there and back; nothing where `skip` holds."""
    lists = [[torch.randn(k, 5).to(device) for _ in range(2)] for k in (70, 3, 20, 33, 1)[:count]]
    stacks = gather(lists)
    assert all(torch.equal(s, torch.stack(x)) for s, x in zip(stacks, lists, strict=True))
    for skip in (torch.tensor(True, device=device), torch.tensor(False, device=device), None):
        homes = [[torch.zeros_like(t) for t in x] for x in lists]
        scatter_(homes, stacks, skip)
        kept = skip is not None and bool(skip)
        assert all(torch.equal(torch.stack(x), 0 * s if kept else s) for x, s in zip(homes, stacks, strict=True))
    assert movable(lists[0])
    assert not movable([lists[0][0].mT])
    assert not movable([lists[0][0].bfloat16()])


# -- launches ---------------------------------------------------------------------------------------------------------

# Outside Newton-Schulz; in plain torch a chunk of COSMOS takes 138. Each is a few microseconds on the critical path.
MOST = {"cosmos": 32, "paper": 29, "nesterov": 31, "rows": 30, "muon": 8, "norm": 9, "normuon": 11}
RANKED = {"rank": 6, "gamma": 0.25}
CASES = {
    "cosmos": (Cosmos, RANKED),
    "paper": (CosmosPaper, RANKED),
    "nesterov": (CosmosPaper, RANKED | {"nesterov": True}),
    "rows": (CosmosPaper, RANKED | {"row_beta2": 0.95}),
    "muon": (Muon, {}),
    "norm": (Muon, {"normalize": True}),
    "normuon": (NorMuon, {}),
}


@pytest.mark.skipif(not INTERPRET, reason="counted where launches can be")
@pytest.mark.parametrize("case", MOST)
def test_launches_of_a_chunk(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step of a chunk asks for few kernels."""
    kind, options = CASES[case]
    params = [torch.randn(M, N).requires_grad_()]  # launches do not depend on how many
    for p in params:
        p.grad = torch.randn_like(p)
    opt, chunks = kind(params, **options), []
    opt.step()
    with monkeypatch.context() as patch:
        patch.setattr(execute, "run_chunk", lambda chunk, *args: chunks.append(chunk))
        opt.step()
    grads, tops = [x.grad for x in chunks[0]], {x.entry.p: [x.grad.abs().max()] for x in chunks[0]}
    moving = Moving(addresses(grads), torch.tensor(0.01).double(), torch.tensor(0.99).double())
    never(params[0].device)  # made once for all steps
    with counted() as seen:
        run_chunk(chunks[0], HERE, M, N, torch.tensor(False), None, FusedAlgebra, tops, moving)
    # Newton-Schulz: five iterations one after the other, or the first three in either of two ways, chosen by a sum and
    # a comparison; the products of the other way end at once.
    made = seen["_symmetric"] + seen["_symmetric_squares"] + seen["bmm"]
    products = made + (seen["sum"] + seen["le"] if "rank" in options else 0)
    assert 15 <= products <= (25 if "rank" in options else 18)
    assert sum(seen.values()) - products <= MOST[case], seen
