"""The Python blocks of docs/frameworks.md and docs/frameworks/ run, each with a small model and data."""

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

DOCS = Path(__file__).resolve().parents[2] / "docs"
# The packages that the code of a page needs, by the page and, if they differ, by its section.
NEEDS = {
    "frameworks": (), "frameworks/transformers": ("accelerate",), "frameworks/trl": ("trl", "peft"),
    "frameworks/accelerate": ("accelerate",), "frameworks/lightning": ("lightning",),
    "frameworks/torchtitan": ("torchtitan",), "frameworks/timm": ("timm",),
    "frameworks/litgpt-torchtune#litgpt": ("litgpt",), "frameworks/litgpt-torchtune#torchtune": ("torchtune",),
    "frameworks/megatron": ("megatron",),
}  # fmt: skip


def blocks() -> dict[str, list[str]]:
    """Return the Python blocks by page, or by page and section, padded so that tracebacks show the line numbers."""
    found: dict[str, list[str]] = {}
    for page in (DOCS / "frameworks.md", *sorted((DOCS / "frameworks").glob("*.md"))):
        text, name = page.read_text(), page.relative_to(DOCS).with_suffix("").as_posix()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            section = (re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE) or [""])[-1]
            part = f"{name}#{section}" if f"{name}#{section}" in NEEDS else name
            found.setdefault(part, []).append("\n" * text[: match.start(1)].count("\n") + match[1])
    return found


def names(page: str) -> dict[str, Any]:
    """Return what a page's blocks take as given."""
    model = tiny_llama()
    given: dict[str, Any] = {"model": model, "dataset": examples(), "__name__": "page"}
    if page == "frameworks/trl":
        from datasets import Dataset

        from tests.integrations.test_trl import tokenizer

        rows = [" ".join(map(str, row)) for row in tokens().tolist()]
        given |= {"texts": Dataset.from_dict({"text": rows}), "tokenizer": tokenizer()}
    if page == "frameworks/lightning":
        given["batches"] = torch.utils.data.DataLoader(tokens(), batch_size=4)  # type: ignore[arg-type]
    if page == "frameworks/timm":
        timm = import_timm()
        given["image_model"] = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2)
    return given


def test_every_page_with_code_is_tested() -> None:
    assert set(blocks()) == set(NEEDS)


@pytest.mark.parametrize("page", NEEDS)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [name for name in NEEDS[page] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"could not import {missing}")
    monkeypatch.chdir(tmp_path)
    if page == "frameworks/trl":
        import trl

        monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, bf16=False, use_cpu=True))  # it expects a GPU
    if page == "frameworks/litgpt-torchtune#litgpt":
        import litgpt.pretrain

        monkeypatch.setattr(litgpt.pretrain, "GPT", litgpt.pretrain.GPT)  # the block replaces it; restored after
    space = names(page)
    for code in blocks()[page]:
        exec(compile(code, page, "exec"), space)
    if page == "frameworks/litgpt-torchtune#torchtune":
        shape = {"vocab_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32}
        space["marked_llama3"](**shape, max_seq_len=8, intermediate_dim=48)
