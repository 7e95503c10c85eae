"""One chunk of matrices: what a recorded step launches, and whole steps by kernels against plain torch."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos, CosmosPaper, Muon, NorMuon
from cosmos_optim.cuda.chunk import DeviceInputs, run_chunk
from cosmos_optim.cuda.kernels.launch import false_flag
from cosmos_optim.cuda.pointer_list import addresses
from cosmos_optim.engine.batching import batches
from tests.cuda.kernel_run import give_gradients, matrices, run_by_kernels, stepped
from tests.cuda.launches import counted
from tests.cuda.step_problems import INTERPRETED, equal, relative
from tests.cuda.test_step import U_ERROR

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")

CPU = torch.device("cpu")
M, N = 24, 20
RANKED = {"rank": 6, "gamma": 0.25}
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "cosmos": (Cosmos, RANKED),
    "paper": (CosmosPaper, RANKED),
    "nesterov": (CosmosPaper, RANKED | {"nesterov": True}),
    "rows": (CosmosPaper, RANKED | {"row_beta2": 0.95}),
    "muon": (Muon, {}),
    "normalized": (Muon, {"normalize": True}),
    "normuon": (NorMuon, {}),
}
# Outside Newton-Schulz; in plain torch a chunk of COSMOS takes 138. Each is a few microseconds on the critical path.
MOST = {"cosmos": 32, "paper": 29, "nesterov": 31, "rows": 30, "muon": 8, "normalized": 9, "normuon": 11}


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_chunk_launches_few_kernels(case: str) -> None:
    """Launches do not depend on the number of matrices."""
    kind, options = CASES[case]
    params = matrices(CPU, (M, N))
    opt = kind(params, **options)
    give_gradients(params, 0)
    opt.step()  # by plain torch: it takes the first basis
    (chunk,) = batches(opt._collect(), set(), [])
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (0.01, 0.99)]
    inputs = DeviceInputs(addresses(chunk.grads), *numbers)
    grad_max = torch.stack([g.abs().max() for g in chunk.grads])
    false_flag(CPU)  # made once for all steps
    with counted() as seen:
        run_chunk(chunk, grad_max, torch.tensor(False), inputs)
    # Newton-Schulz: five iterations one after the other, or the first three in either of two ways, chosen by a sum and
    # a comparison; the products of the other way end at once.
    products = seen["_symmetric"] + seen["_symmetric_squares"] + seen["bmm"]
    products += seen["sum"] + seen["le"] if "rank" in options else 0
    assert 15 <= products <= (25 if "rank" in options else 18), seen
    assert sum(seen.values()) - products <= MOST[case], seen


@pytest.mark.parametrize("case", ["cosmos", "normuon"])
def test_a_skipped_chunk_writes_nothing(case: str) -> None:
    """W and M keep every bit, and so does the thin state, which `scatter_` writes."""
    kind, options = CASES[case]
    params = matrices(CPU, (M, N), (M, N))
    opt = kind(params, **options)
    give_gradients(params, 0)
    opt.step()
    (chunk,) = batches(opt._collect(), set(), [])
    held = [*chunk.params, *(x for tensors in chunk.state().values() for x in tensors)]
    before = [x.clone() for x in held]
    run_chunk(chunk, torch.ones(2), torch.tensor(True))
    assert equal(held, before)
    run_chunk(chunk, torch.ones(2), torch.tensor(False))
    assert not any(torch.equal(x, y) for x, y in zip(held, before, strict=True))


# Newton-Schulz in float16 against float32; for COSMOS on a wide matrix with few columns, and momentum in bfloat16.
TWO_STEPS = 3e-2  # measured 1.3e-2
TWO_STEPS_OF_MUON = 3e-3  # measured 1.4e-3


@pytest.mark.parametrize(("kind", "options", "bound"), [
    (Cosmos, RANKED | {"momentum_dtype": torch.bfloat16}, TWO_STEPS), (Muon, {}, TWO_STEPS_OF_MUON),
    (NorMuon, {}, TWO_STEPS_OF_MUON),
])  # fmt: skip
def test_two_steps_by_kernels_equal_two_by_plain_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """From the first gradient on, through the engine: first basis, gather, step, scatter, step counts, decay."""
    options = options | {"weight_decay": 0.1}
    shapes = [(M, N), (N, M)]
    expected, start = matrices(CPU, *shapes), matrices(CPU, *shapes)
    states = stepped(kind, expected, 2, **options)
    run_by_kernels(monkeypatch)
    found = matrices(CPU, *shapes)
    new = stepped(kind, found, 2, **options)
    for p, q, old, a, b in zip(found, expected, start, new, states, strict=True):
        assert relative((p - old)[None].detach(), (q - old)[None].detach()) < bound
        assert float(a["step"]) == float(b["step"]) == 2
        assert a.keys() == b.keys()


def test_diagnostics_by_kernels_are_those_of_plain_torch_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition computes the diagnostics; the kernels take the step."""
    records, params = [], []
    for by_kernels, watched in ((False, True), (True, True), (True, False)):
        with monkeypatch.context() as patch:
            mine = matrices(CPU, (M, N))
            opt = Cosmos(mine, **RANKED)
            give_gradients(mine, 0)
            opt.step()  # by plain torch in all three: the same first basis
            give_gradients(mine, 1)
            if by_kernels:
                run_by_kernels(patch)
            if watched:
                with opt.diagnostics() as record:
                    opt.step()
                records.append(record)
            else:
                opt.step()
            params.append(mine[0].detach())
    plain, found = records
    assert plain.keys() == found.keys()
    for name, numbers in plain.items():
        assert found[name] == pytest.approx(numbers, rel=U_ERROR)
    assert torch.equal(params[1], params[2])
    assert not torch.equal(params[0], params[1])  # kernels did run
