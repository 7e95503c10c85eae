"""Weights of 24 bits in kernels: the same bits as the definition, in a tile, in the update, and in whole steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos, Muon, NorMuon
from cosmos_optim.cuda import self_check
from cosmos_optim.cuda.chunk import run_chunk
from cosmos_optim.cuda.graph import graph_key
from cosmos_optim.cuda.kernels.launch import jit, tl
from cosmos_optim.cuda.kernels.split_precision import split_both
from cosmos_optim.cuda.kernels.update import update_
from cosmos_optim.cuda.kernels.weight24_tiles import join_weight, split_weight
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.engine.batching import batches
from cosmos_optim.linalg import weight24
from cosmos_optim.rules import RULES
from tests.cuda.kernel_run import matrices, run_by_kernels
from tests.cuda.step_problems import INTERPRETED, equal, relative, stored
from tests.cuda.test_chunk import TWO_STEPS, TWO_STEPS_OF_MUON
from tests.cuda.test_self_check import SOUND
from tests.linalg.test_weight24 import all_pairs, numbers

CPU = torch.device("cpu")
BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")
# On a GPU the same source may be contracted to multiply-adds differently for another dtype: a unit of the correction.
ROUNDED_APART = 0.0 if INTERPRETED else 1e-2


@jit
def _split(x, p, correction, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, low = split_weight(tl.load(x + at, mask=at < count, other=0.0))
    tl.store(p + at, high, mask=at < count)
    tl.store(correction + at, low, mask=at < count)


@jit
def _join(x, p, correction, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high, low = tl.load(p + at, mask=at < count, other=0.0), tl.load(correction + at, mask=at < count, other=0)
    tl.store(x + at, join_weight(high, low), mask=at < count)


def test_a_kernel_splits_as_the_definition(device: torch.device) -> None:
    """Also zeros of both signs, inf, every NaN, and numbers that round to inf."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, -1e-45])
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = torch.cat([numbers(5), special, nans]).to(device)
    p, correction = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int8)
    _split[(-(-x.numel() // 1024),)](x, p, correction, x.numel(), BLOCK=1024)
    expected_p, expected_correction = weight24.split_weight(x)
    assert torch.equal(p.view(torch.int16), expected_p.view(torch.int16))
    assert torch.equal(correction, expected_correction)


@pytest.mark.parametrize("first", [-(1 << 15), -(1 << 12), 0, 1 << 14, 7 << 12])
def test_a_kernel_joins_as_the_definition(first: int, device: torch.device) -> None:
    """All corrections of zeros, inf and NaN among them."""
    p, correction = (x.to(device) for x in all_pairs(first))
    x = torch.empty_like(p, dtype=torch.float32)
    _join[(-(-x.numel() // 65536),)](x, p, correction, x.numel(), BLOCK=65536)
    expected = weight24.join_weight(p, correction)
    assert torch.equal(x.isnan(), expected.isnan())
    assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))
    kept = ~x.isnan()
    assert torch.equal(x.view(torch.int32)[kept], expected.view(torch.int32)[kept])


# -- the update -------------------------------------------------------------------------------------------------------


def weights(m: int, n: int, memory: str, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return two weights and their corrections, in one order of memory."""
    X = torch.randn(2, m, n, generator=torch.Generator().manual_seed(m)).to(device)
    p, correction = weight24.split_weight(X)
    return stored(p, BF16, memory), stored(correction, torch.int8, memory)


def joined(params: list[Tensor], corrections: list[Tensor]) -> Tensor:
    return torch.stack([weight24.join_weight(*x) for x in zip(params, corrections, strict=True)])


@pytest.mark.parametrize("thin", [True, False])
@pytest.mark.parametrize(("m", "n", "memory"), [
    (40, 33, "rows"), (33, 40, "rows"), (40, 33, "columns"), (33, 40, "odd"), (32, 48, "rows"),
])  # fmt: skip
def test_the_update_is_that_of_float32_stored_in_24_bits(
    m: int, n: int, memory: str, thin: bool, device: torch.device
) -> None:
    """Bit for bit what the kernel computes for float32 weights, split as the definition splits it."""
    p, corrections = weights(m, n, memory, device)
    wide = stored(joined(p, corrections), torch.float32)
    B = torch.randn(2, max(m, n), 48, device=device).half()[:, :, : min(m, n)]
    factors = [split_both(torch.randn(2, side, 9, device=device))[1] for side in (m, n)] if thin else [None, None]
    coefficients = torch.tensor([[0.9, 0.5], [0.8, -2.0]], device=device)
    rows = None if thin else torch.rand(2, m, 1, device=device)
    for W in (MatrixList.weights(p, corrections), MatrixList.of(wide)):
        update_(W, B, *factors, coefficients, None, None, rows)
    found, expected = joined(p, corrections), weight24.join_weight(*weight24.split_weight(torch.stack(wide)))
    assert (found != expected).float().mean() <= ROUNDED_APART
    assert torch.allclose(found, expected, rtol=2**-15, atol=1e-6)
    assert all(x.any() for x in corrections)


@pytest.mark.parametrize("skip", [True, False])
def test_a_skipped_update_writes_neither_weights_nor_corrections(skip: bool, device: torch.device) -> None:
    """Also if B is not finite."""
    p, corrections = weights(20, 18, "rows", device)
    before = [x.clone() for x in (*p, *corrections)]
    B = torch.randn(2, 20, 18, device=device).half()
    B[0, 3, 4] = torch.nan if skip else 0.0
    flag = torch.tensor(skip, device=device)
    update_(MatrixList.weights(p, corrections), B, None, None, torch.ones(2, 2, device=device), flag)
    assert equal([*p, *corrections], before) is skip


def test_an_update_of_zero_keeps_every_bit(device: torch.device) -> None:
    """Of weights over many decades, and zeros with corrections that have no meaning."""
    x = numbers(2)
    p, correction = (y[: 16 * 200].view(16, 200).clone().to(device) for y in weight24.split_weight(x))
    before = [p.clone(), correction.clone()]
    B = torch.zeros(1, 200, 16, device=device).half()
    update_(MatrixList.weights([p], [correction]), B, None, None, torch.tensor([[1.0, 1.0]], device=device), None)
    assert equal([p, correction], before)


# -- whole steps ------------------------------------------------------------------------------------------------------

KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any], float]] = [
    (Cosmos, {"rank": 6, "gamma": 0.25}, TWO_STEPS), (Muon, {}, TWO_STEPS_OF_MUON), (NorMuon, {}, TWO_STEPS_OF_MUON),
]  # fmt: skip


def narrow(device: torch.device, *shapes: tuple[int, int]) -> list[nn.Parameter]:
    """Return the same parameters in bfloat16 every time."""
    return [nn.Parameter(p.detach().bfloat16()) for p in matrices(device, *shapes)]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def stepped(kind: Any, params: list[nn.Parameter], steps: int, **options: Any) -> Any:
    opt = kind([{"params": params}], lr=1e-2, weight_correction=True, **options)
    for step in range(steps):
        give_gradients(params, step)
        opt.step()
    return opt


def all_bits(params: list[nn.Parameter], opt: Any) -> list[Tensor]:
    return [weight24.join_weight(p.detach(), opt.state[p]["correction"]) for p in params]


@interpreted
@pytest.mark.parametrize(
    ("kind", "options", "bound"), [pytest.param(*KINDS[0], marks=pytest.mark.slow), *KINDS[1:]]
)
def test_two_steps_by_kernels_equal_two_by_plain_torch(
    kind: Any, options: dict[str, Any], bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moves of the weights of 24 bits are as near as those of float32 weights are."""
    options, shapes = options | {"weight_decay": 0.1}, [(24, 20), (20, 24)]
    start, expected, found = (narrow(CPU, *shapes) for _ in range(3))
    plain = all_bits(expected, stepped(kind, expected, 2, **options))
    run_by_kernels(monkeypatch)
    by_kernels = all_bits(found, stepped(kind, found, 2, **options))
    for x, y, old in zip(by_kernels, plain, start, strict=True):
        assert relative((x - old.detach().float())[None], (y - old.detach().float())[None]) < bound
        assert not torch.equal(x, x.bfloat16().float())


@interpreted
@pytest.mark.parametrize(("kind", "options", "bound"), KINDS)
def test_a_skipped_chunk_writes_nothing(kind: Any, options: dict[str, Any], bound: float) -> None:
    """Corrections keep their addresses, so a recorded step stays valid."""
    params = narrow(CPU, (24, 20), (24, 20))
    opt = stepped(kind, params, 1, **options)
    give_gradients(params, 1)
    (chunk,) = batches(opt._collect(), set(), [])
    assert chunk.corrections is not None
    held = [*chunk.params, *chunk.corrections, *(x for tensors in chunk.state().values() for x in tensors)]
    before, at = [x.clone() for x in held], [x.data_ptr() for x in held]
    run_chunk(chunk, torch.ones(2), torch.tensor(True))
    assert equal(held, before)
    run_chunk(chunk, torch.ones(2), torch.tensor(False))
    assert not any(torch.equal(x, y) for x, y in zip(held, before, strict=True))
    assert [x.data_ptr() for x in held] == at


def test_a_recorded_step_depends_on_the_addresses_of_the_corrections() -> None:
    """Loaded state lies elsewhere, so the step must be recorded again."""
    params = narrow(CPU, (24, 20))
    opt = stepped(Muon, params, 1)
    key = graph_key(opt._collect())
    assert graph_key(opt._collect()) == key
    kept = opt.state[params[0]]["correction"]
    opt.state[params[0]]["correction"] = kept.clone()
    assert graph_key(opt._collect()) != key
    opt.state[params[0]]["correction"] = kept
    assert graph_key(opt._collect()) == key


@interpreted
@pytest.mark.parametrize(("rule", "rank"), [("cosmos", 8), ("muon", 1), ("normuon", 1)])
def test_the_self_check_holds_with_corrections(rule: str, rank: int) -> None:
    """The error is at most half of what the check allows."""
    assert self_check.step_error(RULES[rule], rank, 24, 20, CPU, BF16, corrected=True) < SOUND


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 512), (512, 1371), (2048, 1104)])
@pytest.mark.parametrize(("rule", "rank"), [("cosmos", 32), ("cosmos", 256), ("muon", 1), ("normuon", 1)])
def test_the_kernels_of_this_gpu_work_with_corrections(rule: str, rank: int, shape: tuple[int, int]) -> None:
    """The self-check on the device, for every kind of matrix."""
    p = torch.empty(shape, dtype=BF16, device="cuda")
    assert self_check.kernels_work(p, RULES[rule], rank, corrected=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options", "bound"), KINDS)
def test_recorded_steps_equal_steps_without_a_graph(kind: Any, options: dict[str, Any], bound: float) -> None:
    """Bit for bit: weights and corrections, with a gradient that is not finite, and vectors of Adam beside them."""
    device, ends = torch.device("cuda"), []
    for graphs in (True, False):
        hidden = narrow(device, *[(256, 256)] * 3, (512, 256), (256, 513))
        rest = [nn.Parameter(torch.ones(256, device=device, dtype=BF16))]
        groups = [{"params": hidden}, {"params": rest, "rule": "adam"}]
        opt = kind(groups, lr=1e-3, weight_decay=0.1, weight_correction=True, cuda_graphs=graphs, **options)
        for step in range(12):
            give_gradients([*hidden, *rest], step)
            if step == 7:
                hidden[0].grad[3, 4] = torch.inf
            opt.step()
        assert (opt.cuda_graph.recording is not None) is graphs
        assert opt.skipped_steps == 1
        ends.append([x for p in (*hidden, *rest) for x in (p.detach(), opt.state[p]["correction"])])
    assert equal(*ends)
    assert all(x.any() for x in ends[0])
