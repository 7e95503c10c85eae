"""How a parameter is cut into matrices: the examples at the top of `engine/layout.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cosmos_optim.engine.layout import Layout
from cosmos_optim.rules import RULES


@pytest.mark.parametrize(
    ("stored", "settings", "blocks"),
    [
        ((6, 8), {}, [(6, 8)]),
        ((4, 6, 8), {}, [(6, 8)] * 4),
        ((6, 2, 3, 3), {"layout": "conv"}, [(6, 18)]),
        ((8, 6), {"layout": "in_out"}, [(6, 8)]),
        ((6, 8), {"split_sizes": (3, 2, 1)}, [(3, 8), (2, 8), (1, 8)]),
        ((6, 8), {"split_sizes": 4, "split_side": "input"}, [(6, 4)] * 2),
        ((6, 8), {"side": "smaller"}, [(8, 6)]),
    ],
)
def test_the_examples_of_layout_give_these_blocks(
    stored: tuple[int, ...], settings: dict[str, Any], blocks: list[tuple[int, int]]
) -> None:
    p = torch.zeros(stored)
    layout = Layout("w", p, RULES["cosmos"], {"rank": 2} | settings)
    assert layout.blocks_mn == blocks
    assert [tuple(x.shape) for x in layout.blocks(p)] == blocks


@pytest.mark.parametrize(
    ("stored", "settings", "axes", "shape"),
    [
        ((4, 6, 8), {}, "bnr", (4, 8, 2)),
        ((6, 8), {"split_sizes": 2}, "knr", (3, 8, 2)),
        ((6, 12), {"split_sizes": (5, 4, 3), "split_side": "input"}, "nr", (12, 2)),
    ],
)
def test_the_bases_of_all_blocks_are_stacked_or_concatenated(
    stored: tuple[int, ...], settings: dict[str, Any], axes: str, shape: tuple[int, ...]
) -> None:
    group = dict(RULES["cosmos"].defaults) | {"rank": 2} | settings
    slots = Layout("w", torch.zeros(stored), RULES["cosmos"], group).slots(group)
    assert (slots["U"].axes, slots["U"].shape) == (axes, shape)
    assert (slots["M"].axes, slots["M"].shape) == ("*", stored)
