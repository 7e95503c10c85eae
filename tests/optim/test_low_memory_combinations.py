"""The options that save memory, in all combinations: 8-bit momentum and moments, 24-bit weights, state on the host."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, param_groups, plan
from tests.optim.helpers import gradient, same, small_rank

INT8 = torch.int8
CHOICES: dict[str, tuple[Any, ...]] = {
    "momentum_dtype": (None, INT8),
    "adam_dtype": (None, INT8),
    "weight_correction": (False, True),
}
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
NAMES = [name for name in OPTIMIZERS if name != "cosmos-paper"]  # the rule of cosmos


class Odd(nn.Module):
    """Widths around a block of 128, an embedding of 4,097 elements that is also the head, and the smallest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(241, 17), nn.Linear(17, 241, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(n, 6) for n in (1, 127, 128, 129))
        self.conv, self.experts, self.empty = nn.Conv2d(3, 8, 3), nn.Parameter(torch.empty(2, 6, 10)), nn.Linear(8, 0)
        self.long, self.single, self.scalar = (nn.Parameter(torch.empty(shape)) for shape in ((4097,), (1,), ()))


def made(name: str, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer, equal in every call."""
    model = Odd().to(torch.bfloat16 if options["weight_correction"] else torch.float32)
    for i, p in enumerate(model.parameters()):
        p.data.copy_(0.1 * gradient(tuple(p.shape), i))
    kind = OPTIMIZERS[name]
    groups = param_groups(model, kind.rule, overrides={"experts": kind.rule, "empty.weight": kind.rule})
    return model, kind(groups, weight_decay=0.1, **options)


def take_steps(model: nn.Module, opt: Any, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = scale * gradient(tuple(p.shape), 100 * step + i, p.dtype)
        opt.step()


def bits(model: nn.Module, opt: Any) -> list[Tensor]:
    """Return copies of parameters and state, in one order."""
    held = [opt.state[p][name] for p in model.parameters() for name in sorted(opt.state[p])]
    return [x.detach().clone() for x in (*model.parameters(), *held)]


def combinations(name: str) -> list[dict[str, Any]]:
    """Return all combinations, the last again with `offload`, which changes little on a CPU."""
    keys = [key for key in CHOICES if key in inspect.signature(OPTIMIZERS[name]).parameters]
    found = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(CHOICES[key] for key in keys))]
    return [options | small_rank(name) for options in (*found, found[-1] | {"offload": "cpu"})]


@pytest.mark.filterwarnings("ignore:a step was skipped")
@pytest.mark.parametrize("name", NAMES)
def test_every_combination_trains_skips_saves_and_continues_bit_for_bit(name: str) -> None:
    """The planned bytes are those of the state, and copies of any kind continue alike."""
    for options in combinations(name):
        model, opt = made(name, options)
        rule = OPTIMIZERS[name].rule
        asked = plan(model, name, overrides={"experts": rule, "empty.weight": rule}, **options)
        assert asked.state_bytes == plan(opt).state_bytes == opt.state_bytes(), options
        take_steps(model, opt, range(2))

        before = bits(model, opt)
        model.conv.weight.grad.view(-1)[0] = torch.nan
        opt.step()
        assert same(bits(model, opt), before), options

        file = io.BytesIO()
        torch.save((model.state_dict(), opt.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        loaded = made(name, options)
        loaded[0].load_state_dict(weights)
        loaded[1].load_state_dict(state)
        runs = [(model, opt), loaded, copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
        with opt.diagnostics():
            take_steps(model, opt, range(2, 3))
        take_steps(model, opt, range(3, 4))
        for other in runs[1:]:
            take_steps(*other, range(2, 4))
            assert same(bits(*other), bits(model, opt)), options
        assert all(x.isfinite().all() for x in bits(model, opt)), options


@pytest.mark.parametrize("name", ["cosmos", "muon", "adam"])
def test_all_options_together_stand_gradients_that_are_zero_tiny_or_huge(name: str) -> None:
    """No weight moves by more than a step at the usual size of gradients would, give or take the decay."""
    model, opt = made(name, combinations(name)[-1])
    take_steps(model, opt, range(2))
    take_steps(model, opt, range(20), scale=0.0)
    for scale in (1e-30, 1e-10, 1e10):
        before = [p.detach().clone() for p in model.parameters()]
        take_steps(model, opt, range(2), scale=scale)
        moved = [(p.detach() - q).abs().max() for p, q in zip(model.parameters(), before, strict=True) if p.numel()]
        assert max(moved) < 0.1, scale
    assert all(x.isfinite().all() for x in bits(model, opt))
