"""Settings that every test shares, and where test data lives."""

import os
from pathlib import Path

# Before torch, Triton and the tokenizers are imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked gloo ranks hang with more, and workers share two cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a download
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

from tests.interpreter import interpreted, run_kernels_on_cpu

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are tested on CPU under Triton's interpreter

if interpreted():
    run_kernels_on_cpu()
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a machine with a GPU need not have it
    pass
else:
    # The same examples on every run: a failure in CI is a failure here. No deadline: the machine may be busy.
    settings.register_profile(
        "cosmos", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("cosmos")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu if there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """No test depends on which test ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference data beside the repository (`COSMOS_SHARED` names another place)."""
    folder = Path(os.environ.get("COSMOS_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"the reference data is not here: {folder} (set COSMOS_SHARED)")
    return folder
