"""Kernels are compiled in parallel before they are launched."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from triton import knobs

from cosmos_optim import Cosmos, CosmosPaper, Muon, NorMuon
from cosmos_optim.cuda import precompile, self_check
from cosmos_optim.cuda.precompile import Precompiler
from cosmos_optim.rules import RULES
from tests.cuda.kernel_run import give_gradients, matrices, run_by_kernels, stepped
from tests.cuda.step_problems import INTERPRETED, equal

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")
Works = Sequence[Callable[[], Any]]


class Kernel:
    """Notes whether each launch only asks for a compilation."""

    def __init__(self) -> None:
        self.compile_only: list[bool] = []

    def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        self.compile_only.append(warmup)


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which kinds of work this process has compiled."""
    monkeypatch.setattr(Precompiler, "_known", set())


def test_launches_are_disabled_in_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second optimizer in another thread launches its kernels; after an exception every thread does."""
    kernel = Kernel()
    monkeypatch.setattr(precompile, "KERNELS", [kernel])
    asked: list[bool] = []

    def launch() -> None:
        asked.append(precompile.launches_disabled())
        kernel.run(1, grid=(1,), warmup=False)

    with pytest.raises(KeyError), precompile._disable_launches():
        launch()
        other = threading.Thread(target=launch)
        other.start()
        other.join()
        raise KeyError
    launch()
    assert kernel.compile_only == asked == [True, False, False]


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks on four cores use one thread each."""
    monkeypatch.setattr(precompile.os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert precompile.thread_count() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert precompile.thread_count() == 1


def test_nothing_is_compiled_for_a_cpu() -> None:
    """The interpreter would run the work, on uninitialized memory."""
    ran: list[int] = []
    precompile.compile_in_parallel(CPU, [lambda: ran.append(1)])
    assert ran == []


@pytest.mark.usefixtures("nothing_known")
def test_work_of_a_kind_is_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """All new kinds of a device at once; then the work is released, because it holds gradients."""
    compiled: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(precompile, "compile_in_parallel", lambda device, works: compiled.append((device, len(works))))
    first = Precompiler()
    for kind in ("a", "b", "a"):
        first.add(CPU, kind, lambda: None)
    first.run()
    first.run()
    second = Precompiler()
    second.add(CPU, "a", lambda: None)
    second.run()
    second.add(torch.device("meta"), "a", lambda: None)
    second.run()
    assert compiled == [(CPU, 2), (torch.device("meta"), 1)]


@interpreted
@pytest.mark.parametrize(("kind", "options", "shapes"), [
    (Cosmos, {"rank": 4}, [(20, 17)]), (Muon, {}, [(17, 33), (20, 17)]),
])  # fmt: skip
@pytest.mark.usefixtures("nothing_known")
def test_work_for_the_compiler_touches_no_parameter_and_no_state(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], shapes: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Even if its kernels run, the next step equals one without it, bit for bit.

    The work has two parts: for COSMOS the first bases and a step, for Muon a step of each of two shapes.
    """
    run_by_kernels(monkeypatch)
    counts: list[int] = []

    def run(device: torch.device, works: Works) -> None:
        counts.append(len(works))
        for work in works:
            work()

    plain = matrices(CPU, *shapes)
    state = stepped(kind, plain, 1, **options)
    Precompiler._known.clear()
    monkeypatch.setattr(precompile, "compile_in_parallel", run)
    params = matrices(CPU, *shapes)
    after = stepped(kind, params, 1, **options)
    assert counts == [2]
    assert equal(plain, params)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(state, after, strict=True) for key in {*a, *b})


@interpreted
@pytest.mark.usefixtures("nothing_known")
def test_a_second_optimizer_of_the_same_kind_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the same shapes and options, nor for another learning rate; another option is another kind."""
    run_by_kernels(monkeypatch)
    counts: list[int] = []
    monkeypatch.setattr(precompile, "compile_in_parallel", lambda device, works: counts.append(len(works)))
    for options in ({}, {}, {"weight_decay": 0.1}, {"nesterov": False}):
        stepped(Muon, matrices(CPU, (20, 17)), 1, **options)
    assert counts == [1, 1]


@interpreted
@pytest.mark.usefixtures("nothing_known")
def test_gradients_can_be_freed_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are freed when the user releases them, not when Python collects cycles."""
    run_by_kernels(monkeypatch)
    counts: list[int] = []
    monkeypatch.setattr(precompile, "compile_in_parallel", lambda device, works: counts.append(len(works)))
    params = matrices(CPU, (20, 24))
    opt = Cosmos(params, rank=4)
    give_gradients(params, 0)
    gradients = [weakref.ref(p.grad) for p in params]
    gc.collect()
    gc.disable()
    try:
        opt.step()
        opt.zero_grad(set_to_none=True)
        assert counts == [2]
        assert [g() for g in gradients] == [None]
    finally:
        gc.enable()


# -- on a GPU ---------------------------------------------------------------------------------------------------------

KINDS = [(Cosmos, {"rank": 4}), (CosmosPaper, {"rank": 4}), (Muon, {}), (NorMuon, {})]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """List every compilation: the kernel, and whether it was asked for ahead of the launch."""
    seen: list[tuple[str, bool]] = []

    def note(*, repr: str, is_manual_warmup: bool, **_: object) -> None:
        seen.append((repr, is_manual_warmup))

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.usefixtures("nothing_known")
def test_no_launch_waits_for_the_compiler(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], compiled: list[tuple[str, bool]]
) -> None:  # fmt: skip
    """Neither in the first steps nor in the one that is recorded: all is compiled before."""
    params = matrices(CUDA, *[(1072, 1104)] * 3, *[(1101, 2213)] * 2)
    for p in params:  # the self-check compiles kernels for its own sizes
        assert self_check.kernels_work(p, RULES[kind.rule], options.get("rank", 1))
    compiled.clear()
    stepped(kind, params, 6, **options)
    assert [name for name, ahead in compiled if not ahead] == []


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.usefixtures("nothing_known")
def test_a_second_optimizer_of_the_same_kind_compiles_no_kernel(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], compiled: list[tuple[str, bool]]
) -> None:  # fmt: skip
    """The recording of its step compiles none either."""
    shapes = [(320, 272)] * 2
    stepped(kind, matrices(CUDA, *shapes), 6, **options)
    compiled.clear()
    stepped(kind, matrices(CUDA, *shapes), 6, **options)
    assert compiled == []
