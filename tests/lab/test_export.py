"""Exported folders load in transformers and compute the same function."""

import json
import sys
from pathlib import Path

import pytest
import torch

from cosmos_lab.models import Decoder, build
from cosmos_lab.run.export import export_llama, llama_name, llama_state

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here: pip install transformers")

LOGITS_TOL = 1e-5  # two fp32 implementations of one function; sums are taken in another order
BF16_TOL = 2e-2  # weights rounded to 8 bits on the way
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 1,
            "content": "</s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }  # fmt: skip
    ],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1, "hello": 2}, "unk_token": "<unk>"},
}


def spread_weights(model: Decoder) -> Decoder:
    """Make norms differ from one and attention from uniform, so that a swapped or dropped weight shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5 if parameter.ndim == 1 else parameter * 4)
            assert llama_name(name)
    return model


def load(directory: Path) -> torch.nn.Module:
    model, notes = transformers.LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    return model.float().eval()


def same_logits(model: Decoder, other: torch.nn.Module, tol: float) -> None:
    tokens = torch.randint(0, model.config.vocab_size, (2, 48))
    with torch.no_grad():
        ours, theirs = model(tokens), other(tokens).logits
    assert ours.std() > 0.1  # logits that say something
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tol * float(theirs.abs().max()))


@pytest.mark.parametrize("changes", [{}, {"tied": True, "mlp": 85, "rope_theta": 300.0, "norm_eps": 1e-3}])
def test_exported_checkpoint_gives_the_same_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    model = spread_weights(build("tiny", **changes))
    same_logits(model, load(export_llama(model, tmp_path / "out")), LOGITS_TOL)


def test_state_names_are_exactly_those_of_transformers() -> None:
    model = build("tiny")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=2
    )
    expected = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    assert {name: value.shape for name, value in llama_state(model).items()} == expected


def test_bf16_export_is_half_the_size_and_close(tmp_path: Path) -> None:
    model = spread_weights(build("tiny"))
    full, half = export_llama(model, tmp_path / "a"), export_llama(model, tmp_path / "b", dtype=torch.bfloat16)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (full, half)]
    assert sizes[1] < 0.51 * sizes[0]
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"
    same_logits(model, load(half), BF16_TOL)


def test_without_safetensors_a_bin_file_replaces_the_older_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_llama(build("tiny"), tmp_path)
    model = spread_weights(build("tiny"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        export_llama(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]
    same_logits(model, load(tmp_path), LOGITS_TOL)


def test_the_tokenizer_is_exported_with_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "tok.json"
    source.write_text(json.dumps(TOKENIZER))
    out = export_llama(build("tiny"), tmp_path / "out", source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("hello </s>")["input_ids"] == [2, 1]
    assert tokenizer.eos_token == "</s>"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 1


@pytest.mark.parametrize("text", ["not json", "[]", None])
def test_a_bad_tokenizer_is_named_and_nothing_is_written(tmp_path: Path, text: str | None) -> None:
    source = tmp_path / "tok.json"
    if text is not None:
        source.write_text(text)
    with pytest.raises(ValueError, match=r"tok\.json is not a readable tokenizer\.json"):
        export_llama(build("tiny"), tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", ["gpt2-small", "nanogpt-124m-record4"])
def test_other_architectures_are_refused_before_anything_is_written(tmp_path: Path, preset: str) -> None:
    model = build(preset, width=64, depth=1, mlp=64, vocab_size=64)
    with pytest.raises(ValueError, match="is not a LLaMA; only the llama-\\* and tiny presets"):
        export_llama(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_the_older_export_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build("tiny")
    export_llama(first, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_llama(spread_weights(build("tiny")), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
