"""The runs from which a rule for learning rates could be read: four sizes, five lengths, two sizes of a step.

    python -m benchmarks.sweep --rates llama-60m --plan --out sweep --known results/protocol-60m.json --parallel 2
    python -m benchmarks.rate_runs                             # how long the whole list would take

Each cell searches the hidden rate and the outer rate of COSMOS by the rule of the comparison, with one seed. There is
no rule yet: `rates(model, steps, tokens_per_step)` needs these results first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.protocol import RATES, Entry, Phase, Protocol, Regime

STEPS = (400, 800, 1600, 3200, 6400)
BATCH = 8  # Sequences of 1,024 tokens, so that 6,400 steps see 52M tokens, fewer than the two shards have.
LARGER = ((400, 64), (800, 64), (1600, 32))  # The effect of tokens in a step, at 26M to 52M tokens.
SIZES: Mapping[str, dict[str, Any]] = {  # Instead of the preset's; all with 32,100 T5 tokens.
    "llama-10m": {"vocab_size": 32_100},
    "llama-30m": {"vocab_size": 32_100, "width": 384, "mlp": 1024},
    "llama-60m": {"vocab_size": 32_100},
    "llama-130m": {"vocab_size": 32_100},
}
PRESETS = {"llama-30m": "llama-10m"}
RUNS_PER_CELL = 6  # 3 or 4 hidden rates and 2 or 3 outer rates in addition to the starting one
PARAMETERS = {"llama-10m": 22.8e6, "llama-30m": 38.8e6, "llama-60m": 58.2e6, "llama-130m": 162e6}
# Measured on an H200, two runs at a time: COSMOS at 60M and 16 x 1024 takes 1.65 s for a million tokens, and 8 s more.
# Small models and small steps are limited by launches: no faster than a model of 35 % of the size, and a guess of 12 ms
# for a step.
SECONDS_PER_MILLION, OVERHEAD, LEAST, STEP = 1.65, 8.0, 0.35, 0.012


def name_of(steps: int, batch: int) -> str:
    """Return the name of a regime."""
    return f"{steps}x{batch}"


def protocol(model: str) -> Protocol:
    """Return the search for one size, the middle of the table first."""
    cells = [(steps, BATCH) for steps in STEPS] + list(LARGER)
    regimes = {name_of(*cell): Regime(*cell) for cell in cells}
    # Starting rates: those of the comparison, with more for short runs.
    start = {name_of(s, b): (1e-3 if s <= 800 else 5e-4, 4e-3 if s <= 800 else 2e-3) for s, b in cells}
    order = [(1600, BATCH), (6400, BATCH), (400, BATCH), *LARGER, (800, BATCH), (3200, BATCH)]
    phases: list[Phase] = [(name_of(*cell), ("cosmos",), RATES) for cell in order]
    return Protocol(
        model=model, preset=PRESETS.get(model, model), sizes=SIZES[model], regimes=regimes,
        entries={"cosmos": Entry("cosmos", start)}, phases=phases,
    )  # fmt: skip


def seconds(model: str, regime: Regime) -> float:
    """Return the expected seconds of one run on an H200 with two at a time."""
    share = max(LEAST, PARAMETERS[model] / PARAMETERS["llama-60m"])
    tokens = regime.steps * regime.batch * regime.seq_len
    return OVERHEAD + max(STEP * regime.steps, SECONDS_PER_MILLION * share * tokens / 1e6)


def table() -> str:
    """Return the cells with their runs and seconds of the GPU, two runs at a time."""
    lines, total = [f"{'model':12}{'steps':>6}{'batch':>6}{'tokens':>8}{'runs':>6}{'s a run':>9}{'GPU s':>8}"], 0.0
    for model in SIZES:
        for regime in protocol(model).regimes.values():
            each = seconds(model, regime)
            cost = RUNS_PER_CELL * each / 2
            total += cost
            tokens = regime.steps * regime.batch * regime.seq_len
            lines.append(
                f"{model:12}{regime.steps:6}{regime.batch:6}{tokens / 1e6:7.1f}M{RUNS_PER_CELL:6}{each:9.0f}{cost:8.0f}"
            )
    return "\n".join([*lines, f"in all {total:.0f} s, {total / 60:.0f} minutes, without the start of machines"])


if __name__ == "__main__":
    print(table())
