"""GaLore in numpy: Adam on the gradient projected on its leading singular vectors, renewed every `update_gap` steps.

The projection acts on the shorter side: G P (right) when m >= n, P'G (left) otherwise. Adam's moments live in the
projected space and are kept when P is renewed, so the sign of each new singular vector matters: here it is the one that
keeps a non-negative product with the vector it replaces.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.oracles.adam import Adam
from tests.oracles.linalg import Matrix


@dataclass
class GaLore:
    """One matrix under GaLore."""

    lr: float
    rank: int
    update_gap: int = 200
    scale: float = 0.25
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    P: Matrix | None = None
    adam: Adam = field(init=False)

    def __post_init__(self) -> None:
        self.adam = Adam(self.lr, self.betas, self.eps)

    def step(self, W: Matrix, G: Matrix) -> Matrix:
        """W <- (1 - lr wd) W - lr scale Adam(G P) P'."""
        right = G.shape[0] >= G.shape[1]
        X = G if right else G.T
        if self.adam.t % self.update_gap == 0:
            P = np.linalg.svd(X, full_matrices=False)[2][: self.rank].T
            self.P = P if self.P is None else P * np.where(np.sum(P * self.P, axis=0) < 0, -1.0, 1.0)
        low = X @ self.P
        D = self.scale * self.adam.direction(low, low * low) @ self.P.T
        return W * (1 - self.lr * self.weight_decay) - self.lr * (D if right else D.T)
