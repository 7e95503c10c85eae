"""The examples that need torch alone run as users run them; tests/integrations has those of frameworks."""

import re
from pathlib import Path

import pytest

from examples import nanogpt

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SMALL = ["--width", "32", "--depth", "1", "--length", "16", "--steps", "24", "--lr", "0.004"]


def test_the_nanogpt_example_learns_and_a_resumed_run_repeats_the_unbroken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = nanogpt.main(SMALL)
    shown = capsys.readouterr().out
    assert losses[-1] < 0.75 * losses[0]
    assert "blocks.0.qkv.weight" in shown and f"loss {losses[-1]:.3f}" in shown
    file = ["--checkpoint", str(tmp_path / "run.pt")]
    first = nanogpt.main([*SMALL, *file, "--stop", "12"])
    assert first + nanogpt.main([*SMALL, *file]) == losses


def test_the_table_of_examples_names_every_example_and_nothing_else() -> None:
    named = set(re.findall(r"^\| \[.*?\]\((.*?)\)", (FOLDER / "README.md").read_text(), re.MULTILINE))
    held = {path.name for path in FOLDER.glob("*.py")} | {
        str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/README.md")
    }
    assert named == held
