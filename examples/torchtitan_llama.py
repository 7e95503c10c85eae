"""Use COSMOS in torchtitan: `python examples/torchtitan_llama.py`.

In a torchtitan configuration one field changes, `optimizer=cosmos(lr=5e-4, adam_lr=2e-3)`. torchtitan's trainer needs
GPUs and a tokenizer, so this file does by hand what the trainer does with that field: it builds the container of
optimizers and the container of schedules from their configurations, and trains a small model on a CPU with them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer

from cosmos_optim import plan
from cosmos_optim.integrations.torchtitan import cosmos

LENGTH, BATCH = 64, 16


class Decoder(nn.Module):
    """A decoder over bytes, with torchtitan's names of modules."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        x = self.tok_embeddings(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits = self.lm_head(self.norm(self.layers(x, mask=mask, is_causal=True)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def text() -> Tensor:
    """Return the source of torch.nn as bytes."""
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3, help="rate of the hidden matrices, a fourth of the others'")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Decoder(args.width, args.depth)
    optimizer_config = cosmos(lr=args.lr, adam_lr=4 * args.lr, weight_decay=0.1)
    schedule_config = LRSchedulersContainer.Config(warmup_steps=5)
    optimizers = optimizer_config.build(model_parts=[model])  # one optimizer for each part of a pipeline
    print(plan(optimizers.optimizers[0]))  # before the schedule, which lowers the rates for the warm-up
    schedules = schedule_config.build(optimizers=optimizers, training_steps=args.steps)

    data, generator, losses = text(), torch.Generator().manual_seed(0), []
    for step in range(args.steps):
        tokens = data[torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator) + torch.arange(LENGTH)]
        optimizers.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizers.step()
        schedules.step()
        losses.append(loss.item())
        if step % 10 == 0 or step + 1 == args.steps:
            print(f"step {step:4d}   loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
