"""COSMOS against the fp64 numpy oracle: every option, every shape, parameters and state, over 20 steps.

Shapes: W0 (m, n) first weights, G (20, m, n) gradients, a path (20, m, n) the weights after each step.
"""

from typing import Any

import numpy as np
import pytest
import torch

from cosmos_optim import Cosmos, CosmosPaper
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.coefficients import COEFFICIENTS
from cosmos_optim.linalg.subspace import take_first_bases
from cosmos_optim.rules import cosmos
from tests.oracles.cosmos import Cosmos as Oracle
from tests.oracles.gradients import gradients
from tests.oracles.linalg import NS5, newton_schulz, unit_rms
from tests.oracles.soap import Soap

STEPS = 20
# fp64 against fp64: 1e-16 per step, amplified by Newton-Schulz (3.4^5) and by the inverse gap of the spectrum.
TOLERANCE = 1e-10
# The basis at the end is the product of 20 power steps; V and S are quadratic in it.
STATE_TOLERANCE = 1e-9

LR = 3e-3
COMMON: dict[str, Any] = {"gamma": 0.25, "rank": 4, "residual_guard": 0.0}
# O'GU is diagonal at the first step and its other entries are rounding noise, which only an epsilon well above 1e-16
# keeps out of the update: with 1e-8 two correct implementations differ by 1e-8.
TWO_SIDED: dict[str, Any] = {"two_sided": True, "eps": 1e-4}

CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "tall": ((24, 14), {}),
    "wide": ((12, 26), {}),
    "square": ((16, 16), {}),
    "first basis by iteration": ((48, 64), {}),  # n > 2 (r + 16): no longer a full eigendecomposition
    "one column of basis": ((20, 12), {"rank": 1}),
    "other betas": ((20, 12), {"betas": (0.8, 0.95)}),
    "no first moment": ((20, 12), {"betas": (0.0, 0.95)}),
    "gamma 0": ((20, 12), {"gamma": 0.0}),
    "epsilon inside": ((24, 14), {"eps_placement": "inside"}),
    "epsilon inside, large": ((24, 14), {"eps_placement": "inside", "eps": 1e-2}),
    "epsilon outside, large": ((24, 14), {"eps": 1e-2}),
    "epsilon 0": ((24, 14), {"eps": 0.0}),
    "nesterov": ((24, 14), {"nesterov": True}),
    "nesterov, inside": ((24, 14), {"nesterov": True, "eps_placement": "inside"}),
    "guard on": ((24, 14), {"residual_guard": 1e-5}),
    "smaller side, wide": ((12, 26), {"side": "smaller"}),
    "smaller side, wide, nesterov": ((12, 26), {"side": "smaller", "nesterov": True}),
    "smaller side, tall": ((24, 14), {"side": "smaller"}),
    "smaller side, square": ((16, 16), {"side": "smaller"}),
    "weight decay": ((24, 14), {"weight_decay": 0.3}),
    "rank = n, guarded": ((24, 8), {"rank": 8, "residual_guard": 1e-6}),
    "rank > n, guarded": ((24, 8), {"rank": 64, "residual_guard": 1e-6}),
    "rank > n, gamma 0": ((24, 8), {"rank": 64, "gamma": 0.0}),
    "rows": ((24, 14), {"row_beta2": 0.95}),
    "rows, wide, nesterov": ((12, 26), {"row_beta2": 0.8, "nesterov": True, "weight_decay": 0.3}),
    "rows, no average": ((24, 14), {"row_beta2": 0.0, "eps": 1e-2}),
    "rows, epsilon 0": ((24, 14), {"row_beta2": 0.95, "eps": 0.0, "eps_placement": "inside"}),
    "rows, smaller side": ((12, 26), {"row_beta2": 0.95, "side": "smaller"}),
    "equal rows": ((24, 14), {"equal_rows": True}),
    "equal rows, wide, rows": ((12, 26), {"equal_rows": True, "row_beta2": 0.95, "nesterov": True}),
    "equal rows, smaller side": ((12, 26), {"equal_rows": True, "side": "smaller"}),
    "two-sided, equal rows": ((24, 14), TWO_SIDED | {"equal_rows": True}),
    "two-sided, rows": ((24, 14), TWO_SIDED | {"row_beta2": 0.95}),
    "two-sided": ((24, 14), TWO_SIDED),
    "two-sided, wide": ((12, 26), TWO_SIDED),
    "two-sided, square": ((16, 16), TWO_SIDED),
    "two-sided, first basis by iteration": ((56, 64), TWO_SIDED),
    "two-sided, inside": ((24, 14), TWO_SIDED | {"eps_placement": "inside", "eps": 1e-8}),
    "two-sided, nesterov": ((24, 14), TWO_SIDED | {"nesterov": True}),
    "two-sided, decay": ((24, 14), TWO_SIDED | {"weight_decay": 0.3}),
    "two-sided, rank = n": ((24, 8), TWO_SIDED | {"rank": 8, "residual_guard": 1e-6}),
}


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the relative Frobenius distance."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def run_oracle(W0: np.ndarray, G: np.ndarray, **hyper: Any) -> tuple[np.ndarray, Oracle]:
    """Return the oracle's W after each step, and the oracle."""
    oracle, W, path = Oracle(lr=LR, **hyper), W0, []
    for gradient in G:
        W = oracle.step(W, gradient)
        path.append(W)
    return np.stack(path), oracle


def run_ours(
    W0: np.ndarray, G: np.ndarray, kind: type[Cosmos] = CosmosPaper, **hyper: Any
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return our W after each step, and the final state."""
    p = torch.nn.Parameter(torch.from_numpy(W0.copy()))
    opt = kind([("w", p)], lr=LR, ns_dtype=torch.float64, **hyper)
    path = []
    for gradient in G:
        p.grad = torch.from_numpy(gradient.copy())
        opt.step()
        path.append(p.detach().numpy().copy())
    state = {k: v.detach().numpy() for k, v in opt.state[p].items() if k in {"M", "U", "S", "V", "O", "R", "v"}}
    return np.stack(path), state


def problem(shape: tuple[int, int], rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the first weights and the gradients of one comparison."""
    return np.random.default_rng(100 + seed).normal(size=shape), gradients(STEPS, *shape, rank=rank, seed=seed)


def assert_same_path(ours: np.ndarray, oracle: np.ndarray, W0: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Assert that the displacements from W0 agree at every step."""
    worst = max(error(a - W0, b - W0) for a, b in zip(ours, oracle, strict=True))
    assert worst < tolerance, f"displacement differs by {worst:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_cosmos_follows_the_oracle_in_weights_and_state(name: str) -> None:
    """Compare displacements at every step, and the state at the end, with U and O up to the signs of their columns."""
    shape, options = CASES[name]
    hyper = COMMON | options
    W0, G = problem(shape, hyper["rank"])
    expected, oracle = run_oracle(W0, G, **hyper)
    actual, state = run_ours(W0, G, **hyper)
    assert_same_path(actual, expected, W0)

    right = np.sign(np.sum(state["U"] * oracle.state["U"], axis=0))
    left = np.sign(np.sum(state["O"] * oracle.state["O"], axis=0)) if "O" in state else None
    flipped = dict(oracle.state, U=oracle.state["U"] * right, S=oracle.state["S"] * np.outer(right, right))
    if left is not None:
        flipped |= {"O": flipped["O"] * left, "R": flipped["R"] * np.outer(left, left)}
    transposed = oracle.side == "smaller" and shape[0] < shape[1]
    assert state.keys() == flipped.keys()
    for key, value in flipped.items():
        ours = state[key].T if transposed and key == "M" and state[key].shape != value.shape else state[key]
        assert error(ours, value) < STATE_TOLERANCE, f"{key} differs by {error(ours, value):.2e}"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(Cosmos, {"rank": 32, "nesterov": True, "row_beta2": 0.95}), (CosmosPaper, {"rank": 64})],
)
def test_the_defaults_follow_the_oracle(kind: type[Cosmos], settings: dict[str, Any]) -> None:
    """Set the learning rate only, as a user may."""
    W0, G = problem((80, 72), settings["rank"])
    actual, state = run_ours(W0, G, kind)
    assert_same_path(actual, run_oracle(W0, G, gamma=LR / 2e-3, residual_guard=1e-5, **settings)[0], W0)
    assert state["U"].shape == (72, settings["rank"])


@pytest.mark.parametrize(("options", "coefficients"), [
    ({"ns_coefficients": "polar-express", "ns_steps": 7}, COEFFICIENTS["polar-express"][:7]),
    ({"ns_steps": 3}, NS5[:3]),
], ids=["seven of Polar Express", "three of Jordan"])  # fmt: skip
def test_the_steps_and_polynomials_of_newton_schulz_are_those_of_the_group(options: Any, coefficients: Any) -> None:
    """The table itself is tested in tests/linalg."""
    W0, G = problem((24, 14), 4)
    actual, _ = run_ours(W0, G, **COMMON, **options)
    assert_same_path(actual, run_oracle(W0, G, **COMMON, coefficients=coefficients)[0], W0)


@pytest.mark.parametrize("sides", [{}, TWO_SIDED], ids=["one-sided", "two-sided"])
def test_a_stack_of_matrices_follows_the_oracle_of_each_matrix(sides: dict[str, Any]) -> None:
    """Use one parameter (E, m, n) and E oracles."""
    hyper = COMMON | sides
    problems = [problem((18, 10), 4, seed) for seed in range(3)]
    W0, G = (np.stack(x, axis=axis) for x, axis in zip(zip(*problems, strict=True), (0, 1), strict=True))
    actual, _ = run_ours(W0, G, **hyper)
    for i, (start, grads) in enumerate(problems):
        assert_same_path(actual[:, i], run_oracle(start, grads, **hyper)[0], start)


@pytest.mark.parametrize("sides", [{}, TWO_SIDED], ids=["one-sided", "two-sided"])
def test_the_residual_guard_acts_at_the_same_steps_as_in_the_oracle(sides: dict[str, Any]) -> None:
    """Put the threshold between the residual energies: some steps lose the Muon half, others keep it."""
    rng = np.random.default_rng(7)
    W0, G = problem((24, 14), 4)
    G[5:] += 0.25 * rng.normal(size=G[5:].shape)  # from here on the residual holds most of the energy
    hyper = COMMON | sides
    paths = {guard: run_oracle(W0, G, **hyper | {"residual_guard": guard})[0] for guard in (0.0, 0.3, 2.0)}
    moves = {guard: np.diff(path, axis=0) for guard, path in paths.items()}
    assert error(moves[0.3][0], moves[0.0][0]) > 0.01, "the guard must act early"
    assert error(moves[0.3][-1], moves[2.0][-1]) > 0.01, "the guard must not act later"
    assert_same_path(run_ours(W0, G, **hyper | {"residual_guard": 0.3})[0], paths[0.3], W0)


def test_a_small_guard_changes_no_bit_if_the_residual_has_energy() -> None:
    """Compare a small threshold with none."""
    W0, G = problem((24, 14), 4)
    on, off = (run_ours(W0, G, **COMMON | {"residual_guard": guard})[0] for guard in (1e-6, 0.0))
    assert np.array_equal(on, off)


def test_cosmos_with_gamma_zero_and_full_rank_is_normalized_soap() -> None:
    """Compare with NORM of the direction of one-sided SOAP (V from G U), which has its own oracle."""
    W0, G = problem((24, 8), 8)
    actual, _ = run_ours(W0, G, rank=8, gamma=0.0)
    soap, W = Soap(lr=LR), W0
    for t in range(STEPS):
        W = W - LR * unit_rms(soap.direction(G[t]))
        assert error(actual[t] - W0, W - W0) < TOLERANCE


@pytest.mark.parametrize("sides", [{}, TWO_SIDED], ids=["one-sided", "two-sided"])
def test_the_signs_of_the_basis_do_not_change_the_update(sides: dict[str, Any]) -> None:
    """Replace U by U diag(+-1): A = P U' stays the same, so comparisons of weights need no sign convention."""
    hyper = COMMON | sides
    W0, G = problem((24, 14), 4)
    expected, _ = run_oracle(W0, G, **hyper)
    oracle = Oracle(lr=LR, **hyper)
    W = oracle.step(W0, G[0])
    signs = np.array([1.0, -1.0, -1.0, 1.0])
    for basis, moment in (("U", "S"), ("O", "R")):
        if basis in oracle.state:
            oracle.state[basis] = oracle.state[basis] * signs
            oracle.state[moment] = oracle.state[moment] * np.outer(signs, signs)
    for t in range(1, STEPS):
        W = oracle.step(W, G[t])
        assert error(W - W0, expected[t] - W0) < TOLERANCE


class WithRatio(Oracle):
    """The oracle; it also keeps the ratio of the halves of its last step."""

    ratio = 0.0

    def _combined(self, A: np.ndarray, X: np.ndarray, P: np.ndarray) -> np.ndarray:
        B = unit_rms(newton_schulz(X, self.coefficients))
        self.ratio = float(np.linalg.norm(A) / np.linalg.norm(self.gamma * B))
        return super()._combined(A, X, P)


@pytest.mark.parametrize("options", [{}, {"row_beta2": 0.95, "nesterov": True}, TWO_SIDED], ids=str)
def test_diagnostics_are_those_of_the_oracle(options: dict[str, Any]) -> None:
    """At every step: energy and drift of the basis, and one-sided the ratio of the halves, by their definitions."""
    hyper = COMMON | options
    W, G = problem((24, 14), 4)
    p = torch.nn.Parameter(torch.from_numpy(W.copy()))
    opt, oracle = CosmosPaper([("w", p)], lr=LR, ns_dtype=torch.float64, **hyper), WithRatio(lr=LR, **hyper)
    for step, gradient in enumerate(G[:5]):
        old = oracle.state.get("U")
        W = oracle.step(W, gradient)
        new = oracle.state["U"]
        p.grad = torch.from_numpy(gradient.copy())
        with opt.diagnostics() as seen:
            opt.step()
        expected = {"energy": np.sum((gradient @ new) ** 2) / np.sum(gradient**2), "update_rms": 1.0}
        if step:
            expected["drift"] = 1 - np.sum((new.T @ old) ** 2) / 4
            assert expected["drift"] > 1e-3
        if not options.get("two_sided"):  # its Muon half is not exactly orthogonal to both bases
            expected["ratio"] = oracle.ratio
        for name, value in expected.items():
            assert seen["w"][name] == pytest.approx(value, rel=STATE_TOLERANCE), name


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_the_diagnosed_ratio_does_not_depend_on_the_factors_of_rows(eps: float) -> None:
    """SOAP half over Muon half, with and without the second moment of rows, from the same state."""
    G, M = torch.randn(2, 12, 9, 7, dtype=torch.float64)
    V, v = torch.rand(12, 9, 3, dtype=torch.float64), torch.rand(12, 9, 1, dtype=torch.float64)
    zeros = cosmos.CosmosState(M, torch.zeros(12, 7, 3).double(), torch.eye(3).double(), V)
    state = take_first_bases(G, zeros)
    ratios = []
    for rows, beta in ((None, None), (v, 0.95)):
        old = state._replace(v=rows)
        D, new = cosmos.direction(G, old, torch.tensor(2.0), eps=eps, row_beta2=beta)
        ratios.append(cosmos.diagnose(G, D, old, new, eps=eps, alg=Algebra(9, 7))["ratio"])
    torch.testing.assert_close(*ratios)
