"""Layouts that cannot run are refused when the optimizer is built. The error names parameter, placements and remedy."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cosmos_optim import Cosmos
from tests.sharding.cases import placed
from tests.sharding.ranks import run_ranks


def message(build: Callable[[], Any]) -> str:
    """Return the message of a constructor's ValueError."""
    try:
        build()
    except ValueError as error:
        return str(error)
    return "no error"


def refused(rank: int) -> dict[str, str]:
    """Return the messages of all layouts that must be refused."""
    mesh = init_device_mesh("cpu", (2, 2))
    other = DeviceMesh("cpu", [2, 3])
    left, right = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [1, 2, 3])
    descending = DeviceMesh("cpu", [[1, 0], [3, 2]])
    whole = torch.ones(8, 6)

    def cosmos(p: Any, **settings: Any) -> Any:
        return Cosmos([{"params": [("layer.weight", nn.Parameter(p))], **settings}], gamma=0.25)

    def local(placements: Any) -> DTensor:
        return DTensor.from_local(torch.ones(4, 3), mesh, placements, run_check=False, shape=(8, 6), stride=(6, 1))

    flat = nn.Parameter(torch.ones(48))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    originals = FullyShardedDataParallel(nn.Linear(6, 8), device_id=torch.device("cpu"), use_orig_params=True)
    found = {
        "partial": message(lambda: cosmos(local((Partial(), Replicate())))),
        "strided": message(lambda: cosmos(local((_StridedShard(0, split_factor=3), Shard(0))))),
        "parts": message(lambda: cosmos(local((Shard(0), Replicate())))),
        "other mesh": message(
            lambda: cosmos(DTensor.from_local(torch.ones(4, 6), other, (Shard(0),), run_check=False))
        ),
        "offload": message(
            lambda: Cosmos(
                [("layer.weight", nn.Parameter(placed(whole, mesh, (Shard(0), Replicate()))))], offload="cpu"
            )
        ),
        "descending": message(lambda: cosmos(placed(whole, descending, (Replicate(), Shard(0))))),
        "descending replicas": message(lambda: cosmos(placed(whole, descending, (Shard(0), Replicate())))),
        "conv": message(lambda: cosmos(placed(torch.ones(4, 4, 2, 2), mesh, (Shard(1), Replicate())), layout="conv")),
        "flat": message(lambda: Cosmos([{"params": [("layer.weight", flat)], "rule": "adam"}])),
        "fsdp1": message(lambda: Cosmos(FullyShardedDataParallel(nn.Linear(6, 8), device_id=torch.device("cpu")))),
        "originals": message(lambda: Cosmos(originals)),
    }
    if rank in (1, 2):
        two = [("left", nn.Parameter(placed(whole, left, (Shard(0),)))),
               ("right", nn.Parameter(placed(whole, right, (Shard(0),))))]  # fmt: skip
        found["meshes"] = message(lambda: Cosmos(two))
    return found


def with_other_groups(rank: int) -> str:
    """Cut matrices over two of three mesh dimensions, then on a mesh of some ranks; one of them is in another group."""
    dist.new_group([0, 5])
    cube = init_device_mesh("cpu", (2, 2, 2))
    p = nn.Parameter(placed(torch.ones(8, 6), cube, (Replicate(), Shard(0), Shard(1))))
    p.grad = placed(torch.eye(8, 6), cube, (Replicate(), Shard(0), Shard(1)))
    Cosmos([p], gamma=0.25, rank=2).step()
    few = DeviceMesh("cpu", [[0, 1], [2, 3]])
    if rank > 3:
        return ""
    return message(lambda: Cosmos([nn.Parameter(placed(torch.ones(8, 6), few, (Shard(0), Shard(1))))], gamma=0.25))


def test_a_mesh_of_some_ranks_in_different_numbers_of_groups_is_refused() -> None:
    """On a mesh of all ranks every group can be made. Making a group of some ranks would wait forever."""
    found = run_ranks(8, with_other_groups)
    assert found[4:] == [""] * 4
    assert all("different numbers of groups" in text and "[0, 1, 2, 3]" in text for text in found[:4])


def test_layouts_that_cannot_run_are_refused_with_name_reason_and_remedy() -> None:
    found = run_ranks(4, refused)[1]
    for kind, words in {
        "partial": ("'layer.weight'", "(8, 6)", "Partial", "is neither Shard nor Replicate. Supported are"),
        "strided": ("'layer.weight'", "_StridedShard", "interleaves 3 parts", "Supported are"),
        "parts": ("'layer.weight'", "(4, 3)", "(4, 6)"),
        "other mesh": ("'layer.weight'", "Shard(dim=0)", "does not contain this rank", "build its optimizer"),
        "descending": ("'layer.weight'", "the ranks of its mesh do not ascend", "init_device_mesh"),
        "descending replicas": ("no error",),
        "conv": ("'layer.weight'", "output channels", "Shard(0)"),
        "flat": ("'layer.weight'", "flat partition", "fully_shard"),
        "fsdp1": ("_flat_param", "flat p", "fully_shard"),
        "originals": ("weight", "flat p", "fully_shard"),
        "offload": ("'layer.weight'", "(8, 6)", "leave offload out", "CPUOffloadPolicy"),
        "meshes": ("'left'", "'right'", "different ranks", "one optimizer for each mesh"),
    }.items():
        for word in words:
            assert word in found[kind], f"{kind}: {found[kind]}"
