"""Tests that go through FusedAlgebra, run_chunk or whole steps: to be replaced by tests of cuda/step.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from tests.cuda.test_fused import one_step, problem
from tests.cuda.test_fused_gpu import GPU_SHAPES, model

from cosmos_optim import Cosmos, CosmosPaper, Muon, MuonNorm, NorMuon
from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.kernels import jacobi as eigen
from cosmos_optim.cuda.kernels.launch import false_flag
from cosmos_optim.cuda.kernels.reductions import add_parts
from cosmos_optim.cuda.operands import Basis, Direction, Polar
from cosmos_optim.cuda.pointer_list import addresses
from cosmos_optim.engine import run as execute
from cosmos_optim.engine.batching import Moving, run_chunk
from cosmos_optim.engine.layout import HERE
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules import RULES
from cosmos_optim.rules.cosmos import PAPER
from tests.cuda.launches import counted
from tests.cuda.reference import INTERPRETED as INTERPRET
from tests.gpu import never_waiting

EXACT = 2e-6  # float32
HALF = 5e-4  # float16 holds 11 bits
UPDATE = 5e-2  # half-precision Newton-Schulz against float64
ROWS = 2e-2  # sums of squares of rows of the same
LR = 0.01
M, N = 40, 24

interpreted = pytest.mark.skipif(not INTERPRET, reason="the GPU has its own sizes below")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def rel(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def stack(wide: bool, device: torch.device) -> Tensor:
    """A half-precision work buffer with rows longer than its matrices, seen as the matrices are."""
    B = torch.randn(2, 75, 56).half().to(device)[:, :, :50]
    return B.mT if wide else B


@pytest.mark.parametrize("thin", [True, False])
@pytest.mark.parametrize("eps", [1e-2, 0.0])
def test_second_moment_of_rows(thin: bool, eps: float, device: torch.device) -> None:
    """v, the factors and the energy of D = b B + P U' against the matrix itself; a row of zeros stays one."""
    m, n, r = 75, 50, 9
    buffer, norm = stack(False, device), torch.rand(2, 1, 1).to(device).double() + 1
    U = torch.linalg.qr(torch.randn(2, n, r))[0].contiguous().to(device)
    b, P, v = torch.rand(2, 1, 1).to(device), torch.randn(2, m, r).to(device), torch.rand(2, m, 1).to(device)
    buffer = (buffer.double() - (buffer.double() @ U.double()) @ U.double().mT).half()
    buffer[:, 7], P[:, 7], v[:, 7] = 0, 0, 0
    B, exact = Polar(buffer, norm), buffer.double() / norm.sqrt()
    D = Direction(b, B, P, Basis(U)) if thin else B
    exact = b * exact + P.double() @ U.double().mT if thin else exact
    fused, plain = FusedAlgebra(m, n), Algebra(m, n)
    (even, found), (expected, second) = fused.even_rows(D, v, 0.9, eps), plain.even_rows(exact, v.double(), 0.9, eps)
    assert rel(found, second) < HALF
    assert rel(fused.row_energy(D), plain.row_energy(exact)) < HALF
    assert rel(fused.energy(even), plain.energy(expected)) < HALF
    assert rel(fused.energy(fused.unit_rms(even)), torch.full((2, 1, 1), float(m * n), device=device)) < EXACT
    assert even.rows.gain[:, 7].isfinite().all()
    again = fused.scale_rows(D, even.rows.gain)  # the plain form on the same operands
    assert rel(add_parts(again.rows.energy), add_parts(even.rows.energy)) < EXACT


# -- whole steps ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {"cosmos": {"gamma": 0.25, "row_beta2": 0.9}, "normuon": {"beta2": 0.9}}


def compare(rule: str, m: int, n: int, r: int, device: torch.device, storage: torch.dtype, **more: Any) -> None:
    """One fused step against float64 from the same state, some way into training."""
    grads, state = problem(m, n, r, device)
    state["v"] = [torch.rand(m, 1, dtype=torch.float64, device=device) + 0.1 for _ in grads]
    h = {**RULES[rule].hyper, **({"rank": r} if rule == "cosmos" else {}), **OPTIONS[rule], **more}
    lists = {k: [x.to(storage if k == "M" else torch.float32) for x in state[k]] for k in RULES[rule].slots(m, n, h)}
    wide = {k: [x.double() for x in v] for k, v in lists.items()}
    grads, start = [g.float() for g in grads], [torch.randn_like(g).float() for g in grads]
    mine, exact = [w.clone() for w in start], [w.double() for w in start]
    one_step(FusedAlgebra, rule, h, mine, grads, lists, 5, skip=torch.tensor(True, device=device))
    assert all(torch.equal(w, before) for w, before in zip(mine, start, strict=True))
    assert torch.equal(lists["v"][0].double(), wide["v"][0])
    one_step(FusedAlgebra, rule, h, mine, grads, lists, 5)
    one_step(Algebra, rule, h | {"ns_dtype": torch.float64}, exact, [g.double() for g in grads], wide, 5)
    moved, wanted = (torch.stack([w.double() - 0.99 * w0.double() for w, w0 in zip(ws, start, strict=True)])
                     for ws in (mine, exact))  # fmt: skip
    assert rel(moved, wanted) < UPDATE
    assert rel(torch.stack(lists["v"]), torch.stack(wide["v"])) < ROWS
    assert (moved.square().mean((1, 2)).sqrt() / LR - 1).abs().max() < 1e-3


@interpreted
@pytest.mark.parametrize(("m", "n", "nesterov"), [(37, 24, False), (24, 40, True)])
@pytest.mark.parametrize("rule", OPTIONS)
def test_a_step_under_the_interpreter(rule: str, m: int, n: int, nesterov: bool) -> None:
    """Tall and wide, float32 and bfloat16 momentum; a skipped step leaves v as it was."""
    compare(rule, m, n, 6, CPU, torch.bfloat16 if nesterov else torch.float32, nesterov=nesterov)


@interpreted
@pytest.mark.parametrize("rule", OPTIONS)
def test_a_step_without_thin_kernels(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch does their part."""
    for module in ("cosmos_optim.cuda.fused", "cosmos_optim.cuda.fused_thin"):
        monkeypatch.setattr(f"{module}.kernels_at", lambda X, asked: asked != "thin")
    compare(rule, 37, 24, 6, CPU, torch.float32)


@interpreted
def test_rows_times_one() -> None:
    """The same step by both ways: with factors for rows, and without."""
    h = {**RULES["cosmos"].hyper, **PAPER, "rank": 5, "gamma": 0.25}
    grads, state = problem(30, 24, 5, CPU)
    start = [torch.randn(30, 24) for _ in grads]
    ends = []
    for ones in (False, True):
        alg, W = FusedAlgebra(30, 24), [w.clone() for w in start]
        lists = {k: [x.float() for x in v] for k, v in state.items()}
        G = alg.load([g.float() for g in grads], torch.float32)
        t = torch.full((2, 1, 1), 3.0)
        D, _ = RULES["cosmos"].direction(G, alg.load_state(lists, torch.float32), t, h=h, alg=alg)
        if ones:
            even = alg.scale_rows(alg.combine(D.b, D.B, D.P, D.basis.U), torch.ones(2, 30, 1))
            D = alg.unit_rms(even)
        alg.apply_(W, D, 0.01, 0.99)
        ends.append(torch.stack(W))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rule", OPTIONS)
def test_a_step_on_random_gradients(rule: str, shape: tuple[int, int], nesterov: bool) -> None:
    """Square, tall, wide, and rows of odd length."""
    compare(rule, *shape, 64, CUDA, torch.float32, nesterov=nesterov)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), [(Cosmos, {"row_beta2": 0.95}), (NorMuon, {})])
def test_recorded_steps_are_the_same(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Bit for bit, replayed or not; and the host waits for nothing."""
    ends = []
    for graphs in (False, True, True):
        torch.manual_seed(2)
        params = model(CUDA)
        opt = kind(params, cuda_graphs=graphs, **options)
        for _ in range(5):
            opt.step()
        with never_waiting():
            opt.step()
        assert (opt.replays.recording is not None) == graphs
        ends.append([p.detach().clone() for p in params] + [opt.state[p]["v"].clone() for p in params])
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


def test_the_algebra_asks_for_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fits; torch otherwise."""
    asked = []
    monkeypatch.setattr(eigen, "eigh", lambda A: asked.append(A.shape[-1]) or torch.linalg.eigh(A))
    for k in (eigen.MAX_COLUMNS, eigen.MAX_COLUMNS + 1):
        FusedAlgebra(8, 8).eigh(torch.eye(k, device=device)[None])
    assert asked == [eigen.MAX_COLUMNS]


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
    "norm": (MuonNorm, {}),
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
    false_flag(params[0].device)  # made once for all steps
    with counted() as seen:
        run_chunk(chunks[0], HERE, M, N, torch.tensor(False), None, FusedAlgebra, tops, moving)
    # Newton-Schulz: five iterations one after the other, or the first three in either of two ways, chosen by a sum and
    # a comparison; the products of the other way end at once.
    made = seen["_symmetric"] + seen["_symmetric_squares"] + seen["bmm"]
    products = made + (seen["sum"] + seen["le"] if "rank" in options else 0)
    assert 15 <= products <= (25 if "rank" in options else 18)
    assert sum(seen.values()) - products <= MOST[case], seen
