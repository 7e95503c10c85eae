"""fully_shard changes the class of a module, never its route."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from cosmos_optim import param_groups
from tests.sharding.ranks import run_ranks


class Conv1D(nn.Module):
    """As in transformers' GPT-2: known by its name, stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 8
        self.weight = nn.Parameter(torch.ones(4, 8))


def routes(model: nn.Module) -> dict[str, object]:
    """(rule, layout, split_sizes) by parameter."""
    return {name: (group["rule"], group.get("layout"), group.get("split_sizes"))
            for group in param_groups(model) for name, _ in group["params"]}  # fmt: skip


def before_and_after(rank: int) -> tuple[object, object]:
    model = nn.ModuleDict({"c": Conv1D(), "gru": nn.GRU(4, 6), "linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4),
                           "attention": nn.MultiheadAttention(4, 2)})  # fmt: skip
    before = routes(model)
    for module in model.values():
        fully_shard(module)
    return before, routes(model)


def test_routes_survive_fully_shard() -> None:
    """Every module sharded by itself."""
    for before, after in run_ranks(2, before_and_after):
        assert before["c.weight"][1] == "in_out"
        assert len(before["gru.weight_ih_l0"][2]) == 3
        assert before == after
