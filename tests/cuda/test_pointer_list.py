"""Lists of matrices as one operand of a kernel."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda.pointer_list import MatrixList, addresses, same_layout


def test_only_equal_shapes_dtypes_and_strides_make_a_list(device: torch.device) -> None:
    """One of the strides must be 1."""
    x = torch.randn(6, 8, device=device)
    assert same_layout([x, x.clone()])
    assert same_layout([x.mT, x.clone().mT])
    assert not same_layout([x, x.clone().mT.contiguous().mT])
    assert not same_layout([x, x.bfloat16()])
    assert not same_layout([x[:, ::2]])
    assert not same_layout([x.double()])


def test_a_table_of_addresses_is_never_rewritten(device: torch.device) -> None:
    """A captured graph may read it while other matrices get their own table."""
    xs, ys = [torch.randn(4, 4, device=device) for _ in range(3)], [torch.randn(4, 4, device=device) for _ in range(3)]
    first = addresses(xs)
    second = addresses(ys)
    assert first.tolist() == [x.data_ptr() for x in xs]
    assert second.tolist() == [y.data_ptr() for y in ys]
    assert first.data_ptr() != second.data_ptr()
    if device.type == "cuda":
        assert addresses(xs) is first


@pytest.mark.parametrize(("n", "classes"), [(8, 1), (6, 2), (5, 4)])
def test_rows_have_as_many_alignment_classes_as_offsets_from_16_bytes(
    n: int, classes: int, device: torch.device
) -> None:
    """Tiles of neighbouring rows are aligned only if there is one class."""
    X = MatrixList.of([torch.zeros(4, n, device=device)])
    assert X.source()["ALIGNED"]
    assert X.source()["ALIGNMENT_CLASSES"] == classes
    assert X.rows_source()["ALIGNED"] == (classes == 1)
    assert "ALIGNMENT_CLASSES" not in X.rows_source()


@pytest.mark.parametrize("odd", [0, 2])
def test_a_list_is_aligned_only_if_each_of_its_matrices_is(odd: int, device: torch.device) -> None:
    """Kernels then load 16 bytes at a time, which a matrix at another address would not survive."""
    xs = [torch.zeros(4 * 8 + 1, device=device)[int(i == odd) :][:32].view(4, 8) for i in range(3)]
    assert [x.data_ptr() % 16 for x in xs].count(4) == 1
    X = MatrixList.of(xs)
    assert (X.source()["ALIGNED"], X.source()["ALIGNMENT_CLASSES"], X.rows_source()["ALIGNED"]) == (False, 1, False)
