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
    # swiglu has gate, up and down matrices; the others up and down. gelu is the tanh form, gelu-erf the exact one.
    activation: Literal["swiglu", "gelu", "gelu-erf", "relu2"] = "swiglu"
    bias: bool = False  # of the linear layers, not the head
    qk_norm: bool = False  # RMS norm without weight on each head's query and key
    tied: bool = False  # the head uses the embedding's matrix
    embed_norm: bool = False  # RMS norm without weight right after the embedding
    scaled_attention: bool = False  # multiply the output of attention by 1 / sqrt(2 L)
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    # Matrices start from N(0, init_std²), or for n inputs from N(0, 1 / (3 n)), the variance of torch's nn.Linear.
    init: Literal["normal", "fan-in"] = "normal"
    init_std: float = 0.02
    embed_std: float | None = 0.02  # None: the embedding starts as the other matrices
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
        llama = (self.norm, self.activation, self.bias, self.qk_norm, self.embed_norm, self.scaled_attention)
        return llama == ("rms", "swiglu", False, False, False, False)


def _llama(width: int, depth: int, mlp: int, vocab_size: int = 32_000) -> ModelConfig:
    """LLaMA as in the paper's code base: RMS norm, SwiGLU, no bias, untied head, every matrix N(0, 0.02²)."""
    return ModelConfig(vocab_size, width, depth, mlp)


def _gpt2(width: int, depth: int) -> ModelConfig:
    """GPT-2 with rotary in place of learned positions, as the paper runs it on WikiText-103."""
    return ModelConfig(
        GPT2_VOCAB, width, depth, 4 * width,
        norm="layer", activation="gelu", bias=True, tied=True, norm_eps=1e-5, init_out="depth",
    )  # fmt: skip


def _nanogpt_record_4() -> ModelConfig:
    """Modded-NanoGPT, record 4 of its short track (records/track_1_short/2024-10-10_Muon).

    GPT-2 with rotary positions, bare RMS norm and no biases; attention is scaled by 1 / sqrt(2 L). Here the weights
    come from normal instead of uniform distributions of the same variance.
    """
    return ModelConfig(
        50_257, 768, 12, 3072, norm="rms-bare", activation="gelu-erf", scaled_attention=True, tied=True,
        init="fan-in", embed_std=None, residual_fp32=True,
    )  # fmt: skip


def _nanogpt_record_5() -> ModelConfig:
    """Modded-NanoGPT, record 5 of its short track (records/track_1_short/2024-10-14_ModernArch).

    Heads of 128 with QK norm, ReLU², output matrices that start at zero, a padded vocabulary. Weights as in record 4.
    """
    return ModelConfig(
        GPT2_VOCAB, 768, 12, 3072, head_dim=128, norm="rms-bare", activation="relu2", qk_norm=True, tied=True,
        norm_eps=2.0**-23, init="fan-in", embed_std=None, init_out="zero", residual_fp32=True,
    )  # fmt: skip


def _nanogpt_350m_plain() -> ModelConfig:
    """Return a plain decoder of 350M for the rates of modded-NanoGPT's medium track, not the model of that track.

    Record 2 of that track (records/track_2_medium/2025-01-18) has 16 layers with heads of 128, value embeddings, skip
    connections with learned weights, a layer without attention, rotary positions on half of each head, logits bounded
    by 15 and sliding windows within documents. Common to both are width, bare RMS norm, QK norm, ReLU², output
    matrices that start at zero, and an untied embedding that starts from N(0, 1) and is normalized.
    """
    return ModelConfig(
        GPT2_VOCAB, 1024, 24, 4096, norm="rms-bare", activation="relu2", qk_norm=True, init_out="zero",
        embed_norm=True, embed_std=1.0,
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
    "nanogpt-124m-record4": _nanogpt_record_4(),  # 124M
    "nanogpt-124m-record5": _nanogpt_record_5(),  # 124M
    "nanogpt-350m-plain": _nanogpt_350m_plain(),  # 353.5M without the input embedding
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
