"""Sharded moments of 8 bits: blocks lie within ranks and rounding counts elements of the whole, so bits are equal."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cosmos_optim import Adam
from tests.sharding.cases import STEPS, Block, Case, distance, fsdp, full_weights, gradient, placed, take_steps
from tests.sharding.checkpoints import run_part
from tests.sharding.ranks import run_ranks
from tests.sharding.test_refused_layouts import message

INT8 = torch.int8
# In double precision: vector instructions may round the end of a tensor differently. Codes and scales have the same
# bits, unless noise lies within 1e-15 of a threshold.
CLOSE = 1e-12


class Tables(nn.Module):
    """An embedding and a head with a number of rows that two ranks cannot share evenly, a long vector, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("tall")])
        self.embedding = nn.Embedding(45, 140)
        self.head = nn.Linear(140, 37, bias=False)
        self.scale = nn.Parameter(torch.empty(5 * 1536))  # parts of 2 and 3 ranks are whole blocks
        self.norm = nn.LayerNorm(140)


CASE = Case(Tables, "adam", options=(("adam_dtype", INT8),))


def run_case(rank: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], set[Any]]:
    """Step with FSDP2; return whole weights, whole state and the placements of the state."""
    model, opt = CASE.build(fsdp)
    take_steps(model, opt, CASE.dtype)
    states = [opt.state[p] for p in model.parameters() if "exp_avg_scale" in opt.state[p]]
    held = [{k: x for k, x in state.items() if k != "step"} for state in states]
    assert all(isinstance(x, DTensor) for state in held for x in state.values())
    whole = [{k: x.full_tensor() for k, x in state.items()} for state in held]
    return full_weights(model), whole, {x.placements for state in held for x in state.values()}


def test_two_ranks_of_fsdp2_end_with_weights_codes_and_scales_of_one_process() -> None:
    """Codes and scales bit for bit: a step computes each row by itself."""
    model, opt = CASE.build()
    take_steps(model, opt, CASE.dtype)
    states = [opt.state[p] for p in model.parameters() if "exp_avg_scale" in opt.state[p]]
    assert len(states) == 3
    for weights, found, placements in run_ranks(2, run_case):
        assert distance(weights, full_weights(model))[0] < CLOSE
        assert placements == {(Shard(0),)}
        for state, expected in zip(found, states, strict=True):
            assert all(torch.equal(x, expected[name]) for name, x in state.items())


def continue_run(rank: int, source: Path | None, which: range, target: Path | None) -> dict[str, torch.Tensor]:
    """Continue a run from one folder to another."""
    model, opt = CASE.build(fsdp if dist.is_initialized() else None)
    run_part(model, opt, CASE.dtype, source, which, target)
    return full_weights(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_changes_its_number_of_ranks_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """2 ranks, then 3, then no process group."""
    run_ranks(2, continue_run, None, range(3), tmp_path / "a")
    run_ranks(3, continue_run, tmp_path / "a", range(3, 6), tmp_path / "b")
    found = continue_run(0, tmp_path / "b", range(6, STEPS), None)
    assert distance(found, CASE.on_one_process())[0] < CLOSE


def columns(rank: int) -> list[torch.Tensor]:
    """Return codes and scales of a matrix that is cut by columns at a multiple of a block."""
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(placed(torch.ones(20, 512), mesh, (Shard(1),)))
    opt = Adam([p], adam_dtype=INT8)
    for step in range(3):
        p.grad = placed(gradient(0, p.shape, step, torch.float32), mesh, (Shard(1),))
        opt.step()
    return [x.full_tensor() for x in (p.detach(), *opt.state[p].values()) if isinstance(x, DTensor)]


def test_columns_that_are_cut_between_blocks_give_the_bits_of_one_process() -> None:
    p = nn.Parameter(torch.ones(20, 512))
    opt = Adam([p], adam_dtype=INT8)
    for step in range(3):
        p.grad = gradient(0, p.shape, step, torch.float32)
        opt.step()
    expected = [p.detach(), *(x for name, x in opt.state[p].items() if name != "step")]
    for found in run_ranks(2, columns):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def refused(rank: int) -> dict[str, str]:
    """Return the messages of tensors with blocks that lie on two ranks, and of others."""
    mesh = init_device_mesh("cpu", (2,))

    def adam(placements: Any, shape: tuple[int, ...], dtype: Any = INT8) -> str:
        p = nn.Parameter(placed(torch.ones(shape), mesh, placements))
        return message(lambda: Adam([{"params": [("layer.weight", p)], "adam_dtype": dtype}]))

    return {
        "columns": adam((Shard(1),), (50, 300)), "vector": adam((Shard(0),), (5000,)),
        "rows": adam((Shard(0),), (51, 300)), "blocks": adam((Shard(1),), (50, 512)),
        "small": adam((Shard(1),), (8, 6)),
        "whole": adam((Replicate(),), (50, 300)), "float32": adam((Shard(1),), (50, 300), torch.float32),
    }  # fmt: skip


def test_blocks_on_two_ranks_are_refused_with_name_reason_and_remedy() -> None:
    found = run_ranks(2, refused)[0]
    for kind in ("columns", "vector"):
        for words in ("'layer.weight'", "scale for each 128", "Shard(0)", "adam_dtype=torch.float32"):
            assert words in found[kind], f"{kind}: {found[kind]}"
    assert {found[kind] for kind in ("rows", "blocks", "small", "whole", "float32")} == {"no error"}
