"""Small models with every kind of parameter, gradients for them, and an optimizer run sharded or on one process."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cosmos_optim import OPTIMIZERS, param_groups

STEPS = 10
Weights = dict[str, Tensor]
FUSED = {"*.qkv.weight": {"split_sizes": (8, 8, 8)}}


class Block(nn.Module):
    """Matrices of several shapes, and a norm. `wide` has a side long enough for an iterated first basis."""

    def __init__(self, *shapes: str) -> None:
        super().__init__()
        layers = {"square": (12, 12), "tall": (12, 20), "wide": (48, 12), "qkv": (8, 24)}
        for shape in shapes:
            self.add_module(shape, nn.Linear(*layers[shape], bias=shape == "square"))
        self.norm = nn.LayerNorm(12)


class Even(nn.Module):
    """Sizes that divide evenly, as tensor parallelism needs."""

    shapes = ("square", "tall", "wide", "qkv")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*self.shapes) for _ in range(2))


class TallAndWide(Even):
    """Two shapes only: enough for rules that other tests have checked on one process."""

    shapes = ("tall", "wide")


class SquareAndTall(Even):
    """No more columns than rows: in directions without gradient, SOAP would divide noise by noise."""

    shapes = ("square", "tall")


class EveryKind(Even):
    """Also sizes that do not divide: odd ones, fewer rows than ranks, experts, a convolution, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.odd = nn.Linear(5, 7, bias=False)
        self.thin = nn.Linear(6, 3, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 8, 6))
        self.conv = nn.Conv2d(3, 5, 2)


class EveryKindSmall(EveryKind):
    """The same with fewer shapes, because eight ranks share two cores."""

    shapes = ("square", "qkv")


class FewShapes(Even):
    """One shape that divides, one that does not, one with fewer rows than ranks."""

    shapes = ("square",)

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(5, 7, bias=False)
        self.thin = nn.Linear(6, 3, bias=False)


def build(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return a model with the same weights on every process."""
    model = kind().to(dtype)
    for i, p in enumerate(model.parameters()):
        g = torch.Generator().manual_seed(1000 + i)
        p.data.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) / math.sqrt(p.shape[-1]))
    return model


def gradient(index: int, shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a parameter at a step: three constant leading directions, and noise that changes."""
    g = torch.Generator().manual_seed(7 * index + 1)
    rows, cols = math.prod(shape[:-1]) or 1, shape[-1]
    left = torch.randn(rows, 3, generator=g, dtype=torch.float64)
    right = torch.randn(3, cols, generator=g, dtype=torch.float64) * torch.tensor([[4.0], [2.0], [1.0]])
    g.manual_seed(10_000 * (step + 1) + index)
    noise = torch.randn(rows, cols, generator=g, dtype=torch.float64)
    return (left @ right + 0.3 * noise).reshape(shape).to(dtype)


def placed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut a tensor by torch.chunk, mesh dimension after mesh dimension, FSDP2's strided shards after all others."""
    order = sorted(range(mesh.ndim), key=lambda dim: (isinstance(placements[dim], _StridedShard), dim))
    part = whole
    for dim in order:
        placement = placements[dim]
        if not placement.is_replicate():
            chunks = part.chunk(mesh.size(dim), placement.dim)
            at = mesh.get_local_rank(dim)
            part = chunks[at] if at < len(chunks) else part.narrow(placement.dim, 0, 0)
    part = part.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def shard_like(p: Tensor, whole: Tensor) -> Tensor:
    """Return `whole` with the placements of p."""
    return placed(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


def take_steps(model: nn.Module, opt: torch.optim.Optimizer, dtype: torch.dtype, which: range = range(STEPS)) -> None:
    """Take optimizer steps with the gradients of `gradient`."""
    for step in which:
        for i, p in enumerate(model.parameters()):
            p.grad = shard_like(p, gradient(i, p.shape, step, dtype))
        opt.step()


@dataclass(frozen=True)
class Case:
    """An optimizer on a model: one process and several must get the same weights."""

    model: type[nn.Module] = EveryKind
    name: str = "cosmos"
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()

    def build(self, shard: Callable[[nn.Module], nn.Module] | None = None) -> tuple[nn.Module, Any]:
        """Return the model, sharded or not, and its optimizer: Newton-Schulz in the case's precision, a small basis."""
        model = build(self.model, self.dtype)
        if shard is not None:
            shard(model)
        hyper: dict[str, Any] = {}
        if self.name in ("cosmos", "muon", "normuon"):
            hyper["ns_dtype"] = self.dtype
        if self.name in ("cosmos", "galore"):
            hyper["rank"] = 2
        fused = any(name.endswith("qkv.weight") for name, _ in model.named_parameters())
        groups = param_groups(model, self.name, overrides=FUSED if fused else None)
        return model, OPTIMIZERS[self.name](groups, lr=0.01, weight_decay=0.1, **hyper, **dict(self.options))

    @functools.cache  # noqa: B019
    def on_one_process(self) -> Weights:
        """Return the weights after STEPS steps on one process, without a mesh."""
        model, opt = self.build()
        take_steps(model, opt, self.dtype)
        return {key: p.detach().clone() for key, p in model.named_parameters()}


# -- layouts ----------------------------------------------------------------------------------------------------------


def fsdp(model: nn.Module) -> nn.Module:
    """Apply FSDP2 over all ranks: to each block, then to the rest."""
    return _fully_shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(model: nn.Module) -> nn.Module:
    """Make two replicas, each sharded over half of the ranks."""
    shape = (2, dist.get_world_size() // 2)
    return _fully_shard(model, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Cut `square` and `tall` by output rows, `wide` by input columns."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"square": ColwiseParallel(), "tall": ColwiseParallel(), "wide": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, {key: how for key, how in plan.items() if hasattr(block, key)})
    return model


def fsdp_tensor_parallel(model: nn.Module) -> nn.Module:
    """Apply FSDP2 over tensor parallelism on two ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    return _fully_shard(tensor_parallel(model, mesh["tensor"]), mesh["data"])


def data_parallel(model: nn.Module) -> nn.Module:
    """Apply DDP, which the optimizer does not see."""
    nn.parallel.DistributedDataParallel(model)
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": data_parallel, "fsdp": fsdp, "hsdp": hsdp, "tp": tensor_parallel, "fsdp_tp": fsdp_tensor_parallel,
}  # fmt: skip


def full_weights(model: nn.Module) -> Weights:
    """Return the whole weights of a sharded model, on every rank."""
    return {name: full(p).clone() for name, p in model.named_parameters()}


def full(p: Tensor) -> Tensor:
    """Return the whole of a parameter, sharded or not."""
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def run_sharded(rank: int, layout: str, cases: list[Case]) -> list[Weights] | None:
    """Shard, step and gather each case. Return the weights, on the first and the last rank."""
    found = []
    for case in cases:
        model, opt = case.build(LAYOUTS[layout])
        take_steps(model, opt, case.dtype)
        found.append(full_weights(model))
    return found if rank in (0, dist.get_world_size() - 1) else None


def distance(a: Weights, b: Weights) -> tuple[float, str]:
    """Return the largest difference of two sets of weights, relative to the largest weight, and the weight's name."""
    found = {key: float((a[key] - b[key]).abs().max() / b[key].abs().max()) for key in b}
    return max((value, key) for key, value in found.items())
