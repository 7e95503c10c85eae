"""Write tests/golden/cosmos_oracle.npz: short trajectories of the numpy oracle, to notice if its numbers change.

Run from the repository root: PYTHONPATH=. python tests/golden/make.py
Arrays of each case: W0 (m, n), G (t, m, n), W (t, m, n); `hyper` is the JSON of the oracle's arguments.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.cosmos import Cosmos
from tests.oracles.gradients import gradients

STEPS = 6
FILE = Path(__file__).with_name("cosmos_oracle.npz")
COMMON: dict[str, Any] = {"lr": 1e-2, "gamma": 0.25, "betas": [0.9, 0.98]}
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "tall": ((16, 10), COMMON | {"rank": 4}),
    "wide_inside": ((9, 16), COMMON | {"rank": 3, "eps_placement": "inside", "weight_decay": 0.1}),
    "smaller_side": ((9, 16), COMMON | {"rank": 3, "side": "smaller", "nesterov": True}),
    "full_rank_guarded": ((14, 8), COMMON | {"rank": 64, "residual_guard": 1e-6}),
    # O'GU is diagonal at the first step, its other entries rounding noise: epsilon must stand above that noise.
    "two_sided": ((12, 10), COMMON | {"rank": 4, "two_sided": True, "eps": 1e-4}),
}


def arrays(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one case, computed by the oracle."""
    (m, n), hyper = CASES[name]
    seed = list(CASES).index(name)
    G = gradients(STEPS, m, n, hyper["rank"], seed)
    oracle = Cosmos(**hyper)
    W = [np.random.default_rng(1000 + seed).normal(size=(m, n))]
    for t in range(STEPS):
        W.append(oracle.step(W[-1], G[t]))
    return {"W0": W[0], "G": G, "W": np.stack(W[1:]), "hyper": np.array(json.dumps(hyper))}


def main() -> None:
    """Compute every case and write the file."""
    np.savez_compressed(FILE, **{f"{name}.{key}": value for name in CASES for key, value in arrays(name).items()})
    print(f"{FILE}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
