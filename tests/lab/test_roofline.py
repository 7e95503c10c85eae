"""The least time of a step of benchmarks/roofline.py, and the shapes that it is counted for."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step
from benchmarks.roofline import cosmos_bytes, newton_schulz_flops
from benchmarks.shapes import MODELS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_merged_iterations_save_a_fifth_of_the_flops_of_a_square_matrix() -> None:
    plain, merged = (newton_schulz_flops(2048, 2048, merged=merged) for merged in (False, True))
    assert plain == 5 * 4 * 2048**3  # five times X'X (half of it), X Z and half of R^2
    assert merged == 0.8 * plain


def test_weights_and_gradients_of_two_bytes_are_read_and_written_at_half_the_cost() -> None:
    model = MODELS["tiny"]
    hidden = sum(m * n for m, n in model.matrices())
    vectors = (2 * model.depth + 1) * model.width
    others = 2 * model.vocab * model.width + vectors
    # Hidden: G four times and W twice. Others: the gradient twice and the weight twice.
    assert cosmos_bytes(model, 4) - cosmos_bytes(model, 2) == 2 * (6 * hidden + 4 * others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_measurement_counts_the_bytes_of_its_dtype(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dict.fromkeys(("median_ms", "min_ms", "max_ms", "first_ms", "warm_up_s", "host_ms", "transfer_ms"), 1.0)
    row |= dict.fromkeys(("state_bytes", "transient_bytes", "graph_bytes", "resident_bytes", "syncs"), 1)
    monkeypatch.setattr(step, "measure_optimizer", lambda name, *_: {"name": name, **row})
    monkeypatch.setattr(step, "rates", lambda device: {"flops": 1e12, "bytes": 1e12})
    result: dict[str, Any] = step.main(["--model", "tiny", "--device", "cpu", "--dtype", dtype])
    assert result["bytes"] == cosmos_bytes(MODELS["tiny"], {"float32": 4, "bfloat16": 2}[dtype])
    assert result["roofline"]["traffic_ms"] == pytest.approx(result["bytes"] / 1e9)


def test_kept_measurements_have_the_bytes_of_their_dtype() -> None:
    for path in RESULTS.glob("*.json"):
        kept = json.loads(path.read_text())
        if "bytes" in kept:
            bytes_ = cosmos_bytes(MODELS[kept["model"]], {"float32": 4, "bfloat16": 2}[kept["dtype"]])
            traffic = bytes_ / kept["rates"]["bytes"] * 1e3
            assert kept["bytes"] == bytes_ and kept["roofline"]["traffic_ms"] == pytest.approx(traffic), path.name
