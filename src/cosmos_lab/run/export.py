"""Write a trained LLaMA preset as a folder that transformers' LlamaForCausalLM.from_pretrained loads."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_lab.data.encode import END_TOKENS
from cosmos_lab.models import Decoder, ModelConfig

_IN_BLOCK = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_END_TOKENS = (*END_TOKENS, "[EOS]")  # how tokenizers mark the end of a document; the first found counts


def llama_name(name: str) -> str:
    """Return the name in LlamaForCausalLM of one of our parameters.

    >>> llama_name("blocks.3.attn.q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_IN_BLOCK[rest.removesuffix('.weight')]}.weight"


def llama_state(model: Decoder) -> dict[str, Tensor]:
    """Return the model's parameters under LlamaForCausalLM's names (not copied)."""
    _check_llama(model.config)
    return {llama_name(name): parameter.detach() for name, parameter in model.named_parameters()}


def llama_config(
    config: ModelConfig, dtype: torch.dtype = torch.float32, end_token: int | None = None
) -> dict[str, Any]:
    """Return the content of config.json."""
    _check_llama(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_seq_len,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,
    }


def export_llama(
    model: Decoder, directory: str | Path, tokenizer_path: str | Path | None = None,
    *, dtype: torch.dtype = torch.float32,
) -> Path:  # fmt: skip
    """Write config.json, the weights (safetensors, or pytorch_model.bin if that package is missing) and tokenizer.

    Every file is written to a scratch folder and then moved, so that a full disk leaves an older export whole.
    ``tokenizer_path`` is a tokenizer.json to put beside the weights.
    """
    tokenizer, end = (None, None) if tokenizer_path is None else _read_tokenizer(Path(tokenizer_path))
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in llama_state(model).items()}
    files: dict[str, str] = {"config.json": json.dumps(llama_config(model.config, dtype, end and end[1]), indent=2)}
    if tokenizer is not None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.config.max_seq_len}
        files["tokenizer.json"] = tokenizer
        files["tokenizer_config.json"] = json.dumps(settings | ({"eos_token": end[0]} if end else {}), indent=2)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as scratch:
        weights = _save_weights(tensors, Path(scratch))
        for name, text in files.items():
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        # config.json last: a reader who sees it finds its weights.
        for name in [weights, *sorted(set(files) - {"config.json"}), "config.json"]:
            os.replace(Path(scratch) / name, target / name)
        for stale in set(_WEIGHTS) - {weights}:  # of an older export: transformers would read the wrong one
            (target / stale).unlink(missing_ok=True)
    return target


def _check_llama(config: ModelConfig) -> None:
    if not config.is_llama:
        raise ValueError(
            f"export: a model with norm={config.norm!r}, activation={config.activation!r}, bias={config.bias}, "
            f"qk_norm={config.qk_norm} is not a LLaMA; only the llama-* and tiny presets can be exported"
        )


def _read_tokenizer(path: Path) -> tuple[str, tuple[str, int] | None]:
    """Return the text of a tokenizer.json, and its end-of-document token with its id."""
    try:
        text = path.read_text(encoding="utf-8")
        added = json.loads(text).get("added_tokens", [])
        ids = {token["content"]: int(token["id"]) for token in added}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"export: {path} is not a readable tokenizer.json ({error}); give one or leave it out"
        ) from error
    return text, next(((name, ids[name]) for name in _END_TOKENS if name in ids), None)


def _save_weights(tensors: dict[str, Tensor], folder: Path) -> str:
    """Write the tensors into the folder and return the name of the file."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        torch.save(tensors, folder / _WEIGHTS[1])
        return _WEIGHTS[1]
    save_file(tensors, folder / _WEIGHTS[0], metadata={"format": "pt"})
    return _WEIGHTS[0]
