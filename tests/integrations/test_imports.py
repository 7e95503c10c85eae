"""The integrations need no framework until they are used."""

from __future__ import annotations

import subprocess
import sys

FRAMEWORKS = {"transformers", "accelerate", "lightning", "timm", "torchtitan", "megatron", "emerging_optimizers"}


def test_importing_the_integrations_imports_no_framework() -> None:
    """torchtitan's is a subclass of its container, so that module is the exception."""
    modules = ", ".join(
        f"cosmos_optim.integrations.{name}" for name in ("transformers", "timm", "lightning", "megatron")
    )
    code = f"import sys, {modules}; print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert shown.stdout.strip() == "[]"
