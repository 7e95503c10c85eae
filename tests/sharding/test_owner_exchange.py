"""The exchange with owners: parts of a regular grid, copied all at once, against any parts, copied one by one."""

import itertools

import pytest
import torch

from cosmos_optim.sharding import collectives
from cosmos_optim.sharding.mesh import Cut, Team
from cosmos_optim.sharding.owner_exchange import Exchange, ShardMap


def cut(size: int, *mesh_dims: int) -> Cut:
    """Return a dimension that is divided over these mesh dimensions."""
    return Cut(size, mesh_dims, 0, size)


@pytest.mark.parametrize(
    ("mesh", "cuts", "rank_step"),
    [
        ((2, 3), (cut(8, 0), cut(6, 1)), 1),
        ((2, 3), (cut(9, 1), cut(6, 0)), 3),
        ((2, 3), (cut(12, 1, 0), cut(5)), 3),  # FSDP2 over tensor parallelism
        ((2, 3), (cut(5), cut(12, 1, 0)), 3),
        ((2, 2, 2), (cut(8, 2, 0), cut(6, 1)), 2),
        ((2, 3), (cut(7, 0), cut(6, 1)), None),  # parts of different sizes
        ((2, 3), (cut(12, 0, 1), cut(5)), None),  # one after the other: copied at once in any case
    ],
)
@pytest.mark.parametrize("count", [13, 3])
def test_parts_copied_as_a_grid_equal_parts_copied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], cuts: tuple[Cut, Cut], rank_step: int | None, count: int
) -> None:
    coordinates = tuple(itertools.product(*map(range, mesh)))
    sent: list[torch.Tensor] = []
    arriving = torch.randn(2 * count * cuts[0].size * cuts[1].size)

    def exchange(x: torch.Tensor, send: list[int], receive: list[int], group: object) -> torch.Tensor:
        sent.append(x)
        return arriving[: sum(receive)]

    monkeypatch.setattr(collectives, "exchange", exchange)
    for rank in range(len(coordinates)):
        team = Team(None, coordinates, rank)  # type: ignore[arg-type]
        shards = ShardMap(cuts, mesh, team)
        by_grid, one_by_one = Exchange(team, count, [shards, shards]), Exchange(team, count, [shards, shards])
        assert [grid.rank_step for grid in by_grid.grids] == ([] if rank_step is None else [rank_step] * 2)
        one_by_one.grids = []
        stacks = [torch.randn(count, *shards.part_shapes[rank]) for _ in range(2)]
        wholes = by_grid.to_owners(stacks)
        for a, b in zip(wholes, one_by_one.to_owners(stacks), strict=True):
            assert torch.equal(a, b) and a.shape == (by_grid.owned_counts[rank], *shards.whole_shape)
        for a, b in zip(by_grid.to_shards(wholes), one_by_one.to_shards(wholes), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(sent[-1], sent[-2])
