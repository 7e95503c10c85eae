"""Kernels for an M of 8 bits: codes, scales and products against float64, and whole steps against plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos, Muon, NorMuon
from cosmos_optim.cuda import self_check
from cosmos_optim.cuda.chunk import run_chunk
from cosmos_optim.cuda.kernels.momentum import momentum_
from cosmos_optim.cuda.kernels.residual import residual
from cosmos_optim.cuda.kernels.split_precision import split_both
from cosmos_optim.cuda.pointer_list import MatrixList
from cosmos_optim.engine.batching import batches
from cosmos_optim.linalg.int8_momentum import BLOCK, dequantize, quantize
from cosmos_optim.rules import RULES
from tests.cuda.kernel_run import give_gradients, matrices, run_by_kernels, stepped
from tests.cuda.step_problems import INTERPRETED, equal, relative
from tests.cuda.test_self_check import SOUND
from tests.oracles import int8_momentum as oracle

CPU = torch.device("cpu")
INT8 = torch.int8
W = 0.125
GU_ERROR = MU_ERROR = 5e-7  # both multiply float16 parts; measured 1.5e-7
HALF = 5e-4  # the work buffer is float16: 2^-11 of an entry; measured 2.1e-4
TWO_STEPS = 4e-3  # through Newton-Schulz in float16, as in test_chunk.py; measured 1.6e-3
# (m, n), memory of G and M: shorter than a block, odd, several blocks with a shorter last one, transposed.
SHAPES = [(24, 20, "rows"), (33, 129, "rows"), (17, 300, "rows"), (40, 256, "rows"), (33, 150, "columns")]


def problem(m: int, n: int, memory: str, device: torch.device) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return two gradients, and the codes and scales of two momenta."""
    g = torch.Generator().manual_seed(m + n)
    G, M = (torch.randn(2, m, n, generator=g).to(device) for _ in range(2))
    codes, scales = quantize(M * 10 ** (2 * torch.rand(2, m, 1, generator=g)).to(device))

    def stored(X: Tensor) -> list[Tensor]:
        return [x.mT.contiguous().mT if memory == "columns" else x.clone() for x in X]

    return stored(G), stored(codes), [x.clone() for x in scales]


def expected_momentum(G: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of M + w (G - M) by the oracle."""
    M = dequantize(codes, scales)
    return tuple(torch.from_numpy(x) for x in oracle.quantize((M + W * (G - M)).cpu().numpy()))  # type: ignore


@pytest.mark.parametrize(("m", "n", "memory"), SHAPES)
def test_the_kernel_stores_the_oracles_codes_and_multiplies_them(
    m: int, n: int, memory: str, device: torch.device
) -> None:
    """A code may be one apart if a number is half way between two: nearly none is."""
    G, codes, scales = problem(m, n, memory, device)
    U = torch.linalg.qr(torch.randn(2, n, 8, generator=torch.Generator().manual_seed(1)))[0].to(device)
    before = [expected_momentum(*x) for x in zip(G, codes, scales, strict=True)]
    M = MatrixList.momentum({"M": codes, "M_scale": scales})
    grad_max = torch.stack([x.abs().max() for x in G])
    GU, MU, block_max = momentum_(M, MatrixList.of(G), W, split_both(U), 8, None, grad_max)
    for i, (expected_codes, expected_scales) in enumerate(before):
        assert torch.allclose(scales[i].cpu().double(), expected_scales, rtol=2**-16)
        apart = (codes[i].cpu().int() - expected_codes.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 2e-3
    new = torch.stack([dequantize(*x) for x in zip(codes, scales, strict=True)])
    assert relative(MU, new.double() @ U.double()) < MU_ERROR
    assert relative(GU, torch.stack(G).double() @ U.double()) < GU_ERROR
    assert torch.equal(block_max.amax(1), torch.maximum(grad_max, new.abs().amax((1, 2))))
    N = 0.9 * new + 0.1 * torch.stack(G)
    X, _, c = residual(M, MatrixList.of(G), 0.9, 0.1, None, None, block_max)
    assert relative((X if m >= n else X.mT).float() / c, N) < HALF


@pytest.mark.parametrize("skip", [True, False])
def test_a_skipped_kernel_writes_neither_codes_nor_scales(skip: bool, device: torch.device) -> None:
    """Also if the gradient is not finite."""
    G, codes, scales = problem(20, 150, "rows", device)
    G[0][3, 4] = torch.nan if skip else 0.0
    before = [x.clone() for x in (*codes, *scales)]
    M = MatrixList.momentum({"M": codes, "M_scale": scales})
    momentum_(M, MatrixList.of(G), W, None, 1, torch.tensor(skip, device=device))
    assert equal([*codes, *scales], before) is skip


def test_storing_again_is_exact(device: torch.device) -> None:
    """With a weight of 0, no code and no scale moves; zeros and an outlier in a block are exact too."""
    G, codes, scales = problem(20, 2 * BLOCK + 5, "rows", device)
    X = torch.stack([dequantize(*x) for x in zip(codes, scales, strict=True)])
    X[0, :5], X[1, 2, 140] = 0.0, 1e6 * X[1].abs().max()
    codes, scales = ([x.clone() for x in stack] for stack in quantize(X))
    before = [x.clone() for x in (*codes, *scales)]
    momentum_(MatrixList.momentum({"M": codes, "M_scale": scales}), MatrixList.of(G), 0.0, None, 1, None)
    assert equal([*codes, *scales], before)


interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")


@interpreted
@pytest.mark.parametrize(("kind", "options"), [(Cosmos, {"rank": 6, "gamma": 0.25}), (Muon, {}), (NorMuon, {})])
def test_two_steps_by_kernels_equal_two_by_plain_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Codes are at most one apart, as rounding may decide."""
    options = options | {"weight_decay": 0.1, "momentum_dtype": INT8}
    # A long first basis is iterated, by the kernels with fewer steps: COSMOS gets bases short enough to be exact.
    shapes = [(24, 20), (150, 24)] if "rank" in options else [(24, 150), (150, 24)]
    expected, start = matrices(CPU, *shapes), matrices(CPU, *shapes)
    states = stepped(kind, expected, 2, **options)
    run_by_kernels(monkeypatch)
    found = matrices(CPU, *shapes)
    new = stepped(kind, found, 2, **options)
    for p, q, old, a, b in zip(found, expected, start, new, states, strict=True):
        assert relative((p - old)[None].detach(), (q - old)[None].detach()) < TWO_STEPS
        assert a.keys() == b.keys()
        assert (a["M"].int() - b["M"].int()).abs().max() <= 1
        assert torch.allclose(a["M_scale"], b["M_scale"], rtol=2**-16)


@interpreted
@pytest.mark.parametrize(("kind", "options"), [(Cosmos, {"rank": 6, "gamma": 0.25}), (NorMuon, {})])
def test_a_skipped_chunk_writes_nothing(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """State tensors keep their addresses and every bit, so a recorded step stays valid."""
    params = matrices(CPU, (24, 150), (24, 150))
    opt = kind(params, momentum_dtype=INT8, **options)
    give_gradients(params, 0)
    opt.step()
    give_gradients(params, 1)  # another one: the same would only change the scales
    (chunk,) = batches(opt._collect(), set(), [])
    held = [*chunk.params, *(x for tensors in chunk.state().values() for x in tensors)]
    before, at = [x.clone() for x in held], [x.data_ptr() for x in held]
    run_chunk(chunk, torch.ones(2), torch.tensor(True))
    assert equal(held, before)
    run_chunk(chunk, torch.ones(2), torch.tensor(False))
    assert not any(torch.equal(x, y) for x, y in zip(held, before, strict=True))
    assert [x.data_ptr() for state in opt.state.values() for x in state.values() if x.dtype is INT8] == [
        pointer for x, pointer in zip(held, at, strict=True) if x.dtype is INT8
    ]


@interpreted
@pytest.mark.parametrize(("rule", "rank", "m", "n"), [("cosmos", 8, 24, 140), ("muon", 1, 140, 24)])
def test_the_self_check_holds_with_int8(rule: str, rank: int, m: int, n: int) -> None:
    """The error is at most half of what the check allows."""
    assert self_check.step_error(RULES[rule], rank, m, n, CPU, torch.float32, INT8) < SOUND


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 512), (512, 1371), (2048, 1104)])
@pytest.mark.parametrize(("rule", "rank"), [("cosmos", 32), ("cosmos", 256), ("muon", 1), ("normuon", 1)])
def test_the_kernels_of_this_gpu_work_with_int8(rule: str, rank: int, shape: tuple[int, int]) -> None:
    """The self-check on the device, for every kind of matrix."""
    assert self_check.kernels_work(torch.empty(shape, device="cuda"), RULES[rule], rank, INT8)
