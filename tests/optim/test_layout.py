"""How a parameter is cut into matrices: the examples at the top of `engine/layout.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cosmos_optim import Cosmos
from cosmos_optim.engine.layout import Layout
from cosmos_optim.rules import RULES
from tests.optim.helpers import matrix


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


@pytest.mark.parametrize("shape", [(3, 6, 8), (18, 8)])
def test_state_number_i_belongs_to_block_i(shape: tuple[int, ...]) -> None:
    """Block i has a gradient in one direction only, which its first basis must find."""
    p = nn.Parameter(torch.zeros(shape))
    opt = Cosmos([{"params": [p], **({} if len(shape) == 3 else {"split_sizes": 6})}], rank=1)
    directions = torch.linalg.qr(torch.randn(8, 3))[0].mT
    p.grad = torch.einsum("bm,bn->bmn", torch.ones(3, 6), directions).reshape(shape)
    opt.step()
    overlaps = torch.einsum("bn,bn->b", opt.state[p]["U"][..., 0], directions)
    torch.testing.assert_close(overlaps.abs(), torch.ones(3))


@pytest.mark.parametrize("settings", [{}, {"layout": "in_out", "split_side": "input"}])
def test_experts_below_each_other_in_one_matrix_train_as_their_own_layers(settings: dict[str, Any]) -> None:
    """As docs/routing.md says for DBRX: three experts of width 5, stored (out, in) or (in, out)."""
    turned = bool(settings)
    whole, gradient = matrix((15, 8)), torch.randn(15, 8)
    apart = [nn.Parameter((x.mT if turned else x).clone()) for x in whole.detach().split(5)]
    whole.grad = gradient
    for p, g in zip(apart, gradient.split(5), strict=True):
        p.grad = (g.mT if turned else g).clone()
    Cosmos([{"params": [whole], "split_sizes": 5, **settings}], rank=2).step()
    Cosmos(apart, rank=2).step()
    assert torch.equal(whole, torch.cat([p.mT if turned else p for p in apart]))


@pytest.mark.parametrize("sizes", [np.int64(4), [np.int64(4), np.int32(4)], (4, np.int64(4))])
def test_split_sizes_may_be_integers_of_numpy(sizes: Any) -> None:
    p = matrix((8, 6))
    opt = Cosmos([{"params": [p], "split_sizes": sizes}], rank=2)
    assert opt.state[p]["U"].shape == (2, 6, 2)


@pytest.mark.parametrize("sizes", [True, [True] * 8, [4.0, 4.0], np.float64(4), "44"])
def test_split_sizes_that_are_not_integers_are_refused(sizes: Any) -> None:
    with pytest.raises(ValueError, match="split_sizes=.* is not valid: give the size of each block"):
        Cosmos([{"params": [matrix((8, 6))], "split_sizes": sizes}], rank=2)
