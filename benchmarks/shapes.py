"""The shapes of the parameters of the paper's LLaMA models. A matrix is (out, in)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_lab.models import PRESETS


@dataclass(frozen=True)
class Llama:
    """A decoder with four width x width matrices, gate and up (mlp x width) and down (width x mlp) in each layer."""

    width: int
    mlp: int
    depth: int
    vocab: int

    def matrices(self) -> list[tuple[int, int]]:
        """Return the shapes of the hidden matrices, (out, in)."""
        d, f = self.width, self.mlp
        return [(d, d), (d, d), (d, d), (d, d), (f, d), (f, d), (d, f)] * self.depth

    def others(self) -> list[tuple[int, ...]]:
        """Return the shapes of embedding, head and norms."""
        return [(self.vocab, self.width), (self.vocab, self.width), *[(self.width,)] * (2 * self.depth + 1)]


def preset(name: str) -> Llama:
    """Return the shapes of a preset of the lab."""
    c = PRESETS[name]
    return Llama(c.width, c.mlp, c.depth, c.vocab_size)


MODELS = {name: preset(name) for name in ("llama-60m", "llama-130m", "llama-350m", "llama-1b", "tiny")}


def parameters(model: Llama, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return (hidden matrices, others) with random values and gradients, equal in every call."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: tuple[int, ...]) -> Tensor:
        p = torch.randn(shape, generator=generator, device=device).mul_(0.02).to(dtype).requires_grad_()
        p.grad = torch.randn(shape, generator=generator, device=device).mul_(1e-3).to(dtype)
        return p

    return [draw(s) for s in model.matrices()], [draw(s) for s in model.others()]
