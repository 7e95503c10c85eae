"""What Triton makes of the kernels for a GPU that is not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")


@pytest.mark.slow
def test_nothing_is_overwritten_that_a_product_still_reads(tmp_path: Path) -> None:
    """A tile with two uses, a product and its squares, once had a buffer too few: B U came out different every time."""
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    env = {**os.environ, **own}
    done = subprocess.run([sys.executable, "-m", "tests.cuda.compiled"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {"_project", "_correlate", "_momentum", "_residual", "_overlap", "_update", "_symmetric"} <= {*found}
    doubtful = [found.pop(name) for name in ("carried", "both_used")]
    if triton.__version__.startswith("3.6."):  # what looks for it finds it there
        assert doubtful == [["a"], ["a"]]
    assert not any(found.values()), found
