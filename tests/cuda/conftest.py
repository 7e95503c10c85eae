"""Where the kernels run: on a GPU, or on the CPU under Triton's interpreter."""

import pytest
import torch

from cosmos_optim.cuda.kernels.launch import INTERPRET


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every kernel test runs in both places; the interpreter and compiled kernels exclude each other."""
    if (request.param == "cpu") != INTERPRET:
        pytest.skip("TRITON_INTERPRET decides between the CPU's interpreter and the GPU's compiler")
    return torch.device(request.param)
