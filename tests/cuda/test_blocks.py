"""Blocks of rows or columns reach the kernels as views with strides, without a copy."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos, Muon, NorMuon
from cosmos_optim.cuda.chunk import thin_state
from cosmos_optim.cuda.kernels.gather import can_gather
from cosmos_optim.cuda.pointer_list import same_layout
from cosmos_optim.engine.batching import batches
from tests.cuda.kernel_run import give_gradients, matrices, run_by_kernels
from tests.cuda.step_problems import INTERPRETED, relative
from tests.cuda.test_chunk import TWO_STEPS, TWO_STEPS_OF_MUON

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")

CPU = torch.device("cpu")
SHAPE = (40, 42)  # blocks of 21 columns begin at no multiple of 16 bytes
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (Cosmos, {"rank": 6, "gamma": 0.25}), (Muon, {}), (NorMuon, {}),
]  # fmt: skip
BLOCKS = [{"split_sizes": 20}, {"split_sizes": 21, "split_side": "input"},
          {"split_sizes": 20, "split_side": "input", "layout": "in_out"}]  # fmt: skip


@pytest.mark.parametrize("settings", BLOCKS)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_step_of_blocks_by_kernels_equals_one_by_plain_torch(
    kind: Any, options: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch gives blocks the weights of separate parameters (tests/optim/test_split_columns.py)."""
    moved = []
    for by_kernels in (False, True):
        (p,) = matrices(CPU, SHAPE)
        opt = kind([{"params": [p], "rule": kind.rule, **options, **settings}], lr=1e-2, weight_decay=0.1)
        give_gradients([p], 0)
        opt.step()  # by plain torch in both: the same first basis
        before = p.detach().clone()
        give_gradients([p], 1)
        if by_kernels:
            run_by_kernels(monkeypatch)
        opt.step()
        moved.append((p.detach() - before)[None])
    expected, found = moved
    assert not torch.equal(found, expected)  # kernels did run
    assert relative(found, expected) < (TWO_STEPS if kind is Cosmos else TWO_STEPS_OF_MUON)


@pytest.mark.parametrize("settings", BLOCKS)
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_kernels_can_read_blocks_where_they_are(
    kind: Any, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """What `supported` asks of memory: one pair of strides, one of them 1, and contiguous thin factors."""
    params = matrices(CPU, SHAPE)
    opt = kind([{"params": params, **settings}], **options)
    give_gradients(params, 0)
    (batch,) = batches(opt._collect(), set(), [])
    assert len(batch.matrices) == 2
    assert all(same_layout(x) for x in (batch.params, batch.grads, batch.state()["M"]))
    assert all(can_gather(tensors) for tensors in thin_state(batch).values())
    for views, whole in ((batch.params, params[0]), (batch.grads, params[0].grad)):
        assert whole is not None
        assert all(x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for x in views)
