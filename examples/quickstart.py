"""Train a character model on the text of this file with Cosmos or AdamW: `python examples/quickstart.py [adamw]`."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from cosmos_optim import Cosmos, param_groups, plan

CONTEXT, WIDTH, BATCH, STEPS = 16, 64, 64, 100


class CharacterModel(nn.Module):
    """A model that predicts the next character from the last `CONTEXT` characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.mix = nn.Linear(CONTEXT * WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, vocabulary) of the character after tokens (batch, CONTEXT)."""
        x = self.mix(self.embed(tokens).flatten(1))
        return self.head(self.down(nn.functional.gelu(self.norm(x))))


def build_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Return AdamW or Cosmos; only the constructor differs."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1.6e-2, betas=(0.9, 0.98))  # the best of five rates
    print(plan(model, lr=1e-3, adam_lr=1.6e-2))  # rule, rate and memory of each parameter
    return Cosmos(param_groups(model), lr=1e-3, adam_lr=1.6e-2)


def main(name: str = "cosmos") -> float:
    """Train and return the mean loss of the last ten steps."""
    torch.manual_seed(0)
    text = Path(__file__).read_text()
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    model = CharacterModel(len(letters))
    opt = build_optimizer(model, name)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, STEPS)
    losses = []
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1))
        window = tokens[starts + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"{name}  step {step:4d}  loss {sum(losses[-10:]) / 10:.3f}")
    return sum(losses[-10:]) / 10


if __name__ == "__main__":
    main(*sys.argv[1:2])
