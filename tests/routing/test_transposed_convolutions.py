"""Transposed convolutions, stored (in, out / groups, kernel), get the update of the matrix that they apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Cosmos, param_groups, plan
from cosmos_optim.rules import RULES
from tests.optim.helpers import gradient, small_rank

STEPS = 4
MATRIX_RULES = [name for name in OPTIMIZERS if name != "adam"]
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def options(name: str) -> dict[str, Any]:
    ns = {} if name in ("soap", "galore", "adam-mini") else {"ns_dtype": torch.float64}
    return small_rank(name, 3) | ns | {"lr": 0.01, "weight_decay": 0.1}


def trained(name: str, layers: Sequence[nn.Module], stored: Sequence[Sequence[Tensor]], **hyper: Any) -> list[Tensor]:
    """Return the weights of layers after a few steps, given the first weights and the gradients as they are stored."""
    model = nn.ModuleList([nn.Identity(), *layers])
    weights = [layer.get_parameter("weight") for layer in layers]
    with torch.no_grad():
        for w, first in zip(weights, stored[0], strict=True):
            w.copy_(first)
    opt = OPTIMIZERS[name](param_groups(model, OPTIMIZERS[name].rule), **options(name), **hyper)
    for grads in stored[1:]:
        for w, grad in zip(weights, grads, strict=True):
            w.grad = grad.clone()
        opt.step()
    return [w.detach() for w in weights]


def matrices(out: int, inputs: int) -> list[list[Tensor]]:
    """Return the first weights and the gradients of two (out, in) matrices, which a step stacks and so copies.

    Of one matrix, a transposed view would be summed in another order than a contiguous one.
    """
    return [[gradient((out, inputs), 10 * i + step, torch.float64) for i in range(2)] for step in range(STEPS + 1)]


def as_linear(name: str, found: list[list[Tensor]], **hyper: Any) -> list[Tensor]:
    """Return the weights of two linear layers with these first weights and gradients."""
    out, inputs = found[0][0].shape
    layers = [nn.Linear(inputs, out, bias=False, dtype=torch.float64) for _ in range(2)]
    return trained(name, layers, found, **hyper)


@pytest.mark.parametrize("name", MATRIX_RULES)
@pytest.mark.parametrize(("out", "inputs"), [(12, 8), (8, 20), (2, 20)])
@pytest.mark.parametrize("dim", TRANSPOSED)
def test_a_1x1_transposed_convolution_trains_like_the_linear_layer_bit_for_bit(
    name: str, out: int, inputs: int, dim: int
) -> None:
    """Also with fewer rows than the basis has columns, if the rule gets the other side."""
    given = matrices(out, inputs)
    layers = [TRANSPOSED[dim](inputs, out, 1, bias=False, dtype=torch.float64) for _ in range(2)]
    stored = [[x.T.reshape(layers[0].weight.shape) for x in pair] for pair in given]
    for found, expected in zip(trained(name, layers, stored), as_linear(name, given), strict=True):
        assert torch.equal(found.flatten(1).T, expected)


@pytest.mark.parametrize("name", MATRIX_RULES)
def test_a_kernel_is_the_matrix_from_one_place_to_several_bit_for_bit(name: str) -> None:
    given = matrices(5 * 9, 6)
    layers = [nn.ConvTranspose2d(6, 5, 3, bias=False, dtype=torch.float64) for _ in range(2)]
    stored = [[x.T.reshape(6, 5, 3, 3) for x in pair] for pair in given]
    for found, expected in zip(trained(name, layers, stored), as_linear(name, given), strict=True):
        assert torch.equal(found.flatten(1).T, expected)


@pytest.mark.parametrize("name", [name for name in MATRIX_RULES if name != "adam-mini"])
@pytest.mark.parametrize("side", ["auto", "smaller", "input"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_the_groups_of_a_transposed_convolution_are_separate_matrices(name: str, side: str, kernel: int) -> None:
    """Adam-mini has one step for each row, and takes no groups."""
    hyper = {"side": side} if RULES[OPTIMIZERS[name].rule].one_sided else {}
    if side != "auto" and not hyper:
        pytest.skip("this rule has no side to choose")
    given = matrices(2 * kernel, 5)
    layer = nn.ConvTranspose1d(2 * 5, 2 * 2, kernel, groups=2, bias=False, dtype=torch.float64)
    stored = [[torch.cat([x.T for x in pair]).reshape(layer.weight.shape)] for pair in given]
    (whole,) = trained(name, [layer], stored, **hyper)
    for found, expected in zip(whole.chunk(2), as_linear(name, given, **hyper), strict=True):
        assert torch.equal(found.flatten(1).T, expected)


def test_transposed_convolutions_are_routed_as_such() -> None:
    model = nn.ModuleDict({
        "one": nn.ConvTranspose2d(4, 6, 3), "grouped": nn.ConvTranspose1d(4, 6, 3, groups=2),
        "depthwise": nn.ConvTranspose1d(4, 4, 3, groups=4), "to_one": nn.ConvTranspose2d(4, 1, 3),
        "from_one": nn.ConvTranspose2d(1, 4, 3),
    })  # fmt: skip
    why = {row.name.removesuffix(".weight"): (row.rule, row.why) for row in plan(model, lr=1e-3).rows}
    assert why["one"] == why["to_one"] == ("cosmos", "transposed convolution")
    assert why["grouped"] == ("cosmos", "grouped transposed convolution")
    assert why["depthwise"][0] == why["from_one"][0] == "adam"
    opt = Cosmos(model, rank=3)
    assert opt.state[model["one"].weight]["U"].shape == (4, 3)
    assert opt.state[model["grouped"].weight]["U"].shape == (4, 2)  # two bases of two inputs


def test_wrong_blocks_of_a_transposed_convolution_are_named_by_their_side() -> None:
    layer = nn.ConvTranspose2d(4, 6, 3)
    for side, length in (("input", "4 input columns"), ("output", "54 output rows")):
        overrides = {"a.weight": {"split_sizes": 5, "split_side": side}}
        with pytest.raises(ValueError, match=f"split_sizes=5 does not divide the {length}"):
            Cosmos(param_groups(nn.ModuleDict({"a": layer}), overrides=overrides))


def test_a_checkpoint_of_an_older_version_is_refused_until_its_layout_is_given() -> None:
    """It has the basis of the other side."""
    model = nn.ModuleDict({"a": nn.ConvTranspose2d(8, 6, 3)})
    old = param_groups(model, overrides={"a.weight": {"layout": "conv"}})
    saved = Cosmos(old, rank=3).state_dict()
    with pytest.raises(ValueError, match="was saved with layout='conv', here it has layout='conv_in_out'"):
        Cosmos(model, rank=3).load_state_dict(saved)
    Cosmos(old, rank=3).load_state_dict(saved)


def test_adam_mini_cuts_every_transposed_convolution_by_its_outputs() -> None:
    model = nn.ModuleDict({"up": nn.ConvTranspose2d(8, 4, 2), "head": nn.ConvTranspose2d(4, 3, 2)})
    groups = param_groups(model, "adam-mini")
    cut = {name for group in groups if group.get("layout") == "conv_in_out" for name, _ in group["params"]}
    assert cut == {"up.weight", "head.weight"}  # the head, which is not decayed, has its own group
