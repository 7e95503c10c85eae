"""Diagnostics of sharded matrices: every rank reports the numbers of one process."""

import pytest
import torch.distributed as dist

from tests.sharding.cases import LAYOUTS, Case, EveryKindSmall, TallAndWide, take_steps
from tests.sharding.ranks import run_ranks

CLOSE_64 = 1e-9  # sums in another order, over three steps

Numbers = dict[str, dict[str, float]]


def diagnosed(rank: int, layout: str, cases: list[Case]) -> list[Numbers]:
    """Return what is recorded in the third step of each case."""
    found = []
    for case in cases:
        model, opt = case.build(LAYOUTS[layout] if dist.is_initialized() else None)
        take_steps(model, opt, case.dtype, range(2))
        with opt.diagnostics() as record:
            take_steps(model, opt, case.dtype, range(2, 3))
        found.append(record)
    return found


@pytest.mark.parametrize(("layout", "world", "cases"), [
    ("fsdp", 3, [Case(EveryKindSmall), Case(TallAndWide, "muon")]), ("fsdp_tp", 4, [Case(TallAndWide)]),
])  # fmt: skip
def test_every_rank_reports_the_diagnostics_of_one_process(layout: str, world: int, cases: list[Case]) -> None:
    """Energy, drift, ratio and size, also of blocks of a fused weight; the rank that has an expert reports it."""
    expected = diagnosed(0, layout, cases)
    by_rank = run_ranks(world, diagnosed, layout, cases)
    for i, whole in enumerate(expected):
        on_all = {name for name in whole if not name.startswith("experts")}
        assert set().union(*(found[i] for found in by_rank)) == set(whole)
        for found in by_rank:
            assert on_all <= found[i].keys()
            for name, numbers in found[i].items():
                assert numbers == pytest.approx(whole[name], rel=CLOSE_64, abs=CLOSE_64), name
