"""COSMOS in numpy: the paper's Algorithm 1 (one-sided) and Algorithm 4 (two-sided), one matrix.

Shapes: W, G, M (m, n); U (n, r), S (r, r), V (m, r); two-sided also O (m, r'), R (r', r'), and V is (r', r).
What the paper leaves open: t counts from 1; U (and O) start as the leading eigenvectors of the first G'G (GG'); S, R, V
and M start at zero. Misprints of Algorithm 4 are read by their meaning: O R for R O, O O' M for O' O M, a V of the
projected gradient's shape, and the sqrt(m) of Algorithm 1 in the last line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.linalg import NS5, Matrix, equal_rows, leading_eigenvectors, newton_schulz, qr, ratio, unit_rms


@dataclass
class Cosmos:
    """One matrix under COSMOS; `step(W, G)` returns the new W."""

    lr: float
    gamma: float
    rank: int
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    eps_placement: str = "outside"
    nesterov: float = 0.0  # steps the momentum looks ahead
    residual_guard: float = 0.0
    weight_decay: float = 0.0
    two_sided: bool = False
    side: str = "input"
    row_beta2: float | None = None
    equal_rows: bool = False  # not the paper's, either
    coefficients: Sequence[tuple[float, float, float]] = NS5
    t: int = 0
    state: dict[str, Matrix] = field(default_factory=dict)

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """W <- (1 - lr wd) W - lr NORM(A + gamma B sqrt(m)) sqrt(m)."""
        flip = self.side == "smaller" and G.shape[0] < G.shape[1]
        direction = self._two_sided if self.two_sided else self._one_sided
        D = direction(G.T).T if flip else direction(G)
        return W * (1 - self.lr * self.weight_decay) - self.lr * D

    def _one_sided(self, G: Matrix) -> Matrix:
        _, b2 = self.betas
        n = G.shape[1]
        if self.t == 0:
            r = min(self.rank, n)
            U = leading_eigenvectors(G.T @ G, r)
            self.state = {"M": np.zeros_like(G), "U": U, "S": np.zeros((r, r)), "V": np.zeros((G.shape[0], r))}
        self.t += 1
        N = self._momentum(G)
        self._turn("U", "S", G.T @ G)
        U = self.state["U"]
        self.state["V"] = b2 * self.state["V"] + (1 - b2) * (G @ U) ** 2
        A = self._adapted(N @ U) @ U.T
        return self._combined(A, N - N @ U @ U.T, N @ U)

    def _two_sided(self, G: Matrix) -> Matrix:
        _, b2 = self.betas
        m, n = G.shape
        if self.t == 0:
            r, q = min(self.rank, n), min(self.rank, m)
            U = leading_eigenvectors(G.T @ G, r)
            self.state = {"M": np.zeros_like(G), "U": U, "S": np.zeros((r, r)), "V": np.zeros((q, r))}
            self.state |= {"O": leading_eigenvectors(G @ G.T, q), "R": np.zeros((q, q))}
        self.t += 1
        N = self._momentum(G)
        self._turn("U", "S", G.T @ G)
        self._turn("O", "R", G @ G.T)
        U, O = self.state["U"], self.state["O"]
        self.state["V"] = b2 * self.state["V"] + (1 - b2) * (O.T @ G @ U) ** 2
        A = O @ self._adapted(O.T @ N @ U) @ U.T
        return self._combined(A, N - O @ O.T @ N @ U @ U.T, O.T @ N @ U)

    def _momentum(self, G: Matrix) -> Matrix:
        """The bias-corrected momentum of both halves (the MUON half does not feel the correction)."""
        b1, t = self.betas[0], self.t
        self.state["M"] = M = b1 * self.state["M"] + (1 - b1) * G
        for _ in range(int(self.nesterov)):  # as if G came again
            M = b1 * M + (1 - b1) * G
        return M / (1 - b1 ** (t + int(self.nesterov)))

    def _turn(self, basis: str, moment: str, GG: Matrix) -> None:
        """Lines 5-6: H = b2 U S U' + (1 - b2) G'G; U <- QR(H U); S <- U'HU."""
        _, b2 = self.betas
        U, S = self.state[basis], self.state[moment]
        H = b2 * U @ S @ U.T + (1 - b2) * GG
        self.state[basis] = new = qr(H @ U)
        self.state[moment] = new.T @ H @ new

    def _adapted(self, P: Matrix) -> Matrix:
        V, correction = self.state["V"], 1 - self.betas[1] ** self.t
        if self.eps_placement == "inside":
            return ratio(P, np.sqrt((V + self.eps) / correction))
        return ratio(P, np.sqrt(V / correction) + self.eps)

    def _combined(self, A: Matrix, X: Matrix, P: Matrix) -> Matrix:
        """Lines 9-11 from the SOAP half A, the residual X and the projection P that X lacks."""
        rest, held = np.sum(X * X), np.sum(P * P)
        alone = rest < self.residual_guard * (rest + held)
        X = equal_rows(X) if self.equal_rows else X
        B = np.zeros_like(X) if alone else unit_rms(newton_schulz(X, self.coefficients))
        return unit_rms(self._even_rows(A + self.gamma * B))

    def _even_rows(self, D: Matrix) -> Matrix:
        """Not the paper's: rows over the root of their running mean square, as NorMuon has it (arXiv 2510.05491)."""
        if self.row_beta2 is None:
            return D
        v = self.state.get("v", np.zeros((len(D), 1)))
        self.state["v"] = v = self.row_beta2 * v + (1 - self.row_beta2) * np.mean(D * D, axis=1, keepdims=True)
        return ratio(D, np.broadcast_to(np.sqrt(v) + max(self.eps, 1e-4), D.shape))  # rows below are noise
