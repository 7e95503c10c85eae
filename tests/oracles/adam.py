"""Adam with decoupled weight decay, and Adam-mini (one second moment for each block of rows), in numpy."""

from dataclasses import dataclass

import numpy as np

from tests.oracles.linalg import Matrix, ratio


@dataclass
class Adam:
    """W <- (1 - lr wd) W - lr (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    t: int = 0
    M: Matrix | float = 0.0
    V: Matrix | float = 0.0

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """One step; `G` may have any shape."""
        return W * (1 - self.lr * self.weight_decay) - self.lr * self.direction(G, G * G)

    def direction(self, G: Matrix, squares: Matrix) -> Matrix:
        """The adapted momentum; `squares` is what the second moment averages."""
        b1, b2 = self.betas
        self.t += 1
        self.M = b1 * self.M + (1 - b1) * G
        self.V = b2 * self.V + (1 - b2) * squares
        return ratio(self.M / (1 - b1**self.t), np.sqrt(self.V / (1 - b2**self.t)) + self.eps)


@dataclass
class AdamMini(Adam):
    """Adam whose squared gradients are averaged over blocks of `rows` whole rows (1: by row; head_dim: by head)."""

    rows: int = 1

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """One step; the number of rows is a multiple of `rows`."""
        blocks = (G * G).reshape(-1, self.rows * G.shape[1]).mean(axis=1)
        squares = np.broadcast_to(blocks.repeat(self.rows)[:, None], G.shape)
        return W * (1 - self.lr * self.weight_decay) - self.lr * self.direction(G, squares)
