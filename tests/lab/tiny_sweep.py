"""A comparison of two tiny optimizers with its text, for tests of the sweep."""

from pathlib import Path

import numpy as np

from benchmarks.comparison import Entry, Regime, Run
from benchmarks.protocol import Protocol
from benchmarks.sweep_options import Options
from cosmos_lab.data import write_shard

BUNDLE = Path(__file__).resolve().parents[2] / "results" / "protocol-60m.json"
START = {"B": (1e-3, 2e-3)}
TINY = Protocol(
    model="tiny",
    sizes={"width": 64, "depth": 1, "mlp": 96, "vocab_size": 64},
    regimes={"B": Regime(steps=4, batch=4, seq_len=16)},
    entries={"adamw": Entry("adam", START), "cosmos": Entry("cosmos", START)},
    phases=[("B", ("adamw", "cosmos"), ("lr", "adam_lr", "beta2", "seeds"))],
    cut=500,
    block=64,
    curve_tokens=64,
)


def tiny_options(folder: Path) -> Options:
    """Write a text with T5's end-of-document token and return options for it."""
    rng = np.random.default_rng(0)
    for name, length in (("train", 4_000), ("val", 1_000)):
        tokens = rng.integers(2, 64, length)
        tokens[29::30] = 1
        write_shard(folder / f"toy_t5_{name}.bin", tokens)
    data, cache = str(folder / "toy_t5"), str(folder / "cache")
    return Options(data, folder / "out", device="cpu", compile="off", cache=cache, commit="abc")


def fake(protocol: Protocol, best: int) -> dict[str, float]:
    """Run a whole search on losses that are lowest at ``best`` powers of 2 above the starting rates."""
    loss: dict[str, float] = {}
    while runs := protocol.candidates(loss):
        loss[runs[0].id] = float(sum(abs(power - best) for power in powers(runs[0])) + runs[0].beta2)
    return loss


def powers(run: Run) -> list[float]:
    """Return the powers of 2 by which both rates differ from the starting ones."""
    return [np.log2(rate / start) for rate, start in zip((run.lr, run.adam_lr), START["B"], strict=True)]
