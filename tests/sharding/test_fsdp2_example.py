"""The FSDP2 example as users run it: it learns, resumes on other numbers of ranks, and survives a killed save."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from examples import fsdp2_llama
from tests.sharding.ranks import run_ranks

SMALL = ["--width", "64", "--depth", "1", "--batch", "2", "--length", "32", "--every", "4",
         "--lr", "0.003"]  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
CLOSE_32 = 2e-3  # of the loss: the same batch, summed in another order


def run(rank: int, steps: int, folder: Path, replicas: int = 1) -> list[float]:
    """Run the example's main on a rank."""
    more = ["--steps", str(steps), "--checkpoints", str(folder), "--replicas", str(replicas)]
    return fsdp2_llama.main(SMALL + more)


def killed_while_saving(rank: int, folder: Path) -> str:
    """Run the example; rank 1 dies while it writes the second checkpoint."""
    write, calls = dcp.FileSystemWriter.write_data, [0]

    def dying_write(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            os._exit(9)
        return write(*args, **kwargs)  # type: ignore[arg-type]

    dcp.FileSystemWriter.write_data = dying_write  # type: ignore[method-assign,assignment]
    with pytest.raises(BaseException):  # noqa: B017 - gloo has several errors for a lost rank
        run(rank, 8, folder)
    return "alone"


def test_resuming_after_a_killed_save_repeats_the_losses_of_the_unbroken_run(tmp_path: Path) -> None:
    """Eight steps on two ranks; a run killed in its second save; its first checkpoint resumed on two and on 2 x 2."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    losses = run_ranks(2, run, 8, whole)[0]
    assert losses[-1] < 0.8 * losses[0]
    assert run_ranks(2, killed_while_saving, broken, dying=(1,)) == ["alone"]
    assert [p.name for p in sorted(broken.iterdir()) if p.suffix != ".part"] == ["step_000004"]
    again = run_ranks(2, run, 8, broken)[0]
    assert len(again) == 4
    assert max(abs(a - b) for a, b in zip(again, losses[4:], strict=True)) < CLOSE_32
    assert len(run_ranks(4, run, 10, broken, 2)[0]) == 2


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    """With the command of the example's docstring."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples/fsdp2_llama.py"), *SMALL, "--steps", "2"]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-8000:]  # the output of a rank comes before torchrun's summary
    assert "step    1   loss" in done.stdout
