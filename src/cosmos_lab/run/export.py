"""Write a trained model as a folder that transformers' AutoModelForCausalLM.from_pretrained loads.

LLaMAs become LlamaForCausalLM. GPT-2s have rotary positions here, so they become Starcoder2ForCausalLM, which computes
the same function: layer norm, biases, plain MLP, rotary positions. Nothing in transformers computes modded-NanoGPT.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_lab.config import RunConfig
from cosmos_lab.data.encode import END_TOKENS
from cosmos_lab.data.locate import split_name
from cosmos_lab.io import disk_error, first_line, read_json
from cosmos_lab.models import Decoder, ModelConfig
from cosmos_lab.run import build
from cosmos_lab.run.checkpoint import load_trained
from cosmos_lab.run.run_folder import read_config

_MLP = {
    "llama": {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "starcoder2": {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
}
_IN_BLOCK = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
}  # fmt: skip
_OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "gelu-erf": "gelu", "relu2": "relu2"}
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_END_TOKENS = (*END_TOKENS, "[EOS]")  # how tokenizers mark the end of a document; the first found counts
_ADVICE = "choose another folder with -o; an older export there is untouched"


def model_type(config: ModelConfig) -> str:
    """Return the architecture in transformers that computes the same function; a ValueError if there is none."""
    if config.is_llama:
        return "llama"
    changed = config.qk_norm or config.embed_norm or config.scaled_attention
    if config.norm == "layer" and config.activation in _ACTIVATIONS and not changed:
        return "starcoder2"
    raise ValueError(
        f"export: transformers has no class for a model with norm={config.norm!r}, activation={config.activation!r}, "
        f"qk_norm={config.qk_norm}, scaled_attention={config.scaled_attention}; only the llama-*, tiny and gpt2-* "
        "presets can be exported"
    )


def exported_name(name: str, kind: str) -> str:
    """Return the name in transformers of one of our parameters; ``kind`` is the model type.

    >>> exported_name("blocks.3.attn.q.weight", "llama"), exported_name("blocks.0.mlp.up.bias", "starcoder2")
    ('model.layers.3.self_attn.q_proj.weight', 'model.layers.0.mlp.c_fc.bias')
    """
    module, _, last = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{last}"
    _, layer, rest = module.split(".", 2)
    return f"model.layers.{layer}.{(_IN_BLOCK | _MLP[kind])[rest]}.{last}"


def exported_state(model: Decoder) -> dict[str, Tensor]:
    """Return the model's parameters under the names of transformers (not copied)."""
    kind = model_type(model.config)
    return {exported_name(name, kind): parameter.detach() for name, parameter in model.named_parameters()}


def exported_config(
    config: ModelConfig, positions: int, dtype: torch.dtype = torch.float32, end_token: int | None = None
) -> dict[str, Any]:
    """Return the content of config.json; ``positions`` is the length of the context."""
    kind = model_type(config)
    families: dict[str, dict[str, Any]] = {
        "llama": {
            "architectures": ["LlamaForCausalLM"], "head_dim": config.head_dim, "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps, "attention_bias": False, "mlp_bias": False,
        },
        "starcoder2": {
            "architectures": ["Starcoder2ForCausalLM"], "hidden_act": _ACTIVATIONS.get(config.activation),
            "norm_epsilon": config.norm_eps, "use_bias": config.bias, "sliding_window": None,
        },
    }  # fmt: skip
    return {
        **families[kind],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": positions,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": end_token,
        "pad_token_id": None,
    }


def export_run(
    run: str | Path, directory: str | Path, *, tokenizer: str | Path | None = None, step: int | None = None
) -> str:
    """Export the newest checkpoint of a run, or that of ``step``; return Python code that loads and generates.

    ``tokenizer`` is the tokenizer.json to put beside the weights (None: that of the data it was trained on; a warning
    says if it is not found).
    """
    trained = load_trained(Path(run), step)
    if tokenizer is None:
        try:
            tokenizer = find_tokenizer(read_config(Path(run)), trained.conditions.get("data"))
        except (ValueError, OSError) as error:
            why = f"exported without a tokenizer: {first_line(error)}; --tokenizer takes the path of a tokenizer.json"
            warnings.warn(why, stacklevel=2)
    return loading_code(export_model(trained.model, directory, tokenizer, positions=trained.conditions.get("seq_len")))


def find_tokenizer(config: RunConfig, fingerprint: str | None) -> Path:
    """Return the tokenizer.json of a run's data, or raise a ValueError that says why none is surely the right one.

    The data must still be what the run was trained on (``fingerprint``), and the file the one that made the data.
    """
    source = build.load_source(config, "train")
    if source.fingerprint != fingerprint:
        raise ValueError(
            f"data {config.data.data!r} has changed since the run was trained on it (its hash was {fingerprint}, and "
            f"is {source.fingerprint} now), so its tokenizer may be another one"
        )
    shard = source.shards[0].path
    if config.data.data == "embedded":
        return shard.with_name("tokenizer.json")
    record = shard.with_name(f"{split_name(shard).prefix}.json")
    path = record.with_suffix(".tokenizer.json")
    if not path.is_file():
        raise ValueError(f"there is no {path} beside the data")
    made_with = ((read_json(record) or {}).get("plan") or {}).get("tokenizer")
    if hashlib.sha256(path.read_bytes()).hexdigest() != made_with:
        raise ValueError(f"{path} is not the tokenizer that {record.name} says the data was made with")
    return path


def export_model(
    model: Decoder, directory: str | Path, tokenizer_path: str | Path | None = None,
    *, positions: int | None = None, dtype: torch.dtype = torch.float32,
) -> Path:  # fmt: skip
    """Write config.json, the weights (safetensors, or pytorch_model.bin if that package is missing) and tokenizer.

    Every file is written to a scratch folder and then moved, so that a full disk leaves an older export whole.
    ``tokenizer_path`` is a tokenizer.json to put beside the weights, ``positions`` the length of the context (None: the
    model's).
    """
    length = positions or model.config.max_seq_len
    tokenizer, end = (None, None) if tokenizer_path is None else _read_tokenizer(Path(tokenizer_path))
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in exported_state(model).items()}
    about = exported_config(model.config, length, dtype, end and end[1])
    files: dict[str, str] = {"config.json": json.dumps(about, indent=2)}
    if tokenizer is not None:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length,
            "model_input_names": ["input_ids", "attention_mask"], **({"eos_token": end[0]} if end else {}),
        }  # fmt: skip
        files["tokenizer.json"] = tokenizer
        files["tokenizer_config.json"] = json.dumps(settings, indent=2)
    target = Path(directory)
    try:
        _write(target, tensors, files)
    except (OSError, RuntimeError) as error:  # torch reports a short write as a RuntimeError
        causes = [cause for cause in (error, error.__context__) if isinstance(cause, OSError)]
        raise disk_error((causes or [OSError(errno.EIO, first_line(error))])[0], target, _ADVICE) from error
    return target


def _write(target: Path, tensors: dict[str, Tensor], files: dict[str, str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".export-") as scratch:
        weights = _save_weights(tensors, Path(scratch))
        for name, text in files.items():
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        shutil.copymode(Path(scratch) / "config.json", Path(scratch) / weights)  # safetensors lets only the owner read
        # config.json last: a reader who sees it finds its weights.
        for name in [weights, *sorted(set(files) - {"config.json"}), "config.json"]:
            os.replace(Path(scratch) / name, target / name)
        # Of an older export: transformers would read the wrong one.
        for stale in {*_WEIGHTS, "tokenizer.json", "tokenizer_config.json"} - {weights, *files}:
            (target / stale).unlink(missing_ok=True)


def loading_code(folder: Path) -> str:
    """Return Python code that loads an exported folder and generates some tokens."""
    place = repr(str(folder))
    code = ["from transformers import AutoModelForCausalLM", f"model = AutoModelForCausalLM.from_pretrained({place})"]
    if not (folder / "tokenizer.json").is_file():
        first = "model.generate(torch.tensor([[0]]), max_new_tokens=20, do_sample=True)"
        return "\n".join(["import torch", *code, f"print({first}[0].tolist())  # token ids"])
    return "\n".join([
        code[0] + ", AutoTokenizer", *code[1:], f"tokenizer = AutoTokenizer.from_pretrained({place})",
        'prompt = tokenizer("The", return_tensors="pt", add_special_tokens=False)',
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=True)[0]))",
    ])  # fmt: skip


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
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        with open(folder / _WEIGHTS[1], "xb") as out:
            torch.save(tensors, out)
        return _WEIGHTS[1]
    try:
        save_file(tensors, folder / _WEIGHTS[0], metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, first_line(error)) from error
    return _WEIGHTS[0]
