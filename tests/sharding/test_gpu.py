"""Sharding on a GPU: two ranks on one device, and messages of one stack while another computes."""

import os
import subprocess
import sys
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
from cosmos_optim.sharding import collectives, overlap
from tests.sharding.cases import gradient, placed

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
# In units of the update's root mean square, after five steps: single precision in another order, and half precision in
# Newton-Schulz.
NS_DTYPES = {torch.float32: 2e-3, None: 5e-2}
SHAPES = [(256, 128), (100, 96), (128, 256)] * 2
LR = 0.01


def take_steps(mesh: Any, ns_dtype: torch.dtype | None, device: str) -> list[Tensor]:
    """Take five steps and return the parts of the weights that this rank holds."""
    params = []
    for i, shape in enumerate(SHAPES):
        start = gradient(i, torch.Size(shape), -1, torch.float32).to(device)
        params.append(nn.Parameter(start if mesh is None else placed(start, mesh, (Shard(0),))))
    opt = Cosmos(params, lr=LR, rank=3, gamma=0.25, ns_dtype=ns_dtype)
    for step in range(5):
        for i, p in enumerate(params):
            G = gradient(i, p.shape, step, torch.float32).to(device)
            p.grad = G if mesh is None else placed(G, mesh, (Shard(0),))
        opt.step()
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().cpu() for p in params]


def through_the_host(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Exchange by way of the host, because gloo has no all-to-all between GPUs."""
    out = torch.empty(sum(receive), dtype=x.dtype)
    dist.all_to_all_single(out, x.cpu(), list(receive), list(send), group=group)
    overlap.let_others_run()
    return out.to(x.device)


def one_rank(rank: int, folder: str, device: str) -> None:
    """Run one of the two processes that share the GPU."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    collectives.exchange = through_the_host  # type: ignore[assignment]
    mesh = init_device_mesh(device, (2,))
    torch.save({str(dtype): take_steps(mesh, dtype, device) for dtype in NS_DTYPES}, f"{folder}/found{rank}")
    dist.barrier()


def test_two_ranks_that_share_a_gpu_end_with_the_weights_of_one_process(device: str = "cuda") -> None:
    """In single precision, and with Newton-Schulz in half precision."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        code = "from tests.sharding.test_gpu import one_rank; one_rank({}, {!r}, {!r})"
        ranks = [subprocess.Popen([sys.executable, "-c", code.format(rank, folder, device)], env=env,
                                  stderr=subprocess.PIPE, text=True) for rank in range(2)]  # fmt: skip
        for rank in ranks:
            errors = rank.communicate(timeout=120)[1]
            assert rank.returncode == 0, errors[-3000:]
        first, second = (torch.load(Path(folder) / f"found{rank}") for rank in range(2))
    for dtype, close in NS_DTYPES.items():
        pairs = zip(first[str(dtype)], second[str(dtype)], strict=True)
        for shape, parts, expected in zip(SHAPES, pairs, take_steps(None, dtype, device), strict=True):
            far = float((torch.cat(parts) - expected).square().mean().sqrt()) / LR
            print(f"{shape}, {dtype}: {far:.1e}")
            assert far < close, f"{shape}, {dtype}: {far:.1e}"


class SlowMessage:
    """A message that takes time on its own stream, as one over a network does."""

    stream: Any = None

    def __init__(self, cycles: int) -> None:
        SlowMessage.stream = SlowMessage.stream or torch.cuda.Stream()
        SlowMessage.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(SlowMessage.stream):
            torch.cuda._sleep(cycles)
            self.done = SlowMessage.stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait, but not the host."""
        torch.cuda.current_stream().wait_event(self.done)


def test_messages_of_one_stack_are_sent_while_another_computes() -> None:
    """Eight stacks that compute and send alternately: two workers hide most of the shorter of the two."""
    device = torch.device("cuda", 0)
    A = torch.randn(4096, 4096, device=device, dtype=torch.float16)

    def job() -> None:
        X = A
        for _ in range(4):
            for _ in range(10):
                X = X @ A
            message = SlowMessage(4_000_000)
            overlap.let_others_run()
            message.wait()

    def timed(width: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        overlap.run([job] * 8, device, width=width)
        queued = time.perf_counter() - begin
        torch.cuda.synchronize()
        total = time.perf_counter() - begin
        assert queued < 0.7 * total, "the host waited for the GPU"
        return total

    overlap.run([job] * 8, device, width=2)  # streams and the library's handles are made once, while the host waits
    one, two = (min(timed(width) for _ in range(3)) for width in (1, 2))
    print(f"one worker {one * 1e3:.1f} ms, two workers {two * 1e3:.1f} ms")
    assert two < 0.8 * one
