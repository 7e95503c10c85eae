"""On a GPU: shards of two ranks on one device, and messages of one stack while another computes."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cosmos_optim import Cosmos
from cosmos_optim.distributed import comm, lanes
from tests.distributed.problems import gradient, placed

pytestmark = pytest.mark.gpu
CLOSE_32 = 2e-3
# Half precision in Newton-Schulz: its rounding, in units of the update's root mean square.
CLOSE_16 = 3e-2
SHAPES = [(256, 128), (100, 96), (128, 256)] * 2
LR = 0.01


def steps(mesh: Any, ns_dtype: torch.dtype | None) -> list[Tensor]:
    """Five steps on the GPU; the whole weights."""
    params = []
    for i, shape in enumerate(SHAPES):
        start = gradient(i, torch.Size(shape), -1, torch.float32).cuda()
        params.append(nn.Parameter(start if mesh is None else placed(start, mesh, (Shard(0),))))
    opt = Cosmos(params, lr=LR, rank=16, gamma=0.25, ns_dtype=ns_dtype)
    for step in range(5):
        for i, p in enumerate(params):
            G = gradient(i, p.shape, step, torch.float32).cuda()
            p.grad = G if mesh is None else placed(G, mesh, (Shard(0),))
        opt.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in params]


def through_the_host(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """gloo has no all-to-all between GPUs."""
    out = torch.empty(sum(receive), dtype=x.dtype)
    dist.all_to_all_single(out, x.cpu(), list(receive), list(send), group=group)
    lanes.rest()
    return out.to(x.device)


def one_rank(rank: int, folder: str) -> None:
    """A process of the two that share the GPU."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm.exchange = through_the_host  # type: ignore[assignment]
    mesh = init_device_mesh("cuda", (2,))
    found = {str(dtype): steps(mesh, dtype) for dtype in (torch.float32, None)}
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()
    os._exit(0)


def test_two_ranks_on_one_gpu() -> None:
    """The weights of one process, in single precision and with Newton-Schulz in half."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (folder,), nprocs=2)
        found = torch.load(Path(folder) / "found")
    for dtype, close in ((torch.float32, CLOSE_32), (None, CLOSE_16)):
        for shape, ours, expected in zip(SHAPES, found[str(dtype)], steps(None, dtype), strict=True):
            far = float((ours - expected).square().mean().sqrt()) / LR
            assert far < close, f"{shape}, {dtype}: {far:.1e}"


class Slow:
    """A message that takes its time on a stream of its own, as one over a network does."""

    stream: Any = None

    def __init__(self, cycles: int) -> None:
        Slow.stream = Slow.stream or torch.cuda.Stream()
        Slow.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(Slow.stream):
            torch.cuda._sleep(cycles)
            self.done = Slow.stream.record_event()

    def wait(self) -> None:
        """The current stream waits, the host does not."""
        torch.cuda.current_stream().wait_event(self.done)


def test_messages_of_one_stack_travel_while_another_computes() -> None:
    """Eight stacks that compute and send alternately: two lanes hide most of the shorter of the two."""
    device = torch.device("cuda", 0)
    A = torch.randn(4096, 4096, device=device, dtype=torch.float16)

    def job() -> None:
        X = A
        for _ in range(4):
            for _ in range(10):
                X = X @ A
            message = Slow(4_000_000)
            lanes.rest()
            message.wait()

    def timed(width: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        lanes.run([job] * 8, device, width=width)
        asked = time.perf_counter() - begin
        torch.cuda.synchronize()
        total = time.perf_counter() - begin
        assert asked < 0.7 * total, "the host waited for the GPU"
        return total

    timed(2)
    one, two = (min(timed(width) for _ in range(3)) for width in (1, 2))
    print(f"one lane {one * 1e3:.1f} ms, two lanes {two * 1e3:.1f} ms")
    assert two < 0.8 * one
