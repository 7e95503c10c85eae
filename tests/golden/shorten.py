"""Write tests/golden/official_short.npz: a part of the recorded trajectories of the authors' code, to be committed.

Run from the repository root: python tests/golden/shorten.py FOLDER/official_nesterov.npz
A trajectory cannot be cut to fewer rows or columns, so steps are left out: one case has all of them and its final
state U, S, V; the others have their first. Arrays of each case: hyper, W0 (m, n) in fp32, G (t, m, n) in fp64, `steps`,
and D (steps, m, n), the displacements W - W0 after these steps, in fp32; U, S, V if the case is whole.
"""

import sys
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("official_short.npz")
# Case: the steps after which displacements are kept; G is kept up to the last.
STEPS = {"tall": [1, 2], "wide": [1, 2, 10], "square": [1]}


def shortened(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays to commit."""
    out = {"hyper_names": data["hyper_names"]}
    for case, steps in STEPS.items():
        W0, G, W = (data[f"{case}.{key}"] for key in ("W0", "G", "W"))
        displacements = W[np.array(steps) - 1] - W0
        arrays = {"hyper": data[f"{case}.hyper"], "W0": W0.astype(np.float32), "G": G[: steps[-1]]}
        arrays |= {"steps": np.array(steps), "D": displacements.astype(np.float32)}
        if steps[-1] == len(G):
            arrays |= {key: data[f"{case}.{key}"] for key in "USV"}
        out |= {f"{case}.{key}": value for key, value in arrays.items()}
    return out


if __name__ == "__main__":
    np.savez_compressed(FILE, **shortened(dict(np.load(sys.argv[1]))))
    print(f"{FILE}: {FILE.stat().st_size} bytes")
