"""Train a small LLaMA with COSMOS under FSDP2, on CPUs or GPUs.

    torchrun --nproc-per-node 2 examples/fsdp2_llama.py
    torchrun --nproc-per-node 8 examples/fsdp2_llama.py --replicas 2 --width 1024 --depth 16   # HSDP on a GPU node

Only one line is specific to COSMOS: `Cosmos(model)` after `fully_shard`. The optimizer reads from the parameters how
they are sharded. Checkpoints are those of torch.distributed.checkpoint: run the script again with more or fewer
processes and the same --checkpoints folder, and it continues after the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from cosmos_optim import Cosmos

VOCABULARY = 256  # bytes


# -- the model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, head: int = 32) -> None:
        super().__init__()
        self.head = head
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as x, (batch, time, width)."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor) -> Tensor:
    """Rotate pairs of features by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequency = 10000 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.attention, self.norm1, self.norm2 = Attention(width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as x, (batch, time, width)."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """A decoder over bytes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def shard(model: Llama, device: torch.device, replicas: int) -> Llama:
    """Shard by FSDP2 over all processes, or by HSDP: `replicas` copies, each sharded over a part of the processes."""
    world = dist.get_world_size()
    if replicas > 1:
        mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh} | ({"mp_policy": policy} if device.type == "cuda" else {})
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


# -- data: the sources of torch.nn, which every machine has -----------------------------------------------------------


def text() -> Tensor:
    """Return a megabyte of Python, as bytes."""
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def batch(data: Tensor, size: int, length: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets: different for each rank and step, equal if the run is repeated."""
    generator = torch.Generator().manual_seed(step * 100_003 + dist.get_rank())
    starts = torch.randint(len(data) - length - 1, (size,), generator=generator).tolist()
    pieces = torch.stack([data[s : s + length + 1] for s in starts]).to(device)
    return pieces[:, :-1], pieces[:, 1:]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, model: nn.Module, opt: Cosmos) -> None:
    """Write to another folder, then rename it: if the process is killed, the previous checkpoint stays complete."""
    target = folder / f"step_{step:06d}"
    part = target.with_suffix(".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
    dist.barrier()
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(target)
    dist.barrier()


def resume(folder: Path, model: nn.Module, opt: Cosmos) -> int:
    """Load the newest complete checkpoint, written by any number of processes, and return its step."""
    found = sorted(p for p in folder.glob("step_*") if p.suffix != ".part")
    if not found:
        return 0
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=found[-1])
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    return int(found[-1].name.removeprefix("step_"))


# -- training ---------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(0)
    model = shard(Llama(args.width, args.depth).to(device), device, args.replicas)
    opt = Cosmos(model, lr=args.lr, adam_lr=4 * args.lr, weight_decay=0.1)
    begin = resume(Path(args.checkpoints), model, opt) if args.checkpoints else 0
    prints = dist.get_rank() == 0
    if prints:
        size = sum(p.numel() for p in model.parameters())
        print(f"{size:,} parameters on {dist.get_world_size()} x {device.type}, from step {begin}; "
              f"optimizer state here: {opt.state_bytes() / 2**20:.1f} MiB")  # fmt: skip
    data, losses = text(), []
    for step in range(begin, args.steps):
        loss = model(*batch(data, args.batch, args.length, step, device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        if prints and (step % 10 == 0 or step + 1 == args.steps):
            print(f"step {step:4d}   loss {losses[-1]:.3f}")
        if args.checkpoints and (step + 1) % args.every == 0:
            save(Path(args.checkpoints), step + 1, model, opt)
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Join the other processes and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences on each process")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model; more than one is HSDP")
    parser.add_argument("--checkpoints", default="", help="folder for checkpoints; by default none are written")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args(argv)
    owns_group = not dist.is_initialized()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if owns_group:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    losses = train(args, device)
    if owns_group:
        dist.barrier()  # no process may close its connections while another one still needs them
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
    # torch's caches keep gloo's threads alive after destroy_process_group. If one of them releases a tensor while
    # Python shuts down, the process aborts although its work is done: leave without the shutdown.
    sys.stdout.flush()
    os._exit(0)
