"""COSMOS on the optimizer track of modded-NanoGPT (records/track_3_optimization), in one file that needs only torch.

    torchrun --standalone --nproc_per_node=8 train_cosmos.py        # 1, 2, 4 or 8 GPUs give the same run
    torchrun --standalone --nproc_per_node=8 train_cosmos.py 4      # four runs, one after the other, in one log

The track fixes data, batch and architecture and allows one forward and backward pass for each step. Free are the
optimizer, its settings and the initialization: the sections "COSMOS" and `optimizers` and `initialize` below.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SOURCE = Path(__file__).read_text()  # a log begins with the code of its run


@dataclass(frozen=True)
class Settings:
    """The whole run. The defaults are the track's; tests make the model and the data smaller."""

    # Fixed by the track.
    data: Path = Path("data/fineweb10B")
    vocabulary: int = 50_304
    depth: int = 12
    width: int = 768
    head_dim: int = 128
    length: int = 1024  # tokens of a sequence
    batch: int = 512  # sequences of a step, on all GPUs together
    val_batch: int = 10_240  # sequences of a validation
    dtype: torch.dtype = torch.bfloat16  # of the embedding and of all activations
    # Free. Result 36 of the track, its tuned Muon, has the same steps, cooldown and rates (see `optimizers`).
    steps: int = 3250
    cooldown: float = 0.7  # the share of steps in which the rates fall to 0
    # No effect on the result.
    micro_batch: int = 64  # sequences of one forward pass
    val_every: int = 125
    val_every_at_the_end: int = 25  # in the last tenth


# -- data -------------------------------------------------------------------------------------------------------------

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024


def read_shard(path: Path) -> Tensor:
    """Return the tokens of a shard: a header of 256 int32 (magic number, version, count, zeros), then uint16."""
    header = torch.from_file(str(path), size=HEADER_BYTES // 4, dtype=torch.int32)
    magic, version, count = header[:3].tolist()
    if (magic, version) != (MAGIC, VERSION) or path.stat().st_size != HEADER_BYTES + 2 * count:
        raise ValueError(f"{path} is not a whole token shard (magic {magic}, version {version}, {count} tokens)")
    return torch.from_file(str(path), size=HEADER_BYTES // 2 + count, dtype=torch.uint16)[HEADER_BYTES // 2 :]


def batches(settings: Settings, split: str, sequences: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each batch, as inputs and targets (sequences, length), in the order of the files."""
    if sequences % dist.get_world_size():
        raise ValueError(f"{sequences} sequences cannot be divided among {dist.get_world_size()} ranks")
    files = sorted(settings.data.glob(f"fineweb_{split}_*.bin"))
    size = sequences * settings.length
    share = size // dist.get_world_size()
    for path in files:
        tokens = read_shard(path)
        for start in range(0, len(tokens) - size - 1, size):
            part = tokens[start + dist.get_rank() * share :][: share + 1].long().to(device)
            yield part[:-1].view(-1, settings.length), part[1:].view(-1, settings.length)
    raise ValueError(f"the {len(files)} shards {settings.data}/fineweb_{split}_*.bin have too few tokens: add shards")


# -- architecture -----------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMS norm with gains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) times the gains."""
        return F.rms_norm(x, x.shape[-1:], self.gain.to(x.dtype))


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a layer, stored in float32, in the dtype of x."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


class Attention(nn.Module):
    """Causal attention over normalized queries and keys, half of whose dimensions rotate with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, head_dim: int, length: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        # A quarter of the dimensions with frequencies from 1 to 1/1024; each rotates together with another one.
        frequency = torch.cat([1024.0 ** -torch.linspace(0, 1, head_dim // 4), torch.zeros(head_dim // 4)])
        angle = torch.outer(torch.arange(length).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each pair of dimensions i and i + D/2 of x (batch, heads, time, D) by its angle, in float32."""
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * self.cos + b * self.sin, b * self.cos - a * self.sin], dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as x, (batch, time, width)."""
        q, k, v = (linear(x, f).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (self.rotate(F.rms_norm(y, (self.head_dim,))) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        return linear(y.transpose(1, 2).flatten(2), self.out)


class Block(nn.Module):
    """Attention and an MLP with squared ReLU, each after a norm."""

    def __init__(self, width: int, head_dim: int, length: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, head_dim, length)
        self.norm2, self.up, self.down = Norm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as x, (batch, time, width)."""
        x = x + self.attention(self.norm1(x))
        return x + linear(linear(self.norm2(x), self.up).relu().square(), self.down)


class GPT(nn.Module):
    """The track's decoder: untied, with biases, a norm after the embedding, and logits bounded by 15."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.embedding = nn.Embedding(settings.vocabulary, width, dtype=settings.dtype)
        self.norm_in, self.norm_out = Norm(width), Norm(width)
        self.blocks = nn.ModuleList(Block(width, settings.head_dim, settings.length) for _ in range(settings.depth))
        self.head = nn.Linear(width, settings.vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of all tokens."""
        x = self.norm_in(self.embedding(inputs))
        for block in self.blocks:
            x = block(x)
        logits = linear(self.norm_out(x), self.head).float()
        logits = 15 * logits * torch.rsqrt(logits.square() + 225)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def initialize(model: GPT) -> None:
    """Draw the weights as the track's baseline does: all that write to the residual stream, and the head, at 0."""
    for name, p in model.named_parameters():
        if name.endswith("gain"):
            p.fill_(1)
        elif name.endswith(("bias", "out.weight", "down.weight", "head.weight")):
            p.zero_()
        else:
            p.normal_(std=1 if name.startswith("embedding") else (0.33 / p.shape[-1]) ** 0.5)
        dist.broadcast(p, 0)


# -- COSMOS -----------------------------------------------------------------------------------------------------------
#
# G (m, n)  gradient                       M (m, n)  momentum: its moving average
# U (n, r)  leading eigenbasis of G'G      S (r, r)  second moment G'G in that basis
# V (m, r)  second moment of G U           v (m, 1)  mean squares of the rows of the direction
#
# SOAP (Adam in the tracked eigenbasis U) steps the part of the momentum in U, Muon (Newton-Schulz) the rest.


class Cosmos(torch.optim.Optimizer):
    """COSMOS for matrices, with the defaults of the library cosmos-optim. Each rank steps its share of the matrices.

    W <- (1 - lr weight_decay) W - lr D, where D has a root mean square of 1. The gradients must be the same on all
    ranks. All products are in float32.

    lr: the root mean square of an update.
    gamma: weight of the Muon part; None is lr / 2e-3, so that the SOAP part moves at 2e-3 while lr is at its peak.
    guard: share of the momentum's energy below which the Muon part is dropped as rounding noise.
    """

    def __init__(
        self, params: Any, lr: float = 5e-4, *, weight_decay: float = 0.0, rank: int = 32, gamma: float | None = None,
        betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, row_beta2: float = 0.95, guard: float = 1e-5,
        ns_steps: int = 5,
    ) -> None:  # fmt: skip
        own = {"betas": betas, "eps": eps, "row_beta2": row_beta2, "guard": guard, "ns_steps": ns_steps}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rank": rank, "gamma": gamma, **own})
        for group in self.param_groups:
            if group["gamma"] is None:
                group["gamma"] = group["lr"] / 2e-3

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every matrix on one rank, and send it to the others."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        matrices = [(p, group) for group in self.param_groups for p in group["params"]]
        matrices.sort(key=lambda matrix: -matrix[0].numel())  # so that every rank gets as many large ones
        messages = []
        for i, (p, group) in enumerate(matrices):
            if i % world == rank:
                self.step_matrix(p, group)
            if world > 1:
                messages.append(dist.broadcast(p, i % world, async_op=True))
        for message in messages:
            message.wait()

    def step_matrix(self, p: Tensor, group: dict[str, Any]) -> None:
        """Decay the weights and step along D. Until the first gradient that is not zero, only decay them."""
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state, G = self.state[p], p.grad
        if not state:
            if not G.any():  # the case in the first two steps, because the head and the last matrix of a layer are 0
                return
            m, r = G.shape[0], min(group["rank"], *G.shape)
            state.update(
                t=torch.zeros((), dtype=torch.float64), M=torch.zeros_like(G), S=G.new_zeros(r, r), V=G.new_zeros(m, r),
                v=G.new_zeros(m, 1), U=torch.linalg.svd(G, full_matrices=False).Vh[:r].mT.contiguous(),
            )  # fmt: skip
        state["t"] += 1
        settings = {key: group[key] for key in ("gamma", "betas", "eps", "row_beta2", "guard", "ns_steps")}
        D, new = direction(G, **state, **settings)
        state.update(new)
        p.add_(D, alpha=-group["lr"])


# fmt: off
def direction(
    G: Tensor, *, t: Tensor, M: Tensor, U: Tensor, S: Tensor, V: Tensor, v: Tensor,
    gamma: float, betas: tuple[float, float], eps: float, row_beta2: float, guard: float, ns_steps: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the direction D and the new state. t counts steps from 1."""
    (b1, b2), tiny = betas, torch.finfo(G.dtype).eps
    M = torch.lerp(M, G, 1 - b1)
    N = b1 * M + (1 - b1) * G                                         # Nesterov's momentum

    # Track the eigenbasis by one power step. The term with `tiny` keeps columns that have had no gradient.
    GU = G @ U
    size = GU.square().sum() + S.trace()
    HU = G.mT @ GU + tiny * size * U
    U_old, U = U, torch.linalg.qr(b2 * U @ S + (1 - b2) * HU).Q
    GU, C = G @ U, U.mT @ U_old
    E = (1 - b2) * GU.mT @ GU
    S = b2 * C @ S @ C.mT + E
    S = (S + S.mT) / 2
    V = b2 * V + (1 - b2) * GU.square()

    # SOAP in the basis, without columns and elements that hold only rounding noise.
    NU = N @ U
    P = NU / (1 - b1 ** (t + 1)) / ((V / (1 - b2**t)).sqrt() + eps)
    floor = max(64 * tiny, 2.0**-30) ** 2
    P = P * ((S.diag() > floor * S.trace()) | (E.diag() > floor * E.trace()))
    largest = GU.square().amax(dim=1, keepdim=True)
    P = P * ((floor * V.amax(dim=1, keepdim=True) <= V) | (GU.square() > floor * largest))

    # Muon on the rest of the momentum, unless that is rounding noise.
    X = N - NU @ U.mT
    B = unit_rms(newton_schulz(X, ns_steps))
    B = B * (X.square().sum() > guard * (X.square().sum() + NU.square().sum()))

    # Add both, and divide each row by the root of its average mean square.
    D = gamma * B + P @ U.mT
    v = row_beta2 * v + (1 - row_beta2) * D.square().mean(dim=1, keepdim=True)
    D = D / (v.sqrt() + max(eps, 1e-4))
    return unit_rms(D), {"M": M, "U": U, "S": S, "V": V, "v": v}
# fmt: on


def unit_rms(X: Tensor) -> Tensor:
    """Scale X to a root mean square of 1. A zero matrix stays zero."""
    return X * X.square().mean().clamp_min(torch.finfo(X.dtype).tiny).rsqrt()


def newton_schulz(X: Tensor, steps: int) -> Tensor:
    """Move the singular values of X / |X| towards 1: each step maps one, x, to 3.4445 x - 4.775 x^3 + 2.0315 x^5."""
    wide = X.shape[0] < X.shape[1]
    X = X.mT if wide else X
    X = X / X.norm().clamp_min(torch.finfo(X.dtype).tiny)
    for _ in range(steps):
        R = X.mT @ X
        X = 3.4445 * X + X @ (-4.775 * R + 2.0315 * R @ R)
    return X.mT if wide else X


def optimizers(model: GPT) -> list[torch.optim.Optimizer]:
    """Return COSMOS for the matrices of the blocks and AdamW for the rest.

    AdamW is that of result 36. So is the size of a matrix's step and of its decay: that Muon steps by
    0.025 sqrt(max(1, m / n)) times a matrix with singular values 1. The root mean square of this is 0.025 / sqrt(n).
    """
    muon_lr, muon_decay = 0.025, 0.05
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    groups = []
    for n in sorted({p.shape[1] for p in matrices}):
        lr = muon_lr / n**0.5
        alike = [p for p in matrices if p.shape[1] == n]
        groups.append({"params": alike, "lr": lr, "weight_decay": muon_lr * muon_decay / lr})
    vectors = [p for p in model.parameters() if p.ndim < 2]
    adamw = torch.optim.AdamW(
        [
            {"params": [model.embedding.weight], "lr": 0.7},
            {"params": [model.head.weight], "lr": 0.004},
            {"params": vectors, "lr": 0.015},
        ],
        betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001, fused=True,
    )  # fmt: skip
    return [Cosmos(groups), adamw]


# -- training ---------------------------------------------------------------------------------------------------------


def train(model: GPT, settings: Settings, log: Callable[[str], None]) -> list[tuple[int, float]]:
    """Train from new weights; log and return the steps and losses of all validations, which stop the clock."""
    device = model.head.weight.device
    initialize(model)
    opts = optimizers(model)
    peaks = [[group["lr"] for group in opt.param_groups] for opt in opts]
    validation = next(batches(settings, "val", settings.val_batch, device))
    data = batches(settings, "train", settings.batch, device)
    losses: list[tuple[int, float]] = []
    seconds, since = 0.0, start_clock(device)
    for step in range(settings.steps + 1):
        near_end = step >= 0.9 * settings.steps
        if step == settings.steps or step % (settings.val_every_at_the_end if near_end else settings.val_every) == 0:
            took = start_clock(device) - since
            seconds += took
            each = 1000 * took / (step - losses[-1][0]) if losses else float("nan")
            losses.append((step, validate(model, validation, settings)))
            log(f"step:{step}/{settings.steps} val_loss:{losses[-1][1]:.5f} train_time:{seconds:.3f}s "
                f"step_avg:{each:.2f}ms")  # fmt: skip
            since = start_clock(device)
        if step == settings.steps:
            return losses
        backward(model, next(data), settings)
        rate = min(1.0, (1 - step / settings.steps) / settings.cooldown)
        for opt, own in zip(opts, peaks):
            for group, peak in zip(opt.param_groups, own):
                group["lr"] = peak * rate
            opt.step()
        model.zero_grad(set_to_none=True)
    raise AssertionError("the last step returns")


def backward(model: GPT, batch: tuple[Tensor, Tensor], settings: Settings) -> None:
    """Sum the gradients of the whole batch over micro-batches and ranks."""
    for inputs, targets in zip(*(x.split(settings.micro_batch) for x in batch)):
        model(inputs, targets).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


@torch.no_grad()
def validate(model: GPT, batch: tuple[Tensor, Tensor], settings: Settings) -> float:
    """Return the mean loss of a token of the validation data."""
    total = torch.zeros((), device=batch[0].device)
    for inputs, targets in zip(*(x.split(settings.micro_batch) for x in batch)):
        total += model(inputs, targets)
    dist.all_reduce(total)
    return total.item() / (settings.val_batch * settings.length)


def start_clock(device: torch.device) -> float:
    """Wait for this device and for all ranks, and return the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    return time.perf_counter()


def open_log(folder: Path, device: torch.device) -> Callable[[str], None]:
    """Return a function that prints a line and writes it to a new file, on rank 0. The file begins with this code."""
    if dist.get_rank():
        return lambda line: None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{uuid.uuid4()}.txt"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    where = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, {name}, world_size {dist.get_world_size()}"
    ruler = "=" * 100
    path.write_text("\n".join([SOURCE, ruler, where, ruler, ""]))
    print(path)

    def log(line: str) -> None:
        print(line, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    return log


def main() -> None:
    """Join the ranks that torchrun started, and train once, or as often as the first argument says."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    log = open_log(Path("logs"), device)
    model = GPT(Settings()).to(device)
    model.compile(dynamic=False)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        train(model, Settings(), log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
