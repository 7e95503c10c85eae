"""Symmetric products by halves, and orthonormal columns, against their plain forms."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.syrk import SymmetricProducts, TileShape, squares_of, supports, symmetric_product
from cosmos_optim.cuda.kernels.thin_qr import orthonormal, thin_gram, thin_gram_torch
from cosmos_optim.linalg.cholesky_qr import orthonormalize
from cosmos_optim.linalg.newton_schulz import NewtonSchulz, TorchProducts, iterate, with_start

SUM = 1e-5  # float32 products in another order (the interpreter's operands are float32)
HALF = 2e-3  # one rounding of operands and one of the result to float16
EXACT = 2e-6  # 22-bit parts, summed in float32
ORTHONORMAL = 3e-6


def stack(device: torch.device, rows: int, cols: int) -> tuple[Tensor, float]:
    """Two matrices as the products take them here, and how exact they are."""
    X = torch.randn(2, rows, cols).to(device) / rows**0.5
    return (X.half(), HALF) if device.type == "cuda" else (X, SUM)


def rel(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x.double() - y.double()).norm() / y.double().norm())


# Tiles wider than high (whose halves on the diagonal are left out), square, and higher than wide; edges everywhere.
TILES = {"cpu": [TileShape(16, 32, 16), TileShape(16, 16, 16), TileShape(32, 16, 16)],
         "cuda": [TileShape(), TileShape(128, 128, 64, warps=4), TileShape(64, 128, 64, warps=4)]}  # fmt: skip


@pytest.mark.parametrize("tiles", [0, 1, 2])
@pytest.mark.parametrize("width", [40, 88])
def test_gram(tiles: int, width: int, device: torch.device) -> None:
    """weight X'X, exactly symmetric, with a weight for each matrix."""
    X, bound = stack(device, 53, width * (8 if device.type == "cuda" else 1))
    weight = torch.tensor([1.0, 2.0], device=device).view(2, 1, 1)
    R = symmetric_product(X, X, weight=weight, tiles=TILES[device.type][tiles])
    exact = weight * (X.float().mT @ X.float())
    assert rel(R, exact) < bound
    mirrored = R.mT == R
    if device.type == "cpu":  # a tile on the diagonal is numpy's product, which is as symmetric as this CPU's BLAS
        block = torch.arange(width) // max(TILES["cpu"][tiles].BM, TILES["cpu"][tiles].BN)
        mirrored |= block[:, None] == block
        assert rel(R, R.mT) < bound
    assert mirrored.all()
    squares = squares_of(X, TILES[device.type][tiles])
    symmetric_product(X, X, weight=weight, tiles=TILES[device.type][tiles], squares=squares)
    assert rel(squares.sum(1), exact.square().sum((1, 2))) < bound


@pytest.mark.parametrize("tiles", [0, 1, 2])
def test_polynomials(tiles: int, device: torch.device) -> None:
    """aI + bR + cR^2, the same with another matrix added, and the product of two polynomials in R."""
    X, bound = stack(device, 60, 56)
    R, how = (X.mT @ X).contiguous(), TILES[device.type][tiles]
    Z = symmetric_product(R, R, alpha=0.5, beta=-0.3, D=R, gamma=2.0, tiles=how)
    wide = R.float()
    assert rel(Z, 0.5 * wide @ wide - 0.3 * wide + 2 * torch.eye(56, device=device)) < bound
    assert rel(symmetric_product(R, Z, tiles=how), wide @ Z.float()) < bound
    Y = symmetric_product(R, R, alpha=0.5, beta=-0.3, D=R, delta=1.5, E=Z, gamma=2.0, tiles=how)
    assert rel(Y, Z.float() + 1.5 * Z.float()) < bound


@pytest.mark.parametrize("fresh", [{0, 1, 2, 3, 4}, {0, 3}])
def test_the_whole_iteration(fresh: set[int], device: torch.device) -> None:
    """The same loop over these products and over torch's."""
    X, bound = stack(device, 64, 24)
    X = (X.float() / torch.linalg.vector_norm(X.float(), dim=(1, 2), keepdim=True) * 32).to(X.dtype)
    rows = NewtonSchulz().rows()
    ours = iterate(X, rows, SymmetricProducts(), scale=32.0, fresh=fresh)
    assert rel(ours, iterate(X.double(), rows, TorchProducts(), scale=32.0)) < 5 * bound


@pytest.mark.parametrize("tiles", [0, 1, 2])
@pytest.mark.parametrize("want", [True, False])
def test_only_some(tiles: int, want: bool, device: torch.device) -> None:
    """The others are left as they are."""
    X, bound = stack(device, 60, 56)
    flags = torch.tensor([True, False], device=device)
    out = torch.full((2, 56, 56), 7.0, dtype=X.dtype, device=device)
    symmetric_product(X, X, tiles=TILES[device.type][tiles], out=out, only=(flags, want))
    mine, other = (0, 1) if want else (1, 0)
    assert rel(out[mine], X[mine].float().mT @ X[mine].float()) < bound
    assert bool((out[other] == 7).all())


@pytest.mark.parametrize(("fresh", "weighted"), [({0, 1, 2, 3, 4}, True), ({0, 3}, False)])
def test_three_iterations_as_one(fresh: set[int], weighted: bool, device: torch.device) -> None:
    """For the one of two matrices that has no leading direction; the other in full."""
    X, bound = stack(device, 96, 72)
    X = X.float()
    X[0] = torch.linalg.qr(X[0])[0] * torch.linspace(0.8, 1.2, 72).to(device)  # |X'X| = 0.12 |X|^2
    X[1] += 3
    norm = torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True)
    weight = (32.0 / norm).square() if weighted else None
    start = (X if weighted else X * 32 / norm).to(torch.float16 if device.type == "cuda" else torch.float32)
    rows = NewtonSchulz().rows()
    steps, when = with_start(rows, fresh)
    ours = iterate(start, steps, SymmetricProducts(), weight=weight, scale=32.0, fresh=when)
    exact = iterate((X / norm).double() * 32, rows, TorchProducts(), scale=32.0)
    ours = ours * 32 / norm if weighted else ours
    assert rel(ours[0], exact[0]) < 5 * bound + 2e-3
    assert rel(ours[1], exact[1]) < 5 * bound
    assert device.type == "cuda" or rel(ours[0], exact[0]) > 10 * bound  # it is the other polynomial


def test_what_the_copy_engine_takes(device: torch.device) -> None:
    """Rows of 16 bytes' multiples; anything else goes to torch."""
    X = torch.randn(2, 16, 24, device=device).half()
    assert supports(X)
    assert not supports(X.float())
    assert not supports(X.mT)
    assert not supports(X[:, :, 1:])
    assert not supports(X[0])


def test_thin_gram(device: torch.device) -> None:
    """A'B as in float32."""
    A, B = torch.randn(2, 70, 9).to(device), torch.randn(2, 70, 9).to(device) * 1e-9
    assert rel(thin_gram(A, B), A.double().mT @ B.double()) < EXACT
    assert rel(thin_gram(A, B), thin_gram_torch(A, B)) < EXACT


@pytest.mark.parametrize("spread", [0, -8])
def test_orthonormal(spread: int, device: torch.device) -> None:
    """The columns of the plain form, for norms that span the spectrum of a gradient."""
    Y = (torch.randn(2, 50, 7) * torch.logspace(0, spread, 7)).to(device)
    spare = torch.linalg.qr(torch.randn(2, 50, 7))[0].contiguous().to(device)
    Q = orthonormal(Y, spare)
    expected = orthonormalize(Y.double(), lambda A, B: A.mT @ B, spare.double())
    assert (Q.double().mT @ Q.double() - torch.eye(7, device=device)).abs().max() < ORTHONORMAL
    assert rel(Q, expected) < EXACT


@pytest.mark.parametrize("angle", [1e-1, 1e-2, 1e-3])
def test_columns_that_nearly_agree(angle: float, device: torch.device) -> None:
    """Conditions up to 1e3, where the second pass begins far from the identity: orthonormal all the same."""
    Y = torch.randn(2, 60, 1) + angle * torch.randn(2, 60, 8)
    spare = torch.linalg.qr(torch.randn(2, 60, 8))[0].contiguous()
    Q = orthonormal(Y.to(device), spare.to(device))
    assert (Q.double().mT @ Q.double() - torch.eye(8, device=device)).abs().max() < ORTHONORMAL
    # A change of Y by rounding turns such columns by 1 / angle times as much.
    assert rel(Q, orthonormalize(Y.double(), lambda A, B: A.mT @ B, spare.double()).to(device)) < EXACT / angle


def test_dependent_columns_keep_the_fallback(device: torch.device) -> None:
    """A zero column, and NaN; the other matrix is not touched by it."""
    Y = torch.randn(3, 40, 6).to(device)
    spare = torch.linalg.qr(torch.randn(3, 40, 6))[0].contiguous().to(device)
    Y[1, :, 3] = 0
    Y[2, 5, 2] = float("nan")
    Q = orthonormal(Y, spare)
    assert torch.equal(Q[1:], spare[1:])
    assert rel(Q[:1], orthonormalize(Y[:1].double(), lambda A, B: A.mT @ B, spare[:1].double())) < EXACT
