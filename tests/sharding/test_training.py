"""Real backward passes: ranks that each see a part of a batch train as one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cosmos_optim import Cosmos
from tests.sharding.cases import distance, full_weights
from tests.sharding.ranks import run_ranks

CLOSE_64 = 1e-9
BATCH = 24


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 14, bias=False), nn.LayerNorm(14), nn.Linear(14, 6)]
    return nn.Sequential(*layers).double()


def train(rank: int, how: str) -> dict[str, Tensor]:
    """Take ten steps; every data-parallel rank takes its part of each batch."""
    model = wrapped = model_of()
    parts, part = 1, 0
    if how == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
        parts, part = dist.get_world_size(), rank
    elif how == "fsdp":
        fully_shard(model[2])
        fully_shard(model)
        parts, part = dist.get_world_size(), rank
    elif how == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        parts, part = 2, rank // 2
    opt = Cosmos(model, lr=0.02, adam_lr=0.02, rank=3, weight_decay=0.1, ns_dtype=torch.float64)
    for step in range(10):
        torch.manual_seed(100 + step)
        x, y = torch.randn(BATCH, 10).double(), torch.randn(BATCH, 6).double()
        wrapped(x.chunk(parts)[part]).sub(y.chunk(parts)[part]).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize(("how", "world"), [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("fsdp_tp", 4)])
def test_ranks_with_parts_of_a_batch_train_as_one_process_with_all_of_it(how: str, world: int) -> None:
    expected = train(0, "alone")
    for weights in run_ranks(world, train, how):
        assert distance(weights, expected)[0] < CLOSE_64, distance(weights, expected)
