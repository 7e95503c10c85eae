"""The Python blocks of docs/frameworks.md run, each with a small model and data."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.helpers import examples, tiny_llama, tokens
from tests.integrations.torchvision_stub import import_timm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
NEEDS = {
    "Rates": (), "transformers": ("accelerate",), "TRL and PEFT": ("trl", "peft"),
    "Other frameworks on top of transformers": ("accelerate",), "accelerate": ("accelerate",),
    "Lightning": ("lightning",), "torchtitan": ("torchtitan",), "timm": ("timm",), "litgpt": ("litgpt",),
    "torchtune": ("torchtune",), "Megatron-LM": ("megatron",),
}  # fmt: skip


def blocks() -> dict[str, list[str]]:
    """Return the Python blocks of each section, padded so that tracebacks show the page's line numbers."""
    text = PAGE.read_text()
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        section = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)[-1]
        found.setdefault(section, []).append("\n" * text[: match.start(1)].count("\n") + match[1])
    return found


def names(section: str) -> dict[str, Any]:
    """Return what a section's blocks take as given."""
    model = tiny_llama()
    given: dict[str, Any] = {"model": model, "dataset": examples(), "__name__": "page"}
    if section == "TRL and PEFT":
        from datasets import Dataset

        from tests.integrations.test_trl import tokenizer

        rows = [" ".join(map(str, row)) for row in tokens().tolist()]
        given |= {"texts": Dataset.from_dict({"text": rows}), "tokenizer": tokenizer()}
    if section == "Lightning":
        given["batches"] = torch.utils.data.DataLoader(tokens(), batch_size=4)  # type: ignore[arg-type]
    if section == "timm":
        timm = import_timm()
        given["image_model"] = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2)
    return given


def test_every_section_with_code_is_tested() -> None:
    assert set(blocks()) == set(NEEDS)


@pytest.mark.parametrize("section", NEEDS)
def test_the_code_of_a_section_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name in NEEDS[section] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"could not import {missing}")
    monkeypatch.chdir(tmp_path)
    if section == "TRL and PEFT":
        import trl

        monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, bf16=False, use_cpu=True))  # it expects a GPU
    if section == "litgpt":
        import litgpt.pretrain

        monkeypatch.setattr(litgpt.pretrain, "GPT", litgpt.pretrain.GPT)  # the block replaces it; restored after
    space = names(section)
    for code in blocks()[section]:
        exec(compile(code, str(PAGE), "exec"), space)
    if section == "torchtune":
        shape = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32}
        space["marked_llama3"](**shape, max_seq_len=8, intermediate_dim=48)
