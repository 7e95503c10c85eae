"""fully_shard changes the class of a module and its parameters, but not their routing."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cosmos_optim import Cosmos, param_groups
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


def build_after_an_evaluation(rank: int) -> tuple[list[str], list[str]]:
    """Return the parameters of an optimizer that are not sharded, and those that a layer unfrozen later adds to it."""
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10))
    fully_shard(model[1])
    fully_shard(model)
    model[1].requires_grad_(False)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)
    opt = Cosmos(model, rank=2)
    whole = [str(p.shape) for group in opt.param_groups for p in group["params"] if not isinstance(p, DTensor)]
    with torch.no_grad():
        model(tokens)
    model[1].requires_grad_(True)
    return whole, [name for group in param_groups(model, beside=opt) for name, _ in group["params"]]


def test_an_optimizer_that_is_built_after_an_evaluation_has_the_shards() -> None:
    """FSDP2 leaves whole copies in the root module then, usually of embedding and head: they would never train."""
    for whole, added in run_ranks(2, build_after_an_evaluation):
        assert whole == []
        assert added == ["1.weight", "1.bias"]
