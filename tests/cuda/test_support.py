"""Which batches the kernels take, and how they are cut."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim import Cosmos
from cosmos_optim.cuda import chunk, support
from cosmos_optim.engine.batching import Batch, batches
from tests.cuda.kernel_run import give_gradients, matrices


def batch_of(device: torch.device, shape: tuple[int, int] = (48, 40), count: int = 2, **options: object) -> Batch:
    """Return the batch of a step of COSMOS."""
    params = matrices(device, *[shape] * count)
    opt = Cosmos(params, gamma=0.25, **{"rank": 8, **options})
    give_gradients(params, 0)
    (batch,) = batches(opt._collect(), set(), [])
    return batch


def test_a_batch_on_a_cpu_is_not_supported() -> None:
    """This holds even if the interpreter could run the kernels."""
    assert not support.supported(batch_of(torch.device("cpu")))


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((48, 40), 8, True),
        ((16, 16), 8, True),
        ((15, 40), 8, False),  # too small
        ((48, 40), 40, False),  # a basis as large as the matrix
        ((24, 40), 24, False),
        ((300, 300), 256, True),
        ((300, 300), 257, False),
    ],
)
def test_a_matrix_is_supported_if_it_is_larger_than_its_basis(
    shape: tuple[int, int], rank: int, expected: bool
) -> None:  # fmt: skip
    """Also, the basis must have at most 256 columns, and the matrix at least 16 rows and columns."""
    assert support.shape_supported(torch.empty(shape), rank) == expected


@pytest.mark.gpu
def test_an_ordinary_batch_on_a_gpu_is_supported() -> None:
    """Otherwise every test of kernels in an optimizer would test plain torch."""
    assert support.supported(batch_of(torch.device("cuda"), (320, 272)))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"ns_dtype": torch.float32}, {"ns_dtype": torch.bfloat16}, {"two_sided": True}])
def test_options_without_kernels_are_not_supported(options: dict[str, object]) -> None:
    """Newton-Schulz in another dtype, and the two-sided form, run by plain torch."""
    assert not support.supported(batch_of(torch.device("cuda"), (320, 272), **options))


@pytest.mark.gpu
def test_memory_that_kernels_cannot_read_is_not_supported() -> None:
    """Float64, state that is not contiguous, and gradients with two kinds of strides."""
    cuda = torch.device("cuda")
    batch = batch_of(cuda, (320, 272))
    first, second = batch.matrices
    wide = {name: x.double() for name, x in first.state.items()}
    assert not support.supported(replace(batch, matrices=[replace(x, state=wide) for x in batch.matrices]))
    turned = first.state | {"U": first.state["U"].mT.contiguous().mT}
    assert not support.supported(replace(batch, matrices=[replace(x, state=turned) for x in batch.matrices]))
    columns = replace(second, grad=second.grad.mT.contiguous().mT)
    assert not support.supported(replace(batch, matrices=[first, columns]))


@pytest.mark.parametrize("shape", [(2048, 2048), (5461, 2048), (2048, 5461)])
def test_chunks_use_the_work_memory_and_no_more(shape: tuple[int, int]) -> None:
    """As many matrices as fit, for steps and for first bases."""
    batch, rank = batch_of(torch.device("cpu")), 8
    large = replace(batch, matrices=[replace(x, p=torch.empty(shape, device="meta")) for x in batch.matrices])
    step, basis = chunk.matrices_in_a_chunk(large), chunk.bases_in_a_chunk(large)
    for count, each in ((step, chunk.bytes_per_matrix(*shape, rank)), (basis, chunk.thin_bytes(*shape, rank))):
        assert count >= 1
        assert count * each <= chunk.WORK_BYTES < (count + 1) * each


def test_a_matrix_that_is_larger_than_the_work_memory_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step must be possible at any size."""
    monkeypatch.setattr(chunk, "WORK_BYTES", 1)
    batch = batch_of(torch.device("cpu"))
    assert chunk.matrices_in_a_chunk(batch) == chunk.bases_in_a_chunk(batch) == 1
