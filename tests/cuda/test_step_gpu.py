"""Whole optimizers on a GPU: against float64 on the CPU, alone and together, captured, in memory, without waiting."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos, CosmosPaper, Muon, NorMuon, SkippedStepWarning
from cosmos_optim.cuda.chunk import WORK_BYTES, bytes_per_matrix
from tests.cuda.kernel_run import give_gradients, matrices
from tests.cuda.step_problems import equal, relative
from tests.gpu import never_waiting

CUDA = torch.device("cuda")
# A matrix in a stack of four takes the same kernels as alone, on other blocks: rounding of U, and of W in the step.
ALONE = 1e-4
# The sum of four updates. Computed on a CPU with plain torch in float32, Newton-Schulz in float16: 3.3e-3.
UPDATES = 7e-3
# Two ways to store a matrix: Newton-Schulz in float16 adds in another order. Measured: 1.9e-4 with Muon and NorMuon.
STORED = 4e-4


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_matrices_of_a_stack_move_as_they_would_alone(graphs: bool) -> None:
    """The gradients of a stack differ in size by up to 1e7, and one is zero from the second step on."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 1e-7, 1e-3, 1.0], device=CUDA).view(4, 1, 1)
    start = torch.randn(4, 256, 192, device=CUDA)
    stack, alone = start.clone().requires_grad_(), [x.clone().requires_grad_() for x in start]
    one, other = (Cosmos(x, lr=0.01, gamma=0.25, cuda_graphs=graphs) for x in ([stack], alone))
    for step in range(8):
        G = torch.randn_like(start) * sizes
        G[3] *= step == 0
        before = stack.detach().clone()
        stack.grad = G
        for p, g in zip(alone, G, strict=True):
            p.grad = g.clone()
        one.step()
        other.step()
        moved = torch.stack([stack[i].detach() - before[i] for i in range(3)])
        expected = torch.stack([alone[i].detach() - before[i] for i in range(3)])
        assert relative(moved, expected) < ALONE, step
        assert torch.equal(stack[3], before[3]) == (step > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("kind", "options"), [
    (Cosmos, {"gamma": 0.25}), (CosmosPaper, {"gamma": 0.25}), (Muon, {}), (Muon, {"equal_rows": True}),
    (Cosmos, {"gamma": 0.25, "equal_rows": True}), (Muon, {"normalize": True}), (NorMuon, {}),
])  # fmt: skip
def test_an_optimizer_on_a_gpu_follows_the_one_in_float64_on_a_cpu(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], graphs: bool
) -> None:  # fmt: skip
    """Four steps from the first gradient on, with decay, tall, wide and odd.

    The gradients of a matrix share as many leading directions as the basis has columns. Without a gap there, rounding
    would decide which directions the first basis holds.
    """
    shapes = [(320, 192), (192, 320), (257, 261)]
    start = matrices(torch.device("cpu"), *shapes)
    generator = torch.Generator().manual_seed(5)
    r = 64 if kind is CosmosPaper else 32
    leading = [torch.randn(m, r, generator=generator) @ torch.randn(r, n, generator=generator) for m, n in shapes]
    ends = []
    for device, dtype in ((CUDA, torch.float32), (torch.device("cpu"), torch.float64)):
        params = [nn.Parameter(p.detach().to(device, dtype)) for p in start]
        opt = kind(params, lr=0.01, weight_decay=0.1, cuda_graphs=graphs, **options)
        for step in range(4):
            noise = torch.Generator().manual_seed(step)
            for p, shared in zip(params, leading, strict=True):
                p.grad = (shared + torch.randn(p.shape, generator=noise)).to(device, dtype)
            opt.step()
        ends.append([p.detach().cpu().double() for p in params])
    for found, exact, old in zip(*ends, start, strict=True):
        moved, expected = found - old.detach().double(), exact - old.detach().double()
        assert relative(moved[None], expected[None]) < UPDATES


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", [Cosmos, Muon, NorMuon])
def test_a_transposed_convolution_moves_as_the_matrix_that_it_is(
    kind: type[torch.optim.Optimizer], graphs: bool
) -> None:  # fmt: skip
    """`layout="conv_in_out"` gives the rule the transpose of (in, out * kernel); here it is also stored that way."""
    torch.manual_seed(0)
    kernel = torch.randn(192, 48, 3, 3, device=CUDA).mul_(0.02)
    as_kernel = kernel.clone().requires_grad_()
    as_matrix = kernel.flatten(1).t().contiguous().requires_grad_()
    groups = [{"params": [as_kernel], "layout": "conv_in_out"}], [{"params": [as_matrix]}]
    one, other = (kind(group, lr=0.01, weight_decay=0.1, cuda_graphs=graphs) for group in groups)
    for _ in range(4):
        as_kernel.grad = torch.randn_like(kernel)
        as_matrix.grad = as_kernel.grad.flatten(1).t().contiguous()
        one.step()
        other.step()
    moved = as_kernel.detach() - kernel
    expected = as_matrix.detach().t().reshape(kernel.shape) - kernel
    assert relative(moved.flatten(1)[None], expected.flatten(1)[None]) < STORED


def model(device: torch.device) -> list[Tensor]:
    """Return a few matrices of several shapes, with gradients."""
    shapes = [(256, 256)] * 5 + [(512, 256)] * 3 + [(256, 513)] * 2
    params = [torch.randn(s, device=device).mul_(0.02).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Cosmos, Muon, NorMuon])
def test_a_step_does_not_wait_for_the_gpu(kind: type[torch.optim.Optimizer]) -> None:
    """Once every basis exists, the host makes no synchronization."""
    opt = kind(model(CUDA))
    for _ in range(2):
        opt.step()
    with never_waiting():
        opt.step()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_a_skipped_step_is_reported_by_a_later_step_and_the_host_does_not_wait(graphs: bool) -> None:
    torch.manual_seed(1)
    params = model(CUDA)
    opt = Cosmos(params, gamma=0.25, cuda_graphs=graphs)
    for _ in range(6):  # bases, kernels and the graph
        opt.step()
    good = [p.grad.clone() for p in params]
    with never_waiting():
        params[0].grad.fill_(float("nan"))
        opt.step()
        params[0].grad.copy_(good[0])
    torch.cuda.synchronize()
    with never_waiting(), pytest.warns(SkippedStepWarning, match="a step was skipped.*nonfinite='raise'") as seen:
        for _ in range(3):
            opt.step()
    assert sum(w.category is SkippedStepWarning for w in seen) == 1
    assert (opt.skipped_steps, opt.cuda_graph.recording is not None) == (1, graphs)
    params[0].grad.fill_(float("nan"))
    with pytest.warns(SkippedStepWarning, match="20 steps in a row"):
        for _ in range(22):
            opt.step()
            torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_step_captured_by_the_user_equals_the_plain_step() -> None:
    """Replayed with new gradients and a new rate in the same tensors, one of them not finite."""
    torch.manual_seed(1)
    params = model(CUDA)
    twins = [p.detach().clone().requires_grad_() for p in params]
    rate, twin_rate = torch.tensor(1e-3, device=CUDA), torch.tensor(1e-3, device=CUDA)
    opt, twin = Cosmos(params, lr=rate, gamma=0.25), Cosmos(twins, lr=twin_rate, gamma=0.25)
    for _ in range(2):
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.clone()
        opt.step()
        twin.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records, does not run
        opt.step()
    for turn in range(3):
        rate.fill_(1e-3 / (turn + 1))
        twin_rate.fill_(1e-3 / (turn + 1))
        for p, q in zip(params, twins, strict=True):
            p.grad.copy_(torch.randn_like(p).add_(float("nan") if turn == 1 else 0.0))
            q.grad = p.grad.clone()
        graph.replay()
        twin.step()
        torch.cuda.synchronize()
        for p, q in zip(params, twins, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert opt.skipped_steps == twin.skipped_steps == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "rank"), [(Cosmos, 32), (CosmosPaper, 64)])
def test_the_work_buffers_of_a_step_stay_below_the_estimate(kind: type[Cosmos], rank: int) -> None:
    """They are freed after the step."""
    params = [torch.randn(1024, 512, device=CUDA).requires_grad_() for _ in range(24)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = kind(params)
    for _ in range(2):
        opt.step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 24 * bytes_per_matrix(1024, 512, rank)
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.gpu
def test_the_work_buffers_of_many_large_matrices_stay_below_the_bound() -> None:
    """48 matrices of a model with a billion parameters would need several times `WORK_BYTES` at once.

    Beside the chunks in work there is what an optimizer always has: the largest |g|, tables, a few small tensors.
    """
    params = [torch.zeros(2048, 2048, device=CUDA).requires_grad_() for _ in range(48)]
    gradient = torch.randn(2048, 2048, device=CUDA)
    for p in params:
        p.grad = gradient  # read, never written
    opt = Cosmos(params, gamma=0.25, cuda_graphs=False)
    assert 48 * bytes_per_matrix(2048, 2048, 32) > 2 * WORK_BYTES
    for _ in range(2):
        opt.step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Cosmos, Muon, NorMuon])
def test_a_step_is_deterministic(kind: type[torch.optim.Optimizer]) -> None:
    """Bit for bit, with two chunks in work at a time: no sum depends on which comes first."""
    results = []
    for _ in range(2):
        torch.manual_seed(2)
        params = model(CUDA)
        opt = kind(params)
        for _ in range(3):
            opt.step()
        results.append([p.detach().clone() for p in params])
    assert equal(*results)


@pytest.mark.gpu
def test_a_step_on_another_stream_equals_that_on_the_default_stream() -> None:
    """The streams of the chunks wait for the caller's stream, and it waits for them."""
    ends = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        params = matrices(CUDA, *[(512, 256)] * 3, (256, 513))
        opt = Cosmos(params, gamma=0.25, cuda_graphs=False)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for step in range(3):
                give_gradients(params, step)
                opt.step()
            ends.append([p.detach().clone() for p in params])
        torch.cuda.synchronize()
    assert equal(*ends)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Cosmos, NorMuon])
def test_a_recorded_step_with_row_beta2_equals_the_unrecorded_one(kind: type[torch.optim.Optimizer]) -> None:
    """Bit for bit, recorded or not, with the second moment of rows; and the host waits for nothing."""
    ends = []
    for graphs in (False, True, True):
        torch.manual_seed(2)
        params = model(CUDA)
        opt = kind(params, cuda_graphs=graphs)
        for _ in range(5):
            opt.step()
        with never_waiting():
            opt.step()
        assert (opt.cuda_graph.recording is not None) == graphs
        ends.append([p.detach().clone() for p in params] + [opt.state[p]["v"].clone() for p in params])
    assert equal(ends[0], ends[1])
    assert equal(ends[0], ends[2])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")
def test_a_model_on_two_gpus_takes_the_step_of_a_model_on_one() -> None:
    """Each matrix is stepped on its own device, not on the current one."""
    torch.manual_seed(3)
    alone = model(CUDA)
    devices = [torch.device("cuda", i % 2) for i in range(len(alone))]
    apart = [p.detach().to(device, copy=True).requires_grad_() for p, device in zip(alone, devices, strict=True)]
    for p, q in zip(alone, apart, strict=True):
        q.grad = p.grad.to(q.device)
    one, two = Cosmos(alone), Cosmos(apart)
    for _ in range(4):
        one.step()
        two.step()
    for p, q in zip(alone, apart, strict=True):
        torch.testing.assert_close(q.to(p.device), p, rtol=0, atol=1e-6)
