"""The kernel for AdamW's moments of 8 bits: against the oracle, and whole steps against plain torch."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Adam, Cosmos
from cosmos_optim.cuda import adam_run
from cosmos_optim.cuda.adam_run import coefficients, step_error
from cosmos_optim.cuda.kernels.adam_update import adam_
from cosmos_optim.cuda.self_check import relative_error
from cosmos_optim.engine import adam_state
from cosmos_optim.engine.batching import Entry
from cosmos_optim.linalg.weight24 import join_weight, split_weight
from cosmos_optim.rules import adam
from tests.cuda.kernel_run import run_by_kernels
from tests.cuda.step_problems import INTERPRETED, equal

INT8, BF16 = torch.int8, torch.bfloat16
GROUP: dict[str, Any] = {**adam.DEFAULTS, "lr": 0.01, "weight_decay": 0.1, "maximize": False}
# In float32: an update has a size of 0.01, so this is 2e-5 of it and a rounding of weights of size 4.
CLOSE = 5e-7
# Of codes that differ, by one: float32 rounds differently, and noise of 13 bits is near a threshold for few.
APART = 2e-3
# Of the moments after four steps: some codes are one apart, which is at most 1 % of those. Measured 3e-4.
MOMENTS = 2e-3
# Whole rows, a shorter last block, rows shorter than a block, vectors, three dimensions, one unit.
SHAPES = [(40, 256), (33, 300), (90, 50), (5000,), (3, 20, 130), (4, 128)]


def problem(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a parameter, a gradient, moments in float32 and their stored form, after 3 steps."""
    generator = torch.Generator().manual_seed(sum(shape))

    def draw() -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    t = torch.tensor(4.0, device=device)
    sizes = 10 ** (-2 * torch.rand(shape, generator=generator)).to(device)
    moments = adam.AdamState(draw() * sizes, (draw() * sizes).square())
    wanted = {name: draw() for name in adam_state.QUANTIZED}
    stored = adam_state.stored(moments, wanted, t - 1, (0, 0), shape[-1])
    return {"p": draw().to(dtype), "g": draw() * sizes, "moments": moments, "stored": stored, "t": t}


def by_torch(x: dict[str, Any], tensors: dict[str, Tensor], **place: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the new parameter in float32, and what is stored."""
    where = {"first": (0, 0), "width": x["p"].shape[-1]} | place
    D, new = adam.direction(x["g"].float(), adam_state.load(tensors, torch.float32), x["t"])
    decayed = x["p"].float() * (1 - GROUP["lr"] * GROUP["weight_decay"])
    return decayed - GROUP["lr"] * D, adam_state.stored(new, tensors, x["t"], **where)


def by_kernel(x: dict[str, Any], tensors: dict[str, Tensor], **more: Any) -> None:
    """Take the same step in place."""
    steps = x["t"].view(1)
    adam_([x["p"]], [x["g"]], {name: [y] for name, y in tensors.items()}, coefficients(steps, GROUP), steps.int(),
          betas=GROUP["betas"], eps=GROUP["eps"], **{"skip": None} | more)  # fmt: skip


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that nearly all codes are equal, and the others one apart."""
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(found[f"{name}_scale"], expected[f"{name}_scale"], rtol=2**-19, atol=0)
        apart = (found[name].int() - expected[name].int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < APART


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_takes_the_step_of_plain_torch(shape: tuple[int, ...], device: torch.device) -> None:
    x = problem(shape, device)
    value, expected = by_torch(x, x["stored"])
    by_kernel(x, x["stored"])
    assert torch.allclose(x["p"], value, atol=CLOSE)
    assert_alike(x["stored"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_rounded_to_nearest(dtype: torch.dtype, device: torch.device) -> None:
    x = problem((40, 130), device, dtype)
    x["g"] = x["g"].to(dtype)
    value, expected = by_torch(x, x["stored"])
    by_kernel(x, x["stored"])
    assert torch.allclose(x["p"].float(), value, rtol=torch.finfo(dtype).eps, atol=CLOSE)
    assert_alike(x["stored"], expected)


def test_a_part_of_a_tensor_is_rounded_as_in_the_whole(device: torch.device) -> None:
    """Rows 8 to 20 by themselves give the codes of the whole."""
    x = problem((40, 300), device)
    part = {k: v[8:20].clone() if isinstance(v, Tensor) and v.dim() else v for k, v in x.items()}
    part["stored"] = {k: v[8:20].clone() for k, v in x["stored"].items()}
    by_kernel(x, x["stored"])
    by_kernel(part, part["stored"], first=(8, 0), width=300)
    assert torch.equal(part["p"], x["p"][8:20])
    assert all(torch.equal(part["stored"][k], x["stored"][k][8:20]) for k in x["stored"])


@pytest.mark.parametrize("quantized", [True, False])
def test_weights_of_24_bits_take_the_step_of_float32(quantized: bool, device: torch.device) -> None:
    """The bfloat16 and its correction are those of the float32 result, also with moments in float32."""
    x = problem((40, 130), device)
    tensors = x["stored"] if quantized else x["moments"]._asdict()
    x["p"], correction = split_weight(x["p"])
    whole = {**x, "p": join_weight(x["p"], correction)}
    value, expected = by_torch(whole, tensors)
    by_kernel(x, tensors, corrections=[correction])
    assert torch.allclose(join_weight(x["p"], correction), value, rtol=2**-15, atol=CLOSE)
    assert not torch.equal(x["p"].float(), value)
    if quantized:
        assert_alike(tensors, expected)
    else:
        assert all(torch.allclose(tensors[k], expected[k], rtol=1e-6) for k in tensors)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_skipped_kernel_writes_nothing(bad: float, device: torch.device) -> None:
    x = problem((40, 130), device)
    x["g"][3, 4] = bad
    held = [x["p"], *x["stored"].values()]
    before = [y.clone() for y in held]
    by_kernel(x, x["stored"], skip=torch.tensor(True, device=device))
    assert equal(held, before)
    x["g"][3, 4] = 0.0
    by_kernel(x, x["stored"], skip=torch.tensor(False, device=device))
    assert not any(torch.equal(y, z) for y, z in zip(held, before, strict=True))


def test_the_self_check_passes(device: torch.device) -> None:
    """Moments are off by what a code of 8 bits holds. In float32, weights of 24 bits are the only rounding."""
    narrow = (torch.bfloat16, torch.bfloat16)
    for kind in ((torch.float32, torch.float32), narrow, (*narrow, True, True)):
        assert step_error(device, *kind) < 0.5 * adam_run.CLOSE
    assert step_error(device, *narrow, False, True) < 2.0**-16


def trained(
    steps: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:  # fmt: skip
    """Return parameters and states after a few steps: two embeddings, a vector, a small norm."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((50, 130), (50, 130), (4500,), (30,))
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    opt = Adam(params, **{"adam_dtype": INT8, "weight_decay": 0.1} | options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        opt.step()
    return [p.detach() for p in params], [opt.state[p] for p in params]


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET decides whether kernels run on a CPU")
@pytest.mark.parametrize(("options", "tensors"), [
    ({}, [2, 1]), ({"maximize": True}, [2, 1]), ({"lr": torch.tensor(1e-3)}, [2, 1]), ({"eps": 0.0}, [2, 1]),
    ({"weight_correction": True, "dtype": BF16}, [2, 1, 1]),
    ({"weight_correction": True, "dtype": BF16, "adam_dtype": None}, [2, 1, 1]),
    ({"adam_dtype": None}, []), ({"adam_dtype": None, "dtype": BF16, "lr": 0.1}, [2, 1, 1]),
    ({"adam_dtype": None, "dtype": BF16, "stochastic_rounding": True}, [2, 1, 1]),
    ({"adam_dtype": None, "dtype": torch.float16}, [2, 1, 1]),
])  # fmt: skip
def test_steps_of_an_optimizer_by_the_kernel_equal_those_of_plain_torch(
    options: dict[str, Any], tensors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Tensors of equal shape are one launch. What torch's kernel can step stays with it."""
    expected = trained(**options)
    run_by_kernels(monkeypatch)
    launches: list[int] = []

    def counted(params: Any, *args: Any, **more: Any) -> None:
        launches.append(len(params))
        adam_(params, *args, **more)

    monkeypatch.setattr(adam_run, "available", lambda device: True)
    monkeypatch.setattr(adam_run, "adam_", counted)
    monkeypatch.setattr(adam_run, "adam_kernel_works", lambda *kind: True)
    found = trained(**options)
    assert launches == tensors * 4
    for p, q, a, b in zip(*found[:1], *expected[:1], found[1], expected[1], strict=True):
        if "correction" in a:
            p, q = join_weight(p, a["correction"]), join_weight(q, b["correction"])
        # A code that is one apart moves later steps, by at most 1e-4; two neighbours of 24 bits are 2^-15 apart.
        atol, rtol = 1e-4 if "exp_avg_scale" in a else 1e-6, 2**-14 if "correction" in a else 0
        if p.dtype is not torch.float32:
            # The same bits, but the interpreter cuts bfloat16 off in each step; elements move by 0.4 in that case.
            atol, rtol = 0.08 if p.dtype is BF16 and "stochastic_rounding" not in options else 0, 0
        assert torch.allclose(p, q, atol=atol, rtol=rtol)
        for x, y in zip(adam_state.load(a, torch.float32), adam_state.load(b, torch.float32), strict=True):
            assert relative_error(x, y) < MOMENTS


def test_the_kernel_does_not_step_another_elementwise_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state may have the same names, as that of AdamW with rows of equal size."""
    monkeypatch.setattr(adam_run, "available", lambda device: True)
    monkeypatch.setattr(adam_run, "adam_kernel_works", lambda *kind: True)
    p = nn.Parameter(torch.zeros(4, 4, dtype=BF16))
    opt = Adam([p])
    entry = Entry(p, torch.zeros_like(p), opt.state[p], opt._layouts[p], opt.param_groups[0], adam.RULE)
    assert adam_run.kernel_supports(entry)
    assert not adam_run.kernel_supports(entry._replace(rule=dataclasses.replace(adam.RULE, name="other")))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_a_gpu_takes_the_steps_of_a_cpu_without_waiting(graphs: bool) -> None:
    """Beside a recorded step too."""
    found = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        shapes = ((300, 260), (64, 64))
        params = [nn.Parameter(torch.randn(s, generator=generator).to(device)) for s in shapes]
        groups = [{"params": params[:1], "rule": "adam"}, {"params": params[1:]}]
        opt = Cosmos(groups, rank=4, gamma=0.25, adam_dtype=INT8, cuda_graphs=graphs)
        for step in range(8):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            with torch.cuda.device(0):
                torch.cuda.set_sync_debug_mode("error" if step > 5 else "default")
            try:
                opt.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found.append(params[0].detach().cpu())
    assert torch.allclose(*found, atol=2e-3)
