"""Train a small decoder with Lightning's Trainer: `python examples/lightning_gpt.py`.

Only `configure_optimizers` is specific to COSMOS: `configure` makes the optimizer and steps the schedule after every
batch. Checkpoints are Lightning's: run with `--checkpoints folder`, then again with `--resume folder/last.ckpt` and
more `--steps` to continue. The schedule then follows the new number of steps.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from cosmos_optim import plan
from cosmos_optim.integrations.lightning import configure

LENGTH = 64


class Decoder(lightning.LightningModule):
    """A decoder over bytes, from torch's own layers."""

    def __init__(self, width: int, depth: int, lr: float, steps: int) -> None:
        super().__init__()
        self.options, self.steps, self.losses = {"lr": lr, "weight_decay": 0.1}, steps, []
        self.embed = nn.Embedding(256, width)
        self.positions = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """Return the mean loss of the next byte."""
        x = self.embed(tokens[:, :-1]) + self.positions.weight[: tokens.shape[1] - 1]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits = self.head(self.norm(self.layers(x, mask=mask, is_causal=True)))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.losses.append(loss.item())
        if index % 10 == 0:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            print(f"step {self.global_step:4d}   lr {rate:.2e}   loss {self.losses[-1]:.3f}")
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer, and a schedule that scales both of its rates at every step.

        `CosineAnnealingLR` would restore its old length from a checkpoint, and its rate would rise again.
        """

        def share(step: int) -> float:
            return 0.5 + 0.5 * math.cos(math.pi * step / self.steps)

        return configure(self, **self.options, schedule=lambda opt: LambdaLR(opt, share))


def batches() -> DataLoader[Tensor]:
    """Return the source of torch.nn as sequences of bytes."""
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    return DataLoader(text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH), batch_size=16, shuffle=True)  # type: ignore[arg-type]


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3, help="rate of the hidden matrices, a fourth of the others'")
    parser.add_argument("--checkpoints", help="folder for checkpoints; by default none are written")
    parser.add_argument("--resume", help="checkpoint to continue from")
    args = parser.parse_args(argv)

    lightning.seed_everything(0, verbose=False)
    module = Decoder(args.width, args.depth, args.lr, args.steps)
    print(plan(module, **module.options))
    keep = [ModelCheckpoint(args.checkpoints, save_last=True)] if args.checkpoints else []
    trainer = lightning.Trainer(
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=keep,
        enable_checkpointing=bool(keep),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(), ckpt_path=args.resume, weights_only=True)  # loads tensors and numbers, runs no code
    return module.losses


if __name__ == "__main__":
    main()
