"""Kernels compiled before they are launched."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from triton import knobs

from cosmos_optim import Cosmos, CosmosPaper, Muon
from cosmos_optim.cuda import precompile as ahead
from cosmos_optim.cuda import rehearsal
from cosmos_optim.cuda.fused import FusedAlgebra
from cosmos_optim.cuda.kernels.launch import INTERPRET
from cosmos_optim.engine import run as execute
from cosmos_optim.linalg import subspace


class Kernel:
    """Notes how it is asked."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        self.asked.append(warmup)


def test_launches_are_put_off_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second optimizer in another thread launches its kernels as ever; afterwards everybody does."""
    kernel = Kernel()
    monkeypatch.setattr(ahead, "KERNELS", [kernel])

    def launch() -> None:
        kernel.run(1, grid=(1,), warmup=False)

    with pytest.raises(KeyError), ahead._launches_put_off():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
        raise KeyError
    launch()
    assert kernel.asked == [True, False, False]


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks on four cores: one thread each."""
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ahead.threads() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ahead.threads() == 1


def stepped(
    kind: type[torch.optim.Optimizer], params: Sequence[nn.Parameter], steps: int, **kwargs: object
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """A few steps on the same gradients every time; the state of each parameter after them."""
    optimizer = kind([{"params": list(params)}], lr=1e-2, **kwargs)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        optimizer.step()
    return [optimizer.state[p] for p in params]


def matrices(device: torch.device, *shapes: tuple[int, int]) -> list[nn.Parameter]:
    """The same every time."""
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """First bases in one step of as many columns as are kept: the interpreter is slow, and any bases do."""
    monkeypatch.setitem(subspace.START_STEPS, torch.float32, 1)
    monkeypatch.setattr(FusedAlgebra, "oversampling", lambda self, r: 0)


@pytest.mark.skipif(not INTERPRET, reason="TRITON_INTERPRET decides whether kernels run on a CPU")
@pytest.mark.parametrize(("kind", "kwargs", "shapes"), [(Cosmos, {"rank": 4}, 1), (Muon, {}, 2)])
def test_a_rehearsal_touches_nothing(
    kind: type[torch.optim.Optimizer], kwargs: dict[str, object], shapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if its kernels ran: every kind of chunk is rehearsed once, and the step is as without it, bit for bit.

    For COSMOS the first bases and a step, for MUON a step of each of two shapes.
    """
    monkeypatch.setattr(execute, "local_algebra", lambda matrices: FusedAlgebra)
    monkeypatch.setattr(rehearsal.Rehearsal, "_known", set())
    quick(monkeypatch)
    rehearsed: list[int] = []

    def run(device: torch.device, works: Sequence[Callable[[], Any]]) -> None:
        rehearsed.append(len(works))
        for work in works:
            work()

    cpu, sizes = torch.device("cpu"), [(17, 33), (24, 18)][-shapes:]
    plain = matrices(cpu, *sizes)
    state = stepped(kind, plain, 1, **kwargs)
    rehearsal.Rehearsal._known.clear()
    monkeypatch.setattr(rehearsal, "compile_ahead", run)
    with_rehearsal = matrices(cpu, *sizes)
    after = stepped(kind, with_rehearsal, 1, **kwargs)
    assert rehearsed == [2]
    assert all(torch.equal(a, b) for a, b in zip(plain, with_rehearsal, strict=True))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(state, after, strict=True) for key in {*a, *b})


def test_a_rehearsal_keeps_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the first step's gradients is free when the user lets go of them, not when Python collects cycles."""
    monkeypatch.setattr(execute, "local_algebra", lambda matrices: FusedAlgebra)
    monkeypatch.setattr(rehearsal.Rehearsal, "_known", set())
    quick(monkeypatch)
    ran: list[int] = []
    monkeypatch.setattr(rehearsal, "compile_ahead", lambda device, works: ran.append(len(works)))
    params = matrices(torch.device("cpu"), (24, 40))
    opt = Cosmos(params, rank=4)
    for p in params:
        p.grad = torch.randn_like(p)
    gradients = [weakref.ref(p.grad) for p in params]
    gc.collect()
    gc.disable()
    try:
        opt.step()
        opt.zero_grad(set_to_none=True)
        assert ran == [2]
        assert [g() for g in gradients] == [None]
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [(Cosmos, {"rank": 4}), (CosmosPaper, {"rank": 4}), (Muon, {})],
)
def test_no_launch_waits_for_the_compiler(
    kind: type[torch.optim.Optimizer], kwargs: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the first steps nor in the one that is recorded: all is compiled before."""
    late: list[str] = []

    def compiled(*, repr: str, is_manual_warmup: bool, **_: object) -> None:
        if not is_manual_warmup:
            late.append(repr)

    monkeypatch.setattr(rehearsal.Rehearsal, "_known", set())
    device = torch.device("cuda", 0)
    # The check of the kernels compiles some for its own sizes only.
    stepped(kind, matrices(device, (64, 64), (64, 67)), 1, **kwargs)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
    stepped(kind, matrices(device, *[(1072, 1104)] * 3, *[(1101, 2213)] * 2), 6, **kwargs)
    assert late == []
