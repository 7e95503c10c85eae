"""Small models and gradients that the optimizer tests share."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cosmos_optim import OPTIMIZERS


class Decoder(nn.Module):
    """A small decoder with the usual shapes: embedding, tall and wide matrices, norm, biases, head."""

    def __init__(self, vocab: int = 32, width: int = 12, mlp: int = 20) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.lm_head(self.norm(h + self.down(self.up(h).relu())))


def small_rank(name: str, rank: int = 4) -> dict[str, int]:
    """Return a rank below the sides of these matrices, for the optimizers that have one."""
    return {"rank": rank} if "rank" in inspect.signature(OPTIMIZERS[name]).parameters else {}


def decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(seed)
    return Decoder().to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Return the loss on a batch that depends on the seed."""
    x = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(x).float().flatten(0, 1), ((3 * x + 1) % 32).flatten())


def backward(model: nn.Module, step: int) -> None:
    """Compute the gradients of one batch."""
    model.zero_grad()
    loss_of(model, step).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on these batches, one step each, so that a run can be cut and continued."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of every parameter and state tensor."""
    held = [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state.values():
        held += [value.clone() for value in state.values()]
    return held


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def resumes_bit_for_bit(build: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]], by: str) -> bool:
    """Return whether a run that is saved and loaded after three steps ends as an unbroken one.

    build: seed -> a model and its optimizer.
    by: "state_dict" into a new pair of another seed, or "pickle".
    """
    ends = []
    for is_resumed in (False, True):
        model, optimizer = build(0)
        train(model, optimizer, range(3))
        if is_resumed and by == "pickle":
            model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
        elif is_resumed:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = build(1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, range(3, 6))
        ends.append(snapshot(model, optimizer))
    return same(*ends)


def matrix(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + step)).to(dtype)
