"""Whole steps of the fused algebra on a GPU: exactness, waiting, recording, memory."""

import gc

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from tests.cuda.test_fused import BASIS, CONDITION, UPDATE, check, compare, rel

from cosmos_optim import Cosmos, CosmosPaper, Muon
from cosmos_optim.cuda.fused import bytes_per_matrix
from tests.gpu import never_waiting

CUDA = torch.device("cuda")
GPU_SHAPES = [(512, 512), (1376, 512), (512, 1376), (517, 261), (260, 517)]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_experts_of_any_size_move_as_they_would_alone(graphs: bool) -> None:
    """A stack whose gradients differ by 1e-7 in size, and one that has none from the second step on."""
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
        moved = [a.detach() - b for a, b in zip((stack[0], stack[1], stack[2]), before, strict=False)]
        expected = [a.detach() - b for a, b in zip(alone, before, strict=False)][:3]
        assert rel(moved, expected) < BASIS, step
        assert torch.equal(stack[3], before[3]) == (step > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_on_random_gradients(shape: tuple[int, int], nesterov: bool) -> None:
    """Square, tall, wide, and rows of odd length."""
    check(compare(*shape, 64, CUDA, nesterov=nesterov), UPDATE)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_a_step_at_condition_1e6(shape: tuple[int, int]) -> None:
    """Singular values over six decades."""
    check(compare(*shape, 64, CUDA, condition=1e6), CONDITION)


def model(device: torch.device) -> list[Tensor]:
    """A few matrices of several shapes, with gradients."""
    shapes = [(256, 256)] * 5 + [(512, 256)] * 3 + [(256, 513)] * 2
    params = [torch.randn(s, device=device).mul_(0.02).requires_grad_() for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Cosmos, Muon])
def test_a_step_does_not_wait_for_the_gpu(kind: type[torch.optim.Optimizer]) -> None:
    """Once every basis exists nothing is asked back by the host."""
    opt = kind(model(CUDA))
    for _ in range(2):
        opt.step()
    with never_waiting():
        opt.step()


@pytest.mark.gpu
def test_a_captured_step_replays(recwarn: pytest.WarningsRecorder) -> None:
    """A CUDA graph of a step does what the step does, with new gradients and a new rate in the same tensors."""
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
def test_the_transient_is_what_was_promised(kind: type[Cosmos], rank: int) -> None:
    """The work buffers of a step stay below the estimate, and nothing is left behind."""
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
def test_a_step_is_deterministic() -> None:
    """Bit for bit, with two chunks in flight: no sum depends on who comes first."""
    results = []
    for _ in range(2):
        torch.manual_seed(2)
        params = model(CUDA)
        opt = Cosmos(params)
        for _ in range(3):
            opt.step()
        results.append([p.detach().clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here: a model cannot lie on two")
def test_a_model_on_two_gpus() -> None:
    """Each matrix is stepped where it lies, whatever the current device."""
    torch.manual_seed(3)
    alone = model(CUDA)
    places = [torch.device("cuda", i % 2) for i in range(len(alone))]
    apart = [p.detach().to(where, copy=True).requires_grad_() for p, where in zip(alone, places, strict=True)]
    for p, q in zip(alone, apart, strict=True):
        q.grad = p.grad.to(q.device)
    one, two = Cosmos(alone), Cosmos(apart)
    for _ in range(4):
        one.step()
        two.step()
    for p, q in zip(alone, apart, strict=True):
        torch.testing.assert_close(q.to(p.device), p, rtol=0, atol=1e-6)
