"""Every supported placement of one parameter, compared with one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cosmos_optim import SOAP, Cosmos
from cosmos_optim.sharding.mesh import Cut, cuts_of
from tests.sharding.cases import gradient, placed, shard_like
from tests.sharding.ranks import run_ranks

CLOSE_64 = 1e-9
STEPS = 4
R, S = Replicate(), Shard
TENSOR_FIRST = _StridedShard(0, split_factor=2)  # FSDP2 over tensor parallelism on dimension 0

# (shape, settings, placements on a 2 x 2 mesh)
COSMOS: list[tuple[tuple[int, ...], dict[str, Any], tuple[Any, Any]]] = [
    ((9, 5), {}, (S(0), S(0))),
    ((9, 5), {}, (S(1), S(1))),
    ((9, 5), {}, (S(1), S(0))),
    ((9, 5), {}, (TENSOR_FIRST, S(0))),
    ((9, 5), {}, (R, R)),
    ((3, 12), {"rank": 5}, (S(0), S(0))),  # fewer rows than tracked directions, and than ranks
    ((6, 9), {"side": "smaller"}, (S(0), S(1))),
    ((6, 9), {"layout": "in_out"}, (S(0), R)),
    ((7, 9), {"layout": "in_out"}, (TENSOR_FIRST, S(0))),
    ((6, 9), {"layout": "in_out"}, (S(0), S(1))),
    ((12, 5), {"split_sizes": (4, 5, 3)}, (S(0), S(0))),
    ((12, 5), {"split_sizes": (4, 5, 3)}, (TENSOR_FIRST, S(0))),
    ((12, 5), {"split_sizes": (4, 5, 3)}, (S(0), S(1))),
    ((5, 12), {"split_sizes": (4, 8), "layout": "in_out"}, (S(1), S(0))),
    ((5, 4, 3), {}, (S(0), R)),
    ((3, 4, 6), {}, (S(0), S(1))),
    ((1, 8, 6), {}, (S(0), S(2))),
    ((2, 8, 6), {}, (S(1), S(1))),
    ((3, 8, 6), {}, (TENSOR_FIRST, S(0))),
    ((5, 2, 2, 2), {"layout": "conv"}, (S(0), S(0))),
    ((8, 3, 2), {"layout": "conv_in_out"}, (S(0), R)),
    ((12, 3, 2), {"layout": "conv_in_out", "split_sizes": (6, 6), "split_side": "input"}, (S(0), S(0))),
    ((40, 4), {}, (S(0), S(0))),  # so long that Gram matrices are summed
    ((4, 40), {}, (S(1), S(1))),
    ((12, 5), {"split_sizes": 4}, (TENSOR_FIRST, S(0))),
    ((12, 9), {"split_sizes": 4, "rank": 5}, (S(0), S(1))),  # transposed, because a head has fewer rows than the basis
    ((9, 12), {"split_sizes": 4, "split_side": "input"}, (S(0), S(0))),
    ((9, 12), {"split_sizes": 4, "split_side": "input"}, (S(1), S(1))),
    ((9, 12), {"split_sizes": 6, "split_side": "input"}, (S(1), S(1))),
    ((9, 12), {"split_sizes": 4, "split_side": "input"}, (S(0), S(1))),
    ((9, 12), {"split_sizes": (7, 5), "split_side": "input"}, (S(1), R)),
    ((12, 9), {"split_sizes": 4, "split_side": "input", "layout": "in_out"}, (S(0), S(1))),
]
SOAPS = [
    ((9, 6), {"rule": "soap"}, (S(0), S(1))),
    ((6, 5), {"rule": "soap-two-sided"}, (TENSOR_FIRST, S(0))),
    ((10, 4), {"rule": "soap-two-sided", "split_sizes": (5, 5)}, (S(0), S(1))),
    ((2, 6, 5), {"rule": "soap-two-sided"}, (S(0), S(1))),
    ((6, 9), {"rule": "soap-two-sided", "layout": "in_out", "frequency": 2}, (S(1), S(0))),
    ((10, 12), {"rule": "soap", "split_sizes": 4, "split_side": "input"}, (S(0), S(1))),
    ((6, 12), {"rule": "soap-two-sided", "split_sizes": 6, "split_side": "input"}, (S(0), S(1))),
    ((12, 6), {"rule": "soap-two-sided", "split_sizes": 6, "split_side": "input", "layout": "in_out"}, (S(0), S(0))),
]


def train(cls: Any, cases: list[Any], mesh: Any = None) -> list[torch.Tensor]:
    """Take STEPS steps with one parameter for each case, and return the parameters."""
    groups = []
    for i, (shape, settings, placements) in enumerate(cases):
        start = gradient(i, torch.Size(shape), -1, torch.float64)
        p = start if mesh is None else placed(start, mesh, placements)
        groups.append({"params": [nn.Parameter(p)], **settings})
    hyper = {"rank": 2, "ns_dtype": torch.float64, "gamma": 0.25} if cls is Cosmos else {}
    opt = cls(groups, lr=0.01, weight_decay=0.1, **hyper)
    for step in range(STEPS):
        for i, group in enumerate(opt.param_groups):
            p = group["params"][0]
            p.grad = shard_like(p, gradient(i, p.shape, step, torch.float64))
        opt.step()
    return [p for group in opt.param_groups for p in group["params"]]


def compare(rank: int, cls: Any, cases: list[Any], expected: list[torch.Tensor]) -> list[float]:
    """Return how far each parameter's part is from that part of the expected whole."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    far = []
    for p, whole in zip(train(cls, cases, mesh), expected, strict=True):
        difference = (p.to_local() - shard_like(p, whole).to_local()).detach()
        far.append(float(difference.abs().max()) if difference.numel() else 0.0)
    return far


@pytest.mark.parametrize(("cls", "cases"), [(Cosmos, COSMOS), (SOAP, SOAPS)])
def test_every_placement_ends_with_the_weights_of_one_process(cls: Any, cases: list[Any]) -> None:
    """2 x 2 ranks, uneven and empty parts, fused weights, experts, transposed storage."""
    expected = train(cls, cases)
    for far in run_ranks(4, compare, cls, cases, expected):
        for distance, case in zip(far, cases, strict=True):
            assert distance < CLOSE_64, f"{case}: {distance:.1e}"


def test_a_cut_has_the_nested_parts_of_torch_chunk() -> None:
    """A block of a fused weight gets the intersection of each part with the block."""
    assert [Cut(7, (0,), 0, 7).part((3,), (i,)) for i in range(3)] == [(0, 3), (3, 3), (6, 1)]
    assert [Cut(3, (0,), 0, 3).part((4,), (i,)) for i in range(4)] == [(0, 1), (1, 1), (2, 1), (3, 0)]
    nested = Cut(8, (1, 0), 0, 8)  # mesh dimension 1 divides first
    assert [nested.part((2, 2), at) for at in ((0, 0), (0, 1), (1, 0), (1, 1))] == [(0, 2), (4, 2), (2, 2), (6, 2)]
    block = Cut(12, (0,), 4, 9)
    assert [block.part((3,), (i,)) for i in range(3)] == [(0, 0), (0, 4), (4, 1)]


def strided_cuts(rank: int) -> list[Any]:
    """Return the mesh dimensions that cut each dimension of a matrix, the outermost first."""
    mesh = init_device_mesh("cpu", (2, 2))
    return [cut.mesh_dims for cut in cuts_of((8, 8), mesh, (TENSOR_FIRST, S(0)))]


def test_a_strided_shard_divides_the_parts_of_the_other_shards() -> None:
    """FSDP2 divides the parts that tensor parallelism has made."""
    assert run_ranks(4, strided_cuts)[0] == [(1, 0), ()]
