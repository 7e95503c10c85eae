"""Rank 0 warns of skipped steps, and one other rank that knows which gradient is not finite."""

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
        return whole if kind == "whole" else placed(whole, mesh, (Shard(0),))

    p = nn.Parameter(tensor(0))
    opt = Cosmos([{"params": [("w", p)], "rule": "adam" if kind == "adam" else "cosmos"}], lr=0.01, rank=2, gamma=0.25)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(25):
            p.grad = tensor(step)
            if step > 2 and rank in bad:
                (p.grad if kind == "whole" else p.grad.to_local())[0, 0] = float("nan")
            opt.step()
    return [str(w.message) for w in seen if w.category is SkippedStepWarning]


@pytest.mark.parametrize("kind", ["sharded", "adam", "whole"])
@pytest.mark.parametrize("bad", [(2,), (0, 1, 2)], ids=["one rank", "all ranks"])
def test_rank_0_warns_and_one_other_rank_that_can_name_the_parameter(kind: str, bad: tuple[int, ...]) -> None:
    first, *others = run_ranks(3, warned, kind, bad)
    if kind == "whole" and 0 not in bad:  # ranks tell each other about shards only
        assert not first
    else:
        assert len(first) == 2, first  # the first skipped step, and 20 in a row
        # Ranks share the maxima of COSMOS's matrices, so all can name one.
        expected = "'w' (6, 5)" if 0 in bad or kind == "sharded" else "a gradient of another process"
        assert all(expected in text for text in first)
    texts = sum(others, [])
    assert len(texts) == 2 and all("'w' (6, 5)" in text for text in texts), texts
    assert kind == "sharded" or not any(others[rank - 1] for rank in (1, 2) if rank not in bad)
