"""The integrations need no framework until they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {"transformers", "accelerate", "lightning", "timm", "torchtitan", "megatron", "emerging_optimizers"}


@pytest.mark.parametrize("module", ["", ".integrations", *(f".integrations.{name}" for name in (
    "transformers", "timm", "lightning", "megatron"))])  # fmt: skip
def test_importing_an_integration_imports_no_framework(module: str) -> None:
    code = f"import sys, cosmos_optim{module}; print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert shown.stdout.strip() == "[]"
