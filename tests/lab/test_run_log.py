"""What a run records about the code that made it."""

import subprocess
from pathlib import Path

import pytest

from cosmos_lab.run import run_log


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one file in each folder, of which one is this module."""
    for name in ("src/cosmos_lab/run/run_log.py", "src/cosmos_optim/optimizer.py", "benchmarks/step.py", "docs/lab.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("as committed")
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-m", "Add files"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    monkeypatch.setattr(run_log, "__file__", str(tmp_path / "src/cosmos_lab/run/run_log.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "mark"),
    [
        ("src/cosmos_lab/run/run_log.py", "+"),
        ("src/cosmos_optim/optimizer.py", "+"),
        ("benchmarks/step.py", "+"),
        ("docs/lab.md", ""),
    ],
)
def test_the_commit_has_a_plus_if_code_was_edited(repository: Path, edited: str, mark: str) -> None:
    clean = run_log.commit()
    assert clean is not None and len(clean) == 40
    (repository / edited).write_text("edited")
    assert run_log.commit() == clean + mark


def test_the_commit_is_none_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "__file__", str(tmp_path / "src/cosmos_lab/run/run_log.py"))
    assert run_log.commit() is None
