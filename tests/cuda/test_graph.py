"""Steps recorded as a CUDA graph equal steps without one, bit for bit, even if tensors move or settings change."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import Adam, Cosmos, CosmosPaper, Muon, NorMuon
from cosmos_optim.cuda import graph as graph_module
from cosmos_optim.cuda.graph import MAX_WASTED, STEPS_BEFORE_RECORDING, GraphedStep, graph_key, has_schedule
from cosmos_optim.engine.batching import KERNEL_SETTINGS, Entry
from cosmos_optim.engine.gradients import GradientCheck
from cosmos_optim.hyperparameters import COMMON
from cosmos_optim.rules import RULES
from tests.gpu import never_waiting

CUDA = torch.device("cuda")
SHAPES = [(256, 256)] * 5 + [(512, 256)] * 3 + [(256, 513)] * 2
# Steps without a graph before a recording: one takes the first bases, the others show that nothing changes.
EAGER = STEPS_BEFORE_RECORDING + 1


def twins(device: torch.device = CUDA) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two equal lists of matrices and vectors."""
    torch.manual_seed(3)
    shapes: list[tuple[int, ...]] = [*SHAPES, (256,), (300, 8), (12, 300)]
    values = [torch.randn(s, device=device).mul_(0.02) for s in shapes]
    a, b = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    return a, b


def build(kind: type[torch.optim.Optimizer], params: list[nn.Parameter], **kwargs: object) -> torch.optim.Optimizer:
    """Make groups of matrices and of the rest; the two thin matrices are too small for the kernels."""
    rest = [p for p in params if p.dim() < 2]
    matrices = [p for p in params if p.dim() == 2]
    return kind([{"params": matrices}, {"params": rest, "rule": "adam"}], **kwargs)


def give_gradients(step: int, *lists: list[nn.Parameter]) -> None:
    """Give every list the same gradients, in new memory: some of them move."""
    padding = [torch.empty(1000 * step + 64, device=CUDA)]
    for params in lists:
        generator = torch.Generator(CUDA).manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, device=CUDA)
            padding.append(torch.empty(256, device=CUDA))


def step_both(
    one: torch.optim.Optimizer, two: torch.optim.Optimizer, a: list[nn.Parameter], b: list[nn.Parameter], steps: int,
    before: Callable[[int], None],
) -> None:  # fmt: skip
    """Step both on the same gradients, after `before`; assert that their parameters are equal after each step."""
    for step in range(steps):
        give_gradients(step, a, b)
        before(step)
        one.step()
        two.step()
        assert equal(a, b), step


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    """Return whether parameters are equal bit for bit."""
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
        (NorMuon, {}),
        (Cosmos, {"momentum_dtype": torch.bfloat16}),
        (Cosmos, {"momentum_dtype": torch.int8}),
    ],
)
def test_recorded_steps_equal_steps_without_a_graph(
    kind: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:  # fmt: skip
    """With gradients that move, a rate and a decay that change at every step, and a gradient that is not finite."""
    a, b = twins()
    one, two = (build(kind, x, weight_decay=0.1, cuda_graphs=g, **options) for x, g in ((a, True), (b, False)))

    def change(step: int) -> None:
        if step == EAGER + 3:
            a[0].grad[3, 4] = b[0].grad[3, 4] = float("inf")
        for group in one.param_groups + two.param_groups:
            group["lr"] = 1e-2 / (step + 1)
            group["weight_decay"] = 0.1 * (step + 1)

    step_both(one, two, a, b, EAGER + 8, change)
    assert one.cuda_graph.recording is not None and one.cuda_graph.recording.launches == 8
    assert one.cuda_graph.bytes > 0
    assert two.cuda_graph.recording is None
    for p, q in zip(a, b, strict=True):
        assert all(torch.equal(x, two.state[q][name]) for name, x in one.state[p].items())
    assert one.skipped_steps == two.skipped_steps == 1


def _reload_state(opt: Cosmos) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def _change_epsilon(opt: Cosmos) -> None:
    for group in opt.param_groups:
        group["eps"] = 1e-6


def _watch_a_step(opt: Cosmos) -> None:
    with opt.diagnostics() as found:
        opt.step()
    assert found


@pytest.mark.gpu
@pytest.mark.parametrize("change", [_reload_state, _change_epsilon, _watch_a_step])
def test_steps_after_a_change_equal_steps_without_a_graph(change: Callable[[Cosmos], None]) -> None:
    """Between two steps, state moves, a hyper-parameter changes, or diagnostics are switched on."""
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b, cuda_graphs=False)

    def now(step: int) -> None:
        if step == EAGER + 2:
            change(one)
            change(two)

    step_both(one, two, a, b, 3 * EAGER, now)
    assert one.cuda_graph.recording is not None and one.cuda_graph.recording.launches > 0


@pytest.mark.gpu
def test_a_parameter_without_a_gradient_is_left_out_of_the_step() -> None:
    """A step with fewer gradients is another step; afterwards the usual one is recorded again."""
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b, cuda_graphs=False)

    def drop(step: int) -> None:
        if step == EAGER + 1:
            a[2].grad = b[2].grad = None
        if step == EAGER + 2:
            a[10].grad = b[10].grad = None  # Adam's: the graph of the others stays

    step_both(one, two, a, b, 3 * EAGER, drop)


@pytest.mark.gpu
def test_a_learning_rate_on_the_device_is_read_at_every_step() -> None:
    """The graph reads a copy, which each step writes."""
    a, b = twins()
    rates = [torch.tensor(1e-3, device=CUDA) for _ in range(2)]
    one, two = build(Cosmos, a, lr=rates[0], gamma=0.2), build(Cosmos, b, lr=rates[1], gamma=0.2, cuda_graphs=False)

    def renew(step: int) -> None:
        for rate in rates:
            rate.fill_(1e-3 * (step + 1))

    step_both(one, two, a, b, EAGER + 4, renew)


@pytest.mark.gpu
def test_a_recorded_step_neither_waits_nor_allocates() -> None:
    """The host makes no synchronization, and the work buffers are those that the graph keeps."""
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b)
    for _ in range(EAGER + 2):
        give_gradients(0, a)
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
def test_a_capture_by_the_user_records_the_plain_step() -> None:
    """A graph cannot be launched while another one is captured."""
    a, _ = twins()
    one = build(Cosmos, a)
    for step in range(EAGER + 2):
        give_gradients(step, a)
        one.step()
    graph = torch.cuda.CUDAGraph()
    before = [p.detach().clone() for p in a]
    with torch.cuda.graph(graph):
        one.step()
    assert equal(before, a)
    graph.replay()
    torch.cuda.synchronize()
    assert not any(torch.equal(x, y) for x, y in zip(before, a, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_records_its_own_graph(duplicate: Callable[[Cosmos], Cosmos]) -> None:
    """A graph holds addresses of the original's parameters, so a copy starts without one."""
    a, _ = twins()
    one = build(Cosmos, a)
    for step in range(EAGER + 2):
        give_gradients(step, a)
        one.step()
    assert one.cuda_graph.recording is not None
    other = duplicate(one)
    assert other.cuda_graph.recording is None and other.cuda_graph.enabled


@pytest.mark.gpu
def test_training_continues_after_a_recording_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues without a graph, after one warning."""

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(graph_module, "_capture", broken)
    a, b = twins()
    one, two = build(Cosmos, a), build(Cosmos, b, cuda_graphs=False)
    with pytest.warns(UserWarning, match="without one, more slowly"):
        for step in range(EAGER + 1):
            give_gradients(step, a, b)
            one.step()
            two.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.step()
        two.step()
    assert equal(a, b)
    assert not one.cuda_graph.enabled


# -- without a GPU -----------------------------------------------------------------------------------------------------


def entries(opt: Cosmos) -> list[Entry]:
    """Return what a graph of this optimizer's step would hold, with a gradient for each parameter."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
    return [e for e in opt._collect() if has_schedule(e)]


def check_of(held: Sequence[Entry], skip: Tensor | None) -> GradientCheck:
    """Return the result of checking gradients of ones."""
    count = len(held)
    return GradientCheck(held, torch.ones(count), [True] * count, [False] * count, skip=skip)


def test_the_key_holds_all_that_a_recorded_step_does_not_read_from_the_device() -> None:
    """Learning rate, decay and the sign are read at every step; other settings and addresses are in the graph."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24)) for _ in range(2)], lr=1e-3)
    key = graph_key(entries(opt))
    group = opt.param_groups[0]
    group.update(lr=0.5, weight_decay=0.3, maximize=True)
    assert graph_key(entries(opt)) == key
    for name, value in {"betas": (0.8, 0.9), "gamma": 0.9, "ns_steps": 3, "nesterov": False}.items():
        before, group[name] = group[name], value
        assert graph_key(entries(opt)) != key, name
        group[name] = before
    assert graph_key(entries(opt)) == key
    p = group["params"][0]
    opt.state[p]["M"] = opt.state[p]["M"].clone()
    assert graph_key(entries(opt)) != key


def test_the_key_has_every_setting_but_the_numbers_that_a_recorded_step_reads() -> None:
    read_each_step = {"lr", "weight_decay", "maximize"}
    settings = {"rule", "lr", *COMMON}.union(*(rule.defaults for rule in RULES.values()))
    assert settings - read_each_step == KERNEL_SETTINGS


def test_a_gradient_may_move_as_long_as_its_alignment_stays() -> None:
    """Kernels read its address from a table, but are compiled for its alignment, dtype and strides."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24))], lr=1e-3)
    p = opt.param_groups[0]["params"][0]
    memory = torch.ones(2 * 32 * 24 + 8)
    start = -memory.data_ptr() % 16 // 4

    def key_with_gradient_at(offset: int) -> object:
        p.grad = memory[start + offset :][: 32 * 24].view(32, 24)
        return graph_key(entries(opt))

    key = key_with_gradient_at(0)
    assert key_with_gradient_at(4) == key
    assert key_with_gradient_at(1) != key
    p.grad = torch.ones(24, 32).mT
    assert graph_key(entries(opt)) != key


class FakeRecording:
    """Stands in for a graph that is launched `launches` times."""

    made: list[object] = []

    def __init__(self, key: object, inside: set[Tensor], launches: int) -> None:
        self.key, self.inside, self.launches, self.bytes = key, inside, launches, 0
        self.made.append(key)

    def write_inputs(self, *_: object) -> None:
        pass

    def launch(self) -> None:
        pass


@pytest.mark.parametrize(("launches", "recordings"), [(1, MAX_WASTED), (graph_module.WORTH_IT, MAX_WASTED + 3)])
def test_recording_stops_after_several_graphs_that_served_few_steps(
    launches: int, recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """After `MAX_WASTED` graphs that served few steps; graphs that served many are recorded again and again."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24))], lr=1e-3)
    graphed = GraphedStep()
    monkeypatch.setattr(FakeRecording, "made", [])
    monkeypatch.setattr(
        graph_module, "record", lambda held, inside, key: FakeRecording(key, {e.p for e in inside}, launches)
    )
    monkeypatch.setattr(graph_module, "recordable", list)
    for turn in range(MAX_WASTED + 3):
        opt.param_groups[0]["eps"] = 1e-8 * (turn + 1)
        for _ in range(STEPS_BEFORE_RECORDING + 2):
            graphed.prepare(check_of(entries(opt), torch.tensor(False)))
    assert len(FakeRecording.made) == recordings
    assert graphed.enabled == (launches >= graph_module.WORTH_IT)


def test_a_step_is_recorded_once_its_key_has_stayed_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a flag on the device, and those of a disabled graph, do not count."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24))], lr=1e-3)
    monkeypatch.setattr(FakeRecording, "made", [])
    monkeypatch.setattr(graph_module, "record", lambda held, inside, key: FakeRecording(key, {e.p for e in inside}, 1))
    monkeypatch.setattr(graph_module, "recordable", list)
    graphed, held = GraphedStep(), entries(opt)
    for _ in range(EAGER):
        assert graphed.prepare(check_of(held, None)) == (set(), None)
    for _ in range(STEPS_BEFORE_RECORDING):
        assert graphed.prepare(check_of(held, torch.tensor(False))) == (set(), None)
    inside, launch = graphed.prepare(check_of(held, torch.tensor(False)))
    assert inside == {held[0].p} and launch is not None
    disabled = GraphedStep(enabled=False)
    for _ in range(EAGER + 1):
        assert disabled.prepare(check_of(held, torch.tensor(False))) == (set(), None)
    assert len(FakeRecording.made) == 1


def test_a_recording_that_fails_is_reported_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the error and the argument that avoids it."""
    opt = Cosmos([nn.Parameter(torch.randn(32, 24))], lr=1e-3)

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(graph_module, "record", broken)
    monkeypatch.setattr(graph_module, "recordable", list)
    graphed, held = GraphedStep(), entries(opt)
    with pytest.warns(UserWarning, match="RuntimeError: no. Pass cuda_graphs=False to avoid this attempt") as warned:
        for _ in range(EAGER + 3):
            assert graphed.prepare(check_of(held, torch.tensor(False))) == (set(), None)
    assert len(warned) == 1 and not graphed.enabled


def test_every_optimizer_has_the_argument_cuda_graphs_and_a_copy_keeps_it() -> None:
    """Steps on a CPU never ask for it."""
    p = nn.Parameter(torch.randn(32, 24))
    for kind in (Cosmos, Muon, Adam):
        assert kind([p]).cuda_graph.enabled
        off = kind([p], cuda_graphs=False)
        assert not off.cuda_graph.enabled
        for duplicate in (copy.deepcopy(off), pickle.loads(pickle.dumps(off))):
            assert not duplicate.cuda_graph.enabled
