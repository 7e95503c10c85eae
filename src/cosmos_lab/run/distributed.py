"""Devices and processes. In the lab, only this file and `sharded_files` use torch.distributed.

A run under ``torchrun`` finds RANK, LOCAL_RANK and WORLD_SIZE in its environment; without them it is one process.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmos_lab.io import first_line

T = TypeVar("T")


class Shared(ValueError):
    """An error that every process of a run raises together: only the first one needs to print it."""


@dataclass(frozen=True)
class World:
    """This process among the others, as torchrun counts them."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    sharding: str  # "none", "ddp" or "fsdp"

    @property
    def main(self) -> bool:
        """Tell whether this process writes the logs."""
        return self.rank == 0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free_memory(self, graphs: bool) -> None:
        """Free what an earlier run left, its compiled graphs if asked, and restart the count of peak memory."""
        if self.cuda:
            if graphs:
                torch.compiler.reset()  # compiled graphs refer to their models
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(device_ids=[self.local_rank] if self.cuda else None)

    def mean(self, value: Tensor) -> Tensor:
        """Return the average of a tensor over the processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value

    def max(self, value: int) -> int:
        """Return the largest value of any process."""
        if self.size > 1:
            largest = torch.tensor(value, device=self.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            value = int(largest.item())
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every process if any of them failed, so that none waits for the others forever.

        The first process raises its own error if it has one. The others raise the first error of any as ``Shared``.
        """
        if not self.max(int(error is not None)):
            return
        told = error if error is None or isinstance(error, Shared) else Shared(str(error))
        first = next(one for one in self.gather(told) if one is not None)
        if self.main and error is not None:
            raise error
        raise first from error

    def together(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do something on every process and return its result, or raise on all of them if one fails."""
        error: Exception | None = None
        try:
            result = work(*arguments)
        except Exception as problem:
            error = problem
        self.raise_together(error)
        return result


def pick_device(asked: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; a ValueError if a GPU is asked for, or there, and does not start.

    A run that silently continued on the CPU could take days for what a GPU does in an hour.
    """
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if torch.cuda.device_count():  # counted by the driver's library, which works where CUDA does not start
        raise ValueError(f"this machine has a GPU, but CUDA does not start ({_why_cuda_fails()}); use --device cpu")
    if asked == "cuda":
        raise ValueError("--device cuda was asked for, but torch sees no GPU here; use --device cpu or auto")
    return torch.device("cpu")


def _why_cuda_fails() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return "torch.cuda.is_available() is False"


@contextlib.contextmanager
def session(asked_device: str, sharding: str) -> Iterator[World]:
    """Join the process group, if there is one, for the time of a run."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = pick_device(asked_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1 and sharding != "fsdp":
        yield World(0, 0, 1, device, "none")
        return
    if "RANK" not in os.environ:
        raise ValueError("--sharding fsdp needs torchrun: torchrun --nproc-per-node N -m cosmos_lab train ...")
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        rank, local = dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
        yield World(rank, local, dist.get_world_size(), device, "ddp" if sharding == "auto" else sharding)
    except BaseException:
        own = own and device.type != "cuda"  # NCCL would wait for messages that the others may never send
        raise
    finally:
        if own:
            dist.destroy_process_group()


def distribute(model: nn.Module, world: World, bf16: bool) -> nn.Module:
    """Wrap the model in DDP, or shard each block of ``model.blocks`` and then the rest with FSDP2.

    Call it before the optimizer is built, because FSDP2 replaces the parameters by DTensors.
    """
    if world.sharding == "ddp":
        ids = [world.local_rank] if world.cuda else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    if world.sharding == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
        assert isinstance(model.blocks, nn.ModuleList)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


def accumulating(
    runner: nn.Module, model: nn.Module, world: World, last: bool
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of one micro-batch: gradients are exchanged only at the last one of a step."""
    if world.sharding == "ddp" and not last:
        no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = runner.no_sync  # type: ignore[assignment]
        return no_sync()
    if world.sharding == "fsdp":
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    return contextlib.nullcontext()
