"""Ranks compare what they build: a difference is an error on all of them, and a missing rank is not waited for long."""

import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from cosmos_optim import Cosmos, Muon, sharding
from cosmos_optim.sharding import agreement
from tests.sharding.cases import gradient, placed
from tests.sharding.ranks import run_ranks

SHAPE = torch.Size((8, 6))


def sharded(mesh: DeviceMesh, seed: int = 0, shape: torch.Size = SHAPE) -> nn.Parameter:
    """Return a parameter with its rows cut over the last mesh dimension."""
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    return nn.Parameter(placed(gradient(seed, shape, 0, torch.float64), mesh, placements))


def set_grads(params: list[nn.Parameter], step: int = 0) -> None:
    for i, p in enumerate(params):
        p.grad = placed(gradient(i, p.shape, step, torch.float64), p.device_mesh, p.placements)


def message(build: Callable[[], Any]) -> str:
    """Return the message of a ValueError."""
    try:
        build()
    except ValueError as error:
        return str(error)
    return "no error"


DIFFERENT: dict[str, tuple[Callable[[DeviceMesh, bool], Any], str]] = {
    "order": (
        lambda mesh, odd: Cosmos([("qk"[i], sharded(mesh, i)) for i in ([1, 0] if odd else [0, 1])]),
        "parameter 0 of group 0 is 'q' of shape (8, 6), torch.float64, placements (Shard(dim=0),) on a mesh of shape "
        "(2,) on rank 0 and 'k' of shape (8, 6)",
    ),
    "rank": (
        lambda mesh, odd: Cosmos([sharded(mesh)], rank=3 if odd else 2),
        "rank of group 0 is 2 on rank 0 and 3 on rank 1. Give every rank the same parameters in the same order",
    ),
    "lr": (
        lambda mesh, odd: Cosmos([sharded(mesh)], lr=torch.tensor(0.5 if odd else 0.25), gamma=0.25),
        "lr of group 0 is 0.25 on rank 0 and 0.5 on rank 1",
    ),
    "rule": (
        lambda mesh, odd: (Muon if odd else Cosmos)([sharded(mesh)]),
        "different optimizers: rule of group 0 is 'cosmos' on rank 0 and 'muon' on rank 1",
    ),
    "shapes without names": (
        lambda mesh, odd: Cosmos([sharded(mesh, 0, torch.Size((6, 8)) if odd else SHAPE), sharded(mesh)]),
        "parameter 0 of group 0 is shape (8, 6), torch.float64",
    ),
    "number of parameters": (
        lambda mesh, odd: Cosmos([sharded(mesh, i) for i in range(2 if odd else 1)]),
        "parameter 1 of group 0 is missing on rank 0 and shape (8, 6)",
    ),
    "groups": (
        lambda mesh, odd: Cosmos([{"params": [sharded(mesh, i)]} for i in range(2 if odd else 1)]),
        "of group 1 is missing on rank 0 and",
    ),
    "not sharded": (
        lambda mesh, odd: Cosmos([sharded(mesh), nn.Parameter(torch.ones(SHAPE)) if odd else sharded(mesh, 1)]),
        "parameter 1 of group 0 is shape (8, 6), torch.float64, placements (Shard(dim=0),) on a mesh of shape (2,) on "
        "rank 0 and not sharded on rank 1",
    ),
}


def build_different(rank: int) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for build, _ in DIFFERENT.values():
        wrong = message(lambda: build(mesh, rank == 1))  # noqa: B023
        found.append((wrong, message(lambda: build(mesh, False))))  # noqa: B023
    return found


def test_a_difference_is_an_error_on_all_ranks_that_names_it_and_the_same_may_follow() -> None:
    for found in run_ranks(2, build_different):
        for (name, (_, words)), (wrong, right) in zip(DIFFERENT.items(), found, strict=True):
            assert words in wrong, f"{name}: {wrong}"
            assert right == "no error", f"{name}: {right}"


def one_of_four(rank: int) -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    begin = time.monotonic()
    found = message(lambda: Cosmos([sharded(mesh)], rank=3 if rank == 2 else 2))
    return found, time.monotonic() - begin


def test_one_rank_of_a_mesh_with_two_dimensions_differs() -> None:
    for found, seconds in run_ranks(4, one_of_four):
        assert "rank of group 0 is 2 on rank 0 and 3 on rank 2" in found
        assert seconds < 5


def same_in_spite_of_local_parts(rank: int) -> bool:
    """Build with what may differ: local experts, stages of a pipeline on separate meshes, keys of other code."""
    mesh = init_device_mesh("cpu", (4,))
    p = sharded(mesh)
    expert = nn.Parameter(torch.ones(4 + rank, 4, dtype=torch.float64))
    groups = [{"params": [("dense", p)], "host": rank}, {"params": [(f"experts.{rank}", expert)], "rule": "muon"}]
    opt = Cosmos(groups, lr=torch.tensor(1e-3), rank=2)
    set_grads([p])
    expert.grad = torch.ones_like(expert)
    opt.step()
    stages = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    stage = rank // 2
    mine = [sharded(stages[stage], i, torch.Size((8, 4 + 2 * stage))) for i in range(1 + stage)]
    staged = Cosmos([(f"layers.{stage}.{i}", q) for i, q in enumerate(mine)], rank=2 + stage)
    set_grads(mine)
    staged.step()
    return float(staged.state[mine[0]]["step"]) == 1.0


def test_local_experts_stages_of_a_pipeline_and_keys_of_others_may_differ() -> None:
    assert run_ranks(4, same_in_spite_of_local_parts) == [True] * 4


def add_later(rank: int) -> tuple[str, int, float, float]:
    """Add a group that differs, then one that does not, and train."""
    mesh = init_device_mesh("cpu", (2,))
    p, q = sharded(mesh), sharded(mesh, 1)
    opt = Cosmos([("p", p)], rank=2)
    opt.param_groups[0]["lr"] = 0.1 + rank  # compared only at construction
    found = message(lambda: opt.add_param_group({"params": [("q", q)], "rank": 2 + rank}))
    groups = len(opt.param_groups)
    opt.param_groups[0]["lr"] = 0.1
    opt.add_param_group({"params": [("q", q)], "rank": 3})
    set_grads([p, q])
    opt.step()
    return found, groups, float(opt.state[q]["step"]), float(q.full_tensor().sum())


def test_a_group_added_later_is_compared_and_leaves_nothing_behind_if_refused() -> None:
    a, b = run_ranks(2, add_later)
    assert "rank of group 1 is 2 on rank 0 and 3 on rank 1" in a[0]
    assert a[0] == b[0]
    assert (a[1], a[2]) == (1, 1.0)
    assert a[3] == b[3]


def alone_and_late(rank: int) -> list[Any]:
    """Rank 0 builds one optimizer alone; rank 1 builds the next late; then both build different ones, rank 1 late."""
    sharding.BUILD_S = 0.2
    mesh = init_device_mesh("cpu", (2,))
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            Muon([sharded(mesh)])
            found.append([str(x.message) for x in caught])
        else:
            time.sleep(1.5)
        p = sharded(mesh)
        opt = Cosmos([p], rank=2)
        set_grads([p])
        opt.step()
        found.append(float(opt.state[p]["step"]))
        if rank == 1:
            time.sleep(1.5)
        q = sharded(mesh)
        set_grads([q])
        found.append(message(lambda: Cosmos([("q", q)], rank=2 + rank).step()))
        ahead, behind = sharded(mesh), sharded(mesh)
        if rank == 1:  # meanwhile, rank 0 waits with another optimizer
            time.sleep(0.3)
        opts = [Cosmos([("a", ahead)], rank=2), Cosmos([("b", behind)], rank=3)]
        set_grads([ahead, behind])
        for each in opts:
            each.step()
    return found


def test_a_rank_alone_does_not_wait_long_and_late_ranks_are_compared_at_the_first_step() -> None:
    (caught, first, *errors), (second, *others) = run_ranks(2, alone_and_late)
    late = [text for text in caught if "unnamed matrices" not in text]
    assert len(late) == 1 and "not all ranks that share these parameters built it within 0 s" in late[0]
    assert first == second == 1.0
    assert errors == others and "rank of group 0 is 2 on rank 0 and 3 on rank 1" in errors[0]


def twins_and_a_third(rank: int) -> tuple[list[float], float]:
    """Build twin critics and an actor, and train them; rank 1 begins after rank 0 has stopped waiting for two."""
    sharding.BUILD_S = 0.2
    mesh = init_device_mesh("cpu", (2,))
    if rank == 1:
        time.sleep(0.5)
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the ranks that are late
        params = [sharded(mesh, 0), sharded(mesh, 1), sharded(mesh, 2, torch.Size((10, 6)))]
        opts = [Cosmos([("w", p)], rank=2) for p in params]
        set_grads(params)
        for opt in opts:
            opt.step()
    return [float(opt.state[p]["step"]) for opt, p in zip(opts, params, strict=True)], time.monotonic() - begin


def test_equal_optimizers_are_not_taken_for_each_other_if_a_rank_is_late() -> None:
    for steps, seconds in run_ranks(2, twins_and_a_third):
        assert steps == [1.0, 1.0, 1.0] and seconds < 5


def swapped(rank: int) -> list[str]:
    """Put sharded parameters into the groups of an optimizer that was built before, as accelerate does for FSDP2."""
    found = []
    for order in ([0, 1], [0, 1] if rank == 0 else [1, 0]):
        mesh = init_device_mesh("cpu", (2,))
        whole = [nn.Parameter(torch.ones(SHAPE)) for _ in range(2)]
        opt = Cosmos([("qk"[i], whole[i]) for i in order], rank=2)
        params = [sharded(mesh, i) for i in order]
        opt.param_groups[0]["params"] = list(params)
        opt.param_groups[0]["lr"] = 0.1 + rank / 10  # is not compared now
        set_grads(params)
        found.append(message(opt.step))
        if found[-1] == "no error":
            copy = Cosmos([("qk"[i], sharded(mesh, i)) for i in order], rank=2)
            copy.load_state_dict(opt.state_dict())
    return found


def test_parameters_that_were_sharded_after_the_optimizer_was_built_are_compared() -> None:
    for right, wrong in run_ranks(2, swapped):
        assert right == "no error"
        assert "parameter 0 of group 0 is 'q' of shape (8, 6)" in wrong and "and 'k' of" in wrong


def without_other_ranks(rank: int) -> int:
    """Build without a sharded parameter, and on a fake process group, which simulates other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    asked: list[int] = []
    inner = agreement.compare
    agreement.compare = lambda *args: (asked.append(1), inner(*args))[1]  # type: ignore[assignment]
    Cosmos([nn.Parameter(torch.ones(SHAPE))])
    assert not asked
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    Cosmos([sharded(mesh)], rank=2)
    dist.destroy_process_group()
    return len(asked)


def test_nothing_is_sent_if_nothing_is_sharded_or_the_ranks_are_not_real() -> None:
    from tests.sharding import ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks.dist, "barrier", lambda: None)
        assert run_ranks(1, without_other_ranks) == [1]


def test_ranks_that_time_out_together_take_the_result_of_a_full_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank has come, but is slow to write the result: nobody may leave."""
    me = threading.local()
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: me.rank)
    store, ranks, found = dist.HashStore(), [0, 1, 2], {}

    def meet(rank: int) -> None:
        me.rank = rank
        found[rank] = agreement._meet(store, 0, ["x"], ranks, time.monotonic() + 0.2)

    early = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in early:
        thread.start()
    while store.add("0/here", 0) < 2:
        time.sleep(0.001)
    store.add("0/here", 1)  # rank 2 comes, and reads what the others have brought
    time.sleep(0.6)
    store.set("0/result", '["x"]')
    for thread in early:
        thread.join()
    assert found == {0: Counter("x"), 1: Counter("x")}


def test_a_rank_that_left_as_the_last_one_came_learns_the_result_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store, mine = dist.HashStore(), agreement.Description([("lr", "1")])
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agreement.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(agreement.dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(agreement, "_waiting", defaultdict(list))
    monkeypatch.setattr(agreement, "_left", {})
    assert not agreement.compare(mine, [0, 1], seconds=0.01)
    shared = dist.PrefixStore(f"cosmos_optim/{agreement._digest('[0, 1]')}", store)
    shared.add("round", 1)  # rank 1 counted this rank before it left
    shared.set("0/result", f'["{mine.digest}"]')
    assert agreement.compare(mine, [0, 1], seconds=0.01) and mine.agreed
