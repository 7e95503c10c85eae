"""What Triton makes of the kernels for a GPU that is not here."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")


def test_nothing_is_overwritten_that_a_product_still_reads() -> None:
    """A tile with two uses, a product and its squares, once had a buffer too few: B U came out different every time."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.compiled"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {"_project", "_correlate", "_momentum", "_residual", "_overlap", "_update", "_apply", "_moment"} <= {*found}
    assert {name: buffers for name, buffers in found.items() if buffers} == {"carried": ["a"]}
