"""Sharded runs end with the weights of one process: every layout, kind of parameter and rule."""

import pytest
import torch

from tests.sharding.cases import (
    Case,
    Even,
    EveryKind,
    EveryKindSmall,
    FewShapes,
    SquareAndTall,
    TallAndWide,
    distance,
    run_sharded,
)
from tests.sharding.ranks import run_ranks

# Ten steps in double precision differ only by sums in another order. In single precision the same rounding passes
# through ten power steps and as many Newton-Schulz iterations (7e-5 was the most seen).
CLOSE = {torch.float64: 1e-9, torch.float32: 3e-4}
# The high rate of these tests would make gamma 5, and multiply the rounding by 20.
SMALL_GAMMA = (("gamma", 0.25),)


def compare(layout: str, world: int, cases: list[Case]) -> None:
    """Compare all cases on `world` ranks with one process."""
    results = run_ranks(world, run_sharded, layout, cases)
    for result in (results[0], results[-1]):
        for case, weights in zip(cases, result, strict=True):
            far, name = distance(weights, case.on_one_process())
            assert far < CLOSE[case.dtype], f"{case}: {name} differs by {far:.1e}"


@pytest.mark.parametrize(
    ("layout", "world", "model"),
    [
        ("ddp", 2, EveryKindSmall),
        ("fsdp", 1, EveryKind),
        ("fsdp", 2, EveryKind),
        ("fsdp", 4, EveryKind),
        ("fsdp", 8, EveryKindSmall),
        ("hsdp", 4, EveryKind),
        ("tp", 2, Even),
        ("fsdp_tp", 4, Even),
    ],
)
def test_sharded_cosmos_ends_with_the_weights_of_one_process(
    layout: str, world: int, model: type[torch.nn.Module]
) -> None:
    """In double and in single precision."""
    narrow = TallAndWide if layout in ("tp", "fsdp_tp") else FewShapes
    compare(layout, world, [Case(model), Case(narrow, dtype=torch.float32, options=SMALL_GAMMA)])


# Tested on FSDP2 and on FSDP2 x tensor parallelism. Two-sided SOAP runs at owners on both, one-sided on the second.
# Two-sided COSMOS begins with singular vectors on both sides, so the first O'GU is diagonal. The other elements are
# rounding, and only an epsilon above them keeps the quotient from being rounding too.
RULES = [
    Case(TallAndWide, options=(("nesterov", False), ("row_beta2", None))),  # the only case without normalized rows
    Case(TallAndWide, options=(("two_sided", True), ("nesterov", True), ("eps", 1e-3))),
    Case(SquareAndTall, "soap", options=(("frequency", 2),)),
    Case(SquareAndTall, "soap", options=(("two_sided", True),)),
    Case(TallAndWide, "galore", options=(("update_gap", 4),)),
    Case(TallAndWide, "adam-mini", options=(("block_rows", 4),)),
]
# Tested on FSDP2 only.
MORE_RULES = [
    Case(TallAndWide, options=(("side", "smaller"),)),
    Case(TallAndWide, "muon"),
    Case(TallAndWide, "muon", options=(("normalize", True),)),
    Case(TallAndWide, "normuon"),
    Case(TallAndWide, options=(("equal_rows", True),)),
    Case(TallAndWide, "muon", options=(("equal_rows", True),)),
    Case(TallAndWide, "adam"),
    Case(TallAndWide, "adam-mini"),
]


@pytest.mark.parametrize(("layout", "world", "cases"), [("fsdp", 3, [*MORE_RULES, *RULES]), ("fsdp_tp", 4, RULES)])
def test_every_sharded_rule_ends_with_the_weights_of_one_process(layout: str, world: int, cases: list[Case]) -> None:
    """On shards, or on whole matrices at owners if the rule needs them."""
    compare(layout, world, cases)
