"""Sharded weights of 24 bits: corrections are sharded like the weights, and ranks agree with one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from cosmos_optim import OPTIMIZERS, param_groups
from tests.sharding.cases import (
    FUSED,
    LAYOUTS,
    STEPS,
    EveryKind,
    SquareAndTall,
    TallAndWide,
    Weights,
    build,
    distance,
    fsdp,
    full,
    take_steps,
)
from tests.sharding.checkpoints import run_part
from tests.sharding.ranks import run_ranks

BF16 = torch.bfloat16
# Of the largest weight, after ten steps at rate 0.01. Rules run in float32, and sums over ranks have another order,
# which then decides between two neighbours of 24 bits, 3e-5 apart. Measured 1.8e-4 (SOAP), 5.4e-5 (COSMOS), 0 (Muon).
CLOSE = 5e-4
# Every bit is that of one process, because nothing is summed over ranks.
EXACT = ("adam", "adam-mini")


def made(kind: type[nn.Module], name: str, shard: Any = None) -> tuple[nn.Module, Any]:
    """Return a model in bfloat16, sharded or not, and its optimizer."""
    model = build(kind, BF16)
    if shard is not None:
        shard(model)
    fused = any(key.endswith("qkv.weight") for key, _ in model.named_parameters())
    groups = param_groups(model, name, overrides=FUSED if fused else None)
    rank = {"rank": 2} if name in ("cosmos", "galore") else {}
    eps = {"eps": 1e-3} if name in ("cosmos", "soap") else {}  # above the rounding of float32
    return model, OPTIMIZERS[name](groups, lr=0.01, weight_decay=0.1, weight_correction=True, **rank, **eps)


def exported(model: nn.Module, opt: Any) -> Weights:
    """Return the whole weights in float32."""
    return {key: full(x).clone() for key, x in opt.float32_weights(model).items()}


def run_all(rank: int, kind: type[nn.Module], layout: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Step every rule; return whole weights, and what its corrections look like."""
    found = []
    for name in names:
        model, opt = made(kind, name, LAYOUTS[layout])
        take_steps(model, opt, BF16)
        pairs = [(p, opt.state[p]["correction"]) for p in model.parameters()]
        alike = all(
            isinstance(c, DTensor) and c.placements == p.placements and c.to_local().shape == p.to_local().shape
            for p, c in pairs
            if isinstance(p, DTensor)
        )
        weights = opt.float32_weights(model)
        placed = all(x.placements == model.get_parameter(k).placements for k, x in weights.items()
                     if isinstance(model.get_parameter(k), DTensor))  # fmt: skip
        found.append({"weights": exported(model, opt), "alike": alike, "placed": placed, "bytes": opt.state_bytes()})
    return found


@pytest.mark.parametrize(("world", "kind", "layout", "names"), [
    (2, EveryKind, "fsdp", ("adam", "adam-mini", "muon", "normuon", "cosmos")),
    (2, SquareAndTall, "fsdp", ("soap", "galore")), (2, TallAndWide, "tp", ("adam", "muon", "cosmos")),
    (4, TallAndWide, "fsdp_tp", ("muon",)),
])  # fmt: skip
def test_ranks_end_with_the_weights_of_one_process(
    world: int, kind: type[nn.Module], layout: str, names: tuple[str, ...]
) -> None:
    """All 24 bits of them: odd sizes, experts, a convolution and fused weights among them."""
    results = run_ranks(world, run_all, kind, layout, names)
    for i, name in enumerate(names):
        model, opt = made(kind, name)
        take_steps(model, opt, BF16)
        expected = exported(model, opt)
        for result in results:
            far, key = distance(result[i]["weights"], expected)
            print(f"{name} {far:.1e}")  # pytest -rP: what to record above
            assert far <= (0 if name in EXACT else CLOSE), f"{name}: {key} differs by {far:.1e}"
            assert result[i]["alike"] and result[i]["placed"], name
        assert any(not torch.equal(x, x.bfloat16().float()) for x in expected.values())


def continue_run(rank: int, source: Path | None, which: range, target: Path | None) -> Weights:
    """Continue a run from one folder to another."""
    model, opt = made(TallAndWide, "adam", fsdp if dist.is_initialized() else None)
    run_part(model, opt, BF16, source, which, target)
    return exported(model, opt)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_changes_its_number_of_ranks_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """2 ranks, then 3, then no process group: bit for bit, because Adam is elementwise."""
    run_ranks(2, continue_run, None, range(3), tmp_path / "a")
    run_ranks(3, continue_run, tmp_path / "a", range(3, 6), tmp_path / "b")
    found = continue_run(0, tmp_path / "b", range(6, STEPS), None)
    model, opt = made(TallAndWide, "adam")
    take_steps(model, opt, BF16)
    assert all(torch.equal(found[key], x) for key, x in exported(model, opt).items())


def refused(rank: int) -> str:
    """Return the message for a sharded model in float32."""
    model = fsdp(build(TallAndWide, torch.float32))
    try:
        OPTIMIZERS["cosmos"](model, weight_correction=True)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_sharded_model_in_float32_is_refused_by_name() -> None:
    for text in run_ranks(2, refused):
        assert "'blocks.0.tall.weight'" in text
        assert "torch.float32" in text


def test_shards_of_two_ranks_have_half_of_the_bytes() -> None:
    """Of a model whose sizes are even."""
    halves = [result[0]["bytes"] for result in run_ranks(2, run_all, TallAndWide, "fsdp", ("adam",))]
    model, opt = made(TallAndWide, "adam")
    steps = 4 * len(list(model.parameters()))  # step counts are on every rank
    assert [2 * (half - steps) for half in halves] == [opt.state_bytes() - steps] * 2
