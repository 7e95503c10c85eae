"""The memory of Newton-Schulz: parts come back when their tensors go, and the iteration fits in what was counted."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.kernels.syrk import ALL, Only, SymmetricProducts
from cosmos_optim.cuda.memory_pool import ALIGN, MemoryPool, newton_schulz_bytes
from cosmos_optim.linalg.newton_schulz import HALF_SCALE, NewtonSchulz, TorchProducts, fresh_at, iterate, with_start

CPU = torch.device("cpu")


def inside(slab: MemoryPool, x: Tensor) -> bool:
    """Whether a tensor is part of the slab."""
    return x.untyped_storage().data_ptr() == slab.memory.untyped_storage().data_ptr()


def test_parts_come_back() -> None:
    """First fit, in gaps too; somewhere else when there is none."""
    A = torch.zeros(2, 4, 5, dtype=torch.float16)  # rows of 10 bytes, padded to 16
    slab = MemoryPool(3 * ALIGN, CPU)
    parts = [slab.like(A, 7) for _ in range(3)]
    assert all(inside(slab, x) and x.shape == (2, 7, 5) and x.stride() == (56, 8, 1) for x in parts)
    places = [x.data_ptr() for x in parts]
    assert len(set(places)) == 3
    other = slab.like(A, 7)
    assert not inside(slab, other)
    parts[1] = other
    again = slab.like(A, 7)
    assert again.data_ptr() == places[1]
    parts.clear()
    assert slab.like(A, 9).data_ptr() == places[0]


class Watched(TorchProducts):
    """Products by torch that live where SymmetricProducts would put them."""

    def __init__(self, slab: MemoryPool) -> None:
        self.slab, self.strays = slab, 0

    def _put(self, value: Tensor) -> Tensor:
        out = self.slab.like(value, value.shape[1])
        self.strays += not inside(self.slab, out)
        return out.copy_(value)

    def gram(self, X: Tensor, weight: Tensor | None) -> Tensor:
        return self._put(super().gram(X, weight))

    def within(self, R: Tensor, bound: float) -> Tensor:
        return torch.ones(len(R), dtype=torch.bool)

    def quadratic(
        self, R: Tensor, a: float, b: float, c: float,
        d: float = 0.0, D: Tensor | None = None, only: Only = ALL, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        value = super().quadratic(R, a, b, c, d, D)
        return self._put(value) if out is None else out.copy_(value)

    def product(self, A: Tensor, B: Tensor, only: Only = ALL, out: Tensor | None = None) -> Tensor:
        return self._put(super().product(A, B)) if out is None else out.copy_(super().product(A, B))

    def times(self, X: Tensor, Q: Tensor, out: Tensor | None = None) -> Tensor:
        return self._put(super().times(X, Q)) if out is None else super().times(X, Q, out)


@pytest.mark.parametrize("shortened", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("shape", [(40, 40), (72, 40), (120, 40)])
def test_the_count_is_enough(steps: int, shape: tuple[int, int], shortened: bool) -> None:
    """No product finds the slab full, and none overwrites what another still reads; with the first three as one too."""
    X = torch.nn.functional.normalize(torch.randn(3, *shape, dtype=torch.float64), dim=(1, 2))
    rows = NewtonSchulz(steps=steps).rows()
    fresh = fresh_at(*shape, rows, torch.float16)
    slab = MemoryPool(newton_schulz_bytes(3, *shape, 8, len(fresh), steps), CPU)
    products, out = Watched(slab), torch.empty_like(X)
    now, when = with_start(rows, fresh) if shortened else (rows, fresh)
    result = iterate(X, now, products, fresh=when, out=out)
    assert products.strays == 0
    torch.testing.assert_close(result, iterate(X, rows, TorchProducts(), fresh=fresh), rtol=1e-12, atol=1e-12)


def test_symmetric_products_use_it() -> None:
    """Through the kernels, under the interpreter."""
    from cosmos_optim.cuda.kernels.launch import INTERPRET

    if not INTERPRET:
        pytest.skip("the GPU's whole steps run through it")
    X = (torch.nn.functional.normalize(torch.randn(2, 48, 32), dim=(1, 2)) * HALF_SCALE).half()
    slab = MemoryPool(newton_schulz_bytes(2, 48, 32, 2, 2, 5), CPU)
    rows = NewtonSchulz().rows()
    got = iterate(X, rows, SymmetricProducts(slab.like), scale=HALF_SCALE, fresh={0, 3}, out=torch.empty_like(X))
    want = iterate(X, rows, SymmetricProducts(), scale=HALF_SCALE, fresh={0, 3}, out=torch.empty_like(X))
    assert torch.equal(got, want)
