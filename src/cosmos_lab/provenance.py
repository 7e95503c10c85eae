"""Which code made a result: the commit of this source tree, and the versions of Python and of packages."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for a result."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("cosmos-optim", "numpy", "triton", "tokenizers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str | None:
    """Return the commit of this source tree, with "+" if a package or a benchmark was edited; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/benchmarks")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
