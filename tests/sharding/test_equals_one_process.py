"""Sharded runs give the numbers of one process: every layout, kind of parameter and rule."""

import pytest
import torch

from tests.sharding.cases import Case, Even, Few, Pair, Small, Tall, Zoo, distance, together
from tests.sharding.ranks import run_ranks

# Ten steps in double precision: sums in another order, nothing else. In single precision the same rounding passes
# through ten power steps and as many Newton-Schulz iterations.
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-3}


def compare(layout: str, world: int, cases: list[Case]) -> None:
    """All cases on `world` ranks against one process."""
    results = run_ranks(world, together, layout, cases)
    for result in (results[0], results[-1]):
        for case, weights in zip(cases, result, strict=True):
            far, where = distance(weights, case.alone())
            assert far < CLOSE[case.dtype], f"{case}: {where} differs by {far:.1e}"


@pytest.mark.parametrize(
    ("layout", "world", "model"),
    [
        ("ddp", 2, Small), ("fsdp", 1, Zoo), ("fsdp", 2, Zoo), ("fsdp", 4, Zoo), ("fsdp", 8, Small), ("hsdp", 4, Zoo),
        ("tp", 2, Even), ("fsdp_tp", 4, Even),
    ],
)  # fmt: skip
def test_cosmos(layout: str, world: int, model: type[torch.nn.Module]) -> None:
    """COSMOS in both precisions."""
    narrow = Pair if layout in ("tp", "fsdp_tp") else Few
    compare(layout, world, [Case(model), Case(narrow, dtype=torch.float32)])


PAPER = Case(Pair, options=(("nesterov", False), ("row_beta2", None)))  # rows are left alone in none of the others
# Two-sided COSMOS begins with singular vectors on both sides, so that the first O'GU is diagonal: what stands beside
# the diagonal is rounding, and only an epsilon above it keeps the quotient from being rounding too.
WHOLE = [Case(Pair, options=(("two_sided", True), ("nesterov", True), ("eps", 1e-3))),
         Case(Tall, "soap", options=(("frequency", 2),)),
         Case(Tall, "soap", options=(("two_sided", True),)),
         Case(Pair, "galore", options=(("update_gap", 4),)),
         Case(Pair, "adam-mini", options=(("block_rows", 4),))]  # fmt: skip
PLAIN = [Case(Pair, options=(("side", "smaller"),)), Case(Pair, "muon"), Case(Pair, "normuon"), Case(Pair, "adam"),
         Case(Pair, "muon", options=(("normalize", True),))]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "world", "cases"), [("fsdp", 3, [*PLAIN, PAPER, *WHOLE]), ("fsdp_tp", 4, [PAPER, *WHOLE])]
)
def test_rules(layout: str, world: int, cases: list[Case]) -> None:
    """Every other rule by the same code: on shards, or whole on owners where it wants that."""
    compare(layout, world, cases)
