"""One decoder for every preset: LLaMA, GPT-2 with rotary positions, modded-NanoGPT.

Legend: B = batch, T = sequence length, d = width, h = heads, D = head_dim, f = MLP size, V = vocabulary.
Parameters stay separate (q, k, v, gate, up: the optimizer treats each as a matrix) and in their master type; linear.py
makes the joined and aligned copies that the matrix products read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .linear import compute_dtype, joined_linear, output_linear
from .loss import linear_cross_entropy
from .presets import ModelConfig, resolve

# cuDNN's attention is the fastest that torch ships for Hopper and later, but not what torch chooses by itself.
HOPPER_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, computed in fp32 or wider, in the type of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split convention: the pair (x[i], x[i + D/2]) turns by t * theta^(-2i/D).

    Args: x is (B, T, h, D); cos and sin are (T, 1, D/2).
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Norm(nn.Module):
    """RMS norm with or without weight, or layer norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = None if config.norm == "rms-bare" else nn.Parameter(torch.ones(config.width))
        self.bias = nn.Parameter(torch.zeros(config.width)) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = None if self.weight is None else self.weight.to(wide)
        return F.layer_norm(x.to(wide), x.shape[-1:], weight, self.bias.to(wide), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Stored, not computed in forward: a compiler would otherwise compute it again for every activation. And
        # stored here, not handed from layer to layer: FSDP2 casts what a block is called with, but no buffers.
        for name in ("cos", "sin"):
            table = torch.empty(config.max_seq_len, 1, config.head_dim // 2)
            self.register_buffer(name, table, persistent=False)
        self.q, self.k, self.v, self.o = (nn.Linear(config.width, config.width, bias=config.bias) for _ in range(4))

    def fill_tables(self) -> None:
        """cos and sin of t theta^(-2i/D) for t < max_seq_len, i < D/2."""
        size = self.config.head_dim
        frequencies = self.config.rope_theta ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(self.config.max_seq_len).float(), frequencies)[:, None]
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.device, self.q.weight)
        shape = (*x.shape[:2], self.config.heads, self.config.head_dim)
        q, k, v = (part.view(shape) for part in joined_linear(x, (self.q, self.k, self.v), dtype))
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.config.qk_norm:
            q, k = rms_norm(q, None, self.config.norm_eps), rms_norm(k, None, self.config.norm_eps)
        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return output_linear(y.transpose(1, 2).reshape(x.shape), self.o, dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def on_hopper() -> bool:
    """Tell whether the current GPU is a Hopper or later (a constant for the compiler, which cannot ask)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(causal(q k' / sqrt(D))) v for (B, h, T, D) operands."""
    # The choice is made here, not around the training loop, so that a checkpointed block makes it again in backward.
    if on_hopper() and q.is_cuda:
        with sdpa_kernel(HOPPER_ATTENTION, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(f(up(x))) with f = gelu (tanh form or exact) or relu²."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = nn.Linear(config.width, config.mlp, bias=config.bias) if config.activation == "swiglu" else None
        self.up = nn.Linear(config.width, config.mlp, bias=config.bias)
        self.down = nn.Linear(config.mlp, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.device, self.up.weight)
        if self.gate is not None:
            gate, up = joined_linear(x, (self.gate, self.up), dtype)
            y = F.silu(gate) * up
        else:
            (up,) = joined_linear(x, (self.up,), dtype)
            form = "tanh" if self.activation == "gelu" else "none"
            y = F.relu(up).square() if self.activation == "relu2" else F.gelu(up, approximate=form)
        return output_linear(y, self.down, dtype)


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)): the unit of sharding, compilation and checkpointing."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(config), Attention(config)
        self.norm2, self.mlp = Norm(config), MLP(config)
        self.attn_scale = 1 / math.sqrt(2 * config.depth) if config.scaled_attention else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.attn(self.norm1(x)), alpha=self.attn_scale)
        x = x + self.mlp(self.norm2(x))
        return x


def _mean_loss(norm: Norm, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the loss from the output of the last block."""
    return linear_cross_entropy(norm(x).flatten(0, 1), weight, targets.flatten(), dtype)


class Decoder(nn.Module):
    """Decoder-only language model: model(tokens) are logits (B, T, V), model(tokens, targets) is the mean loss.

    >>> model = build("tiny")
    >>> tokens = torch.zeros(2, 8, dtype=torch.int64)
    >>> model(tokens).shape, model(tokens, tokens).shape
    (torch.Size([2, 8, 512]), torch.Size([]))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # True: keep only each block's input, compute the rest again in the backward pass
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = Norm(config)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self._loss = _mean_loss

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw every matrix as the config says, norms at one, biases at zero; fill the rotary tables."""
        config = self.config
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = config.init_std if config.init == "normal" else 1 / math.sqrt(3 * parameter.shape[-1])
            if name == "embed.weight" and config.embed_std is not None:
                std = config.embed_std
            if name.endswith((".o.weight", ".down.weight")):
                std = {"normal": std, "depth": std / math.sqrt(2 * config.depth), "zero": 0.0}[config.init_out]
            parameter.normal_(0.0, std, generator=generator)
        for module in self.modules():
            if isinstance(module, Attention):
                module.fill_tables()

    @property
    def head_weight(self) -> Tensor:
        """The (V, d) matrix that makes logits: the head's, or the embedding's if they are tied."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(
                f"model: {length} tokens in a sequence, but max_seq_len is {self.config.max_seq_len}; raise max_seq_len"
            )
        dtype = compute_dtype(tokens.device, self.head_weight)
        x = self.embed(tokens)
        x = x if self.config.residual_fp32 else x.to(dtype)
        if self.config.embed_norm:
            x = rms_norm(x, None, self.config.norm_eps)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if targets is None:
            return F.linear(self.norm(x).to(dtype), self.head_weight.to(dtype))
        return self._loss(self.norm, x, self.head_weight, targets, dtype)

    def compile_parts(self, *, dynamic: bool = False, backend: str = "inductor") -> None:
        """Compile one block, which serves for all of them, and the loss.

        Compiling the whole model takes many times as long, but saves a pass over the activations between two blocks.
        """
        for block in self.blocks:
            block.compile(dynamic=dynamic, backend=backend)
        self._loss = torch.compile(_mean_loss, dynamic=dynamic, backend=backend)

    def num_parameters(self, non_embedding: bool = False) -> int:
        """Count the parameters; with non_embedding, without the input embedding (unless it is the head too)."""
        total = sum(parameter.numel() for parameter in self.parameters())
        return total - self.embed.weight.numel() if non_embedding and self.head is not None else total

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one token's forward and backward pass: 6 P + 6 L d T.

        A matrix of P entries costs 2 P forward (multiply, add) and twice that backward (for its input and for itself).
        Attention forms q k' and p v against T keys, 2 T d operations each, half of them above the diagonal and not
        done: 2 T d forward, 4 T d backward, in each of L layers. Recomputation is not counted.
        """
        attention = 6 * self.config.depth * self.config.heads * self.config.head_dim * seq_len
        return float(6 * self.num_parameters(non_embedding=True) + attention)


def build(
    name_or_config: str | ModelConfig, *, device: torch.device | str = "cpu", generator: torch.Generator | None = None,
    **overrides: Any,
) -> Decoder:  # fmt: skip
    """Build a decoder from a preset's name or a config, with some fields replaced and weights drawn on `device`.

    >>> build("tiny", depth=1).config.depth
    1
    """
    with torch.device("meta"):  # so that weights are drawn once, where they will live
        model = Decoder(resolve(name_or_config, **overrides))
    model.to_empty(device=device)
    model.init_weights(generator)
    return model
