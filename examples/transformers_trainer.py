"""Train a small LLaMA with transformers' Trainer: `python examples/transformers_trainer.py` (needs accelerate too).

Only `optimizer_cls_and_kwargs` is specific to COSMOS. The Trainer builds the optimizer when the model is ready, saves
it with its checkpoints, and continues from them: `--output folder --resume`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cosmos_optim import plan
from cosmos_optim.integrations.transformers import CosmosFactory

LENGTH = 64


def rows() -> list[dict[str, torch.Tensor]]:
    """Return the source of torch.nn as sequences of bytes; transformers shifts the labels itself."""
    files = sorted(Path(nn.__file__).parent.glob("modules/*.py"))
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main(argv: list[str] | None = None) -> list[float]:
    """Train, and return the logged losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3, help="rate of the hidden matrices")
    parser.add_argument("--output", help="folder for checkpoints; by default none are kept")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    shape = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": args.depth}
    config = LlamaConfig(vocab_size=256, num_attention_heads=2, max_position_embeddings=LENGTH, **shape)
    model = LlamaForCausalLM(config)

    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            args.output or scratch,
            learning_rate=args.lr,
            weight_decay=0.1,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            max_steps=args.steps,
            per_device_train_batch_size=16,
            logging_steps=10,
            save_steps=20,
            save_strategy="steps" if args.output else "no",
            report_to=[],
        )
        adam_lr = 16 * args.lr  # of embedding, head and norms: high, because this trains from scratch
        print(plan(model, lr=settings.learning_rate, adam_lr=adam_lr, weight_decay=settings.weight_decay))
        trainer = Trainer(
            model,
            settings,
            train_dataset=rows(),  # type: ignore[arg-type]
            # More entries of the dict are more arguments of Cosmos.
            optimizer_cls_and_kwargs=(CosmosFactory, {"args": settings, "adam_lr": adam_lr}),
        )
        trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses:", " ".join(f"{loss:.3f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
