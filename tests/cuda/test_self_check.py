"""The check that a machine makes of its kernels before it relies on them."""

import warnings

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which is not installed here")

from cosmos_optim.cuda import pointer_list as table
from cosmos_optim.cuda import precompile as ahead
from cosmos_optim.cuda import self_check as health
from cosmos_optim.cuda.kernels.launch import INTERPRET


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that the interpreter can stand."""
    if INTERPRET:
        monkeypatch.setattr(health, "RANKS", {"": 4, "middle ": 6, "wide ": 20})
        monkeypatch.setattr(health, "SIZE", 24)


@pytest.mark.parametrize("family", ["passes", "odd_rows", "eigen", "thin", "rows", "wide passes", "middle eigen"])
def test_good_kernels_pass(family: str, device: torch.device, small: None) -> None:
    """Far below the bound: the check is not what decides about precision."""
    assert health.FAMILIES[family](device) < health.CLOSE / 5


@pytest.mark.gpu
@pytest.mark.parametrize("family", health.FAMILIES)
def test_this_gpu_is_sound(family: str) -> None:
    """No warning, no fall-back."""
    assert health.sound(torch.device("cuda"), family)


def test_a_wrong_kernel_is_found(device: torch.device, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is a tenth too large."""
    real = health.project
    monkeypatch.setattr(health, "project", lambda *args: 1.1 * real(*args))
    assert health.odd_rows(device) > health.CLOSE


@pytest.mark.parametrize("trouble", ["wrong", "nan", "raises"])
def test_what_fails_is_not_used(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning that names the family and the reason; plain torch from then on."""

    def family(device: torch.device) -> float:
        if trouble == "raises":
            raise RuntimeError("out of shared memory")
        return 0.3 if trouble == "wrong" else float("inf")

    monkeypatch.setitem(health.FAMILIES, "odd_rows", family)
    monkeypatch.setattr(table, "WIDE_ODD_ROWS", True)
    monkeypatch.setattr(health, "_verdicts", {})
    with pytest.warns(UserWarning, match="'odd_rows' kernels do not work on cpu"):
        assert health.ask(torch.device("cpu"), ["odd_rows"]) == [False]
    assert not table.WIDE_ODD_ROWS
    with warnings.catch_warnings(action="error"):
        assert not health.sound(torch.device("cpu"), "odd_rows")


def test_no_verdict_from_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were not launched wrote nothing: the comparison waits until they can be."""
    monkeypatch.setitem(health.FAMILIES, "odd_rows", lambda device: 0.0 if not ahead.rehearsing() else 1e3)
    monkeypatch.setattr(health, "_verdicts", {})
    cpu = torch.device("cpu")
    with ahead._launches_put_off():
        assert health.sound(cpu, "odd_rows")
    assert health._verdicts == {} and not ahead.rehearsing()
    assert health.sound(cpu, "odd_rows")
    assert health._verdicts == {(cpu, "odd_rows"): True}
