"""Compile the kernels for an H100 without one: find prefetched buffers that a product may still read, and their memory.

Run as a program, because the interpreter of the other tests cannot compile. It prints a JSON object: the name of each
kernel -> the buffers at risk, and the bytes of shared memory of its largest form.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

BATCH, ROWS, COLS, RANK = 2, 256, 256, 32


class H100:
    """What Triton asks a driver for before it launches a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@triton.jit
def summed_in_product(x, u, y, n, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum a product in place, of a tile that has another use: Triton 3.6 gives the tile one buffer too few."""
    i, c = tl.arange(0, BM), tl.arange(0, R)
    acc = tl.zeros((BM, R), dtype=tl.float32)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        j = k + tl.arange(0, BK)
        a = tl.load(x + i[:, None] * n + j[None, :])
        squares += a.to(tl.float32) * a.to(tl.float32)
        acc = tl.dot(a, tl.load(u + j[:, None] * R + c[None, :]), acc)
    acc = acc + tl.sum(squares, axis=1)[:, None]
    tl.store(y + i[:, None] * R + c[None, :], acc)


@triton.jit
def used_twice(x, y, n, BM: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do the same in a loop that has no other buffer to compare the number with."""
    i = tl.arange(0, BM)
    acc = tl.zeros((BM, BM), dtype=tl.float32)
    squares = tl.zeros((BM, BK), dtype=tl.float32)
    for k in range(0, n, BK):
        a = tl.load(x + i[:, None] * n + (k + tl.arange(0, BK))[None, :])
        squares += a.to(tl.float32) * a.to(tl.float32)
        acc = tl.dot(a, tl.trans(a), acc)
    tl.store(y + i[:, None] * BM + i[None, :], acc + tl.sum(squares, axis=1)[:, None])


def at_risk(ir: str, stages: int) -> list[str]:
    """Return the buffers that a loop fills while a product of the same iteration may still read them.

    A loop of n stages copies the tiles of n - 1 later iterations, at the end of an iteration. A product that has not
    been waited for by then runs into the next iteration. Its operands need one buffer more than there are copies under
    way: n.
    """
    buffers, base, reading, risks = {}, {}, set(), []
    for line in ir.splitlines():
        made = re.match(r"\s*%(\w+) = (ttg\.(?:local_alloc|memdesc_\w+))(?: %(\w+))?", line)
        if made and made[2] == "ttg.local_alloc":
            depth = re.search(r"-> !ttg\.memdesc<(\d+)x\d+x\d+x", line)
            buffers[made[1]] = int(depth[1]) if depth else 1
        elif made:
            base[made[1]] = base.get(made[3], made[3])
        elif "scf.for" in line or ("warp_group_dot_wait" in line and "pendings = 0" in line):
            reading.clear()
        elif "warp_group_dot " in line and "isAsync = true" in line:
            operands = re.findall(r"%(\w+)", line.split("warp_group_dot ")[1])[:2]
            reading |= {base.get(x, x) for x in operands}
        elif "async_copy_global_to_local" in line or "async_tma_copy_global_to_local" in line:
            filled = {base.get(x, x) for x in re.findall(r"%(\w+)", line)[1:]}
            risks += [re.sub(r"_\d+$", "", x) for x in sorted(filled & reading) if buffers[x] < stages]
    return risks


def compiled(work: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """Return the kernels that `work` would launch, with the buffers at risk and the shared memory of each."""
    import cosmos_optim.cuda.adam_run
    import cosmos_optim.cuda.chunk
    import cosmos_optim.cuda.kernels.jacobi  # noqa: F401  (kernels register themselves when they are imported)
    from cosmos_optim.cuda.kernels.launch import KERNELS

    found: dict[str, dict[str, Any]] = {}

    def compile_only(kernel: Any) -> Callable[..., None]:
        plain = kernel.run

        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            made = plain(*args, grid=grid, warmup=True, **kwargs)
            entry = found.setdefault(kernel.fn.__name__, {"at_risk": [], "shared": 0})
            entry["at_risk"] += at_risk(made.asm["ttgir"], made.metadata.num_stages)
            entry["shared"] = max(entry["shared"], made.metadata.shared)

        return run

    for kernel in (*KERNELS, summed_in_product, used_twice):
        kernel.run = compile_only(kernel)
    work()
    return found


def launch_adam() -> None:
    """Launch Adam's kernel for parameters of every dtype, moments of 8 bits and float32, and weights of 24 bits."""
    from cosmos_optim.cuda.kernels.adam_update import adam_

    moments, scales = dict.fromkeys(("exp_avg", "exp_avg_sq"), (ROWS, COLS)), (ROWS, 2)
    shapes = {**moments, "exp_avg_scale": scales, "exp_avg_sq_scale": scales}
    dtypes = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
    codes = {name: [torch.zeros(shape, dtype=dtypes.get(name))] for name, shape in shapes.items()}
    wide = {name: [torch.zeros(ROWS, COLS)] for name in ("exp_avg", "exp_avg_sq")}
    corrections = [torch.zeros(ROWS, COLS, dtype=torch.int8)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        p = [torch.zeros(ROWS, COLS, dtype=dtype)]
        for state, more in ((codes, None), (codes, corrections), (wide, corrections)):
            if more is None or dtype is torch.bfloat16:
                adam_(p, p, state, torch.ones(1, 3), torch.ones(1, dtype=torch.int32), betas=(0.9, 0.98), eps=1e-8,
                      skip=None, corrections=more, seeded=more is None)  # fmt: skip


def launch_products() -> None:
    """Launch the kernels that multiply with tensor cores and prefetch; those on thin factors also at large ranks."""
    from cosmos_optim.cuda.kernels.basis_second_moment import second_moment
    from cosmos_optim.cuda.kernels.momentum import momentum_
    from cosmos_optim.cuda.kernels.power_step import power_sum
    from cosmos_optim.cuda.kernels.project import overlap, project
    from cosmos_optim.cuda.kernels.project_transposed import project_transposed
    from cosmos_optim.cuda.kernels.residual import residual
    from cosmos_optim.cuda.kernels.split_precision import split, split_both
    from cosmos_optim.cuda.kernels.syrk import SymmetricProducts
    from cosmos_optim.cuda.kernels.thin_qr import MAX_COLUMNS, orthonormalize, thin_product_parts
    from cosmos_optim.cuda.kernels.update import update_
    from cosmos_optim.cuda.pointer_list import MatrixList
    from cosmos_optim.linalg.int8_momentum import quantize
    from cosmos_optim.linalg.weight24 import split_weight

    G, M, W = (MatrixList.of([torch.randn(ROWS, COLS) for _ in range(BATCH)]) for _ in range(3))
    U, Y = torch.randn(BATCH, COLS, RANK), torch.randn(BATCH, ROWS, RANK)
    half, wide = split_both(U)
    x_max, X = torch.ones(BATCH), torch.randn(BATCH, ROWS, COLS).half()
    project(G, half, RANK, x_max)
    project_transposed(G, split(Y, x_max), x_max, RANK, x_max)
    block_max = momentum_(M, G, 0.1, (half, wide), RANK, None, x_max)[2]
    parts = split_both(Y)[1]
    residual(M, G, 0.9, 0.1, parts, wide, block_max)
    for rank in (RANK, 256):  # an M of 8 bits, also with the most columns
        codes, scales = quantize(torch.randn(BATCH, ROWS, COLS))
        state = MatrixList.momentum({"M": list(codes), "M_scale": list(scales)})
        bases, P = split_both(torch.randn(BATCH, COLS, rank)), split_both(torch.randn(BATCH, ROWS, rank))[1]
        block_max = momentum_(state, G, 0.1, bases, rank, None, x_max)[2]
        residual(state, G, 0.9, 0.1, P, bases[1], block_max)
    overlap(X, half, RANK)
    update_(W, X, parts, wide, torch.ones(BATCH, 2), None)
    for rank in (RANK, 256):  # weights of 24 bits, also with the most columns
        high, low = split_weight(torch.randn(BATCH, ROWS, COLS))
        bases, P = (split_both(torch.randn(BATCH, side, rank))[1] for side in (COLS, ROWS))
        update_(MatrixList.weights(list(high), list(low)), X, P, bases, torch.ones(BATCH, 2), None)
    for rank in (RANK, 64, MAX_COLUMNS):
        U, Y, S = torch.randn(BATCH, COLS, rank), torch.randn(BATCH, ROWS, rank), torch.randn(BATCH, rank, rank)
        power_sum(U, S, U, torch.ones(BATCH, 1, 1), 0.9)
        orthonormalize(U, U)
        second_moment(S, thin_product_parts(U, U), thin_product_parts(Y, Y), 0.9, 0.0)
    summed_in_product[(1,)](X, half, U, COLS, BM=128, BK=64, R=RANK, num_warps=8, num_stages=4)
    used_twice[(1,)](X, U, COLS, BM=128, BK=64, num_warps=8, num_stages=4)
    for size in (2048, 1024):  # both tile shapes
        X = torch.empty(BATCH, size, size, dtype=torch.float16)
        products = SymmetricProducts()
        products.quadratic(products.gram(X, torch.full((BATCH, 1, 1), 0.5)), 3.0, 2.0, 0.5)


def launch_schedules() -> None:
    """Launch the kernels of whole steps, those that copy thin state for them, and the one of a first basis."""
    from cosmos_optim.cuda.kernels.gather import gather
    from cosmos_optim.cuda.kernels.jacobi import eigh
    from cosmos_optim.cuda.self_check import step_error
    from cosmos_optim.rules import RULES

    gather([[torch.zeros(COLS, RANK) for _ in range(BATCH)]])
    eigh(torch.zeros(BATCH, RANK, RANK))

    for rule, rank in (("cosmos", RANK), ("muon", 1), ("normuon", 1)):
        for m, n in ((80, 64), (64, 80)):  # of memory that nobody has written
            step_error(RULES[rule], rank, m, n, torch.device("cpu"), torch.float32, equal_rows=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") != "1"
    driver.set_active(H100())
    print(json.dumps(compiled(lambda: (launch_products(), launch_adam(), launch_schedules()))))
