"""State in host memory: the schedule of copies on a CPU, under Triton's interpreter, equals the resident form."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import SOAP, Adam, Cosmos, Muon, NorMuon
from cosmos_optim.cuda import gpu_run, pieces
from cosmos_optim.cuda.chunk import run_chunk
from cosmos_optim.cuda.staging import SLOTS, CopyStreams, Lease, Ring, Staging, packed
from cosmos_optim.engine.batching import batches
from tests.cuda.kernel_run import give_gradients, matrices, run_by_kernels
from tests.cuda.late_copies import stage_late
from tests.cuda.step_problems import INTERPRETED, equal

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")

CPU = torch.device("cpu")
SHAPES = [(24, 20)] * 3 + [(18, 32)]
RANKED = {"rank": 6, "gamma": 0.25}
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "cosmos-int8": (Cosmos, RANKED | {"momentum_dtype": torch.int8}),
    "muon": (Muon, {}),
    "normuon": (NorMuon, {"momentum_dtype": torch.bfloat16}),
    "soap": (SOAP, {}),  # plain torch
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return matrices of two shapes, an embedding and a vector."""
    return [nn.Parameter(p.detach().to(dtype)) for p in matrices(CPU, *SHAPES, (50, 8), (1, 40))]


def build(kind: type[torch.optim.Optimizer], params: list[nn.Parameter], **options: Any) -> Any:
    """Build an optimizer with AdamW for the last two."""
    return kind([{"params": params[:-2]}, {"params": params[-2:], "rule": "adam"}], lr=0.01, adam_lr=0.02, **options)


def take_steps(opt: Any, params: list[nn.Parameter], steps: range) -> None:
    """Take steps; the second has a gradient that is not finite."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if step == 1:
            params[0].grad[0, 0] = float("nan")
        opt.step()


def tensors_of(opt: Any, params: list[nn.Parameter]) -> list[Tensor]:
    """Return all parameters and state."""
    return [*(p.detach() for p in params), *(x for p in params for x in opt.state[p].values())]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slots be used several times: one matrix a chunk, and pieces of a few rows."""
    run_by_kernels(monkeypatch)
    monkeypatch.setattr(gpu_run, "matrices_in_a_chunk", lambda batch: 1)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 9)


@pytest.mark.filterwarnings("ignore:a step was skipped")
@pytest.mark.parametrize("case", [pytest.param("cosmos-int8", marks=pytest.mark.slow), "muon", "normuon", "soap"])
def test_steps_with_state_in_host_memory_equal_resident_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: parameters and state, from the first gradient on, with one step that is skipped."""
    kind, options = CASES[case]
    ends, log = [], []
    for staged in (False, True):
        with monkeypatch.context() as patch:
            if staged:
                log = stage_late(patch)
            params = parameters()
            opt = build(kind, params, weight_decay=0.1, **options)
            take_steps(opt, params, range(3))
            ends.append(tensors_of(opt, params))
    assert equal(*ends)
    assert len(log) > 2 * 3 * len(SHAPES)  # two steps of every chunk and piece


def test_a_slot_is_filled_only_after_its_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads, the end of the computation and downloads of each slot follow each other in this order."""
    log = stage_late(monkeypatch)
    params = parameters()
    take_steps(build(NorMuon, params), params, range(1))
    uploads = [slot for event, slot in log if event == "upload"]
    assert len(uploads) > len(set(uploads)) > 2
    for slot in set(uploads):
        events = [event for event, which in log if which == slot]
        assert events == ["upload", "computed", "downloaded"] * (len(events) // 3)


def test_an_upload_that_does_not_wait_for_its_slot_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late copies of these tests would find such an error."""
    stage_late(monkeypatch)
    params = parameters()
    opt = build(Muon, params)

    def load(self: Lease) -> None:
        self.slot.user = self
        self.copies.upload(self.pairs, None)

    monkeypatch.setattr(Lease, "load", load)
    take_steps(opt, params, range(1))
    assert not all(torch.isfinite(x).all() for p in params for x in opt.state[p].values())


def test_the_momentum_leaves_before_the_chunk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot, the largest, is free during Newton-Schulz."""
    stage_late(monkeypatch)
    seen = []
    store = Lease.store
    monkeypatch.setattr(Lease, "store", lambda self: (seen.append(self.slot.user is self), store(self)))
    params = matrices(CPU, (24, 20))
    opt = Cosmos(params, **RANKED)
    give_gradients(params, 0)
    opt.step()
    # The first basis; then M early, and at the end M again, which does nothing, and the rest.
    assert seen == [True, True, False, True]


def test_a_skipped_chunk_returns_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device's flag says so, kernels write nothing, and the download brings what was there."""
    params = matrices(CPU, (24, 20), (24, 20))
    opt = Cosmos(params, momentum_dtype=torch.int8, **RANKED)
    give_gradients(params, 0)
    opt.step()
    stage_late(monkeypatch)
    (chunk,) = batches(opt._collect(), set(), [])
    held = [*chunk.params, *(x for tensors in chunk.state().values() for x in tensors)]
    for skip in (True, False):
        before, staging = [x.clone() for x in held], Staging(CPU)
        staging.reserve_batch(chunk)
        with staging.forked():
            placed = staging.place(chunk)
            with placed.loaded() as staged:
                run_chunk(staged, torch.ones(2), torch.tensor(skip), M_done=placed.store_M)
        assert equal(held, before) == skip


def test_diagnostics_of_staged_state_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    records = []
    for staged in (False, True):
        with monkeypatch.context() as patch:
            if staged:
                stage_late(patch)
            params = matrices(CPU, (24, 20))
            opt = Cosmos(params, **RANKED)
            for step in range(2):
                give_gradients(params, step)
                with opt.diagnostics() as record:
                    opt.step()
            records.append(record)
    assert records[0] == records[1]


@pytest.mark.parametrize("rounding", [False, True])
def test_adam_in_pieces_rounds_as_on_the_whole(rounding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where stochastic rounding is a hash of the position in the parameter."""
    ends = []
    for staged in (False, True):
        with monkeypatch.context() as patch:
            if staged:
                stage_late(patch)
            params = [nn.Parameter(p.detach().mT.bfloat16() if i else p.detach().bfloat16())
                      for i, p in enumerate(matrices(CPU, (50, 8), (30, 8)))]  # fmt: skip
            opt = Adam(params, lr=0.01, stochastic_rounding=rounding)
            take_steps(opt, params, range(2, 4))
            ends.append(tensors_of(opt, params))
    assert equal(*ends)


@pytest.mark.parametrize("options", [{"adam_dtype": torch.int8}, {"adam_dtype": torch.int8, "weight_correction": True}])
def test_adam_in_pieces_of_codes_rounds_as_on_the_whole(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are rounded by the place of an element: a piece knows its first row. A vector stays whole."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 12)
    ends, cut = [], 0
    for staged in (False, True):
        with monkeypatch.context() as patch:
            if staged:
                stage_late(patch)
            shapes = ((90, 130), (3, 20, 130), (5000,))
            params = [nn.Parameter(torch.arange(math.prod(s)).remainder(7).sub(3).view(s).bfloat16()) for s in shapes]
            opt = Adam(params, lr=0.01, **options)
            take_steps(opt, params, range(2, 5))
            ends.append(tensors_of(opt, params))
            cut = [sum(1 for _ in pieces.pieces(e)) for e in opt._collect()]
    assert equal(*ends)
    assert min(cut[:2]) > 1 and cut[2] == 1


def test_pieces_that_begin_at_odd_addresses_fit_into_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 129 numbers: pieces after the first have another offset in their slot, and need some bytes more.

    Torch's kernel for a CPU rounds the ends of tensors differently, so bits may differ here.
    """
    ends = []
    for staged in (False, True):
        with monkeypatch.context() as patch:
            if staged:
                stage_late(patch)
            params = matrices(CPU, (20, 129))
            opt = Adam(params, lr=0.01)
            take_steps(opt, params, range(2, 4))
            ends.append(tensors_of(opt, params))
    assert all(torch.allclose(x, y, atol=1e-7) for x, y in zip(*ends, strict=True))


def test_pieces_cover_a_parameter_once_and_are_small() -> None:
    params = parameters()
    opt = build(Muon, params)
    give_gradients(params, 0)
    *_, embedding, vector = opt._collect()
    rows = [len(piece.p) for piece in pieces.pieces(embedding)]
    assert rows == [8] * 6 + [2]  # of 8 floats in two moments
    assert [tuple(piece.p.shape) for piece in pieces.pieces(vector)] == [(1, 40)]
    for piece in pieces.pieces(embedding):
        piece.p.add_(1)
    assert torch.equal(embedding.p.detach(), parameters()[-2].detach() + 1)


def test_a_slot_keeps_shapes_strides_and_alignment() -> None:
    """Kernels choose their loads by these, and so their sums: another offset could change bits."""
    memory = torch.arange(1000, dtype=torch.float32)
    on_host = [memory[1:13].view(3, 4), memory[20:32].view(4, 3).mT, memory[40:].to(torch.int8)[3:50]]
    ring = Ring(CopyStreams.of(CPU, "M"), SLOTS["M"], packed(on_host)[1])
    lease = ring.lend(on_host)
    lease.load()
    for x, staged in zip(on_host, lease.tensors, strict=True):
        assert torch.equal(x, staged)
        assert (x.stride(), x.data_ptr() % 16) == (staged.stride(), staged.data_ptr() % 16)


def test_a_slot_cannot_be_lent_twice() -> None:
    """A programming error is found at once, not by wrong numbers."""
    ring = Ring(CopyStreams.of(CPU, "M"), 1, 64)
    ring.lend([torch.zeros(4)]).load()
    with pytest.raises(AssertionError, match="lent again"):
        ring.lend([torch.zeros(4)]).load()
