"""FSDP1, DeepSpeed ZeRO and torch's ZeroRedundancyOptimizer: whole parameters are trained, flat pieces are refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer

from cosmos_optim import Adam, Cosmos, param_groups
from tests.optim.helpers import decoder, loss_of
from tests.sharding.ranks import run_ranks

CLOSE = 1e-5  # float32 gradients averaged over two ranks in another order
RATES = {"lr": 1e-3, "adam_lr": 5e-3}
STEPS = 4


def fsdp1(model: nn.Module, strategy: ShardingStrategy, originals: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=originals
    )


def train_on_ranks(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on a batch of each rank."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, 2 * step + dist.get_rank()).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def one_process(steps: int = STEPS) -> list[Tensor]:
    """Train on the batches of two ranks together."""
    model = decoder()
    opt = Cosmos(model, rank=4, **RATES)
    for step in range(steps):
        opt.zero_grad()
        ((loss_of(model, 2 * step) + loss_of(model, 2 * step + 1)) / 2).backward()
        opt.step()
    return weights(model)


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(float((a - b).abs().max()) < CLOSE for a, b in zip(found, expected, strict=True))


def message(work: Callable[[], Any]) -> str:
    """Return the message of a ValueError."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return "no error"


# -- FSDP1 ----------------------------------------------------------------------------------------------------------


def unsharded(rank: int, order: str) -> tuple[list[str], list[Tensor]]:
    """Train with FSDP1 that shards nothing; the optimizer is built before or after the model is wrapped."""
    model = decoder()
    opt = Cosmos(model, rank=4, **RATES) if order == "before" else None
    wrapped = fsdp1(model, ShardingStrategy.NO_SHARD)
    if order == "groups":
        matrices = [p for n, p in wrapped.named_parameters() if n.endswith(("up.weight", "down.weight"))]
        rest = [p for p in wrapped.parameters() if all(p is not m for m in matrices)]
        opt = Cosmos([{"params": rest, "rule": "adam"}, {"params": matrices}], rank=4, **RATES)
    opt = opt or Cosmos(wrapped, rank=4, **RATES)
    rules = sorted(f"{group['rule']} {len(group['params'])}" for group in opt.param_groups)
    train_on_ranks(wrapped, opt, range(STEPS))
    return rules, weights(wrapped)


@pytest.mark.parametrize("order", ["before", "after", "groups"])
def test_fsdp1_without_sharding_trains_as_one_process_does(order: str) -> None:
    expected = one_process()
    for rules, found in run_ranks(2, unsharded, order):
        assert rules == ["adam 6", "cosmos 2"]
        assert close(found, expected)


def sharded(rank: int, strategy: ShardingStrategy) -> dict[str, str]:
    """Return the messages for all ways to build an optimizer of a model that FSDP1 has cut into pieces."""
    after = fsdp1(decoder(), strategy)
    flat = fsdp1(decoder(), strategy, originals=False)
    model = decoder()
    before = Cosmos(model, rank=4)
    wrapped = fsdp1(model, strategy)
    by_dimension = [{"params": [p for p in after.parameters() if p.dim() < 2], "rule": "adam"}]
    return {
        "model": message(lambda: Cosmos(after)),
        "flat model": message(lambda: Cosmos(flat)),
        "matrices": message(lambda: Cosmos(after.parameters())),
        "adam groups": message(lambda: Cosmos(by_dimension)),
        "flat groups": message(lambda: Cosmos([{"params": list(flat.parameters()), "rule": "adam"}])),
        "adam": message(lambda: Adam(after.parameters())),
        "step": message(lambda: train_on_ranks(wrapped, before, range(1))),
    }


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fsdp1_that_shards_is_refused_when_the_optimizer_is_built_or_steps(strategy: str) -> None:
    for found in run_ranks(2, sharded, ShardingStrategy[strategy]):
        for way, text in found.items():
            for word in ("FSDP1", "fully_shard", "NO_SHARD", "use_orig_params=True"):
                assert word in text, f"{way}: {text}"


def replaced(rank: int) -> list[str]:
    """Take two steps with an optimizer of parameters that FSDP1 has replaced by a flat one."""
    model = decoder()
    opt = Cosmos(model, rank=4)
    wrapped = fsdp1(model, ShardingStrategy.FULL_SHARD, originals=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train_on_ranks(wrapped, opt, range(2))
    return [str(w.message) for w in seen if "no parameter of the optimizer has a gradient" in str(w.message)]


def test_rank_0_and_one_other_warn_once_if_fsdp1_replaced_the_parameters() -> None:
    """They carry no mark then, and never have a gradient."""
    first, second = run_ranks(2, replaced)
    assert len(first) == len(second) == 1
    assert "build the optimizer after" in first[0]


# -- DeepSpeed ZeRO ---------------------------------------------------------------------------------------------------


def like_zero(optimizer: torch.optim.Optimizer) -> None:
    """Do what DeepSpeed's ZeRO stages 1 and 2 do when they take over an optimizer (`DeepSpeedZeroOptimizer`).

    Each group's parameters are flattened into one vector, this rank's part of it is copied to float32, and the group's
    list is replaced by that one 1-D tensor. Then a step with zero gradients allocates the state.
    """
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().flatten() for p in group["params"]])
        part = flat.chunk(2)[0].clone().float().requires_grad_()
        group["params"] = [part]
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.zeros_like(group["params"][0])
    optimizer.step()


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("layers", ["one matrix", "two matrices"])
def test_groups_that_zero_has_flattened_are_refused_with_its_name(named: bool, layers: str) -> None:
    groups = param_groups(decoder())
    if layers == "one matrix":
        groups[0]["params"] = groups[0]["params"][:1]
    if not named:
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
    opt = Cosmos(groups, rank=4)
    assert [g["rule"] for g in opt.param_groups] == ["cosmos", "adam"]
    found = message(lambda: like_zero(opt))
    for word in ("DeepSpeed ZeRO", "FSDP1", "fully_shard", "stage 0", "flat"):
        assert word in found, found
    assert not named or "weight" in found


# -- ZeroRedundancyOptimizer ------------------------------------------------------------------------------------------


def unnamed_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups without names, which ZeroRedundancyOptimizer cannot read."""
    return [{**group, "params": [p for _, p in group["params"]]} for group in param_groups(model)]


def redundancy(rank: int, **arguments: Any) -> tuple[list[tuple[str, float]], list[Tensor]]:
    """Train with torch's ZeroRedundancyOptimizer, save, load into another, and continue."""
    model = decoder()
    wrapped = nn.parallel.DistributedDataParallel(model)
    opt = ZeroRedundancyOptimizer(unnamed_groups(model), optimizer_class=Cosmos, rank=4, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
    train_on_ranks(wrapped, opt, range(STEPS // 2))
    schedule.step()
    rates = [(g["rule"], g["lr"]) for groups in (opt.param_groups, opt.optim.param_groups) for g in groups]
    opt.consolidate_state_dict(to=0)
    box = [opt.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    again = ZeroRedundancyOptimizer(unnamed_groups(model), optimizer_class=Cosmos, rank=4, **arguments)
    again.load_state_dict(box[0])
    train_on_ranks(wrapped, again, range(STEPS // 2, STEPS))
    return rates, weights(model)


def redundancy_with_rates(rank: int) -> tuple[list[tuple[str, float]], list[Tensor]]:
    return redundancy(rank, **RATES)


def test_zero_redundancy_optimizer_trains_each_group_at_its_own_rate() -> None:
    expected = one_process()
    for rates, found in run_ranks(2, redundancy_with_rates):
        assert set(rates) == {("cosmos", RATES["lr"]), ("adam", RATES["adam_lr"])}
        assert close(found, expected)


def added_later(rank: int) -> tuple[str, list[float]]:
    """Add a group to a ZeroRedundancyOptimizer, without and with its own rate; return the error and the rates."""
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    model = decoder()
    opt = ZeroRedundancyOptimizer(unnamed_groups(model), optimizer_class=Cosmos, **RATES)
    opt.add_param_group({"params": extra[:1], "rule": "adam", "lr": 0.25})
    opt.step()
    rates = [group["lr"] for group in opt.optim.param_groups]
    return message(lambda: opt.add_param_group({"params": extra[1:], "rule": "adam"})), rates


def test_a_group_added_to_a_zero_redundancy_optimizer_needs_its_own_rate() -> None:
    """Torch fills in `lr`, and sets it again at each step."""
    for found, rates in run_ranks(2, added_later):
        assert "ZeroRedundancyOptimizer" in found and "its own lr" in found
        assert rates == [RATES["lr"], RATES["adam_lr"], 0.25]
