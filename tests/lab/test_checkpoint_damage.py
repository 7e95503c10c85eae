"""Damaged checkpoints are refused in one line on every rank, and the older one continues the run bit for bit."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch._dynamo  # before the ranks are forked: each would take seconds for it
import torch.distributed.checkpoint.state_dict  # noqa: F401

from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.io import write_json
from cosmos_lab.run import checkpoint
from cosmos_lab.run.train import train
from tests.lab.outcomes import assert_same, outcome
from tests.lab.test_resume import interrupt
from tests.lab.test_train_distributed import losses, on_ranks
from tests.soak.damage import check_damages


def arguments(config: RunConfig) -> list[str]:
    """Return the command line of a run."""
    start = RunConfig().flat()
    given = {name: value for name, value in config.flat().items() if value != start[name]}
    return ["train", "tiny", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def cut(config: RunConfig) -> Path:
    """Train to step 6 of 8, with checkpoints of the steps 2 and 4; return the folder of the newest one."""
    interrupt(config.replace(checkpoint_every=2), 5)
    return config.folder / "checkpoints" / "step_000004"


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


def remove_hashes(folder: Path) -> None:
    """Make a checkpoint as it was written before there were hashes."""
    meta = json.loads((folder / "meta.json").read_text())
    write_json(folder / "meta.json", {name: value for name, value in meta.items() if name not in ("hash", "files")})


def test_random_damages_of_a_plain_checkpoint_are_refused(tiny_run: RunConfig) -> None:
    train(tiny_run)
    check_damages(tiny_run, 40, seed=0)


@pytest.mark.slow
def test_random_damages_of_a_sharded_checkpoint_are_refused_on_both_ranks(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(sharding="fsdp")
    on_ranks(2, lambda: train(config))
    on_ranks(2, lambda: check_damages(config, 20, seed=1))


def test_a_damaged_run_continues_from_the_older_checkpoint_bit_for_bit(
    tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(cut(tiny_run) / "state.pt")
    assert main(arguments(tiny_run)) == 2
    said = capsys.readouterr().err
    assert "state.pt is damaged" in said and "add --resume previous to continue from step_000002" in said
    assert said.count("\n") == 1
    assert main([*arguments(tiny_run), "--resume", "previous"]) == 0
    train(tiny_run.replace(name="whole"))
    assert_same(outcome(tiny_run), outcome(tiny_run.replace(name="whole")))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_stop_with_one_line_and_continue_from_the_older_one(tiny_run: RunConfig, sharding: str) -> None:
    config = tiny_run.replace(sharding=sharding)
    on_ranks(2, lambda: train(config))
    (config.folder / "summary.json").unlink()
    newest = config.folder / "checkpoints" / "step_000008"
    flip(newest / "process_1.pt")

    def refused() -> None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            assert main(arguments(config)) == 2
        lines = [line for line in said.getvalue().splitlines() if "cosmos-lab" in line]
        assert len(lines) == (os.environ["RANK"] == "0"), lines
        assert "Traceback" not in said.getvalue()

    on_ranks(2, refused)
    on_ranks(2, lambda: train(config.replace(resume="previous")))
    on_ranks(2, lambda: train(config.replace(name="whole")))
    assert losses(config) == losses(config.replace(name="whole"))


def test_a_checkpoint_without_its_meta_json_is_not_passed_over(tiny_run: RunConfig) -> None:
    (cut(tiny_run) / "meta.json").unlink()
    with pytest.raises(ValueError, match=r"step_000004 cannot be read.*meta\.json.*--resume previous"):
        train(tiny_run)


def test_a_checkpoint_written_before_hashes_loads_with_a_warning(tiny_run: RunConfig) -> None:
    remove_hashes(cut(tiny_run))
    with pytest.warns(UserWarning, match="step_000004 was written without hashes, so it cannot be checked"):
        train(tiny_run)
    train(tiny_run.replace(name="whole"))
    assert_same(outcome(tiny_run), outcome(tiny_run.replace(name="whole")))


def test_a_damaged_checkpoint_is_neither_evaluated_nor_exported(tiny_run: RunConfig) -> None:
    flip(cut(tiny_run) / "state.pt")
    with pytest.raises(ValueError, match=r"state\.pt is damaged.*remove that folder"):
        checkpoint.load_trained(tiny_run.folder)


def test_a_removed_checkpoint_is_never_found_in_part(tiny_run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of a removal must not leave the rest of a checkpoint under its name."""

    def kill(path: Path, ignore_errors: bool) -> None:
        if path.exists():
            raise KeyboardInterrupt

    newest = cut(tiny_run)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", kill)
        checkpoint._remove(newest)
    assert checkpoint.latest(newest.parent) == newest.with_name("step_000002")
    checkpoint.remove_unfinished(newest.parent)
    assert [path.name for path in newest.parent.iterdir()] == ["step_000002"]
