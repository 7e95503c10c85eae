"""fully_shard changes the class of a module, but not the routing of its parameters."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from cosmos_optim import param_groups
from tests.sharding.ranks import run_ranks


class Conv1D(nn.Module):
    """A layer like that of transformers' GPT-2: recognized by its name, stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 8
        self.weight = nn.Parameter(torch.ones(4, 8))


def routes(model: nn.Module) -> dict[str, object]:
    """Return (rule, layout, split_sizes) of each parameter."""
    return {name: (group["rule"], group.get("layout"), group.get("split_sizes"))
            for group in param_groups(model) for name, _ in group["params"]}  # fmt: skip


def before_and_after(rank: int) -> tuple[object, object]:
    """Return the routes before and after fully_shard."""
    model = nn.ModuleDict({"c": Conv1D(), "gru": nn.GRU(4, 6), "linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4),
                           "attention": nn.MultiheadAttention(4, 2)})  # fmt: skip
    before = routes(model)
    for module in model.values():
        fully_shard(module)
    return before, routes(model)


def test_fully_shard_does_not_change_rule_layout_or_splits() -> None:
    """With fully_shard applied to every module."""
    for before, after in run_ranks(2, before_and_after):
        assert before["c.weight"][1] == "in_out"
        assert len(before["gru.weight_ih_l0"][2]) == 3
        assert before == after
