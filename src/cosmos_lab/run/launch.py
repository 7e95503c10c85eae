"""Devices and processes: the only file of the lab that touches torch.distributed.

A run under ``torchrun`` finds RANK, LOCAL_RANK and WORLD_SIZE in its environment; without them it is one process.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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

    def raise_together(self, error: Exception | None) -> None:
        """Raise on every process if any of them failed, so that none waits for the others forever."""
        if self.max(int(error is not None)) and error is None:
            error = RuntimeError("another process of this run failed; its own message says why")
        if error is not None:
            raise error


def pick_device(asked: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; a missing GPU is a ValueError."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but torch sees no GPU here; use --device cpu or auto")
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


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


def pick_bf16(precision: str, device: torch.device) -> bool:
    """Tell whether to autocast; "auto" is on a GPU."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def pick_compile(how: str, device: torch.device) -> str:
    """Return how to compile, "on", "blocks" or "off"; "auto" is the whole model on a GPU."""
    return how if how != "auto" else "on" if device.type == "cuda" else "off"


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


def save_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the shards of model and optimizer of every process into the folder ``path``."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Read what ``save_sharded`` wrote, on any number of processes."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
