"""Sharded moments of 8 bits: blocks lie within ranks and rounding counts elements of the whole, so bits are equal."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cosmos_optim import Adam
from cosmos_optim.linalg.int8_adam import dequantize_root, dequantize_signed
from tests.sharding.cases import STEPS, Block, Case, distance, fsdp, full, full_weights, gradient, placed, take_steps
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


def sharded_bits(
    rank: int, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> list[torch.Tensor]:  # fmt: skip
    """Return weights, codes and scales of a tensor that is cut, after three steps."""
    mesh = init_device_mesh("cpu", mesh_shape)
    p = nn.Parameter(placed(torch.ones(shape), mesh, placements))
    opt = Adam([p], adam_dtype=INT8)
    for step in range(3):
        p.grad = placed(gradient(0, p.shape, step, torch.float32), mesh, placements)
        opt.step()
    return [x.full_tensor() for x in (p.detach(), *opt.state[p].values()) if isinstance(x, DTensor)]


# Columns that are cut between blocks; experts over ranks, and each of them by rows, evenly or not.
CUTS = [
    ((20, 512), (2,), (Shard(1),)),
    ((2, 16, 160), (2, 2), (Shard(0), Shard(1))),
    ((2, 15, 200), (2, 2), (Shard(0), Shard(1))),
    ((1, 16, 384), (2,), (Shard(1),)),
    ((2, 3, 8, 128), (2,), (Shard(0),)),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CUTS)
def test_a_rank_with_neighbouring_rows_has_the_bits_of_one_process(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    p = nn.Parameter(torch.ones(shape))
    opt = Adam([p], adam_dtype=INT8)
    for step in range(3):
        p.grad = gradient(0, p.shape, step, torch.float32)
        opt.step()
    expected = [p.detach(), *(x for name, x in opt.state[p].items() if name != "step")]
    for found in run_ranks(math.prod(mesh_shape), sharded_bits, shape, mesh_shape, placements):
        assert len(found) == 5
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


# -- checkpoints in 8 bits that the shards cannot hold ----------------------------------------------------------------

LONG = 5000  # two ranks cut a vector of this length inside a block
# The same float32 arithmetic on parts of other lengths: vector instructions may round the end of a tensor differently.
CLOSE_FLOAT32 = 1e-6


def vectors(mesh: Any = None) -> dict[str, nn.Parameter]:
    """Return a matrix that ranks cut between rows, and a vector that they cut inside a block."""
    whole = {"table": torch.ones(40, 130), "norm": torch.ones(LONG)}
    return {name: nn.Parameter(x if mesh is None else placed(x, mesh, (Shard(0),))) for name, x in whole.items()}


def step_vectors(parameters: dict[str, nn.Parameter], opt: Adam, which: range) -> None:
    """Take steps with the same gradients on one process and on several."""
    for step in which:
        for i, p in enumerate(parameters.values()):
            whole = gradient(i, p.shape, step, torch.float32)
            p.grad = placed(whole, p.device_mesh, (Shard(0),)) if isinstance(p, DTensor) else whole
        opt.step()


def saved_in_8_bits() -> dict[str, Any]:
    """Return the checkpoint of three steps on one process, with both parameters in one group."""
    parameters = vectors()
    opt = Adam(list(parameters.items()), adam_dtype=INT8)
    step_vectors(parameters, opt, range(3))
    return copy.deepcopy(opt.state_dict())


def apart(parameters: dict[str, nn.Parameter], norm: Any, **others: Any) -> list[dict[str, Any]]:
    """Return one group for each parameter, with a dtype for the vector, as an override makes them."""
    table, vector = parameters.items()
    return [{"params": [table], **others}, {"params": [vector], "adam_dtype": norm}]


def load_refused(rank: int, saved: dict[str, Any]) -> tuple[str, bool]:
    """Return the message of a load, and whether groups and state stayed as they were."""
    parameters = vectors(init_device_mesh("cpu", (2,)))
    opt = Adam(list(parameters.items()))
    step_vectors(parameters, opt, range(1))
    before = copy.deepcopy(opt.state_dict())
    text, after = message(lambda: opt.load_state_dict(saved)), opt.state_dict()
    same = before["param_groups"] == after["param_groups"] and all(
        torch.equal(full(x), full(after["state"][i][name])) for i in (0, 1) for name, x in before["state"][i].items()
    )
    return text, same


def test_a_checkpoint_with_blocks_on_two_ranks_is_refused_before_anything_changes() -> None:
    for text, same in run_ranks(2, load_refused, saved_in_8_bits()):
        remedy = "overrides={'norm': {'adam_dtype': torch.float32}}"
        for words in ("parameter 'norm'", "saved with adam_dtype=torch.int8", "scale for each 128", remedy):
            assert words in text, text
        assert same


def load_converted(rank: int, saved: dict[str, Any], one_group: bool) -> dict[str, Any]:
    """Load, step, and return whole weights, whether each parameter has scales, the dtypes and the warnings."""
    parameters = vectors(init_device_mesh("cpu", (2,)))
    float32 = torch.float32
    if one_group:
        opt = Adam(list(parameters.items()), adam_dtype=float32)
    else:
        opt = Adam(apart(parameters, float32, adam_dtype=INT8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.load_state_dict(saved)
    step_vectors(parameters, opt, range(3, 6))
    return {
        "weights": {name: full(p) for name, p in parameters.items()},
        "coded": [name for name, p in parameters.items() if "exp_avg_scale" in opt.state[p]],
        "dtypes": [group["adam_dtype"] for group in opt.param_groups],
        "warnings": [str(w.message) for w in caught],
    }  # fmt: skip


def continued_in_float32(saved: dict[str, Any], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return the weights of one process that continues with the moments of these parameters in float32."""
    parameters = vectors()
    groups = [{"params": [(name, p)], "adam_dtype": torch.float32 if name in names else INT8}
              for name, p in parameters.items()]  # fmt: skip
    opt = Adam(groups)
    for i, (name, p) in enumerate(parameters.items()):
        state = saved["state"][i]
        m, v = dequantize_signed(state["exp_avg"], state["exp_avg_scale"]), state["exp_avg_sq"]
        v = dequantize_root(v, state["exp_avg_sq_scale"])
        wide = {"step": state["step"], "exp_avg": m, "exp_avg_sq": v}
        for key, x in (wide if name in names else state).items():
            opt.state[p][key].copy_(x)
    opt._started = set(parameters.values())
    step_vectors(parameters, opt, range(3, 6))
    return {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize("one_group", [False, True])
def test_saved_codes_become_float32_where_the_group_says_so_and_the_shards_cannot_hold_them(one_group: bool) -> None:
    """A group keeps one dtype: a table beside such a vector becomes float32 too, and one in another group does not."""
    saved = saved_in_8_bits()
    expected = continued_in_float32(saved, ("table", "norm") if one_group else ("norm",))
    for found in run_ranks(2, load_converted, saved, one_group):
        assert distance(found["weights"], expected)[0] < CLOSE_FLOAT32
        assert found["coded"] == ([] if one_group else ["table"])
        assert found["dtypes"] == ([torch.float32] if one_group else [INT8, torch.float32])
        assert any("scheduler" in text for text in found["warnings"]) is not one_group


def load_codes_of_ranks(rank: int) -> list[torch.Tensor]:
    """Load codes that lie on ranks between blocks into a matrix that is cut inside one; return both moments."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.ones(50, 300)
    p, q = (nn.Parameter(placed(whole, mesh, (Shard(dim),))) for dim in (0, 1))
    old, new = Adam([("layer.weight", p)], adam_dtype=INT8), Adam([("layer.weight", q)], adam_dtype=torch.float32)
    p.grad = placed(gradient(0, p.shape, 0, torch.float32), mesh, (Shard(0),))
    old.step()
    new.load_state_dict(old.state_dict())
    state = {name: full(x) for name, x in old.state[p].items()}
    return [
        full(new.state[q]["exp_avg"]) - dequantize_signed(state["exp_avg"], state["exp_avg_scale"]),
        full(new.state[q]["exp_avg_sq"]) - dequantize_root(state["exp_avg_sq"], state["exp_avg_sq_scale"]),
    ]


def test_codes_that_are_sharded_over_rows_become_float32_moments_over_columns() -> None:
    assert all(not difference.any() for difference in run_ranks(2, load_codes_of_ranks)[0])
