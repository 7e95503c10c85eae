"""Train a GPT in plain PyTorch: fused qkv, tied head, own loop with warm-up, cosine, clipping, checkpoint and resume.

    python examples/nanogpt.py
    python examples/nanogpt.py --checkpoint run.pt --stop 30    # stops after step 30, as if it were killed there
    python examples/nanogpt.py --checkpoint run.pt              # continues, with the losses of the unbroken run

The text is the source of torch.nn. Two things are specific to COSMOS: the optimizer, and that a loop with its own
schedule scales the rate of each group by the same factor instead of writing one rate into all of them.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_optim import Cosmos, param_groups, plan


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # three matrices in one
        self.proj = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as x, (batch, time, width)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder over bytes, with the embedding as its output head."""

    def __init__(self, width: int, depth: int, length: int, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: one parameter, which gets AdamW

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        x = self.embed(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def factor(step: int, warmup: int, steps: int) -> float:
    """Return the share of the peak rate: it grows in a line, then falls as a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def batch(data: Tensor, step: int, size: int, length: int) -> Tensor:
    """Return random pieces of the text; the same step gives the same pieces, so a resumed run sees what it would."""
    generator = torch.Generator().manual_seed(step)
    return data[torch.randint(len(data) - length, (size, 1), generator=generator) + torch.arange(length + 1)]


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-3, help="rate of the hidden matrices")
    parser.add_argument("--checkpoint", type=Path, help="file to write at the end, and to continue from if it exists")
    parser.add_argument("--stop", type=int, help="leave after this step, but keep the schedule of --steps")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    model = GPT(args.width, args.depth, args.length)
    overrides = {"*.qkv.weight": {"split_sizes": args.width}}  # update q, k and v as the three matrices that they are
    opt = Cosmos(param_groups(model, overrides=overrides), lr=args.lr, adam_lr=16 * args.lr, weight_decay=0.1)
    print(plan(opt))
    peaks, begin = [group["lr"] for group in opt.param_groups], 0
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        begin = saved["step"]

    end, losses = min(args.steps, args.stop or args.steps), []
    for step in range(begin, end):
        for group, peak in zip(opt.param_groups, peaks, strict=True):
            group["lr"] = peak * factor(step, 10, args.steps)
        loss = model(batch(data, step, 16, args.length))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step + 1 == end:
            print(f"step {step:4d}   lr {opt.param_groups[0]['lr']:.2e}   loss {losses[-1]:.3f}")
    if args.checkpoint:
        part = args.checkpoint.with_suffix(".part")
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "step": end}, part)
        os.replace(part, args.checkpoint)  # if the process is killed before this, the old file stays whole
    return losses


if __name__ == "__main__":
    main()
