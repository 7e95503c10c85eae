"""Which versions of torch a test needs."""

import pytest
import torch


def torch_version() -> tuple[int, ...]:
    """Return major, minor and patch of the installed torch, without a suffix such as +cpu."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())


def needs_torch(version: str, reason: str) -> pytest.MarkDecorator:
    """Mark a test to be skipped on a torch older than `version`; the reason names the feature that is missing."""
    wanted = tuple(int(part) for part in version.split("."))
    return pytest.mark.skipif(
        torch_version() < wanted, reason=f"needs torch {version}, here is {torch.__version__}: {reason}"
    )
