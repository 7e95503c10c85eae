"""Journeys of equal parts, which are copied all at once, against those of any parts, which are copied one by one."""

import itertools

import pytest
import torch

from cosmos_optim.sharding import collectives
from cosmos_optim.sharding.mesh import Cut, Team
from cosmos_optim.sharding.owner_exchange import Exchange, shard_map


def cut(size: int, *over: int) -> Cut:
    """A whole dimension over these mesh dimensions."""
    return Cut(size, over, 0, size)


@pytest.mark.parametrize(
    ("mesh", "cuts", "step"),
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
def test_equal_parts_at_once(
    monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, ...], cuts: tuple[Cut, Cut], step: int | None, count: int
) -> None:
    at = tuple(itertools.product(*map(range, mesh)))
    sent: list[torch.Tensor] = []
    arriving = torch.randn(2 * count * cuts[0].size * cuts[1].size)

    def exchange(x: torch.Tensor, send: list[int], receive: list[int], group: object) -> torch.Tensor:
        sent.append(x)
        return arriving[: sum(receive)]

    monkeypatch.setattr(collectives, "exchange", exchange)
    for me in range(len(at)):
        team = Team(None, at, me)  # type: ignore[arg-type]
        tiles = shard_map(cuts, mesh, team)
        quick, plain = Exchange(team, count, [tiles, tiles]), Exchange(team, count, [tiles, tiles])
        assert [grid.step for grid in quick.grids] == ([] if step is None else [step, step])
        plain.grids = []
        stacks = [torch.randn(count, *tiles.shapes[me]) for _ in range(2)]
        wholes = quick.to_owners(stacks)
        for a, b in zip(wholes, plain.to_owners(stacks), strict=True):
            assert torch.equal(a, b) and a.shape == (quick.counts[me], *tiles.whole)
        for a, b in zip(quick.to_shards(wholes), plain.to_shards(wholes), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(sent[-1], sent[-2])
