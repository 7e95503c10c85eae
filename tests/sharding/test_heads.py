"""Heads of sharded attention: ranks hold parts of heads, and the weights are those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cosmos_optim import OPTIMIZERS, param_groups
from tests.sharding.cases import build, full_weights, take_steps
from tests.sharding.ranks import run_ranks

# Sums in another order, in double precision.
CLOSE_64 = 1e-9
HEAD, WIDTH = 4, 20
NAMES = ["cosmos", "muon", "normuon"]


class Attention(nn.Module):
    """Five heads of queries and two of keys and values. Two and three ranks cut inside heads."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, 2 * HEAD), "v": (WIDTH, 2 * HEAD), "o": (WIDTH, WIDTH)}
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(*size, bias=False))


def shard(layout: str, model: nn.Module) -> nn.Module:
    """Cut by rows (FSDP2), or by tensor parallelism: queries, keys and values by rows, the output by columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "fsdp":
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()})


def train(name: str, layout: str | None = None) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """Take six steps, the last three by an optimizer that loaded the state of the first.

    Return the weights, and the local shape of all state of the output projection.
    """
    model = build(Attention, torch.float64)
    if layout is not None:
        model = shard(layout, model)
    options: dict[str, Any] = {"rank": 2} if name == "cosmos" else {}

    def make() -> Any:
        groups = param_groups(model, name, split_heads=HEAD)
        return OPTIMIZERS[name](groups, lr=0.01, weight_decay=0.1, ns_dtype=torch.float64, **options)

    first, second = make(), make()
    take_steps(model, first, torch.float64, range(3))
    second.load_state_dict(first.state_dict())
    take_steps(model, second, torch.float64, range(3, 6))
    held = second.state[model.get_parameter("o.weight")].values()
    return full_weights(model), [tuple(x.to_local().shape if isinstance(x, DTensor) else x.shape) for x in held]


def run(rank: int, layout: str) -> list[tuple[dict[str, Tensor], list[tuple[int, ...]]]]:
    return [train(name, layout) for name in NAMES]


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("fsdp", 3), ("tp", 2)])
def test_sharded_heads_end_with_the_weights_of_one_process(layout: str, world: int) -> None:
    """Also after a checkpoint. A rank's state of the output projection has its rows or columns of every head."""
    expected = [train(name)[0] for name in NAMES]
    for found in run_ranks(world, run, layout):
        for name, (weights, _), wanted in zip(NAMES, found, expected, strict=True):
            for key in wanted:
                far = float((weights[key] - wanted[key]).abs().max())
                assert far < CLOSE_64, f"{name}: {key} differs by {far:.1e}"
        shapes = set(found[0][1])
    if (layout, world) == ("fsdp", 2):  # step, M, U, S, V, v
        assert shapes == {(), (10, 20), (20, 2), (5, 2, 2), (5, 10, 2), (5, 10, 1)}
    if layout == "tp":
        assert shapes == {(), (20, 10), (10, 2), (5, 2, 2), (5, 20, 2), (5, 20, 1)}
