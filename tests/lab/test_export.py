"""Exported folders load in transformers and compute the same function."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.data import write_shard
from cosmos_lab.data.prepare import Settings, prepare
from cosmos_lab.models import Decoder, build
from cosmos_lab.run.build import load_source
from cosmos_lab.run.checkpoint import load_trained
from cosmos_lab.run.evaluate import evaluate
from cosmos_lab.run.export import (
    export_model,
    export_run,
    exported_name,
    exported_state,
    find_tokenizer,
    loading_code,
    model_type,
)
from cosmos_lab.run.train import train
from tests.lab.conftest import tiny_config

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here: pip install transformers")
Tokenizer = pytest.importorskip("tokenizers").Tokenizer

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
            assert exported_name(name, model_type(model.config))
    return model


def load(directory: Path) -> torch.nn.Module:
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
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
    same_logits(model, load(export_model(model, tmp_path / "out")), LOGITS_TOL)


@pytest.mark.parametrize("changes", [{}, {"bias": False, "tied": False, "activation": "relu2", "rope_theta": 300.0}])
def test_an_exported_gpt2_gives_the_same_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    model = spread_weights(build("gpt2-small", width=128, depth=2, mlp=344, vocab_size=512, **changes))
    other = load(export_model(model, tmp_path / "out"))
    assert type(other).__name__ == "Starcoder2ForCausalLM"
    same_logits(model, other, LOGITS_TOL)


def test_state_names_are_exactly_those_of_transformers() -> None:
    model = build("tiny")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=2
    )
    expected = {name: value.shape for name, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    assert {name: value.shape for name, value in exported_state(model).items()} == expected


def test_bf16_export_is_half_the_size_and_close(tmp_path: Path) -> None:
    model = spread_weights(build("tiny"))
    full, half = export_model(model, tmp_path / "a"), export_model(model, tmp_path / "b", dtype=torch.bfloat16)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (full, half)]
    assert sizes[1] < 0.51 * sizes[0]
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"
    same_logits(model, load(half), BF16_TOL)


def test_without_safetensors_a_bin_file_replaces_the_older_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(build("tiny"), tmp_path)
    model = spread_weights(build("tiny"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.torch", None)
        export_model(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]
    same_logits(model, load(tmp_path), LOGITS_TOL)


def test_the_tokenizer_is_exported_with_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "tok.json"
    source.write_text(json.dumps(TOKENIZER))
    out = export_model(build("tiny"), tmp_path / "out", source)
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
        export_model(build("tiny"), tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", ["nanogpt-124m-record4", "nanogpt-124m-record5", "nanogpt-350m-plain"])
def test_other_architectures_are_refused_before_anything_is_written(tmp_path: Path, preset: str) -> None:
    model = build(preset, width=128, depth=1, mlp=64, vocab_size=64)
    with pytest.raises(ValueError, match=r"transformers has no class .*only the llama-\*, tiny and gpt2-\* presets"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_the_older_export_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build("tiny")
    export_model(first, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="free some space .*, or choose .*an older export there is untouched"):
        export_model(spread_weights(build("tiny")), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_full_disk_is_one_line_that_names_the_folder(
    tmp_path: Path, safetensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource", reason="Windows has no limit on the size of files")
    if not safetensors:
        monkeypatch.setitem(sys.modules, "safetensors", None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="cannot write .*out: .*an older export there is untouched") as error:
            export_model(build("tiny"), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").iterdir())


def test_a_full_disk_is_named_if_safetensors_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors")

    def full_disk(*args: object, **kwargs: object) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="no space left on the disk; free some space"):
        export_model(build("tiny"), tmp_path / "out")


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
def test_whoever_may_read_an_exported_config_may_read_its_weights(tmp_path: Path) -> None:
    export_model(build("tiny"), tmp_path)
    config, weights = ((tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors"))
    assert config == weights


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Train a run with checkpoints at steps 2 and 4 on text prepared with an own tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    text = " ".join(f"The number {i} is followed by {i + 1}." for i in range(3000))
    (folder / "book.txt").write_text(text)
    made = prepare([str(folder / "book.txt")], folder / "data", "train:300", Settings())
    config = tiny_config(folder, str(made.spec)).replace(vocab_size=None, steps=4, checkpoint_every=2)
    train(config)
    return config


@pytest.mark.slow
def test_an_exported_run_has_its_own_tokenizer_and_length_and_the_code_shown_generates(
    prepared: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(prepared.folder), "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == prepared.data.seq_len
    own = Path(f"{prepared.data.data}.tokenizer.json")
    assert (out / "tokenizer.json").read_bytes() == own.read_bytes()
    code = shown.out.partition("\n\n")[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = Tokenizer.from_file(str(own)).encode("The number 7", add_special_tokens=False).ids
    assert tokenizer("The number 7")["input_ids"] == ids


def test_a_step_can_be_exported_and_evaluated(
    prepared: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(prepared.folder, tmp_path, step=2)
    same_logits(load_trained(prepared.folder, 2).model, load(tmp_path), LOGITS_TOL)
    losses = {step: evaluate(prepared.folder, step=step, tokens=64, device="cpu") for step in (2, 4, None)}
    assert [result["step"] for result in losses.values()] == [2, 4, 4]
    assert losses[2]["val_loss"] != losses[4]["val_loss"] == losses[None]["val_loss"]
    for command in ("export", "evaluate"):
        assert main([command, str(prepared.folder), "--step", "3"]) == 2
        assert "has no checkpoint of --step 3; it has 2, 4" in capsys.readouterr().err


@pytest.mark.slow
def test_the_embedded_tokenizer_is_found(tmp_path: Path) -> None:
    config = RunConfig().replace(data="embedded", cache_dir=str(tmp_path))
    source = load_source(config, "train")
    tokenizer = Tokenizer.from_file(str(find_tokenizer(config, source.fingerprint)))
    ids = source.read(0, int(source.documents[1]) - 1).tolist()  # the first document without its end
    assert len(ids) > 100 and tokenizer.encode(tokenizer.decode(ids)).ids == ids


@pytest.mark.parametrize("damage", ["data", "tokenizer", "record", "missing"])
def test_a_tokenizer_that_may_be_wrong_is_never_taken(prepared: RunConfig, tmp_path: Path, damage: str) -> None:
    """The weights are exported, and one line says why the tokenizer is not, and how to give one."""
    data = shutil.copytree(Path(prepared.data.data).parent, tmp_path / "data")
    run = shutil.copytree(prepared.folder, tmp_path / "run")
    prefix = Path(prepared.data.data).name
    about = json.loads((run / "config.json").read_text())
    about["config"]["data"] = str(data / prefix)
    (run / "config.json").write_text(json.dumps(about))
    shard = next(data.glob(f"{prefix}_train*.bin"))
    tokenizer, record = data / f"{prefix}.tokenizer.json", data / f"{prefix}.json"
    if damage == "data":
        write_shard(shard, np.arange(300).repeat(100))
    elif damage == "tokenizer":
        tokenizer.write_text(json.dumps(TOKENIZER))
    elif damage == "record":
        record.write_text(json.dumps({**json.loads(record.read_text()), "plan": None}))
    else:
        tokenizer.unlink()
    with pytest.warns(UserWarning, match="^exported without a tokenizer: .*--tokenizer takes the path") as notes:
        assert main(["export", str(run), "-o", str(tmp_path / "out")]) == 0
    assert len(notes) == 1 and "\n" not in str(notes[0].message)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.slow
def test_the_code_shown_without_a_tokenizer_runs(prepared: RunConfig, tmp_path: Path) -> None:
    code = loading_code(export_model(load_trained(prepared.folder).model, tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) > 1
