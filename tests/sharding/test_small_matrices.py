"""Matrices with few rows, and gradients of low rank, take the same steps on several ranks as on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from cosmos_optim import Cosmos, Muon
from tests.sharding.cases import full, gradient, placed, shard_like
from tests.sharding.ranks import run_ranks
from tests.small_gradients import F64, FAMILIES, SHAPES, STEPS

LR = 0.01
UNCHANGED = 1e-6  # of an element of a step, in units of lr: as for one rounding of the gradient, tests/rules
# Of an update, in units of lr: the owner gets the momentum rounded to float16, and Newton-Schulz amplifies what that is
# of small singular values. Measured 0.013; without the scale, 2.
HALF = 5e-2
# One shape for each family: fewer rows than the rank, and more. Each number of ranks takes a third of them.
CASES = [(name, *SHAPES[(5 * i + 2) % len(SHAPES)]) for i, name in enumerate(FAMILIES)]


class Matrices(nn.Module):
    """One parameter for each case."""

    def __init__(self, cases: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(m, n, dtype=F64)) for _, m, n in cases)


def updates(rank: int, cases: list[tuple[str, int, int]], sharded: bool = True) -> list[Tensor] | None:
    """Return all updates of each parameter in units of lr, on the last rank."""
    model = Matrices(cases)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    opt, paths = Cosmos(list(model.all), lr=LR), [[full(p).clone()] for p in model.all]
    for step in range(STEPS):
        for p, (name, m, n) in zip(model.all, cases, strict=True):
            p.grad = shard_like(p, FAMILIES[name](m, n, step, 1))
        opt.step()
        for p, path in zip(model.all, paths, strict=True):
            path.append(full(p).clone())
    last = not sharded or rank == dist.get_world_size() - 1
    return [torch.stack(path).diff(dim=0) / LR for path in paths] if last else None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_small_matrices_take_the_steps_of_one_process(world: int) -> None:
    """FSDP2, in double precision: sums over ranks are in another order."""
    cases = CASES[world % 3 :: 3]
    expected = updates(0, cases, sharded=False)
    assert expected is not None
    for case, a, b in zip(cases, run_ranks(world, updates, cases)[-1], expected, strict=True):
        assert float((a - b).abs().max()) < UNCHANGED, f"{case}: {float((a - b).abs().max()):.1e} lr"


def half_precision_update(rank: int, size: float) -> Tensor:
    """Return the update, in units of lr, by gradients of this size and Newton-Schulz in float16."""
    whole, shape = torch.zeros(12, 12), torch.Size((12, 12))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    p = nn.Parameter(whole if mesh is None else placed(whole, mesh, (Shard(0),)))
    opt = Muon([p], lr=LR, normalize=True, ns_dtype=torch.float16)
    grad = size * gradient(0, shape, 0, torch.float32)
    p.grad = grad if mesh is None else placed(grad, mesh, (Shard(0),))
    opt.step()
    return full(p) / LR


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_matrices_beyond_the_range_of_half_precision_reach_their_owners(size: float) -> None:
    """They are sent in float16, which holds 6e-8 to 65504, so they are scaled before."""
    expected = half_precision_update(0, size)
    assert float(expected.square().mean().sqrt()) == pytest.approx(1, rel=1e-3)
    for found in run_ranks(2, half_precision_update, size):
        assert float((found - expected).abs().max()) < HALF
