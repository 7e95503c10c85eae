"""One rank of a job warns of skipped steps: one that knows which gradient is not finite."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from cosmos_optim import Cosmos, SkippedStepWarning
from tests.sharding.cases import gradient, placed
from tests.sharding.ranks import run_ranks

SHAPE = torch.Size((6, 5))


def warned(rank: int, kind: str, bad: tuple[int, ...]) -> list[str]:
    """Take 25 steps; after two of them, the gradient is NaN on some ranks. Return the warnings of this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def tensor(step: int) -> Any:
        whole = gradient(0, SHAPE, step, torch.float64)
        return placed(whole, mesh, (Shard(0),)) if kind == "sharded" else whole

    p = nn.Parameter(tensor(0))
    opt = Cosmos([("w", p)], lr=0.01, rank=2, gamma=0.25)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(25):
            p.grad = tensor(step)
            if step > 2 and rank in bad:
                (p.grad.to_local() if kind == "sharded" else p.grad)[0, 0] = float("nan")
            opt.step()
    return [str(w.message) for w in seen if w.category is SkippedStepWarning]


@pytest.mark.parametrize("kind", ["sharded", "whole"])
@pytest.mark.parametrize("bad", [(2,), (0, 1, 2)], ids=["one rank", "all ranks"])
def test_one_rank_warns_and_names_the_parameter(kind: str, bad: tuple[int, ...]) -> None:
    found = run_ranks(3, warned, kind, bad)
    texts = sum(found, [])
    assert len(texts) == 2, texts  # the first, and 20 in a row
    assert all("'w' (6, 5)" in text for text in texts)
    if kind == "whole":  # ranks tell each other about shards only
        assert not any(found[rank] for rank in range(3) if rank not in bad)
