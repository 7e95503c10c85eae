"""Compute what a sharded COSMOS step sends and computes, from shapes only.

`python -m benchmarks.sharded_cost` prints the projection in docs/distributed-internals.md.
tests/sharding/test_messages.py compares these formulas with the bytes that a run really sends.

Letters: matrices m x n, rank r, k ranks (processes), j the number of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.roofline import newton_schulz_flops


@dataclass(frozen=True)
class Shape:
    """A shape m x n that `count` matrices of a model have."""

    m: int
    n: int
    count: int


@dataclass(frozen=True)
class Cost:
    """Bytes that one rank sends in a step: for sums, and for the exchange with the owners of matrices."""

    sums: float
    exchange: float


def part(size: int, k: int, j: int) -> int:
    """Return how many elements of a dimension rank j of k holds, as `torch.chunk` divides them."""
    chunk = -(-size // k)
    return max(0, min(chunk, size - chunk * j))


def owned(count: int, k: int, j: int, first: int = 0) -> int:
    """Return how many matrices rank j of k owns; `first` is the rank that owns the first one."""
    return count // k + ((j - first) % k < count % k)


def ring(payload: float, k: int) -> float:
    """Return the bytes that each of k ranks sends to sum `payload` bytes."""
    return 2 * (k - 1) / k * payload


def rows_sharded(
    s: Shape, r: int, k: int, j: int, *, first: int = 0, word: int = 4, travel: int = 2, rows: int | None = None
) -> Cost:
    """Return the cost with rows over k ranks, as in FSDP2.

    Sums of n x r, r x r and five float64 numbers per matrix; X to its owner, and B back.
    """
    mine, here = owned(s.count, k, j, first), (part(s.m, k, j) if rows is None else rows) * s.n
    payload = s.count * ((s.n * r + r * r) * word + 5 * 8)
    return Cost(ring(payload, k), travel * ((s.count - mine) * here + mine * (s.m * s.n - here)))


def columns_sharded(s: Shape, r: int, k: int, j: int, *, first: int = 0, word: int = 4, travel: int = 2) -> Cost:
    """Return the cost with columns over k ranks.

    Sums of 3 m x r, 5 r x r, m and three float64 numbers per matrix; X to its owner, and B back.
    """
    mine, here = owned(s.count, k, j, first), s.m * part(s.n, k, j)
    payload = s.count * ((3 * s.m * r + 5 * r * r + s.m) * word + 3 * 8)
    return Cost(ring(payload, k), travel * ((s.count - mine) * here + mine * (s.m * s.n - here)))


def grid_sharded(
    s: Shape, r: int, rows: int, cols: int, i: int, j: int, *, first: int = 0, word: int = 4, travel: int = 2
) -> Cost:
    """Return the cost with rows over `rows` ranks and columns over `cols`: both kinds of sums, each over its ranks."""
    k = rows * cols
    mine, m, n = owned(s.count, k, i * cols + j, first), part(s.m, rows, i), part(s.n, cols, j)
    over_rows = s.count * ((n * r + r * r) * word + 2 * 8)
    over_cols = s.count * ((3 * m * r + 5 * r * r + m) * word)
    over_both = s.count * 3 * 8
    sums = ring(over_rows, rows) + ring(over_cols, cols) + ring(over_both, k)
    return Cost(sums, travel * ((s.count - mine) * m * n + mine * (s.m * s.n - m * n)))


# -- the projection -------------------------------------------------------------------------------------------------

LLAMA = {
    "7B": [Shape(4096, 4096, 128), Shape(11008, 4096, 64), Shape(4096, 11008, 32)],
    "70B": [Shape(8192, 8192, 160), Shape(1024, 8192, 160), Shape(28672, 8192, 160), Shape(8192, 28672, 80)],
}
PARAMETERS = {"7B": 6.7e9, "70B": 69e9}
RANK = 32
NODE = 8  # GPUs with NVLink between them
NIC = 50e9 * 0.8  # bytes per second and GPU: 80 % of 400 Gb/s
NVLINK = 450e9 * 0.8
HALF_RATE = 500e12  # flop/s of large half-precision products
HBM = 3.35e12 * 0.8
THIN_RATE = 20e12  # flop/s of float32 products of thin factors
PASS_BYTES = 40  # read and written for each element of a shard: G three times, M twice, X, B, W twice
LATENCY = 20e-6  # of a message; 5 us are added for each doubling of the ranks
MESSAGES = 9
TOKENS = 4e6
MODEL_RATE = 400e12  # flop/s of the model itself


def sequential_flops(shapes: list[Shape], k: int) -> float:
    """Return the flops of Newton-Schulz that run one after the other.

    If each rank owns at most one matrix, stacks belong to different owners and run on two streams at the same time.
    Otherwise they share the GPUs.
    """
    jobs = [-(-s.count // k) * newton_schulz_flops(s.m, s.n, merged=False) for s in shapes]
    if sum(s.count for s in shapes) > k:
        return sum(jobs)
    streams = [0.0, 0.0]
    for job in jobs:
        streams[streams.index(min(streams))] += job
    return max(streams)


def thin_time(shapes: list[Shape]) -> float:
    """Return the seconds for the thin factors of all matrices on every rank: 18 n r^2 flops and 30 passes over U."""
    size = sum(s.count * s.n * RANK for s in shapes)
    return 18 * RANK * size / THIN_RATE + 30 * 4 * size / HBM


def project(model: str, k: int) -> dict[str, float]:
    """Return milliseconds and megabytes of one step on k GPUs, with the optimizer's shards over all of them."""
    shapes = LLAMA[model]
    firsts = [sum(s.count for s in shapes[:i]) % k for i in range(len(shapes))]
    cost = [[rows_sharded(s, RANK, k, j, first=f) for s, f in zip(shapes, firsts, strict=True)] for j in range(k)]
    sums, exchange = sum(c.sums for c in cost[0]), max(sum(c.exchange for c in rank) for rank in cost)
    latency = len(shapes) * MESSAGES * (LATENCY + 5e-6 * (k - 1).bit_length())
    communication = sums * max(1 / (NODE * NIC), 1 / NVLINK) + exchange / NIC + latency
    compute = sequential_flops(shapes, k) / HALF_RATE
    everything = sum(s.count * newton_schulz_flops(s.m, s.n, merged=False) for s in shapes)
    matrices = sum(s.count * s.m * s.n for s in shapes)
    gather = 2 * matrices * (k - 1) / k
    return {
        "local": (thin_time(shapes) + PASS_BYTES * matrices / k / HBM) * 1e3,
        "sums": sums / 1e6, "exchange": exchange / 1e6, "communication": communication * 1e3, "compute": compute * 1e3,
        "adamw": 28 * PARAMETERS[model] / k / HBM * 1e3,
        "gather": gather / 1e6, "gather_communication": gather * max(1 / (NODE * NIC), 1 / NVLINK) * 1e3,
        "gather_compute": everything / HALF_RATE * 1e3,
        "step": 6 * PARAMETERS[model] * TOKENS / k / MODEL_RATE * 1e3,
    }  # fmt: skip


def main() -> None:
    """Print the table as markdown."""
    print("| model | GPUs | sums | exchange | messages | Newton-Schulz | the rest | COSMOS, nothing overlapped | AdamW "
          "| gather-everything Muon | its bytes | model's own step |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for model in LLAMA:
        for k in (64, 512, 4096):
            p = project(model, k)
            print(f"| LLaMA-{model} | {k:,} | {p['sums']:,.0f} MB | {p['exchange']:,.0f} MB "
                  f"| {p['communication']:,.1f} ms | {p['compute']:,.1f} ms | {p['local']:,.1f} ms "
                  f"| **{p['communication'] + p['compute'] + p['local']:,.0f} ms** | {p['adamw']:,.2f} ms "
                  f"| {p['gather_communication'] + p['gather_compute']:,.0f} ms "
                  f"| {p['gather'] / 1e3:,.0f} GB | {p['step']:,.0f} ms |")  # fmt: skip


if __name__ == "__main__":
    main()
