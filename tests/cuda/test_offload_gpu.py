"""State in host memory on a GPU: the same bits as the resident form, little GPU memory, no waiting, checkpoints."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import SOAP, Adam, Cosmos, Muon, NorMuon
from cosmos_optim.cuda import chunk
from cosmos_optim.cuda.graph import STEPS_BEFORE_RECORDING
from cosmos_optim.cuda.staging import SLOTS
from tests.gpu import never_waiting

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = [(512, 512)] * 7 + [(1024, 512)] * 5 + [(512, 1025)] * 3
# One step takes the first bases, others show that nothing changes; the next is recorded.
RECORDED = STEPS_BEFORE_RECORDING + 2
INT8 = {"momentum_dtype": torch.int8}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slots be used several times in a step, by chunks of two or three matrices."""
    monkeypatch.setattr(chunk, "WORK_BYTES", 24 << 20)


def parameters() -> list[nn.Parameter]:
    """Return matrices of three shapes, an embedding of several pieces, and vectors, equal in every call."""
    generator = torch.Generator(CUDA).manual_seed(3)
    shapes: list[tuple[int, ...]] = [*SHAPES, (20000, 256), (512,), (1024,)]
    return [nn.Parameter(torch.randn(s, generator=generator, device=CUDA).mul_(0.02)) for s in shapes]


def build(kind: type[torch.optim.Optimizer], params: list[nn.Parameter], **options: Any) -> Any:
    """Build an optimizer with AdamW for the embedding and the vectors."""
    groups = [{"params": params[:-3]}, {"params": params[-3:], "rule": "adam"}]
    return kind(groups, lr=0.01, adam_lr=0.02, weight_decay=0.1, **options)


def take_steps(opt: Any, params: list[nn.Parameter], steps: range, bad: int = -1) -> None:
    """Take steps on gradients that depend on the step; that of step `bad` is not finite."""
    for step in steps:
        generator = torch.Generator(CUDA).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, device=CUDA)
        if step == bad:
            params[1].grad[2, 3] = float("nan")
        opt.step()


def equal(one: Any, other: Any) -> bool:
    """Return whether the parameters and states of two optimizers are equal bit for bit."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for a, b in zip(one.param_groups, other.param_groups, strict=True):
        for p, q in zip(a["params"], b["params"], strict=True):
            pairs += [(p, q), *((x, other.state[q][name]) for name, x in one.state[p].items())]
    torch.cuda.synchronize()
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)


@pytest.mark.filterwarnings("ignore:a step was skipped")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("kind", "options"), [
    (Cosmos, INT8), (Cosmos, {}), (Cosmos, {"momentum_dtype": torch.bfloat16}), (Muon, {}), (NorMuon, INT8), (SOAP, {}),
    (Adam, {}),
])  # fmt: skip
def test_offloaded_steps_equal_resident_ones(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], graphs: bool
) -> None:  # fmt: skip
    """Bit for bit over eight steps, of which one is skipped: parameters and all state."""
    made = []
    for offload in (None, "cpu"):
        params = parameters()
        opt = build(kind, params, cuda_graphs=graphs, offload=offload, **options)
        take_steps(opt, params, range(8), bad=5)
        made.append(opt)
    assert equal(*made)
    assert made[0].skipped_steps == made[1].skipped_steps == 1
    assert (made[1].cuda_graph.recording is not None) == (graphs and kind not in (SOAP, Adam))
    assert made[1].state_bytes() == made[0].state_bytes()
    assert made[1].state_bytes("cuda") < 0.05 * made[0].state_bytes("cuda")


def test_large_state_is_in_pinned_memory_and_small_state_on_the_gpu() -> None:
    params = parameters()
    opt = build(Cosmos, params, offload="cpu", **INT8)
    state, embedding, vector = opt.state[params[0]], opt.state[params[-3]], opt.state[params[-1]]
    assert state["M"].is_pinned() and state["U"].is_pinned() and embedding["exp_avg"].is_pinned()
    assert state["step"].is_cuda and state["S"].is_cuda and vector["exp_avg"].is_cuda


@pytest.mark.parametrize("kind", [Cosmos, Muon])
def test_a_step_does_not_wait_for_the_gpu(kind: type[torch.optim.Optimizer]) -> None:
    """Neither without a graph, nor when one is replayed. Recording one may wait."""
    params = parameters()
    opt = build(kind, params, offload="cpu")
    take_steps(opt, params, range(2))
    with never_waiting():
        opt.step()
    take_steps(opt, params, range(3, RECORDED + 2))
    assert opt.cuda_graph.recording is not None
    with never_waiting():
        opt.step()


def test_a_step_keeps_no_more_gpu_memory_than_slots_and_work_buffers() -> None:
    """The graph counts its slots, and they hold a small part of the state."""
    sizes = {}
    for offload in (None, "cpu"):
        params = parameters()
        opt = build(Cosmos, params, offload=offload, **INT8)
        take_steps(opt, params, range(RECORDED + 2))
        gc.collect()
        sizes[offload] = opt.cuda_graph.bytes
        leases = opt.cuda_graph.recording.leases
        slots = {x.slot.memory.data_ptr(): x.slot.memory.numel() for x in leases}
        if offload:
            assert len(slots) == SLOTS["M"] + SLOTS["rest"]
            assert sum(slots.values()) < 0.5 * opt.state_bytes("cpu")
            assert sizes["cpu"] - sum(slots.values()) <= sizes[None] + (4 << 20)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            opt.step()
            assert torch.cuda.max_memory_allocated() - before < 60 << 20  # the pieces of AdamW, and small tensors
        else:
            assert not leases


@pytest.mark.parametrize("first", [None, "cpu"])
def test_a_checkpoint_moves_between_both_forms(first: str | None) -> None:
    """Half of the steps in one form, then a checkpoint, then the other form: equal to the unbroken run."""
    second = "cpu" if first is None else None
    params, unbroken = parameters(), parameters()
    opt, whole = build(Cosmos, params, offload=first, **INT8), build(Cosmos, unbroken, **INT8)
    take_steps(opt, params, range(6))
    saved = pickle.loads(pickle.dumps(opt.state_dict()))
    opt = build(Cosmos, params, offload=second, **INT8)
    opt.load_state_dict(saved)
    assert opt.state[params[0]]["M"].is_cuda == (second is None)
    take_steps(opt, params, range(6, 12))
    take_steps(whole, unbroken, range(12))
    assert equal(opt, whole)


def test_a_copy_of_an_optimizer_has_pinned_state_and_continues_alike() -> None:
    """`copy.deepcopy` copies pinned memory to memory that is not."""
    params = parameters()
    opt = build(Cosmos, params, offload="cpu", **INT8)
    take_steps(opt, params, range(6))
    other = copy.deepcopy(opt)
    copies = [p for group in other.param_groups for p in group["params"]]
    assert other.state[copies[0]]["M"].is_pinned()
    for one, held in ((opt, params), (other, copies)):
        take_steps(one, held, range(6, 12))
    assert equal(opt, other)


def test_state_follows_a_model_to_the_gpu_and_back() -> None:
    """Built on a CPU, moved to the GPU, and to the CPU again."""
    model = nn.Linear(512, 512, bias=False)
    opt = Cosmos([{"params": [model.weight]}], offload="cpu", **INT8)
    for device, pinned in (("cuda", True), ("cpu", False), ("cuda", True)):
        model.to(device)
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
        state = opt.state[model.weight]
        assert (state["M"].is_cpu, state["M"].is_pinned(), state["S"].device.type) == (True, pinned, device)


def test_diagnostics_work_on_offloaded_state() -> None:
    records = []
    for offload in (None, "cpu"):
        params = parameters()
        opt = build(Cosmos, params, offload=offload)
        take_steps(opt, params, range(2))
        with opt.diagnostics() as record:
            opt.step()
        records.append(record)
    assert records[0] == records[1]
