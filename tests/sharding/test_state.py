"""Sharded state: its placements, its bytes, and its conversion from and to whole tensors."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cosmos_optim import SOAP, Cosmos
from tests.sharding.cases import Case, EveryKindSmall, fsdp, gradient, placed, take_steps
from tests.sharding.ranks import run_ranks

M, N, RANK, COUNT = 64, 48, 4, 3
SLACK = 1.02  # step counts


def describe(rank: int) -> dict[str, Any]:
    """Describe the state of equal matrices cut over 4 ranks by rows, and over 2 x 2 by rows and columns."""
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = gradient(0, torch.Size((M, N)), 0, torch.float32)
    rows = [nn.Parameter(placed(whole, flat, (Shard(0),))) for _ in range(COUNT)]
    both = [nn.Parameter(placed(whole, grid, (Shard(0), Shard(1))))]
    by_rows, by_both = Cosmos(rows, rank=RANK), Cosmos(both, rank=RANK)
    owned = SOAP([{"params": [nn.Parameter(placed(whole, flat, (Shard(0),)))], "rule": "soap-two-sided"}])
    return {
        "bytes": by_rows.state_bytes(),
        "rows": {k: v.placements for k, v in by_rows.state[rows[0]].items() if isinstance(v, DTensor)},
        "both": {k: v.placements for k, v in by_both.state[both[0]].items() if isinstance(v, DTensor)},
        "owned": owned.state_bytes(),
        "owned placements": {k: v.placements for k, v in next(iter(owned.state.values())).items() if k != "step"},
        "keys": [list(state) for state in by_rows.state.values()],
    }


def test_a_rank_holds_its_share_of_the_state_and_no_more() -> None:
    """M, V and v are cut like the parameter's rows, U like its columns."""
    found = run_ranks(4, describe)
    R, S = Replicate(), Shard
    for one in found:
        assert one["rows"] == {"M": (S(0),), "U": (R,), "S": (R,), "V": (S(0),), "v": (S(0),)}
        assert one["both"] == {"M": (S(0), S(1)), "U": (R, S(0)), "S": (R, R), "V": (S(0), R), "v": (S(0), R)}
        assert one["keys"] == found[0]["keys"]
        share = 4 * COUNT * ((M * N + M * RANK + M) / 4 + N * RANK + RANK * RANK)
        assert share <= one["bytes"] <= SLACK * share
        # A rule that runs on owners has all of its state divided: M V (m n), L U (n n), K O (m m). The rows m
        # are cut; L and U have none, so their second dimension is cut.
        assert one["owned placements"] == dict.fromkeys("MVKO", (S(0),)) | dict.fromkeys("LU", (S(1),))
        assert one["owned"] <= SLACK * 4 * (2 * M * N + 2 * N * N + 2 * M * M) / 4


def save_and_load_full_state(rank: int) -> float:
    """Gather state to whole tensors and load it into another optimizer by torch's functions; return the difference."""
    case = Case(EveryKindSmall)
    model, opt = case.build(fsdp)
    take_steps(model, opt, case.dtype, range(3))
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, opt, options=options)
    other = case.build(fsdp)
    for p, q in zip(model.parameters(), other[0].parameters(), strict=True):
        q.data.copy_(p.data)
    set_optimizer_state_dict(*other, whole, options=options)
    take_steps(model, opt, case.dtype, range(3, 5))
    take_steps(*other, case.dtype, range(3, 5))
    pairs = zip(model.parameters(), other[0].parameters(), strict=True)
    return max(float((p.full_tensor() - q.full_tensor()).abs().max()) for p, q in pairs)


def test_a_full_state_dict_and_back_changes_no_bit() -> None:
    assert run_ranks(2, save_and_load_full_state) == [0.0, 0.0]


def load_state_of_one_process(rank: int, saved: Any) -> Any:
    """Load the state_dict of one process into a sharded optimizer, and return it gathered."""
    case = Case(EveryKindSmall)
    model, opt = case.build(fsdp)
    opt.load_state_dict(saved)
    held = opt.state_dict()["state"]
    return {i: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in s.items()} for i, s in held.items()}


def test_a_state_dict_of_one_process_loads_into_sharded_optimizers() -> None:
    """Plain tensors are cut when they are loaded."""
    case = Case(EveryKindSmall)
    model, opt = case.build()
    take_steps(model, opt, case.dtype, range(2))
    saved = opt.state_dict()
    for found in run_ranks(3, load_state_of_one_process, saved):
        for i, state in saved["state"].items():
            for key, value in state.items():
                assert torch.equal(found[i][key], value), f"parameter {i}, {key}"
    assert not dist.is_initialized()


def load_the_file_of_another_rank(rank: int, folder: Path) -> list[str]:
    """Save the shards of each rank by torch.save, and load the file of rank 0 on all; return the errors."""
    case = Case(EveryKindSmall)
    model, opt = case.build(fsdp)
    take_steps(model, opt, case.dtype, range(2))
    torch.save(opt.state_dict(), folder / f"{rank}.pt")
    dist.barrier()
    errors = []
    for source in (rank, 0):
        try:
            opt.load_state_dict(torch.load(folder / f"{source}.pt", weights_only=True))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_the_shards_of_another_rank_are_refused(tmp_path: Path) -> None:
    """Shapes are often equal, so these would be taken for our own."""
    first, second = run_ranks(2, load_the_file_of_another_rank, tmp_path)
    assert first == [] and len(second) == 1
    assert "the checkpoint has the shards of another rank: load on each rank the file that it wrote" in second[0]


def keep_a_wrappers_state(rank: int) -> list[bool]:
    """Keep sharded copies of the weights in the state; save and load them, sharded, whole, and in another dtype."""
    case = Case(EveryKindSmall)
    model, opt = case.build(fsdp)
    take_steps(model, opt, case.dtype, range(1))
    for p in model.parameters():
        opt.state[p] |= {"z": p.detach().clone(), "k": 3}
    take_steps(model, opt, case.dtype, range(1, 2))
    full = StateDictOptions(full_state_dict=True)
    found = []
    for kind in ("plain", "sharded", "full", "whole tensors"):
        other, again = case.build(fsdp)
        if kind == "plain":
            again.load_state_dict(opt.state_dict())
        elif kind == "whole tensors":
            saved = opt.state_dict()
            whole = {i: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
                     for i, state in saved["state"].items()}  # fmt: skip
            again.load_state_dict(saved | {"state": whole})
        else:
            options = full if kind == "full" else StateDictOptions()
            for q in other.parameters():  # torch distributes whole state only to names that exist here
                again.state[q] |= {"z": torch.zeros_like(q), "k": 0}
            saved = get_optimizer_state_dict(model, opt, options=options)
            set_optimizer_state_dict(other, again, saved, options=options)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            a, b = opt.state[p], again.state[q]
            assert isinstance(b["z"], DTensor) and b["z"].placements == q.placements, kind
            assert torch.equal(a["z"].to_local(), b["z"].to_local()) and b["k"] == 3, kind
        take_steps(other, again, case.dtype, range(2, 3))
        found.append(all("z" in state for state in again.state.values()))
    for p in model.parameters():
        opt.state[p]["z"] = opt.state[p]["z"].float()
    model.to(torch.float32)
    take_steps(model, opt, torch.float32, range(2, 3))
    return [*found, all(opt.state[p]["M"].dtype is torch.float32 for p in model.parameters() if "M" in opt.state[p])]


def test_sharded_state_of_a_wrapper_survives_every_kind_of_checkpoint() -> None:
    for found in run_ranks(2, keep_a_wrappers_state):
        assert found == [True] * 5
