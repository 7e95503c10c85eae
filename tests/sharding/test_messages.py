"""The messages of a step: how many there are, and their bytes by the formulas of docs/distributed-internals.md."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.sharded_cost import Cost, Shape, columns_sharded, grid_sharded, rows_sharded
from cosmos_optim import Cosmos
from cosmos_optim.sharding import sharded_algebra
from cosmos_optim.sharding.sharded_algebra import prefer_sums
from tests.sharding.cases import gradient, placed
from tests.sharding.message_counter import count_messages
from tests.sharding.ranks import run_ranks

RANK = 2
M, N = 10, 9  # neither divides by four
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "fsdp": ((4,), (Shard(0),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "tp rows": ((2,), (Shard(0),)),
    "tp columns": ((2,), (Shard(1),)),
    "fsdp x tp rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "fsdp x tp columns": ((2, 2), (Shard(0), Shard(1))),
}


def formula(name: str, count: int, rank: int) -> Cost:
    """Return the bytes by docs/distributed-internals.md, in double precision throughout."""
    shape, sizes = Shape(M, N, count), {"word": 8, "travel": 8}
    if name == "tp columns":
        return columns_sharded(shape, RANK, 2, rank, **sizes)
    if name == "fsdp x tp columns":
        return grid_sharded(shape, RANK, 2, 2, rank // 2, rank % 2, **sizes)
    if name == "fsdp x tp rows":  # ranks 0 1 2 3 hold parts 0 2 1 3; 10 rows are 3 2 3 2
        return rows_sharded(Shape(M, N, count), RANK, 4, rank, rows=(3, 3, 2, 2)[rank], **sizes)
    k, j = (2, rank % 2) if name in ("hsdp", "tp rows") else (4, rank)
    return rows_sharded(shape, RANK, k, j, **sizes)


def measure(rank: int, name: str, counts: list[int]) -> list[Any]:
    """Take a step for each number of equal matrices. Return our counts, torch's, and the matrices iterated here."""
    dims, placements = MESHES[name]
    mesh = init_device_mesh("cpu", dims)
    seen: list[int] = []
    inner = sharded_algebra.newton_schulz
    sharded_algebra.newton_schulz = lambda X, *args: (seen.append(X.shape[0]), inner(X, *args))[1]
    found = []
    for count in counts:
        params = [nn.Parameter(placed(gradient(i, torch.Size((M, N)), 0, torch.float64), mesh, placements))
                  for i in range(count)]  # fmt: skip
        opt = Cosmos(params, lr=0.01, rank=RANK, ns_dtype=torch.float64, gamma=0.25)
        for step in range(2):
            for i, p in enumerate(params):
                p.grad = placed(gradient(i, p.shape, step, torch.float64), mesh, placements)
            seen.clear()
            with count_messages() as messages, CommDebugMode() as debug:
                opt.step()
        found.append((dict(messages.calls), messages.sent, debug.get_total_counts(), sum(seen)))
    return found


SUMS = {"fsdp": 7, "hsdp": 7, "tp rows": 7, "tp columns": 12, "fsdp x tp rows": 7, "fsdp x tp columns": 16}


@pytest.mark.parametrize("name", MESHES)
def test_a_step_sends_the_documented_messages_and_bytes(name: str) -> None:
    """As many messages for nine matrices as for three, and no rank iterates more than its share."""
    dims, _ = MESHES[name]
    world = torch.Size(dims).numel()
    team = dims[-1] if name == "hsdp" else world
    counts = [3, 9]
    for rank, found in enumerate(run_ranks(world, measure, name, counts)):
        for count, (calls, sent, by_torch, iterated) in zip(counts, found, strict=True):
            assert calls == {"sum": SUMS[name], "exchange": 2, "max": 1}
            assert by_torch == sum(calls.values())
            expected = formula(name, count, rank)
            assert sent["sum"] == pytest.approx(expected.sums)
            assert sent["exchange"] == expected.exchange
            assert sent["max"] == pytest.approx(2 * (world - 1) / world * 8 * (3 + count))
            assert iterated <= -(-count // team)


def matrices_of_two_shapes(rank: int) -> int:
    """Return how many matrices this rank iterates in a step with two matrices of each of two shapes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seen: list[int] = []
    inner = sharded_algebra.newton_schulz
    sharded_algebra.newton_schulz = lambda X, *args: (seen.append(X.shape[0]), inner(X, *args))[1]
    shapes = [torch.Size(shape) for shape in ((M, N), (M, N), (N, M), (N, M))]
    grads = [placed(gradient(i, shape, 0, torch.float64), mesh, (Shard(0),)) for i, shape in enumerate(shapes)]
    params = [nn.Parameter(g.clone()) for g in grads]
    opt = Cosmos(params, lr=0.01, rank=RANK, ns_dtype=torch.float64, gamma=0.25)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    opt.step()
    return sum(seen)


def test_matrices_of_several_shapes_are_divided_over_all_ranks() -> None:
    """The second shape begins with the ranks that own none of the first."""
    assert run_ranks(4, matrices_of_two_shapes) == [1, 1, 1, 1]


def test_gram_matrices_are_summed_only_if_that_costs_no_more() -> None:
    """The busiest rank counts: sums are cheaper for few, long matrices that are cut along the long side."""
    half = torch.float16
    assert not prefer_sums(64, 4096, 4096, 8, 5, half)  # square: owners
    assert not prefer_sums(64, 11008, 4096, 8, 5, half)  # many: every rank would repeat all of them
    assert prefer_sums(1, 65536, 1024, 8, 5, half)
    assert not prefer_sums(16, 65536, 1024, 8, 5, half)
    assert prefer_sums(1, 40, 4, 4, 5, torch.float64)


def one_long_matrix(rank: int) -> Any:
    """Count the messages of one long matrix in its second step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = nn.Parameter(placed(gradient(0, torch.Size((40, 4)), 0, torch.float64), mesh, (Shard(0),)))
    opt = Cosmos([p], lr=0.01, rank=RANK, ns_dtype=torch.float64, gamma=0.25)
    for step in range(2):
        p.grad = placed(gradient(0, p.shape, step, torch.float64), mesh, (Shard(0),))
        with count_messages() as messages:
            opt.step()
    return dict(messages.calls)


def test_one_long_matrix_is_iterated_by_sums_without_an_exchange() -> None:
    """One sum for each of five iterations, because double precision forms every Gram matrix again."""
    assert run_ranks(4, one_long_matrix)[0] == {"sum": 7 + 5, "max": 1}
