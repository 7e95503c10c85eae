"""MUON as in the paper's box, MUON + NORM, and NorMuon, in numpy.

MUON: M <- mu M + G; N = mu M + G (Nesterov); B = NS5(N / |N|_F); W <- W - lr B scale(m, n).
NorMuon (arXiv 2510.05491): v <- b2 v + (1 - b2) (row means of B^2); B / (sqrt(v) + eps); rescaled as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracles.linalg import NS5, Matrix, equal_rows, newton_schulz, ratio, unit_rms

# The paper multiplies by sqrt(m) and assumes that m is the longer side; the other two are those of torch.optim.Muon.
SCALES: dict[str, Callable[[int, int], float]] = {
    "paper": lambda m, n: max(m, n) ** 0.5,
    "original": lambda m, n: max(1.0, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
}


@dataclass
class Muon:
    """One matrix under MUON; `ema=True` averages (M <- mu M + (1 - mu) G) instead of summing."""

    lr: float
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "paper"
    weight_decay: float = 0.0
    ema: bool = False
    coefficients: Sequence[tuple[float, float, float]] = NS5
    equal_rows: bool = False
    M: Matrix | float = 0.0

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """W <- (1 - lr wd) W - lr D."""
        return W * (1 - self.lr * self.weight_decay) - self.lr * self.direction(G)

    def polar(self, G: Matrix) -> Matrix:
        """NS5 of the (Nesterov) momentum."""
        mu, w = self.momentum, (1 - self.momentum if self.ema else 1.0)
        self.M = mu * self.M + w * G
        N = mu * self.M + w * G if self.nesterov else self.M
        return newton_schulz(equal_rows(N) if self.equal_rows else N, self.coefficients)

    def direction(self, G: Matrix) -> Matrix:
        """The direction before the learning rate."""
        return self.polar(G) * SCALES[self.scale](*G.shape)


@dataclass
class MuonNorm(Muon):
    """MUON whose update is NORM(NS5(.)) sqrt(m): root mean square 1."""

    def direction(self, G: Matrix) -> Matrix:
        """The direction before the learning rate."""
        return unit_rms(self.polar(G))


@dataclass
class NorMuon(Muon):
    """MUON with a second moment for each row after Newton-Schulz, the whole rescaled to root mean square 1."""

    beta2: float = 0.95
    eps: float = 1e-8
    v: Matrix | float = 0.0

    def direction(self, G: Matrix) -> Matrix:
        """The direction before the learning rate."""
        B = self.polar(G)
        self.v = self.beta2 * self.v + (1 - self.beta2) * (B * B).mean(axis=1, keepdims=True)
        return unit_rms(ratio(B, np.broadcast_to(np.sqrt(self.v) + self.eps, B.shape)))
