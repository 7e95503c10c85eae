"""The fused algebra under the same rules as the plain one, and whole steps on a GPU."""


import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.fused import FusedAlgebra, bytes_per_matrix, chunk_matrices, fusable
from cosmos_optim.cuda.kernels.launch import INTERPRET
from cosmos_optim.engine.batching import Probe
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.rules import RULES
from cosmos_optim.rules.cosmos import PAPER

# What speed may cost of exactness, against float64 from the same state.
UPDATE = 5e-2  # the whole update; half-precision Newton-Schulz
CONDITION = 1.2e-1  # the same at condition 1e6
BASIS = 1e-4  # U, S, V
MOMENT = 1e-6
SOAP = 1e-4  # the SOAP half as it stands in the update

Lists = dict[str, list[Tensor]]


def rel(x: list[Tensor], y: list[Tensor]) -> float:
    """|x - y| / |y| over lists."""
    a, b = torch.stack([t.double() for t in x]), torch.stack([t.double() for t in y])
    return float((a - b).norm() / b.norm())


def one_step(
    kind: type[Algebra], rule: str, h: dict[str, object], params: list[Tensor], grads: list[Tensor], state: Lists,
    t: int, skip: Tensor | None = None, top: Tensor | None = None,
) -> None:  # fmt: skip
    """What the engine does with one chunk."""
    alg = kind(*params[0].shape, skip=skip)
    if isinstance(alg, FusedAlgebra):
        alg.top = top
    dtype = params[0].dtype
    G = alg.load(grads, dtype)
    loaded = alg.load_state(state, dtype)
    count = torch.full((len(params), 1, 1), float(t), dtype=dtype, device=params[0].device)
    D, new = RULES[rule].direction(G, loaded, count, h=h, alg=alg)
    alg.store_state_(state, new)
    alg.apply_(params, D, 0.01, 0.99, top=top)


def problem(m: int, n: int, r: int, device: torch.device, condition: float | None = None) -> tuple[list[Tensor], Lists]:
    """Two gradients and a state some way into training, in float64."""
    if condition is None:
        G = torch.randn(2, m, n, dtype=torch.float64)
    else:
        k = min(m, n)
        left = torch.linalg.qr(torch.randn(2, m, k, dtype=torch.float64))[0]
        right = torch.linalg.qr(torch.randn(2, n, k, dtype=torch.float64))[0]
        G = (left * torch.logspace(0, -torch.tensor(condition).log10().item(), k, dtype=torch.float64)) @ right.mT
    G = G.to(device)
    U = torch.linalg.qr(G.mT @ (G @ torch.randn(2, n, r, dtype=torch.float64).to(device)))[0]
    size = float(G.square().mean())
    state = {
        "M": [0.5 * g + 0.3 * size**0.5 * torch.randn_like(g) for g in G],
        "U": list(U),
        "S": [torch.eye(r, dtype=torch.float64, device=device) * size for _ in G],
        "V": [torch.rand(m, r, dtype=torch.float64, device=device) * size for _ in G],
    }
    return list(G), state


def compare(
    m: int, n: int, r: int, device: torch.device, *, nesterov: bool = False, condition: float | None = None,
    storage: torch.dtype = torch.float32,
) -> dict[str, float]:  # fmt: skip
    """Relative errors of one fused step against float64, from the same numbers."""
    grads, state = problem(m, n, r, device, condition)
    h = {**RULES["cosmos"].hyper, **PAPER, "rank": r, "gamma": 0.25, "nesterov": nesterov}
    grads = [g.float().double() for g in grads]
    state = {k: [x.to(storage if k == "M" else torch.float32).double() for x in v] for k, v in state.items()}
    params = [torch.randn_like(g).float().double() for g in grads]
    fused = {k: [x.to(storage if k == "M" else torch.float32) for x in v] for k, v in state.items()}
    before, mine = [0.99 * p for p in params], [p.float() for p in params]
    one_step(FusedAlgebra, "cosmos", h, mine, [g.float() for g in grads], fused, 5)
    one_step(Algebra, "cosmos", h | {"ns_dtype": torch.float64}, params, grads, state, 5)
    errors = {k: rel(fused[k], state[k]) for k in state}
    step, exact = ([p.double() - b for p, b in zip(ps, before, strict=True)] for ps in (mine, params))
    P = [U @ U.mT for U in state["U"]]
    return errors | {
        "update": rel(step, exact),
        "soap": rel([s @ p for s, p in zip(step, P, strict=True)], [s @ p for s, p in zip(exact, P, strict=True)]),
        "rms": max(abs(float(s.square().mean().sqrt()) / 0.01 - 1) for s in step),
    }


def check(errors: dict[str, float], update: float) -> None:
    """The bars of exactness."""
    assert errors["update"] < update, errors
    assert max(errors["U"], errors["S"], errors["V"]) < BASIS, errors
    assert errors["M"] < MOMENT, errors
    assert errors["soap"] < SOAP, errors
    assert errors["rms"] < 1e-4, errors


@pytest.mark.skipif(not INTERPRET, reason="the GPU has its own sizes below")
@pytest.mark.parametrize(("m", "n", "nesterov"), [(37, 24, False), (24, 40, True)])
def test_a_step_under_the_interpreter(m: int, n: int, nesterov: bool) -> None:
    """Tall and wide, with and without Nesterov's blend."""
    check(compare(m, n, 6, torch.device("cpu"), nesterov=nesterov), UPDATE)


@pytest.mark.skipif(not INTERPRET, reason="the GPU has its own sizes below")
@pytest.mark.parametrize("family", ["thin", "basis"])
def test_a_step_without_some_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a family does not work, plain torch does its part among the other kernels."""
    for module in ("cosmos_optim.cuda.fused", "cosmos_optim.cuda.fused_thin"):
        monkeypatch.setattr(f"{module}.kernels_at", lambda X, asked: asked != family)
    check(compare(37, 24, 6, torch.device("cpu"), nesterov=True), UPDATE)


@pytest.mark.skipif(not INTERPRET, reason="one place is enough")
def test_diagnostics_see_the_same() -> None:
    """What a probe is shown by the kernels and by plain torch."""
    seen = []
    for kind in (FusedAlgebra, Algebra):
        torch.manual_seed(3)
        grads, state = problem(30, 24, 5, torch.device("cpu"))
        alg, h = kind(30, 24), {**RULES["cosmos"].hyper, **PAPER, "rank": 5, "gamma": 0.25}
        G = alg.load([g.float() for g in grads], torch.float32)
        lists = {k: [x.float() for x in v] for k, v in state.items()}
        record: dict[str, dict[str, float]] = {}
        probe = Probe(record, ["a", "b"])
        t = torch.full((2, 1, 1), 3.0)
        D, _ = RULES["cosmos"].direction(G, alg.load_state(lists, torch.float32), t, h=h, alg=alg, probe=probe)
        probe.update(alg.energy(D) / (30 * 24))
        seen.append(record)
    for name, values in seen[1].items():
        assert seen[0][name] == pytest.approx(values, rel=UPDATE)


@pytest.mark.skipif(not INTERPRET, reason="the GPU has its own sizes below")
def test_skip_and_muon() -> None:
    """A skipped step changes nothing; a rule without a basis runs as well."""
    device = torch.device("cpu")
    h = dict(RULES["muon"].hyper)
    G = [torch.randn(24, 18) for _ in range(2)]
    W, M = [torch.randn(24, 18) for _ in G], [torch.randn(24, 18) for _ in G]
    before = [x.clone() for x in W + M]
    one_step(FusedAlgebra, "muon", h, W, G, {"M": M}, 3, skip=torch.tensor(True, device=device))
    assert all(torch.equal(a, b) for a, b in zip(before, W + M, strict=True))
    plain = [x.clone() for x in W], [x.clone() for x in M]
    one_step(FusedAlgebra, "muon", h, W, G, {"M": M}, 3, skip=torch.tensor(False, device=device))
    one_step(Algebra, "muon", h, plain[0], G, {"M": plain[1]}, 3)
    step, exact = ([a - 0.99 * b for a, b in zip(ws, before[:2], strict=True)] for ws in (W, plain[0]))
    assert rel(M, plain[1]) < MOMENT
    assert rel(step, exact) < UPDATE


@pytest.mark.skipif(not INTERPRET, reason="one place is enough")
def test_a_zero_gradient_and_momentum() -> None:
    """Nothing but decay happens, and no NaN."""
    zeros = {"M": [torch.zeros(24, 18)], "S": [torch.zeros(4, 4)], "V": [torch.zeros(24, 4)]}
    U = torch.linalg.qr(torch.randn(18, 4))[0].contiguous()
    state = {**zeros, "U": [U.clone()]}
    h = {**RULES["cosmos"].hyper, **PAPER, "rank": 4, "gamma": 0.25}
    W = [torch.randn(24, 18)]
    before = W[0].clone()
    one_step(FusedAlgebra, "cosmos", h, W, [torch.zeros(24, 18)], state, 1)
    torch.testing.assert_close(W[0], 0.99 * before)
    torch.testing.assert_close(state["U"][0], U, rtol=0, atol=1e-5)


@pytest.mark.skipif(not INTERPRET, reason="one place is enough")
@pytest.mark.parametrize(
    ("rule", "options"), [("cosmos", {}), ("muon", {}), ("muon", {"normalize": True}), ("normuon", {})]
)
def test_one_without_a_gradient(rule: str, options: dict[str, bool]) -> None:
    """It is only decayed, and its momentum dies away; its neighbour moves as ever."""
    h = {**RULES[rule].hyper, "rank": 4, "gamma": 0.25, **options}
    G = [torch.randn(24, 18), torch.zeros(24, 18)]
    shapes = {"M": (24, 18), "U": (18, 4), "S": (4, 4), "V": (24, 4), "v": (24, 1)}
    state = {name: [torch.rand(shapes[name]) for _ in G] for name in RULES[rule].slots(24, 18, h)}
    if "U" in state:
        state |= {"U": [torch.linalg.qr(x)[0] for x in state["U"]], "S": [torch.eye(4) for _ in G]}
    moments = [x.clone() for x in state["M"]]
    W = [torch.randn(24, 18) for _ in G]
    before = [x.clone() for x in W]
    one_step(FusedAlgebra, rule, h, W, G, state, 5, top=torch.tensor([float(G[0].abs().max()), 0.0]))
    assert torch.equal(W[1], 0.99 * before[1])
    assert (W[0] - 0.99 * before[0]).square().mean().sqrt() > 1e-3
    assert float((state["M"][1] / moments[1]).std()) < 1e-6 and state["M"][1].norm() < moments[1].norm()


def test_what_is_fused() -> None:
    """Only on a GPU, for matrices with more than r rows and columns, in half precision."""
    x, ns = [torch.randn(32, 24)], NewtonSchulz()
    assert not fusable([x, x, x], 8, ns)  # a CPU tensor, whatever the interpreter says
    assert not fusable([x, x, x], 8, NewtonSchulz(dtype=torch.float64))


def test_chunks_are_bounded() -> None:
    """At least one matrix, and never more than the budget holds."""
    assert chunk_matrices(2048, 2048, 64, 1) == 1
    for shape in ((2048, 2048), (5461, 2048), (2048, 5461)):
        count = chunk_matrices(*shape, 64, 1 << 30)
        assert count * bytes_per_matrix(*shape, 64) <= 1 << 30 < (count + 1) * bytes_per_matrix(*shape, 64)
