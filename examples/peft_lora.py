"""Fine-tune with LoRA (PEFT): `python examples/peft_lora.py`.

A tiny LLaMA first learns the source of torch.nn, as a stand-in for a pre-trained model. Then its weights are frozen,
and LoRA adapters learn another kind of text, the prose of Python's help pages. Build the optimizer after
`get_peft_model`: it takes what has `requires_grad`, so it holds the adapters alone. Their matrices get COSMOS.
"""

from __future__ import annotations

import argparse
import pydoc_data
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from cosmos_optim import Cosmos, plan

LENGTH, BATCH = 64, 16


def text(*files: Path) -> Tensor:
    """Return files as bytes."""
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def train(model: nn.Module, opt: Cosmos, data: Tensor, steps: int) -> list[float]:
    """Train on random pieces of the text, and return the losses."""
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        tokens = data[torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator) + torch.arange(LENGTH)]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step + 1 == steps:
            print(f"step {step:4d}   loss {losses[-1]:.3f}")
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    """Pre-train, fine-tune, and return the losses of the second part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--base-steps", type=int, default=30, help="steps that train the base model")
    parser.add_argument("--steps", type=int, default=30, help="steps of fine-tuning")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=3e-3, help="rate of the adapters")
    parser.add_argument("--adapters", help="folder to save the adapters in")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    shape = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=2, max_position_embeddings=LENGTH, **shape))
    code = text(*sorted(Path(nn.__file__).parent.glob("modules/*.py")))
    print("the base model, on code:")
    train(base, Cosmos(base, lr=1e-3, adam_lr=4e-3), code, args.base_steps)

    model = get_peft_model(base, LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    opt = Cosmos(model, lr=args.lr, gamma=0.5)  # for a large model start at lr=1e-3
    print("the adapters, on prose:")
    print(plan(opt))
    losses = train(model, opt, text(Path(pydoc_data.__file__).parent / "topics.py"), args.steps)
    if args.adapters:
        model.save_pretrained(args.adapters)
    return losses


if __name__ == "__main__":
    main()
