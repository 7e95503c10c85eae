"""The device on which the kernel tests run: a GPU, or the CPU under Triton's interpreter."""

import pytest
import torch

from tests.interpreter import interpreted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run a test on both devices; a process interprets or compiles kernels, so one is skipped."""
    if (request.param == "cpu") != interpreted():
        pytest.skip("TRITON_INTERPRET decides between the CPU's interpreter and the GPU's compiler")
    return torch.device(request.param)
