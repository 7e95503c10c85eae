"""`CosmosPaper` against recorded trajectories: those of the authors' released code, and those of our own oracle.

Shapes: W0 (m, n) first weights, G (t, m, n) gradients, W (t, m, n) weights after each step.
"""

import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_optim import CosmosPaper

# The recorded code adds 1e-7 to the norm before Newton-Schulz; a plain fp64 transcription differs from it by 6e-6.
OFFICIAL_TOLERANCE = 1e-4
# Without that epsilon U, S and V do not depend on Newton-Schulz at all.
OFFICIAL_STATE_TOLERANCE = 1e-9
# fp64 against fp64, stored on another machine with another BLAS.
OWN_TOLERANCE = 1e-9

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "tests" / "golden" / "cosmos_oracle.npz"
MAKER = ROOT / "tests" / "golden" / "make.py"
OFFICIAL_SHORT = ROOT / "tests" / "golden" / "official_short.npz"
SHORTENER = ROOT / "tests" / "golden" / "shorten.py"


def run(W0: np.ndarray, G: np.ndarray, **hyper: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Return our W after each step, and the final state."""
    p = torch.nn.Parameter(torch.from_numpy(W0.copy()))
    opt = CosmosPaper([("w", p)], ns_dtype=torch.float64, **hyper)
    path = []
    for gradient in G:
        p.grad = torch.from_numpy(gradient.copy())
        opt.step()
        path.append(p.detach().numpy().copy())
    return path, dict(opt.state[p])


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the relative Frobenius distance."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def follow_official(data: Mapping[str, np.ndarray], case: str, displacements: Mapping[int, np.ndarray]) -> None:
    """Compare displacements after these steps, and U (up to signs), S and V at the end if the file has them."""
    h = dict(zip(data["hyper_names"].tolist(), data[f"{case}.hyper"].tolist(), strict=True))
    W0 = data[f"{case}.W0"].astype(np.float64)
    path, state = run(
        W0,
        data[f"{case}.G"],
        lr=h["lr"] * h["lr_ratio"],
        betas=(h["beta1"], h["beta2"]),
        eps=h["eps"],
        rank=int(h["rank"]),
        gamma=h["gamma"],
        weight_decay=h["weight_decay"] / h["lr_ratio"],  # theirs is multiplied by lr, ours by the hidden lr
        nesterov=True,
        eps_placement="outside",
    )
    for step, expected in displacements.items():
        assert error(path[step - 1] - W0, expected) < OFFICIAL_TOLERANCE
    if f"{case}.U" not in data:
        return
    U, S, V = (state[k].numpy() for k in "USV")
    signs = np.sign(np.sum(U * data[f"{case}.U"], axis=0))
    assert error(U * signs, data[f"{case}.U"]) < OFFICIAL_STATE_TOLERANCE
    assert error(S * np.outer(signs, signs), data[f"{case}.S"]) < OFFICIAL_STATE_TOLERANCE
    assert error(V, data[f"{case}.V"]) < OFFICIAL_STATE_TOLERANCE


@pytest.mark.parametrize("case", ["tall", "wide", "square"])
def test_cosmos_follows_the_released_code(case: str) -> None:
    """Compare with the committed part: every shape, and all steps and the final state of the wide matrix."""
    data = dict(np.load(OFFICIAL_SHORT))
    follow_official(data, case, dict(zip(data[f"{case}.steps"].tolist(), data[f"{case}.D"], strict=True)))


@pytest.mark.parametrize("case", ["tall", "wide", "square"])
def test_cosmos_follows_the_released_code_over_whole_trajectories(case: str, shared: Path) -> None:
    """Compare with the whole file: every step and the final state of every shape."""
    data = dict(np.load(shared / "golden" / "official_nesterov.npz"))
    follow_official(data, case, dict(enumerate(data[f"{case}.W"] - data[f"{case}.W0"], 1)))


def test_the_committed_part_of_the_released_code_is_from_the_whole_file(shared: Path) -> None:
    made = runpy.run_path(str(SHORTENER))["shortened"](dict(np.load(shared / "golden" / "official_nesterov.npz")))
    data = dict(np.load(OFFICIAL_SHORT))
    assert made.keys() == data.keys() and "wide.U" in data
    assert all(np.array_equal(made[key], data[key]) for key in data)


def own_cases() -> list[str]:
    """Return the names of the cases in the committed file."""
    return sorted({key.split(".")[0] for key in np.load(OWN).files})


@pytest.mark.parametrize("case", own_cases())
def test_cosmos_follows_the_recorded_oracle(case: str) -> None:
    """Run the library on the gradients of the committed trajectories."""
    data = np.load(OWN)
    W0, W = data[f"{case}.W0"], data[f"{case}.W"]
    hyper = json.loads(str(data[f"{case}.hyper"]))
    path, _ = run(W0, data[f"{case}.G"], **hyper | {"betas": tuple(hyper["betas"])})
    for actual, expected in zip(path, W, strict=True):
        assert error(actual - W0, expected - W0) < OWN_TOLERANCE


def test_the_oracle_still_produces_the_committed_file() -> None:
    """A change of the oracle must fail here, instead of silently changing what the library is compared with."""
    maker, data = runpy.run_path(str(MAKER)), np.load(OWN)
    assert sorted(maker["CASES"]) == own_cases()
    for case in maker["CASES"]:
        made = maker["arrays"](case)
        assert str(made["hyper"]) == str(data[f"{case}.hyper"])
        for key in ("W0", "G"):
            assert np.allclose(made[key], data[f"{case}.{key}"], rtol=0, atol=1e-12)
        assert error(made["W"] - made["W0"], data[f"{case}.W"] - data[f"{case}.W0"]) < OWN_TOLERANCE
