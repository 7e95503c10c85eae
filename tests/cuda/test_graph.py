"""Recorded steps: the same numbers as steps without a graph, whatever moves or changes between them."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import Adam, Cosmos, CosmosPaper, Muon
from cosmos_optim.cuda.graph import PATIENCE, SETTLED, Replays, signature
from cosmos_optim.engine.entries import Entry
from tests.gpu import never_waiting

CUDA = torch.device("cuda")
SHAPES = [(256, 256)] * 5 + [(512, 256)] * 3 + [(256, 513)] * 2
# Eager steps before a recording: one takes the first bases, the others show that nothing changes.
EAGER = SETTLED + 1


def twins(device: torch.device = CUDA) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Two equal lists of matrices and vectors."""
    torch.manual_seed(3)
    shapes: list[tuple[int, ...]] = [*SHAPES, (256,), (300, 8), (12, 300)]
    values = [torch.randn(s, device=device).mul_(0.02) for s in shapes]
    a, b = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    return a, b


def build(kind: type[torch.optim.Optimizer], params: list[nn.Parameter], **kwargs: object) -> torch.optim.Optimizer:
    """Matrices and the rest in their groups; the two thin matrices are too small for the kernels."""
    rest = [p for p in params if p.dim() < 2]
    matrices = [p for p in params if p.dim() == 2]
    return kind([{"params": matrices}, {"params": rest, "rule": "adam"}], **kwargs)


def feed(step: int, *lists: list[nn.Parameter]) -> None:
    """The same gradients for every list, each in new memory: some of them at other places than before."""
    padding = [torch.empty(1000 * step + 64, device=CUDA)]
    for params in lists:
        generator = torch.Generator(CUDA).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, device=CUDA)
            padding.append(torch.empty(256, device=CUDA))


def lockstep(
    one: torch.optim.Optimizer, two: torch.optim.Optimizer, a: list[nn.Parameter], b: list[nn.Parameter], steps: int,
    before: Callable[[int], None],
) -> None:  # fmt: skip
    """Steps of both on the same gradients, `before` each whatever a test does; equal after each."""
    for step in range(steps):
        feed(step, a, b)
        before(step)
        one.step()
        two.step()
        assert equal(a, b), step


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Cosmos, {}),
        (Cosmos, {"rank": 12}),
        (Cosmos, {"rank": 100}),
        (CosmosPaper, {}),
        (Muon, {}),
        (Muon, {"normalize": True}),
    ],
)
def test_replays_equal_steps(kind: type[torch.optim.Optimizer], options: dict[str, object]) -> None:
    """With gradients that move, a rate and a decay that change at every step, and a gradient that is not finite."""
    a, b = twins()
    one, two = (build(kind, x, weight_decay=0.1, cuda_graphs=g, **options) for x, g in ((a, True), (b, False)))

    def change(step: int) -> None:
        if step == EAGER + 3:
            a[0].grad[3, 4] = b[0].grad[3, 4] = float("inf")
        for group in one.param_groups + two.param_groups:
            group["lr"] = 1e-2 / (step + 1)
            group["weight_decay"] = 0.1 * (step + 1)

    lockstep(one, two, a, b, EAGER + 8, change)
    assert one.replays.recording is not None and one.replays.recording.replayed == 8
    assert one.replays.bytes > 0
    assert two.replays.recording is None
    assert one.skipped_steps == two.skipped_steps == 1


def _moved(opt: Cosmos) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def _other_epsilon(opt: Cosmos) -> None:
    for group in opt.param_groups:
        group["eps"] = 1e-6


def _watched(opt: Cosmos) -> None:
    with opt.diagnostics() as found:
        opt.step()
    assert found


@pytest.mark.gpu
@pytest.mark.parametrize("change", [_moved, _other_epsilon, _watched])
def test_a_change_between_steps(change: Callable[[Cosmos], None]) -> None:
    """State that moved, a hyper-parameter, a step that is looked into: steps go on as without graphs."""
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b, cuda_graphs=False)

    def now(step: int) -> None:
        if step == EAGER + 2:
            change(one)
            change(two)

    lockstep(one, two, a, b, 3 * EAGER, now)
    assert one.replays.recording is not None and one.replays.recording.replayed > 0


@pytest.mark.gpu
def test_a_parameter_without_gradient() -> None:
    """A step with fewer gradients is another step; afterwards the usual one is recorded again."""
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b, cuda_graphs=False)

    def drop(step: int) -> None:
        if step == EAGER + 1:
            a[2].grad = b[2].grad = None
        if step == EAGER + 2:
            a[10].grad = b[10].grad = None  # Adam's: the others' replay does not care

    lockstep(one, two, a, b, 3 * EAGER, drop)


@pytest.mark.gpu
def test_a_rate_on_the_device() -> None:
    """A tensor as rate is read at every replay."""
    a, b = twins()
    rates = [torch.tensor(1e-3, device=CUDA) for _ in range(2)]
    one, two = build(Cosmos, a, lr=rates[0], gamma=0.2), build(Cosmos, b, lr=rates[1], gamma=0.2, cuda_graphs=False)

    def renew(step: int) -> None:
        for rate in rates:
            rate.fill_(1e-3 * (step + 1))

    lockstep(one, two, a, b, EAGER + 4, renew)


@pytest.mark.gpu
def test_no_waiting_and_no_new_memory() -> None:
    """A replay asks the host for nothing, and what it works in is what it keeps."""
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b)
    for _ in range(EAGER + 2):
        feed(0, a)
        one.step()
    del two, b
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with never_waiting():
        for _ in range(3):
            one.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.gpu
def test_a_graph_around_a_replay_and_copies() -> None:
    """Somebody else's capture takes the plain step; a deep copy records its own."""
    a, _ = twins()
    one = build(Cosmos, a)
    for step in range(EAGER + 2):
        feed(step, a)
        one.step()
    graph = torch.cuda.CUDAGraph()
    before = [p.detach().clone() for p in a]
    with torch.cuda.graph(graph):
        one.step()
    assert all(torch.equal(x, y) for x, y in zip(before, a, strict=True))
    graph.replay()
    torch.cuda.synchronize()
    assert not any(torch.equal(x, y) for x, y in zip(before, a, strict=True))
    other = copy.deepcopy(one)
    assert other.replays.recording is None and other.replays.on


@pytest.mark.gpu
def test_a_capture_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without a graph, and says so once."""
    from cosmos_optim.cuda import graph as replay

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(replay, "_capture", broken)
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b, cuda_graphs=False)
    with pytest.warns(UserWarning, match="without one, slower"):
        for step in range(EAGER + 1):
            feed(step, a, b)
            one.step()
            two.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.step()
        two.step()
    assert equal(a, b)


# -- anywhere ---------------------------------------------------------------------------------------------------------


def entries(opt: Cosmos) -> list[Entry]:
    """What a step would run on."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    return [e for e in opt._collect() if e.rule.lazy]


def test_what_a_recording_depends_on() -> None:
    """Anything that a kernel was told once changes the key; what is written at every step does not."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24)) for _ in range(2)], lr=1e-3)
    key = signature(entries(opt))
    group = opt.param_groups[0]
    group.update(lr=0.5, weight_decay=0.3, maximize=True)
    assert signature(entries(opt)) == key
    for name, value in {"betas": (0.8, 0.9), "gamma": 0.9, "ns_steps": 3, "nesterov": False}.items():
        before, group[name] = group[name], value
        assert signature(entries(opt)) != key
        group[name] = before
    assert signature(entries(opt)) == key
    p = group["params"][0]
    opt.state[p]["M"] = opt.state[p]["M"].clone()
    assert signature(entries(opt)) != key


def test_a_step_that_always_changes_is_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few recordings in vain nothing is recorded any more."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24))], lr=1e-3)
    replays, skip, peaks = Replays(), torch.tensor(False), torch.ones(1)
    made = []

    class Made:
        replayed, inside, replay, bytes = 1, {opt.param_groups[0]["params"][0]}, None, 0

        def __init__(self, key: object) -> None:
            self.key = key
            made.append(key)

        def prepare(self, *_: object) -> None:
            pass

    monkeypatch.setattr("cosmos_optim.cuda.graph.record", lambda entries, inside, key: Made(key))
    monkeypatch.setattr("cosmos_optim.cuda.graph.recordable", lambda entries: list(entries))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for turn in range(PATIENCE + 3):
        opt.param_groups[0]["eps"] = 1e-8 * (turn + 1)
        for _ in range(SETTLED + 2):
            replays.take(entries(opt), skip, peaks)
    assert len(made) == PATIENCE
    assert not replays.on


def test_it_is_an_argument_of_every_optimizer() -> None:
    """And survives a copy; steps on a CPU never ask."""
    p = nn.Parameter(torch.randn(32, 24))
    for kind in (Cosmos, Muon, Adam):
        assert kind([p]).replays.on
        off = kind([p], cuda_graphs=False)
        assert not off.replays.on and not copy.deepcopy(off).replays.on


def test_gradients_are_found_by_their_place() -> None:
    """Signatures tell where a gradient begins only up to alignment: it may move."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24))], lr=1e-3)
    first = entries(opt)
    again: Tensor = first[0].grad.clone()
    p = opt.param_groups[0]["params"][0]
    p.grad = again
    moved = [e for e in opt._collect() if e.rule.lazy]
    assert moved[0].grad.data_ptr() != first[0].grad.data_ptr()
    assert (signature(moved) == signature(first)) == (again.data_ptr() % 16 == first[0].grad.data_ptr() % 16)
