"""The memory of Newton-Schulz: parts become free with their tensors, and the iteration needs what was estimated."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.syrk import SymmetricProducts
from cosmos_optim.cuda.memory_pool import ALIGN, MemoryPool, iterate_bytes
from cosmos_optim.linalg.newton_schulz import (
    EVERY_MATRIX,
    HALF_SCALE,
    NewtonSchulz,
    Selection,
    TorchProducts,
    choose_gram_steps,
    iterate,
    merge_first_iterations,
)
from tests.cuda.reference import INTERPRETED

CPU = torch.device("cpu")
FLOAT64 = 1e-12  # the same products in double precision, in another order


def inside(pool: MemoryPool, x: Tensor) -> bool:
    """Return whether a tensor is part of the pool."""
    return x.untyped_storage().data_ptr() == pool.memory.untyped_storage().data_ptr()


def test_a_part_is_reused_once_its_tensor_is_deleted() -> None:
    """The first gap that fits is taken; a full pool allocates outside."""
    A = torch.zeros(2, 4, 5, dtype=torch.float16)  # rows of 10 bytes, padded to 16
    pool = MemoryPool(3 * ALIGN, CPU)
    parts = [pool.empty_stack(A, 7) for _ in range(3)]
    assert all(inside(pool, x) and x.shape == (2, 7, 5) and x.stride() == (56, 8, 1) for x in parts)
    addresses = [x.data_ptr() for x in parts]
    assert len(set(addresses)) == 3
    outside = pool.empty_stack(A, 7)
    assert not inside(pool, outside)
    parts[1] = outside
    reused = pool.empty_stack(A, 7)
    assert reused.data_ptr() == addresses[1]
    parts.clear()
    assert pool.empty_stack(A, 9).data_ptr() == addresses[0]


class PooledTorchProducts(TorchProducts):
    """Products by torch in memory of the pool, as SymmetricProducts allocates it; counts those that did not fit."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pool, self.outside = pool, 0

    def _put(self, value: Tensor) -> Tensor:
        out = self.pool.empty_stack(value, value.shape[1])
        self.outside += not inside(self.pool, out)
        return out.copy_(value)

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        return self._put(super().gram(X, weight))

    def within(self, R: Tensor, bound: float) -> Tensor:
        return torch.ones(len(R), dtype=torch.bool)

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Selection = EVERY_MATRIX, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        value = super().quadratic(R, a, b, c, d, D)
        return self._put(value) if out is None else out.copy_(value)

    def product(self, A: Tensor, B: Tensor, only: Selection = EVERY_MATRIX, out: Tensor | None = None) -> Tensor:
        return self._put(super().product(A, B)) if out is None else out.copy_(super().product(A, B))

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._put(super().times(X, Q)) if out is None else super().times(X, Q, out)


@pytest.mark.parametrize("shortened", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("shape", [(40, 40), (72, 40), (120, 40)])
def test_newton_schulz_fits_in_the_estimated_bytes(steps: int, shape: tuple[int, int], shortened: bool) -> None:
    """No product finds the pool full, and none overwrites what another still reads; also with the short start."""
    X = torch.nn.functional.normalize(torch.randn(3, *shape, dtype=torch.float64), dim=(1, 2))
    rows = NewtonSchulz(steps=steps).coefficients_of_steps()
    fresh = choose_gram_steps(*shape, rows, torch.float16)
    pool = MemoryPool(iterate_bytes(3, *shape, 8, len(fresh), steps), CPU)
    products, out = PooledTorchProducts(pool), torch.empty_like(X)
    now, when = merge_first_iterations(rows, fresh) if shortened else (rows, fresh)
    result = iterate(X, now, products, gram_steps=when, out=out)
    assert products.outside == 0
    torch.testing.assert_close(result, iterate(X, rows, TorchProducts(), gram_steps=fresh), rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU whole steps use the pool")
def test_symmetric_products_in_the_pool_equal_those_outside_of_it() -> None:
    """Bit for bit, under the interpreter."""
    X = (torch.nn.functional.normalize(torch.randn(2, 48, 32), dim=(1, 2)) * HALF_SCALE).half()
    pool = MemoryPool(iterate_bytes(2, 48, 32, 2, 2, 5), CPU)
    rows = NewtonSchulz().coefficients_of_steps()
    pooled, plain = (
        iterate(X, rows, products, scale=HALF_SCALE, gram_steps={0, 3}, out=torch.empty_like(X))
        for products in (SymmetricProducts(pool.empty_stack), SymmetricProducts())
    )
    assert torch.equal(pooled, plain)
