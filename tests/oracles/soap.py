"""SOAP in numpy: Adam in the slowly turning eigenbasis of the averaged G'G (one-sided), and of GG' too (two-sided).

The paper's box (Algorithm 2) misprints the average of line 5; its meaning is L <- b2 L + (1 - b2) G'G. Published SOAP
averages the squares of the projected gradient, the box those of the projected momentum: `squares` chooses.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.oracles.linalg import Matrix, leading_eigenvectors, qr, ratio


@dataclass
class Soap:
    """One matrix under SOAP; the bases are turned by one power step and QR every `frequency` steps."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    two_sided: bool = False
    frequency: int = 1
    squares: str = "gradient"
    t: int = 0
    state: dict[str, Matrix] = field(default_factory=dict)

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """W <- (1 - lr wd) W - lr Q_l [(Q_l' M Q_r) / (sqrt(V) + eps)] Q_r', bias-corrected."""
        return W * (1 - self.lr * self.weight_decay) - self.lr * self.direction(G)

    def direction(self, G: Matrix) -> Matrix:
        """The direction before the learning rate."""
        (b1, b2), s = self.betas, self.state
        m, n = G.shape
        if self.t == 0:
            s |= {"M": np.zeros_like(G), "V": np.zeros_like(G), "L": np.zeros((n, n)), "K": np.zeros((m, m))}
            s |= {"U": leading_eigenvectors(G.T @ G, n), "O": np.eye(m)}
            if self.two_sided:
                s["O"] = leading_eigenvectors(G @ G.T, m)
        self.t += 1
        s["M"] = b1 * s["M"] + (1 - b1) * G
        s["L"] = b2 * s["L"] + (1 - b2) * G.T @ G
        s["K"] = b2 * s["K"] + (1 - b2) * G @ G.T
        if self.t > 1 and (self.t - 1) % self.frequency == 0:
            s["U"] = qr(s["L"] @ s["U"])
            s["O"] = qr(s["K"] @ s["O"]) if self.two_sided else s["O"]
        U, O = s["U"], s["O"]
        P = O.T @ s["M"] @ U
        s["V"] = b2 * s["V"] + (1 - b2) * (P if self.squares == "momentum" else O.T @ G @ U) ** 2
        return O @ ratio(P / (1 - b1**self.t), np.sqrt(s["V"] / (1 - b2**self.t)) + self.eps) @ U.T
