"""Symmetric products of which half is computed, compared with the full products."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels import syrk
from cosmos_optim.cuda.kernels.syrk import SymmetricProducts, TileShape, empty_norm_sq_parts, supports
from cosmos_optim.linalg.newton_schulz import NewtonSchulz, TorchProducts, iterate, merge_first_iterations
from tests.cuda.reference import relative_error

SUM = 1e-5  # float32 products in another order (the interpreter's operands are float32 here)
HALF = 2e-3  # one rounding of the operands and one of the result to float16
FIVE_STEPS = 5  # each Newton-Schulz iteration rounds once more
SHORT_START = 2e-3  # the polynomial that replaces the first three iterations differs from them by this much


def stack(device: torch.device, rows: int, cols: int) -> tuple[Tensor, float]:
    """Return two matrices, float16 on a GPU and float32 under the interpreter, and the tolerance of their products."""
    X = torch.randn(2, rows, cols).to(device) / rows**0.5
    return (X.half(), HALF) if device.type == "cuda" else (X, SUM)


# Tiles wider than high (half of a tile on the diagonal is left out), square, and higher than wide; all have edges.
TILES = {"cpu": [TileShape(16, 32, 16), TileShape(16, 16, 16), TileShape(32, 16, 16)],
         "cuda": [TileShape(), TileShape(128, 128, 64, warps=4), TileShape(64, 128, 64, warps=4)]}  # fmt: skip


@pytest.fixture(params=[0, 1, 2])
def tiles(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> TileShape:
    """Let all products run in tiles of one shape."""
    shape = TILES[device.type][request.param]
    monkeypatch.setattr(syrk, "tile_shape", lambda s, K: shape)
    return shape


def symmetric_product(A: Tensor, B: Tensor, **options: Any) -> Tensor:
    """Return a product in new memory."""
    return syrk.symmetric_product(A, B, **{"out": syrk.empty_stack(A, A.shape[2]), **options})


@pytest.mark.parametrize("width", [40, 88])
def test_a_gram_matrix_is_exact_and_symmetric_with_its_squared_norm(
    tiles: TileShape, width: int, device: torch.device
) -> None:
    """Compute weight X'X with a weight for each matrix."""
    X, tolerance = stack(device, 53, width * (8 if device.type == "cuda" else 1))
    weight = torch.tensor([1.0, 2.0], device=device).view(2, 1, 1)
    norm_sq_parts = empty_norm_sq_parts(X)
    R = symmetric_product(X, X, weight=weight, norm_sq_parts=norm_sq_parts)
    exact = weight.double() * (X.double().mT @ X.double())
    assert relative_error(R, exact) < tolerance
    mirrored = R.mT == R
    if device.type == "cpu":  # a tile on the diagonal is numpy's product, which is as symmetric as this CPU's BLAS
        block = torch.arange(width) // max(tiles.BM, tiles.BN)
        mirrored |= block[:, None] == block
        assert relative_error(R, R.mT) < tolerance
    assert mirrored.all()
    assert relative_error(norm_sq_parts.sum(1), exact.square().sum((1, 2))) < tolerance


def test_polynomials_of_a_symmetric_matrix_equal_the_full_products(tiles: TileShape, device: torch.device) -> None:
    """Compute aI + bR + cR^2, the same with another matrix added, and the product of two polynomials in R."""
    X, tolerance = stack(device, 60, 56)
    R = (X.mT @ X).contiguous()
    Z = symmetric_product(R, R, alpha=0.5, beta=-0.3, D=R, gamma=2.0)
    wide = R.double()
    eye = torch.eye(56, dtype=torch.float64, device=device)
    assert relative_error(Z, 0.5 * wide @ wide - 0.3 * wide + 2 * eye) < tolerance
    assert relative_error(symmetric_product(R, Z), wide @ Z.double()) < tolerance
    Y = symmetric_product(R, R, alpha=0.5, beta=-0.3, D=R, delta=1.5, E=Z, gamma=2.0)
    assert relative_error(Y, Z.double() + 1.5 * Z.double()) < tolerance


@pytest.mark.parametrize("fresh", [{0, 1, 2, 3, 4}, {0, 3}])
def test_newton_schulz_over_symmetric_products_equals_it_in_float64(fresh: set[int], device: torch.device) -> None:
    """Run the same loop over these products and over torch's, with every Gram matrix formed from X and with two."""
    X, tolerance = stack(device, 64, 24)
    X = (X.float() / torch.linalg.vector_norm(X.float(), dim=(1, 2), keepdim=True) * 32).to(X.dtype)
    rows = NewtonSchulz().coefficients_of_steps()
    ours = iterate(X, rows, SymmetricProducts(), scale=32.0, gram_steps=fresh)
    assert relative_error(ours, iterate(X.double(), rows, TorchProducts(), scale=32.0)) < FIVE_STEPS * tolerance


@pytest.mark.parametrize("wanted", [True, False])
def test_a_product_of_some_matrices_leaves_the_others_as_they_are(
    tiles: TileShape, wanted: bool, device: torch.device
) -> None:
    """Flags on the device choose them."""
    X, tolerance = stack(device, 60, 56)
    flags = torch.tensor([True, False], device=device)
    out = torch.full((2, 56, 56), 7.0, dtype=X.dtype, device=device)
    symmetric_product(X, X, out=out, only=(flags, wanted))
    computed, other = (0, 1) if wanted else (1, 0)
    assert relative_error(out[computed], X[computed].double().mT @ X[computed].double()) < tolerance
    assert bool((out[other] == 7).all())


@pytest.mark.parametrize(("fresh", "weighted"), [({0, 1, 2, 3, 4}, True), ({0, 3}, False)])
def test_only_a_matrix_without_a_leading_direction_takes_the_short_start(
    fresh: set[int], weighted: bool, device: torch.device
) -> None:
    """The first of two matrices runs its first three iterations as one; the second runs them in full."""
    X, tolerance = stack(device, 96, 72)
    X = X.float()
    X[0] = torch.linalg.qr(X[0])[0] * torch.linspace(0.8, 1.2, 72).to(device)  # |X'X| = 0.12 |X|^2
    X[1] += 3
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)
    weight = (32.0 / norm).square() if weighted else None
    start = (X if weighted else X * 32 / norm).to(torch.float16 if device.type == "cuda" else torch.float32)
    rows = NewtonSchulz().coefficients_of_steps()
    steps, when = merge_first_iterations(rows, fresh)
    ours = iterate(start, steps, SymmetricProducts(), weight=weight, scale=32.0, gram_steps=when)
    exact = iterate((X / norm).double() * 32, rows, TorchProducts(), scale=32.0)
    ours = ours * 32 / norm if weighted else ours
    assert relative_error(ours[0], exact[0]) < FIVE_STEPS * tolerance + SHORT_START
    assert relative_error(ours[1], exact[1]) < FIVE_STEPS * tolerance
    assert device.type == "cuda" or relative_error(ours[0], exact[0]) > 10 * tolerance  # it is the other polynomial


def test_bulk_copies_take_only_half_precision_rows_of_16_byte_multiples(device: torch.device) -> None:
    """Torch computes the products of any other stack."""
    X = torch.randn(2, 16, 24, device=device).half()
    assert supports(X)
    assert not supports(X.float())
    assert not supports(X.mT)
    assert not supports(X[:, :, 1:])
    assert not supports(X[0])
