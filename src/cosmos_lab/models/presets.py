"""Shapes of the decoders that the paper trains, and the small ones that tests and demos use.

Legend: d = width, L = depth, V = vocabulary, T = sequence length, h = heads of 64.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

GPT2_VOCAB = 50_304  # 50,257 ids, padded to a multiple of 128: an odd vocabulary quarters the speed of the head


@dataclass(frozen=True)
class ModelConfig:
    """One decoder: x = embed(tokens); x += attn(norm(x)); x += mlp(norm(x)) L times; logits = head(norm(x))."""

    vocab_size: int
    width: int
    depth: int
    mlp: int  # the inner size of the MLP
    head_dim: int = 64
    norm: Literal["rms", "rms-bare", "layer"] = "rms"  # with a weight; without; with weight and bias
    activation: Literal["swiglu", "gelu", "relu2"] = "swiglu"  # gate, up and down matrices; the others up and down
    bias: bool = False  # of the linear layers, not the head
    qk_norm: bool = False  # RMS norm without weight on each head's query and key
    tied: bool = False  # the head uses the embedding's matrix
    embed_norm: bool = False  # RMS norm without weight right after the embedding
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    init_std: float = 0.02
    embed_std: float = 0.02
    # The two matrices that write to the residual stream start as the others, with std / sqrt(2 L), or at zero.
    init_out: Literal["normal", "depth", "zero"] = "normal"
    residual_fp32: bool = False  # under autocast, keep the residual stream in fp32
    max_seq_len: int = 2048  # length of the rotary tables

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "depth", "mlp", "head_dim", "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model: {name} is {value!r}; give a positive integer")
        if self.width % self.head_dim:
            raise ValueError(f"model: width {self.width} is not a multiple of head_dim {self.head_dim}; change either")
        if self.head_dim % 2:
            raise ValueError(f"model: head_dim {self.head_dim} is odd; rotary positions need an even size")
        for name, hint in get_type_hints(ModelConfig).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"model: {name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(hint))}")

    @property
    def heads(self) -> int:
        """Return the number of attention heads, width / head_dim."""
        return self.width // self.head_dim

    @property
    def is_llama(self) -> bool:
        """Tell whether LLaMA's architecture (as transformers implements it) computes the same function."""
        llama = (self.norm, self.activation, self.bias, self.qk_norm, self.embed_norm)
        return llama == ("rms", "swiglu", False, False, False)


def _llama(width: int, depth: int, mlp: int, vocab_size: int = 32_000) -> ModelConfig:
    """LLaMA as in the paper's code base: RMS norm, SwiGLU, no bias, untied head, every matrix N(0, 0.02²)."""
    return ModelConfig(vocab_size, width, depth, mlp)


def _gpt2(width: int, depth: int) -> ModelConfig:
    """GPT-2 with rotary in place of learned positions, as the paper runs it on WikiText-103."""
    return ModelConfig(
        GPT2_VOCAB, width, depth, 4 * width,
        norm="layer", activation="gelu", bias=True, tied=True, norm_eps=1e-5, init_out="depth",
    )  # fmt: skip


def _nanogpt(width: int, depth: int, **changes: Any) -> ModelConfig:
    """Modded-NanoGPT of October 2024: bare RMS norm, QK norm, ReLU², output matrices start at zero.

    The speed-run of that month used heads of 128; head_dim=128 gives them.
    """
    return ModelConfig(
        GPT2_VOCAB, width, depth, 4 * width,
        norm="rms-bare", activation="relu2", qk_norm=True, init_out="zero", **changes,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "tiny": _llama(128, 2, 344, vocab_size=512),  # 0.5M, for tests
    "llama-10m": _llama(256, 8, 688, vocab_size=8192),  # 10.5M; 22.7M with 32,000 tokens
    "llama-60m": _llama(512, 8, 1376),  # 58M
    "llama-130m": _llama(768, 12, 3072),  # 162M; the paper's MLP is 4 d here, 8/3 d elsewhere
    "llama-350m": _llama(1024, 24, 2736),  # 368M
    "llama-350m-16l": _llama(1024, 16, 2736),  # 267M: the depth that the paper's text gives
    "llama-1b": _llama(2048, 24, 5461),  # 1,339M
    "gpt2-small": _gpt2(768, 12),  # 124M
    "gpt2-medium": _gpt2(1024, 24),  # 354M
    # One matrix for embedding and head, as in the speed-run until November 2024.
    "nanogpt-124m": _nanogpt(768, 12, tied=True),  # 124M
    # Untied with a normalized N(0, 1) embedding: the medium track trains the embedding at lr 0.3, the head at 0.003.
    # 353.5M without the input embedding. The track's own model has 16 layers and adds value embeddings and skips.
    "nanogpt-350m": _nanogpt(1024, 24, embed_norm=True, embed_std=1.0),
}


def resolve(name_or_config: str | ModelConfig, **overrides: Any) -> ModelConfig:
    """Return the named preset, or the given config, with some fields replaced.

    >>> resolve("llama-1b", vocab_size=32_100).vocab_size
    32100
    """
    config = PRESETS.get(name_or_config) if isinstance(name_or_config, str) else name_or_config
    if config is None:
        raise ValueError(f"model: no preset {name_or_config!r}; choose one of {', '.join(PRESETS)}")
    known = {field.name for field in fields(ModelConfig)}
    if unknown := sorted(set(overrides) - known):
        raise ValueError(f"model: no field {', '.join(unknown)}; the fields are {', '.join(sorted(known))}")
    return replace(config, **overrides)
