"""The decoder against an independent fp64 form, its loss against torch's, and what the optimizer and FSDP2 rely on."""

import math
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cosmos_lab.models import Decoder, ModelConfig, build, loss

FP32_TOL = 1e-5  # fp32 against fp64 or against another order of summation, on values of order one
BF16_TOL = 3e-2  # relative, whole gradient: each product rounds its operands to 8 bits
NORMAL = {"init": "normal", "embed_std": 0.02, "init_out": "normal"}  # weights of the size that BF16_TOL is for
SMALL: dict[str, dict[str, Any]] = {  # each family at a size for tests, with odd MLP and vocabulary
    "tiny": {"mlp": 85, "vocab_size": 251},
    "gpt2-small": {"width": 128, "depth": 2, "mlp": 170, "vocab_size": 251},
    "nanogpt-124m-record4": {"width": 128, "depth": 2, "mlp": 85, "vocab_size": 251, **NORMAL},
    "nanogpt-124m-record5": {"width": 256, "depth": 2, "mlp": 85, "vocab_size": 251, **NORMAL},
    "nanogpt-350m-plain": {"width": 128, "depth": 2, "mlp": 85, "vocab_size": 251, "init_out": "normal"},
}
families = pytest.mark.parametrize("family", SMALL)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of these small batches take 3 chunks, the last one shorter."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 22 * 251)


def small(family: str, **changes: Any) -> Decoder:
    """Build a small model with biases and norms that are not trivial and attention that is not uniform."""
    model = build(family, **SMALL[family] | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter) if parameter.ndim == 1 else parameter * 4)
    return model


def batch(vocab: int = 251) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocab, (2, 33))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def gradients(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    difference = math.sqrt(sum(float((ours[name] - value).square().sum()) for name, value in theirs.items()))
    return difference / math.sqrt(sum(float(value.square().sum()) for value in theirs.values()))


def oracle(c: ModelConfig, p: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits of one sequence, written from the definitions in fp64: complex rotary, one head and layer at a time."""

    def norm(x: Tensor, name: str) -> Tensor:
        if c.norm == "layer":
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
            return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * p.get(f"{name}.weight", torch.ones(1))

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("ti,oi->to", x, p[f"{name}.weight"]) + p.get(f"{name}.bias", torch.zeros(1))

    def turn(x: Tensor) -> Tensor:
        half = c.head_dim // 2
        angle = torch.arange(len(x))[:, None] * c.rope_theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        turned = torch.cat((turned.real, turned.imag), -1)
        return norm(turned, "none") if c.qk_norm else turned

    activations = {
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
        "gelu-erf": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "relu2": lambda x: x.clamp(min=0) ** 2,
    }
    attention_scale = (2 * c.depth) ** -0.5 if c.scaled_attention else 1.0
    x = p["embed.weight"][tokens]
    x = norm(x, "none") if c.embed_norm else x
    future = torch.ones(len(x), len(x)).triu(1).bool()
    for i in range(c.depth):
        y, mixed = norm(x, f"blocks.{i}.norm1"), []
        q, k, v = (linear(y, f"blocks.{i}.attn.{part}").split(c.head_dim, -1) for part in "qkv")
        for head in range(c.heads):
            scores = turn(q[head]) @ turn(k[head]).T / math.sqrt(c.head_dim)
            mixed.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[head])
        x = x + attention_scale * linear(torch.cat(mixed, -1), f"blocks.{i}.attn.o")
        y = norm(x, f"blocks.{i}.norm2")
        up = linear(y, f"blocks.{i}.mlp.up")
        gate = linear(y, f"blocks.{i}.mlp.gate") if c.activation == "swiglu" else up
        inner = gate * gate.sigmoid() * up if c.activation == "swiglu" else activations[c.activation](up)
        x = x + linear(inner, f"blocks.{i}.mlp.down")
    return norm(x, "norm") @ p["embed.weight" if c.tied else "head.weight"].T


@families
def test_logits_loss_and_gradients_match_the_fp64_oracle(family: str) -> None:
    model = small(family)
    tokens, targets = batch()
    double = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
    logits = torch.stack([oracle(model.config, double, sequence) for sequence in tokens])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert logits.std() > 0.1
    torch.testing.assert_close(
        model(tokens).double(), logits, rtol=0, atol=FP32_TOL * float(logits.detach().abs().max())
    )
    value = model(tokens, targets)
    value.backward()
    assert abs(float(value.detach() - expected.detach())) < FP32_TOL
    wanted = {name: value.grad for name, value in double.items() if value.grad is not None}
    assert set(wanted) == {name for name, _ in model.named_parameters()}
    assert relative_error(gradients(model), wanted) < FP32_TOL


@families
@pytest.mark.parametrize("residual_fp32", [False, True])
def test_bf16_autocast_stays_close_and_keeps_odd_shapes(family: str, residual_fp32: bool) -> None:
    model = small(family, residual_fp32=residual_fp32)
    tokens, targets = batch()
    exact = model(tokens, targets)
    exact.backward()
    wanted = {name: value.clone() for name, value in gradients(model).items()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = model(tokens, targets)
        logits = model(tokens)
    value.backward()
    assert logits.shape == (2, 32, 251) and logits.dtype == torch.bfloat16
    assert abs(float(value.detach() - exact.detach())) < BF16_TOL
    assert all(value.dtype == torch.float32 for value in gradients(model).values())
    assert relative_error(gradients(model), wanted) < BF16_TOL


class _Products(TorchDispatchMode):
    """Remembers the three sizes of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.sizes.append((*out.shape, args[-1].shape[0]))
        return out


def test_every_bf16_product_has_aligned_operands() -> None:
    model = small("tiny")
    with torch.autocast("cpu", torch.bfloat16), _Products() as seen:
        value = model(*batch())
    with seen:
        value.backward()
    assert len(seen.sizes) == 3 * (4 * 2) + 3 * 3  # forward and backward of 4 products a layer, and of 3 chunks
    features = {size for product in seen.sizes for size in product if size not in (20, 22, 64)}  # those are tokens
    assert all(size % 8 == 0 for size in features), features


@families
def test_activation_checkpointing_saves_memory_and_changes_no_gradient(family: str) -> None:
    model = small(family)
    tokens, targets = batch()
    results, saved = [], []
    for enabled in (False, True):
        model.checkpointing = enabled
        model.zero_grad()
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            value = model(tokens, targets)
        value.backward()
        results.append({name: grad.clone() for name, grad in gradients(model).items()})
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 3
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name


def test_the_model_compiles_to_one_graph_with_the_same_result() -> None:
    """aot_eager traces forward and backward as the real compiler does, without waiting for a C++ compiler."""
    model = small("tiny", depth=1)
    tokens, targets = batch()
    results = []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = function(tokens, targets)
        value.backward()
        results.append(({name: grad.clone() for name, grad in gradients(model).items()}, value.detach()))
    torch._dynamo.reset()
    torch.testing.assert_close(results[0], results[1], rtol=FP32_TOL, atol=FP32_TOL)


def test_all_blocks_share_one_compiled_graph() -> None:
    tokens, targets = batch()
    results = []
    for parts in (False, True):
        torch.manual_seed(0)
        model = small("tiny", depth=3)
        before = counters["stats"]["unique_graphs"]
        if parts:
            model.compile_parts(backend="aot_eager")
        value = model(tokens, targets)
        value.backward()
        results.append((gradients(model), value.detach()))
        assert counters["stats"]["unique_graphs"] - before == (2 if parts else 0)  # a block and the loss
    torch._dynamo.reset()
    torch.testing.assert_close(results[0], results[1], rtol=FP32_TOL, atol=FP32_TOL)


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["tiny", "gpt2-small"])  # untied and tied
def test_fsdp2_shards_blocks_then_model(family: str, one_rank: None) -> None:
    model = small(family)
    tokens, targets = batch()
    expected = model(tokens, targets)
    expected.backward()
    wanted = {name: grad.clone() for name, grad in gradients(model).items()}
    count = model.num_parameters()
    model.zero_grad()
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    value = model(tokens, targets)
    value.backward()
    torch.testing.assert_close(value, expected)
    assert model.num_parameters() == count
    for name, grad in gradients(model).items():
        assert isinstance(grad, DTensor), name
        torch.testing.assert_close(grad.full_tensor(), wanted[name])


@pytest.mark.parametrize("family", ["tiny", "gpt2-small"])
def test_fsdp2_in_bf16_rounds_what_autocast_rounds(family: str, one_rank: None) -> None:
    """FSDP2's own bf16 parameters, and the inputs that it casts, give autocast's loss to its last digits."""
    model = small(family)
    tokens, targets = batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = float(model(tokens, targets))
    mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    value = model(tokens, targets)
    value.backward()
    assert abs(float(value.detach()) - expected) < BF16_TOL
    assert all(cast(DTensor, grad).dtype == torch.float32 for grad in gradients(model).values())
    assert model.blocks[0].attn.cos.dtype == torch.float32


@pytest.mark.parametrize("family", ["tiny", "gpt2-small"])
def test_flops_are_what_torch_counts(family: str) -> None:
    """Forward products counted by torch, attention halved for the mask, three times for forward and backward."""
    model = small(family)
    tokens, _ = batch()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for name, count in counts.items() if "bmm" in name)
    products = counter.get_total_flops() - attention
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    expected = 3 * (products + attention / 2) / tokens.numel() + 6 * vectors
    assert attention > 0
    assert model.flops_per_token(tokens.shape[1]) == expected


def test_a_batch_can_be_learnt() -> None:
    model = build("tiny", depth=1)
    tokens, targets = batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = float(model(tokens, targets).detach())
    for _ in range(30):
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()
    assert start == pytest.approx(math.log(512), abs=0.1)
    assert float(model(tokens, targets).detach()) < 0.2 * start


@pytest.mark.gpu
def test_bf16_on_a_gpu_matches_fp32_on_the_cpu() -> None:
    """On CUDA under autocast, with any attention kernel that torch picks, compiled: within bf16 of the fp32 CPU."""
    model = small("tiny")
    tokens, targets = batch()
    exact = model(tokens, targets)
    exact.backward()
    wanted = {name: value.clone() for name, value in gradients(model).items()}
    model.zero_grad()
    model.cuda()
    function = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        value = function(tokens.cuda(), targets.cuda())
    value.backward()
    assert abs(float(value.detach()) - float(exact.detach())) < BF16_TOL
    assert relative_error({name: value.cpu() for name, value in gradients(model).items()}, wanted) < BF16_TOL


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@families
def test_no_position_sees_a_later_one(family: str, device: str) -> None:
    """Other tokens in the second half leave the logits of the first half as they were, to the bit."""
    model = small(family).to(device)
    tokens = batch()[0].to(device)
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = (tokens[:, half:] + 1) % model.config.vocab_size
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        before, after = model(tokens), model(other)
    assert torch.equal(before[:, :half], after[:, :half])
    assert not torch.equal(before[:, half:], after[:, half:])
