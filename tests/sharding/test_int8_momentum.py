"""A sharded momentum of 8 bits: each rank stores whole rows, so ranks agree with one process as in any other dtype."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cosmos_optim import Cosmos, Muon
from tests.sharding.cases import (
    STEPS,
    Block,
    Case,
    EveryKind,
    distance,
    fsdp,
    full,
    full_weights,
    gradient,
    placed,
    take_steps,
)
from tests.sharding.checkpoints import run_part
from tests.sharding.ranks import run_ranks
from tests.sharding.test_refused_layouts import message

INT8 = torch.int8
# In double precision. Codes and scales are computed row by row, so ranks store the same bits as one process, unless a
# number lies within 1e-9 of half way between two codes.
CLOSE = 1e-9


class Wide(nn.Module):
    """Rows of several blocks, in a number that two ranks cannot share evenly; and a fused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("tall", "qkv")])
        self.long = nn.Linear(300, 9, bias=False)


def case(model: type[nn.Module], name: str = "cosmos") -> Case:
    """Return a case in double precision with momentum in int8."""
    return Case(model, name, options=(("momentum_dtype", INT8),))


CASES = [case(EveryKind), case(Wide), case(Wide, "muon"), case(Wide, "normuon")]


def run_all(rank: int) -> list[dict[str, Any]]:
    """Step every case with FSDP2; return whole weights, and codes, scales and placements of the longest matrix."""
    found = []
    for one in CASES:
        model, opt = one.build(fsdp)
        take_steps(model, opt, one.dtype)
        states = [opt.state[p] for p in model.parameters() if "M_scale" in opt.state[p]]
        held = states[-1]
        assert all(isinstance(x, DTensor) for x in (held["M"], held["M_scale"]))
        found.append({
            "weights": full_weights(model), "codes": held["M"].full_tensor(), "scales": held["M_scale"].full_tensor(),
            "placements": (held["M"].placements, held["M_scale"].placements), "bytes": opt.state_bytes(),
        })  # fmt: skip
    return found


def test_two_ranks_of_fsdp2_end_with_weights_codes_and_scales_of_one_process() -> None:
    """Odd sizes, experts, a convolution and fused weights among them."""
    results = run_ranks(2, run_all)
    for i, one in enumerate(CASES):
        model, opt = one.build()
        take_steps(model, opt, one.dtype)
        held = [opt.state[p] for p in model.parameters() if "M_scale" in opt.state[p]][-1]
        for result in results:
            far, name = distance(result[i]["weights"], full_weights(model))
            assert far < CLOSE, f"{one}: {name} differs by {far:.1e}"
            assert torch.equal(result[i]["codes"], held["M"])
            assert torch.equal(result[i]["scales"], held["M_scale"])
            assert result[i]["placements"] == ((Shard(0),), (Shard(0),))


def continue_run(rank: int, source: Path | None, which: range, target: Path | None) -> dict[str, torch.Tensor]:
    """Continue a run from one folder to another."""
    model, opt = case(Wide).build(fsdp if dist.is_initialized() else None)
    run_part(model, opt, torch.float64, source, which, target)
    return full_weights(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_changes_its_number_of_ranks_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """2 ranks, then 3, then no process group."""
    run_ranks(2, continue_run, None, range(3), tmp_path / "a")
    run_ranks(3, continue_run, tmp_path / "a", range(3, 6), tmp_path / "b")
    found = continue_run(0, tmp_path / "b", range(6, STEPS), None)
    far, name = distance(found, case(Wide).on_one_process())
    assert far < CLOSE, f"{name} differs by {far:.1e}"


def refused(rank: int) -> dict[str, str]:
    """Return the messages of matrices with rows that are cut, as the rule sees them."""
    flat, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))

    def cosmos(mesh: Any, placements: Any, shape: tuple[int, int] = (8, 6), **settings: Any) -> str:
        p = nn.Parameter(placed(torch.ones(shape), mesh, placements))
        group = {"params": [("layer.weight", p)], "momentum_dtype": INT8, **settings}
        return message(lambda: Cosmos([group], gamma=0.25, rank=4))

    return {
        "columns": cosmos(flat, (Shard(1),)),
        "both": cosmos(grid, (Shard(0), Shard(1))),
        "in_out": cosmos(flat, (Shard(0),), layout="in_out"),
        "flipped": cosmos(flat, (Shard(0),), (3, 8)),
        "whole": cosmos(flat, (Replicate(),)),
        "in_out columns": cosmos(flat, (Shard(1),), layout="in_out"),
        "bfloat16": cosmos(flat, (Shard(1),), momentum_dtype=torch.bfloat16),
    }


def test_cut_rows_are_refused_with_name_reason_and_remedy() -> None:
    """A block would lie on two ranks."""
    found = run_ranks(2, refused)[0]
    for kind in ("columns", "both", "in_out", "flipped"):
        for words in ("'layer.weight'", "scale for each block", "Shard(0)", "torch.bfloat16"):
            assert words in found[kind], f"{kind}: {found[kind]}"
    assert {found[kind] for kind in ("whole", "in_out columns", "bfloat16")} == {"no error"}


# -- checkpoints in 8 bits of matrices with rows that are cut here -----------------------------------------------------

# Kinds of matrices: shape, optimizer, settings of the group, and the dimension that ranks cut.
MATRICES: dict[str, tuple[tuple[int, ...], Any, dict[str, Any], int]] = {
    "muon": ((6, 300), Muon, {}, 1), "one block": ((6, 128), Muon, {}, 1),
    "cosmos": ((40, 300), Cosmos, {"rank": 4}, 1),
    "in_out": ((300, 40), Cosmos, {"rank": 4, "layout": "in_out"}, 0), "flipped": ((3, 300), Cosmos, {"rank": 4}, 0),
    "experts": ((3, 6, 300), Muon, {}, 2), "fused": ((12, 300), Muon, {"split_sizes": (6, 6)}, 1),
}  # fmt: skip


def optimizer_of(kind: str, p: torch.Tensor, dtype: Any) -> Any:
    """Return an optimizer of one matrix."""
    _, optimizer, settings, _ = MATRICES[kind]
    gamma = {"gamma": 0.25} if optimizer is Cosmos else {}
    return optimizer([{"params": [("layer.weight", p)], "momentum_dtype": dtype, **gamma, **settings}])


def written_on_one_process(kind: str, dtype: Any) -> dict[str, Any]:
    """Return a checkpoint after two steps."""
    p = nn.Parameter(torch.ones(MATRICES[kind][0]))
    opt = optimizer_of(kind, p, dtype)
    for step in range(2):
        p.grad = gradient(0, p.shape, step, torch.float32)
        opt.step()
    return copy.deepcopy(opt.state_dict())


def load_cut_rows(rank: int, saved: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Load each checkpoint without a dtype and with float32; return the message, and the converted momentum."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for kind, (shape, _, _, dim) in MATRICES.items():
        p, q = (nn.Parameter(placed(torch.ones(shape), mesh, (Shard(dim),))) for _ in range(2))
        refused, opt = optimizer_of(kind, p, None), optimizer_of(kind, q, torch.float32)
        text = message(lambda opt=refused, kind=kind: opt.load_state_dict(saved[kind]))
        opt.load_state_dict(saved[kind])
        M = full(opt.state[q]["M"])
        q.grad = placed(gradient(0, q.shape, 2, torch.float32), mesh, (Shard(dim),))
        opt.step()
        found[kind] = (text, set(refused.state[p]) | set(opt.state[q]), opt.param_groups[0]["momentum_dtype"], M)
    return found


def test_a_saved_momentum_of_8_bits_is_refused_or_becomes_float32_where_rows_are_cut() -> None:
    """It is refused without a dtype of ours. A momentum that was never rounded is within one code of the converted."""
    saved = {kind: written_on_one_process(kind, INT8) for kind in MATRICES}
    for found in run_ranks(2, load_cut_rows, saved):
        for kind, (text, names, dtype, M) in found.items():
            remedy = "overrides={'layer.weight': {'momentum_dtype': torch.float32}}"
            for words in ("parameter 'layer.weight'", "saved with momentum_dtype=torch.int8", remedy):
                assert words in text, f"{kind}: {text}"
            assert "M_scale" not in names
            assert dtype is torch.float32
            exact = written_on_one_process(kind, None)["state"][0]["M"]
            assert (M - exact).abs().max() <= 2 * exact.abs().max() / 127, kind
