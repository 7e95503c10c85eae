"""Blocks of rows or columns of one weight are updated as separate matrices: the same weights, bit for bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Cosmos, Muon
from cosmos_optim.engine.batching import Entry
from cosmos_optim.engine.gradients import block_max
from cosmos_optim.rules import RULES
from tests.optim.helpers import gradient, matrix, small_rank

STEPS = 3
ROWS, COLUMNS = {"split_sizes": 4}, {"split_sizes": 4, "split_side": "input"}
MATRIX_RULES = [name for name in OPTIMIZERS if name != "adam"]


def blocks(x: Tensor, settings: dict[str, Any]) -> list[Tensor]:
    """Return the blocks of a tensor as the rule should see them, each in separate memory."""
    x = x.mT if settings.get("layout") == "in_out" else x
    return [part.clone() for part in x.split(settings["split_sizes"], int("split_side" in settings))]


def options(name: str) -> dict[str, Any]:
    """Return options that make float64 steps exact enough to compare bit for bit."""
    ns = {} if name in ("soap", "galore", "adam-mini") else {"ns_dtype": torch.float64}
    return small_rank(name, 3) | ns | {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize("name", MATRIX_RULES)
@pytest.mark.parametrize("shape", [(12, 8), (8, 20)])
@pytest.mark.parametrize(
    "settings", [ROWS, COLUMNS, ROWS | {"layout": "in_out"}, COLUMNS | {"layout": "in_out"}, COLUMNS | {"rank": 6},
                 ROWS | {"rank": 6}, ROWS | {"side": "smaller"}, COLUMNS | {"side": "smaller"}],
)  # fmt: skip
def test_blocks_end_with_the_weights_of_separate_parameters(
    name: str, shape: tuple[int, int], settings: dict[str, Any]
) -> None:
    """Also if the basis is wider than a head has rows: a block chooses its tracked side as a parameter does."""
    if "rank" in settings and not small_rank(name):
        pytest.skip("this rule has no rank")
    if "side" in settings and not RULES[OPTIMIZERS[name].rule].one_sided:
        pytest.skip("this rule has no side to choose")
    whole = nn.Parameter(gradient(shape, 99, torch.float64))
    parts = [nn.Parameter(part) for part in blocks(whole.detach(), settings)]
    alone = {key: value for key, value in settings.items() if key in ("rank", "side")}
    one = OPTIMIZERS[name]([{"params": [whole], **settings}], **options(name))
    many = OPTIMIZERS[name]([{"params": parts, **alone}], **options(name))
    for step in range(STEPS):
        whole.grad = gradient(shape, step, torch.float64)
        for p, g in zip(parts, blocks(whole.grad, settings), strict=True):
            p.grad = g
        one.step()
        many.step()
    for found, p in zip(blocks(whole.detach(), settings), parts, strict=True):
        assert torch.equal(found, p.detach())
    elements = sum(x.numel() for x in one.state[whole].values()) - 1
    assert elements == sum(x.numel() for p in parts for x in many.state[p].values()) - len(parts)


def test_the_state_of_column_blocks_has_one_slice_for_each_head() -> None:
    """U has the rows of all heads' columns; what belongs to the outputs is kept for each head."""
    p = matrix((12, 8))
    opt = Cosmos([{"params": [p], **COLUMNS}], rank=3)
    shapes = {name: tuple(x.shape) for name, x in opt.state[p].items()}
    assert shapes == {"M": (12, 8), "U": (8, 3), "S": (2, 3, 3), "V": (2, 12, 3), "v": (2, 12, 1), "step": ()}
    assert opt.state_bytes() == 4 * sum(map(math.prod, shapes.values()))


def test_a_size_that_does_not_divide_names_the_parameter_and_its_side() -> None:
    for settings, side in ((ROWS, "12 output rows"), (COLUMNS, "6 input columns")):
        with pytest.raises(ValueError, match=rf"split_sizes=5 does not divide the {side} of parameter 'w' of shape"):
            Cosmos([{"params": [("w", matrix((12, 6)))], **settings, "split_sizes": 5}])
    with pytest.raises(ValueError, match="add up to its 6 input columns"):
        Cosmos([{"params": [("w", matrix((12, 6)))], "split_sizes": [6, 6], "split_side": "input"}])
    for name, wrong in (("split_side", "columns"), ("split_sizes", True), ("split_sizes", 0)):
        with pytest.raises(ValueError, match=name):
            Cosmos([{"params": [matrix((12, 6))], name: wrong}])


@pytest.mark.parametrize("kind", [Cosmos, Muon])
def test_a_checkpoint_with_other_blocks_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    """The state of Muon has the same shape however it is cut, so only the settings can tell."""
    p = matrix((8, 8))
    saved = kind([{"params": [p], **COLUMNS}]).state_dict()
    same = kind([{"params": [p], **COLUMNS}])
    same.load_state_dict(copy.deepcopy(saved))
    with pytest.raises(ValueError, match="was saved with split_side='input', here it has split_side='output'"):
        kind([{"params": [p], **ROWS}]).load_state_dict(saved)
    with pytest.raises(ValueError, match="was saved with split_sizes=4, here it has split_sizes=2"):
        kind([{"params": [p], **COLUMNS, "split_sizes": 2}]).load_state_dict(saved)


@pytest.mark.parametrize("settings", [ROWS, COLUMNS, COLUMNS | {"layout": "in_out"}, {"split_sizes": (3, 5)}])
def test_the_largest_gradient_is_found_for_each_block(settings: dict[str, Any]) -> None:
    """Equal blocks are read as one tensor, without a copy; a block without gradient is only decayed."""
    p = matrix((8, 8))
    opt = Muon([{"params": [p], **settings}], lr=0.1)
    p.grad = gradient((8, 8), 0)
    views = opt._layouts[p].blocks(p.grad)
    views[0].zero_()
    together = opt._layouts[p].stacked_blocks(p.grad)
    if settings["split_sizes"] == 4:
        assert together is not None and together.data_ptr() == p.grad.data_ptr()
        assert all(torch.equal(x, y) for x, y in zip(together, views, strict=True))
    else:
        assert together is None
    found = block_max([Entry(p, p.grad, opt.state[p], opt._layouts[p], opt.param_groups[0], RULES["muon"])])
    assert found.tolist() == [float(x.abs().max()) for x in views]
    before = p.detach().clone()
    opt.step()
    first, second = opt._layouts[p].blocks(p.detach() - before)
    assert not first.any() and second.all()


def test_the_largest_gradients_of_stacks_and_matrices_are_in_the_order_of_their_blocks() -> None:
    """Stacks are read apart from single matrices; an element below zero counts by its size."""
    shapes = [(5, 4), (3, 5, 4), (4,), (2, 4, 5), (8, 8), (5, 4)]
    params = [matrix(shape, i) for i, shape in enumerate(shapes)]
    own = [{}, {}, {"rule": "adam"}, {}, COLUMNS, {}]
    opt = Muon([{"params": [p], **settings} for p, settings in zip(params, own, strict=True)])
    entries, expected = [], []
    for i, (p, group) in enumerate(zip(params, opt.param_groups, strict=True)):
        layout, grad = opt._layouts[p], -gradient(tuple(p.shape), i).abs()
        entries.append(Entry(p, grad, opt.state[p], layout, group, RULES[group["rule"]]))
        expected += [float(x.abs().max()) for x in ([grad] if p.dim() < 2 else layout.blocks(grad))]
    assert block_max(entries).tolist() == expected
