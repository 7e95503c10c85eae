"""`offload="cpu"` without a GPU: no effect on parameters on a CPU, and which state would be in host memory."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS, Adam, Cosmos
from cosmos_optim.engine import layout
from tests.optim.helpers import decoder, same, small_rank, snapshot, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_has_no_effect_on_parameters_on_a_cpu(name: str) -> None:
    """Results and state are those without it, also of a copy and after loading a checkpoint."""
    ends = []
    for offload in (None, "cpu"):
        model = decoder()
        opt = OPTIMIZERS[name](model, offload=offload, **small_rank(name))
        train(model, opt, range(2))
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        opt = copy.deepcopy(opt)
        ends.append((snapshot(model, opt), opt.state_bytes()))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_state_that_moves_to_a_cpu_leaves_its_pinned_memory() -> None:
    """`Tensor.to` would return a pinned tensor itself. Without a GPU, any new memory shows it."""
    model = nn.Linear(8, 16, bias=False)
    opt = Cosmos([{"params": [model.weight], "rule": "cosmos"}], rank=4, momentum_dtype=torch.int8, offload="cpu")
    before = opt.state[model.weight]["M"].data_ptr()
    model.double()
    model.weight.grad = torch.ones_like(model.weight)
    held = opt.state[model.weight]["M"]  # so that its memory is not used again
    opt.step()
    assert held.data_ptr() == before != opt.state[model.weight]["M"].data_ptr()


def test_state_bytes_can_count_one_device() -> None:
    opt = Cosmos(decoder(), rank=4, offload="cpu")
    assert opt.state_bytes("cpu") == opt.state_bytes(torch.device("cpu")) == opt.state_bytes() > 0
    assert opt.state_bytes("cuda") == 0


def offloaded(monkeypatch: pytest.MonkeyPatch, p: Tensor, rule: type[Any] = Cosmos, **group: Any) -> set[str]:
    """Return the names of the state that would be in host memory if the parameter were on a GPU."""
    monkeypatch.setattr(layout, "OFFLOADED_FROM", ("cpu",))
    monkeypatch.setattr(layout, "OFFLOAD_BYTES", 512)
    opt = rule([{"params": [nn.Parameter(p)], **group}], offload="cpu")
    ((p, mine),) = opt._layouts.items()
    return {name for name, slot in mine.slots(opt.param_groups[0]).items() if mine._is_offloaded(p, slot)}


@pytest.mark.parametrize(
    ("shape", "group", "expected"),
    [
        ((64, 48), {}, {"M", "U", "V"}),
        ((64, 48), {"momentum_dtype": torch.int8}, {"M", "U", "V"}),
        ((64, 48), {"rank": 12}, {"M", "U", "S", "V"}),
        ((8, 8), {}, set()),
        ((3, 64, 48), {}, {"M", "U", "V"}),
        ((64, 48), {"split_sizes": 32}, {"M", "U", "V"}),
        ((64, 48), {"split_sizes": 24, "split_side": "input"}, {"V"}),  # blocks of M have gaps, and U is small
        ((64, 48), {"split_sizes": 32, "split_side": "input", "layout": "in_out"}, {"M", "U", "V"}),
        ((16, 8, 3, 3), {"layout": "conv"}, {"M", "U"}),
    ],
)
def test_large_state_with_blocks_in_one_piece_is_offloaded(
    shape: tuple[int, ...], group: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    group = {"rank": 4, "gamma": 0.25, "row_beta2": None, "side": "input"} | group
    assert offloaded(monkeypatch, torch.ones(shape), **group) == expected


def test_a_transposed_weight_is_offloaded_and_a_vector_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """State has the memory order of the parameter, so a transposed one is also in one piece."""
    group = {"rank": 4, "gamma": 0.25, "row_beta2": None}
    assert offloaded(monkeypatch, torch.ones(48, 64).mT, **group) == {"M", "U", "V"}
    assert offloaded(monkeypatch, torch.ones(100), Adam) == set()
    assert offloaded(monkeypatch, torch.ones(200), Adam) == {"exp_avg", "exp_avg_sq"}
