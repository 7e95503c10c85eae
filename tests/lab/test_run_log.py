"""What a run records: the code that made it, and numbers as every reader of JSON takes them."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab import provenance
from cosmos_lab.config import RunConfig
from cosmos_lab.io import write_json
from cosmos_lab.results.reading import METRICS, read_metrics
from cosmos_lab.run import integrity
from cosmos_lab.run.train import train


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one file in each folder, of which one is this module."""
    for name in ("src/cosmos_lab/provenance.py", "src/cosmos_optim/optimizer.py", "benchmarks/step.py", "docs/lab.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("as committed")
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-m", "Add files"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "src/cosmos_lab/provenance.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "mark"),
    [
        ("src/cosmos_lab/provenance.py", "+"),
        ("src/cosmos_optim/optimizer.py", "+"),
        ("benchmarks/step.py", "+"),
        ("docs/lab.md", ""),
    ],
)
def test_the_commit_has_a_plus_if_code_was_edited(repository: Path, edited: str, mark: str) -> None:
    clean = provenance.commit()
    assert clean is not None and len(clean) == 40
    (repository / edited).write_text("edited")
    assert provenance.commit() == clean + mark


@pytest.mark.parametrize(
    "error", [OSError(), subprocess.TimeoutExpired("git", 20), subprocess.CalledProcessError(1, "git")]
)
def test_a_git_that_does_not_answer_costs_no_run(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert provenance.commit() is None


def test_the_commit_is_none_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "src/cosmos_lab/provenance.py"))
    assert provenance.commit() is None


def strictly(text: str) -> Any:
    """Read JSON, which has neither nan nor inf."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_numbers_that_json_lacks_are_written_as_null(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"rows": [{"values": (math.nan, 1.0)}, [math.inf]], "best": -math.inf})
    assert strictly((tmp_path / "a.json").read_text()) == {"rows": [{"values": [None, 1.0]}, [None]], "best": None}


def test_every_file_of_a_diverging_run_is_json_and_its_checkpoints_can_be_read(tiny_run: RunConfig) -> None:
    rates = {"optimizer": "adam", "rank": None, "lr": 1e30, "adam_lr": 1e30, "warmup": 0.0}
    train(tiny_run.replace(**rates, steps=6, log_every=0, checkpoint_every=1, keep=9))
    (tiny_run.folder / "metrics.jsonl").open("a").write('{"step": 1, "old": NaN}\n')  # by an earlier version
    (tiny_run.folder / "summary.json").unlink()
    train(tiny_run.replace(**rates, steps=6, log_every=0, checkpoint_every=1, keep=9))
    found = list(tiny_run.folder.rglob("*.json*"))
    for path in found:
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            strictly(text)
    metas = [path.parent for path in found if path.name == "meta.json"]
    assert any(integrity.check(folder)["loss_sum"] is None for folder in metas)


@pytest.mark.parametrize(
    ("last", "steps"), [(None, [1, 2, 3]), (0, []), (13, [3]), (23, [3]), (25, [2, 3]), (99, [1, 2, 3])]
)
def test_the_end_of_a_log_is_read_in_whole_lines(tmp_path: Path, last: int | None, steps: list[int]) -> None:
    (tmp_path / METRICS).write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))  # 12 bytes each
    assert [record["step"] for record in read_metrics(tmp_path, last=last)] == steps
