"""What Triton compiles the kernels to, for a GPU that this machine need not have."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")


SHARED_MEMORY = 232_448  # bytes that one block of an H100 or H200 may use


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the kernels, compiled for an H100."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
                "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
    env = {**os.environ, **settings}
    done = subprocess.run([sys.executable, "-m", "tests.cuda.compiled"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_no_prefetch_overwrites_what_a_product_still_reads(kernels: dict[str, dict[str, Any]]) -> None:
    """A tile with two uses, a product and its squares, once had one buffer too few: B U was different every time."""
    found = {name: kernel["at_risk"] for name, kernel in kernels.items()}
    expected = {"_project", "_project_transposed", "_momentum", "_residual", "_overlap", "_update", "_symmetric",
                "_momentum_int8", "_adam"}  # fmt: skip
    assert expected <= {*found}
    known_bad = [found.pop(name) for name in ("summed_in_product", "used_twice")]
    if triton.__version__.startswith("3.6."):  # this version has the fault, so the search must find it
        assert known_bad == [["a"], ["a"]]
    assert not any(found.values()), found


@pytest.mark.slow
def test_every_kernel_that_the_package_launches_compiles(kernels: dict[str, dict[str, Any]]) -> None:
    """Without a GPU, nothing else would notice that one does not."""
    files = (Path(__file__).resolve().parents[2] / "src/cosmos_optim/cuda/kernels").glob("*.py")
    launched = {name for file in files for name in re.findall(r"\b(_\w+)\[(?:\(|grid)", file.read_text())}
    assert len(launched) > 20 and launched <= {*kernels}, launched - {*kernels}


@pytest.mark.slow
def test_every_kernel_fits_into_the_shared_memory_of_an_h100(kernels: dict[str, dict[str, Any]]) -> None:
    """With 65 to 128 columns, the last pass of the QR once needed 256 KiB, so these ranks ran without kernels."""
    assert {name: kernel["shared"] for name, kernel in kernels.items() if kernel["shared"] > SHARED_MEMORY} == {}
