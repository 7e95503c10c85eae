"""`momentum_dtype=torch.int8` on a CPU: the step, its state, checkpoints, and the combinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_lab.models import Decoder, resolve
from cosmos_optim import SOAP, Cosmos, GaLore, Muon, NorMuon, plan
from cosmos_optim.linalg.int8_momentum import dequantize
from tests.optim.helpers import decoder, gradient, matrix, resumes_bit_for_bit
from tests.oracles import int8_momentum as oracle

INT8 = torch.int8
# The two-sided form needs an epsilon above rounding, because its first O'GU is diagonal (see tests/sharding).
MAKERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (Cosmos, {"rank": 4, "gamma": 0.25}), (Cosmos, {"rank": 4, "gamma": 0.25, "two_sided": True, "eps": 1e-3}),
    (Muon, {"normalize": True}), (NorMuon, {}),
]  # fmt: skip
# After ten steps, of |W - W_0|: each step's momentum is off by 1/127/sqrt(12) of its blocks' largest entries, about
# 0.8 % of |M|, and Newton-Schulz amplifies what that is of small singular values. Measured 0.009 (Muon) to 0.05
# (two-sided COSMOS); bfloat16 has a third of that.
LIKE_FLOAT32 = 0.1
# In units of lr: the momentum of both steps agrees to a rounding of float64, which Newton-Schulz and the basis amplify.
SAME_MOMENTUM = 1e-9
# A scale has 17 significant bits; storing a momentum again rounds it once.
SCALE_ROUNDING = 2.0**-17


def stepped(
    make: Any, shape: tuple[int, ...], steps: int = 3, scale: float = 1.0, **options: Any
) -> tuple[Tensor, Any]:
    """Return a parameter after a few steps, and its optimizer."""
    p = matrix(shape)
    opt = make([{"params": [p], **options}], lr=0.01, momentum_dtype=INT8)
    for step in range(steps):
        p.grad = scale * gradient(shape, step)
        opt.step()
    return p.detach(), opt


def momentum_of(opt: Any) -> Tensor:
    """Return the momentum of the only parameter, dequantized; its blocks are rows of the stored matrix."""
    (state,) = opt.state.values()
    return dequantize(state["M"], state["M_scale"])


def decay_of(opt: Any) -> float:
    """Return the decay of the momentum."""
    group = opt.param_groups[0]
    return group["momentum"] if "momentum" in group else group["betas"][0]


@pytest.mark.parametrize(("make", "options"), MAKERS)
def test_the_momentum_follows_the_oracle(make: Any, options: dict[str, Any]) -> None:
    """Each step averages what was stored with the gradient, and stores that."""
    p = matrix((9, 150))
    opt = make([p], momentum_dtype=INT8, **options)
    decay = decay_of(opt)
    codes, scales = oracle.quantize(torch.zeros(9, 150).numpy())
    for step in range(3):
        p.grad = gradient((9, 150), step)
        opt.step()
        M = torch.from_numpy(oracle.dequantize(codes, scales)).float()
        codes, scales = oracle.quantize(torch.lerp(M, p.grad, 1 - decay).numpy())
    state = opt.state[p]
    assert state["M"].dtype is INT8
    assert torch.equal(state["M"], torch.from_numpy(codes))
    assert torch.equal(state["M_scale"].double(), torch.from_numpy(scales))


@pytest.mark.parametrize("dtype", [INT8, torch.bfloat16])
@pytest.mark.parametrize(("make", "options"), MAKERS)
def test_a_step_uses_the_momentum_that_it_stores(make: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """As the kernels do: it equals a step in float64 whose momentum comes out at the stored, rounded numbers."""
    F64 = torch.float64
    rounded, exact, as_stored = (
        make([matrix((12, 140), dtype=F64)], lr=1.0, momentum_dtype=x, **options) for x in (dtype, None, None)
    )
    G = gradient((12, 140), 0, F64)
    p, other, q = (opt.param_groups[0]["params"][0] for opt in (rounded, exact, as_stored))
    p.grad, other.grad, q.grad = G, G, G
    rounded.step()
    exact.step()
    M = (momentum_of(rounded) if dtype is INT8 else rounded.state[p]["M"]).to(F64)
    decay = decay_of(rounded)
    as_stored.state[q]["M"].copy_((M - (1 - decay) * G) / decay)  # so that the average with G is M
    as_stored.step()
    assert torch.allclose(p, q, rtol=0, atol=SAME_MOMENTUM)
    assert not torch.allclose(p, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("make", "options"), MAKERS)
def test_the_update_has_a_root_mean_square_of_lr(make: Any, options: dict[str, Any]) -> None:
    p = matrix((24, 140))
    opt = make([p], lr=0.01, momentum_dtype=INT8, **options)
    for step in range(3):
        before = p.detach().clone()
        p.grad = gradient((24, 140), step)
        with opt.diagnostics() as record:
            opt.step()
        assert (p.detach() - before).square().mean().sqrt() == pytest.approx(0.01, rel=1e-4)
        (numbers,) = record.values()
        assert numbers["update_rms"] == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(("make", "options"), [
    (Cosmos, {"rank": 4, "gamma": 0.25, "eps": 0.0}), (Muon, {"normalize": True}), (Muon, {}),
])  # fmt: skip
def test_a_power_of_two_in_the_gradients_changes_no_bit_of_codes(make: Any, options: dict[str, Any]) -> None:
    (p, one), (q, other) = (stepped(make, (12, 140), scale=scale, **options) for scale in (1.0, 2.0**10))
    (a,), (b,) = one.state.values(), other.state.values()
    assert torch.equal(a["M"], b["M"])
    assert torch.equal(2.0**10 * a["M_scale"], b["M_scale"])
    assert torch.allclose(p, q, atol=1e-6)


@pytest.mark.parametrize(("make", "options"), MAKERS)
def test_the_same_steps_give_the_same_bits(make: Any, options: dict[str, Any]) -> None:
    (p, one), (q, other) = (stepped(make, (12, 140), **options) for _ in range(2))
    assert torch.equal(p, q)
    assert torch.equal(momentum_of(one), momentum_of(other))


@pytest.mark.parametrize(("make", "options"), MAKERS)
def test_ten_steps_are_close_to_those_with_momentum_in_float32(make: Any, options: dict[str, Any]) -> None:
    found = []
    for dtype in (None, INT8):
        p = matrix((40, 150))
        opt = make([p], lr=0.01, momentum_dtype=dtype, **options)
        for step in range(10):
            p.grad = gradient((40, 150), step)
            opt.step()
        found.append(p.detach() - matrix((40, 150)).detach())
    assert (found[1] - found[0]).norm() < LIKE_FLOAT32 * found[0].norm()


@pytest.mark.parametrize(("shape", "options", "scales"), [
    ((9, 300), {}, (9, 3)),
    ((300, 9), {"layout": "in_out"}, (9, 3)),  # the rule sees (9, 300)
    ((3, 300), {}, (300, 1)),  # fewer rows than basis columns: the rule sees (300, 3)
    ((6, 40, 3, 3), {"layout": "conv"}, (6, 3)),
    ((2, 9, 130), {}, (2, 9, 2)),
    ((12, 130), {"split_sizes": [8, 4]}, (12, 2)),
])  # fmt: skip
def test_blocks_are_in_rows_of_the_matrix_that_the_rule_sees(
    shape: tuple[int, ...], options: dict[str, Any], scales: tuple[int, ...]
) -> None:
    """M has the shape of the parameter in every layout; the step equals that on the plain matrix."""
    p = matrix(shape)
    opt = Cosmos([{"params": [p], **options}], rank=4, gamma=0.25, momentum_dtype=INT8)
    p.grad = gradient(shape, 0)
    opt.step()
    assert opt.state[p]["M"].shape == shape
    assert tuple(opt.state[p]["M_scale"].shape) == scales
    if options.get("layout") == "in_out":
        q = nn.Parameter(matrix(shape).detach().mT.contiguous())
        plain = Cosmos([q], rank=4, gamma=0.25, momentum_dtype=INT8)
        q.grad = p.grad.mT.contiguous()
        plain.step()
        assert torch.equal(opt.state[p]["M"].mT, plain.state[q]["M"])
        assert torch.equal(opt.state[p]["M_scale"], plain.state[q]["M_scale"])
        assert torch.allclose(p.mT, q, atol=1e-6)


@pytest.mark.parametrize("options", MAKERS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(options: Any, bad: float) -> None:
    make, more = options
    p = matrix((8, 140))
    opt = make([p], momentum_dtype=INT8, **more)
    p.grad = gradient((8, 140), 0)
    opt.step()
    before = [p.detach().clone(), *(x.clone() for x in opt.state[p].values())]
    p.grad[3, 5] = bad
    opt.step()
    assert all(torch.equal(x, y) for x, y in zip([p.detach(), *opt.state[p].values()], before, strict=True))
    assert opt.skipped_steps == 1


def test_zero_gradients_let_the_momentum_decay_to_zero() -> None:
    """By 0.95 a step, as an exact one; and the parameter stays, because it moves only with a gradient."""
    p, opt = stepped(Muon, (8, 140), 1)
    before, M = p.clone(), momentum_of(opt)
    (held,) = opt.param_groups[0]["params"]
    held.grad = torch.zeros_like(held)
    for _ in range(200):
        opt.step()
    assert torch.equal(p, before)
    torch.testing.assert_close(momentum_of(opt), 0.95**200 * M, rtol=200 * SCALE_ROUNDING, atol=0)


def test_an_outlier_in_the_gradient_keeps_other_blocks() -> None:
    """Their codes are those of the same steps without it."""
    states = []
    for value in (0.0, 1e6):
        p = matrix((6, 300))
        opt = Muon([p], momentum_dtype=INT8)
        p.grad = gradient((6, 300), 0)
        p.grad[2, 140] += value
        opt.step()
        states.append(opt.state[p])
    others = torch.ones(6, 300, dtype=torch.bool)
    others[2, 128:256] = False
    assert torch.equal(states[0]["M"][others], states[1]["M"][others])
    assert p.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_of_every_dtype_train(dtype: torch.dtype) -> None:
    """Also rounded stochastically, if they are bfloat16."""
    p = matrix((12, 140), dtype=dtype)
    before = p.detach().clone()
    opt = Cosmos([p], rank=4, gamma=0.25, momentum_dtype=INT8, stochastic_rounding=dtype is torch.bfloat16)
    for step in range(2):
        p.grad = gradient((12, 140), step, dtype)
        opt.step()
    assert p.isfinite().all() and not torch.equal(p, before)
    assert (opt.state[p]["M"].dtype, opt.state[p]["M_scale"].dtype) == (INT8, torch.float32)


def test_a_model_that_moves_to_another_dtype_keeps_its_codes() -> None:
    p, opt = stepped(Muon, (8, 140), 1)
    (held,) = opt.param_groups[0]["params"]
    codes, M = opt.state[held]["M"].clone(), momentum_of(opt)
    held.data, held.grad = held.data.bfloat16(), None
    held.grad = torch.zeros_like(held)
    opt.step()
    assert torch.equal(opt.state[held]["M"], codes)
    torch.testing.assert_close(momentum_of(opt), 0.95 * M, rtol=SCALE_ROUNDING, atol=0)


# -- checkpoints, bytes, and what is refused --------------------------------------------------------------------------


def test_a_loaded_checkpoint_continues_bit_for_bit() -> None:
    def build(seed: int) -> tuple[nn.Module, Cosmos]:
        model = decoder(seed)
        return model, Cosmos(model, rank=4, momentum_dtype=INT8)

    assert resumes_bit_for_bit(build, "state_dict")


@pytest.mark.parametrize(("wrote", "reads"), [(None, INT8), (INT8, None), (INT8, torch.bfloat16)])
def test_a_checkpoint_of_another_momentum_dtype_replaces_ours_with_a_warning(wrote: Any, reads: Any) -> None:
    """The momentum stays as it was saved, and so does the group's setting."""
    p, q = matrix((8, 140)), matrix((8, 140))
    old, new = Cosmos([p], rank=2, momentum_dtype=wrote), Cosmos([q], rank=2, momentum_dtype=reads)
    p.grad, q.grad = gradient((8, 140), 0), gradient((8, 140), 1)
    old.step()
    with pytest.warns(UserWarning, match=f"saved with momentum_dtype={wrote}, which replaces {reads}"):
        new.load_state_dict(old.state_dict())
    assert new.param_groups[0]["momentum_dtype"] is wrote
    assert new.state[q].keys() == old.state[p].keys()
    assert all(torch.equal(x, old.state[p][name]) for name, x in new.state[q].items())
    new.step()


def test_the_plan_and_the_state_count_the_same_bytes() -> None:
    model = decoder()
    opt = Cosmos(model, rank=4, momentum_dtype=INT8)
    assert plan(opt).state_bytes == opt.state_bytes() < plan(Cosmos(decoder(), rank=4)).state_bytes
    assert plan(model, "cosmos", rank=4, momentum_dtype=INT8).state_bytes == plan(opt).state_bytes


def test_the_state_of_a_llama_of_1b_parameters_fits_in_two_and_a_third_gib() -> None:
    """With Adam's state in float32, at the default rank."""
    with torch.device("meta"):
        model = Decoder(resolve("llama-1b"))
    assert plan(model, "cosmos", momentum_dtype=INT8).state_bytes <= 2.30 * 2**30


@pytest.mark.parametrize("rule", ["soap", "galore", "adam", "adam-mini"])
def test_other_rules_refuse_an_int8_momentum_and_name_those_that_have_it(rule: str) -> None:
    with pytest.raises(
        ValueError, match=r"no hyper-parameter 'momentum_dtype'.*\['cosmos', .*'muon', 'normuon'\] have"
    ):
        Cosmos([{"params": [matrix((8, 8))], "rule": rule, "momentum_dtype": INT8}, {"params": [matrix((4, 4))]}])


@pytest.mark.parametrize("make", [SOAP, GaLore])
def test_other_optimizers_have_no_such_argument(make: Any) -> None:
    with pytest.raises(TypeError, match="no argument 'momentum_dtype'"):
        make([matrix((8, 8))], momentum_dtype=INT8)


def test_an_unsigned_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum_dtype=torch.uint8 is not valid: give one of .*torch.int8"):
        Cosmos([matrix((8, 8))], momentum_dtype=torch.uint8)


@pytest.mark.parametrize(("kind", "options"), [(Cosmos, {"rank": 1}), (Muon, {})])
def test_blocks_of_columns_with_other_numbers_of_scales_are_refused_with_advice(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:  # fmt: skip
    """Muon has no rank to lower."""
    group = {"params": [matrix((6, 130))], "rule": kind.rule, "split_sizes": [129, 1], "split_side": "input"}
    with pytest.raises(
        ValueError, match=r"'M_scale' of different widths; give its group momentum_dtype=torch.bfloat16"
    ):
        kind([group], momentum_dtype=INT8, **options)
    kind([group | {"momentum_dtype": torch.bfloat16}], momentum_dtype=INT8, **options)
