"""The kernel that gives rows equal norm, against its definition in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.equal_rows import equalize_rows_
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.normalization import equalize_rows
from tests.cuda.reference import FLOAT16, FLOAT32, add_parts, relative_error


@pytest.mark.parametrize("wide", [False, True])
def test_rows_become_those_of_the_definition(wide: bool, device: torch.device) -> None:
    """Rows are contiguous or not, of sizes over three decades; one is nearly zero, one is zero, and so is a matrix."""
    buffer = torch.randn(3, 75, 56).half().to(device)[:, :, :50]
    X = buffer.mT if wide else buffer
    sizes = torch.logspace(-2, 1, X.shape[1])
    sizes[3:5] = torch.tensor([1e-4, 0.0])
    X.mul_(sizes.half().to(device)[:, None])
    X[2] = 0
    exact = equalize_rows(X.double(), Algebra(*X.shape[1:]))
    norm_sq = X.double().square().sum((1, 2)).float()[:, None].repeat(1, 2) / 2
    new_norm_sq = equalize_rows_(X, norm_sq)
    assert relative_error(X, exact) < FLOAT16 and not X[2].any()
    assert relative_error(add_parts(new_norm_sq).flatten(), exact.square().sum((1, 2))) < FLOAT32
