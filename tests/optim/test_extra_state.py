"""State that wrappers keep beside ours: it survives steps, checkpoints, copies and moves of the model."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_optim import OPTIMIZERS, Adam, Cosmos
from cosmos_optim.cuda.graph import graph_key
from tests.optim.helpers import decoder, gradient, matrix, same, small_rank, train


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested state, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for v in value.values() for x in tensors(v)]
    return [x for v in value for x in tensors(v)] if isinstance(value, (list, tuple)) else []


def keep_extra(opt: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Store what wrappers store: a copy of the weights, counters, nested values, a wider copy."""
    for i, p in enumerate(params):
        opt.state[p] |= {
            "z": p.detach().clone() + i, "k": 3 + i, "seen": torch.tensor(i), "wide": p.detach().double(),
            "nested": {"slow": [p.detach() * 2, "text"], "none": None},
        }  # fmt: skip
    opt.state["global"] = {"calls": 5}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_extra_state_survives_a_checkpoint_and_training_continues_bit_for_bit(name: str) -> None:
    model, other = decoder(), decoder(seed=7)
    opt, again = (OPTIMIZERS[name](m, **small_rank(name)) for m in (model, other))
    keep_extra(opt, model.parameters())
    train(model, opt, range(2))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other.load_state_dict(model.state_dict())
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved)
    assert again.state["global"] == {"calls": 5}
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        a, b = opt.state[p], again.state[q]
        assert set(a) == set(b) and a["k"] == b["k"] and a["nested"]["slow"][1] == b["nested"]["slow"][1] == "text"
        assert same(tensors({k: a[k] for k in sorted(a)}), tensors({k: b[k] for k in sorted(b)}))
        assert b["wide"].dtype is torch.float64
    held = {x.data_ptr() for state in saved["state"].values() for x in tensors(state)}
    assert not held & {x.data_ptr() for state in again.state.values() for x in tensors(state)}
    train(model, opt, range(2, 4))
    train(other, again, range(2, 4))
    assert same(list(model.parameters()), list(other.parameters()))


def test_extra_state_follows_a_model_that_changes_its_dtype() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    keep_extra(opt, model.parameters())
    train(model, opt, range(1))
    model.to(torch.bfloat16)
    train(model, opt, range(1, 3))
    for p in model.parameters():
        mine = opt.state[p]
        assert (mine["z"].dtype, mine["nested"]["slow"][0].dtype) == (torch.bfloat16, torch.bfloat16)
        assert (mine["wide"].dtype, mine["seen"].dtype, mine["k"] >= 3) == (torch.float64, torch.int64, True)
        assert mine["step"].dtype is torch.float32


def test_extra_state_is_copied_counted_and_kept_if_ours_is_allocated_later() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4)
    plain = opt.state_bytes()
    opt.state.clear()
    for p in model.parameters():
        opt.state[p]["z"] = p.detach().clone()
    train(model, opt, range(2))
    assert opt.state_bytes() == plain + sum(p.numel() * 4 for p in model.parameters())
    for p in model.parameters():
        opt.state[p]["view"] = opt.state[p]["z"].flatten()  # shares its memory
    assert opt.state_bytes() == plain + sum(p.numel() * 4 for p in model.parameters())
    _, again = copy.deepcopy((model, opt))
    assert all(set(a) == set(b) and "z" in a for a, b in zip(opt.state.values(), again.state.values(), strict=True))


def test_state_of_another_rule_of_ours_is_not_taken_for_extra_state() -> None:
    p = matrix((8, 6))
    opt = Cosmos([p], rank=2)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["Q"] = torch.zeros(6, 2)
    with pytest.raises(ValueError, match="the checkpoint has state .*'Q'.* this optimizer keeps"):
        opt.load_state_dict(saved)
    del saved["state"][0]["Q"], saved["state"][0]["U"]
    with pytest.raises(ValueError, match="load it into the optimizer class and options that wrote it"):
        opt.load_state_dict(saved)


def test_an_amsgrad_checkpoint_of_torch_keeps_its_extra_tensor() -> None:
    p, q = matrix((8, 6)), matrix((8, 6))
    theirs = torch.optim.AdamW([p], amsgrad=True)
    p.grad = gradient((8, 6), 0)
    theirs.step()
    ours = Adam([q])
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[q]["max_exp_avg_sq"], theirs.state[p]["max_exp_avg_sq"])
    assert ours.param_groups[0]["amsgrad"] is True


class Averaged(torch.optim.Optimizer):
    """A wrapper that shares groups and state with the optimizer inside, as schedule-free wrappers do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                mine = self.state[p]
                if "z" not in mine:
                    mine["z"] = p.detach().clone()
        self.base.step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["z"].lerp_(p, 1 / group["k"])

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)


def test_a_wrapper_that_averages_weights_resumes_bit_for_bit() -> None:
    model, other = decoder(), decoder()
    a, b = Averaged(Cosmos(model, rank=4)), Averaged(Cosmos(other, rank=4))

    def run(net: torch.nn.Module, opt: Averaged, steps: range) -> None:
        for step in steps:
            for i, p in enumerate(net.parameters()):
                p.grad = gradient(tuple(p.shape), 10 * step + i)
            opt.step()

    run(model, a, range(3))
    other.load_state_dict(model.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    run(model, a, range(3, 6))
    run(other, b, range(3, 6))
    assert b.param_groups[0]["k"] == 6
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(a.state[p]["z"], b.state[q]["z"])


def test_a_recorded_step_does_not_depend_on_extra_state() -> None:
    """Otherwise a wrapper's new tensors would have the CUDA graph recorded again, and its numbers have no address."""
    p = matrix((8, 6))
    opt = Cosmos([p], rank=2)
    p.grad = gradient((8, 6), 0)
    key = graph_key(opt._collect())
    opt.state[p] = {"k": 3, "z": p.detach().clone(), **opt.state[p]}
    assert graph_key(opt._collect()) == key
    opt.state[p]["M"] = opt.state[p]["M"].clone()
    assert graph_key(opt._collect()) != key
