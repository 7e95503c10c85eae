"""The examples of frameworks run as users run them, and learn."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

SMALL = ["--width", "32", "--depth", "1", "--steps", "20", "--lr", "0.004"]
# Example, the packages that it needs, flags that make it small, and the rate and decay that its plan must show.
EXAMPLES = {
    "transformers_trainer": (
        ("transformers", "accelerate"),
        ["--width", "32", "--depth", "1", "--steps", "30"],
        ("0.001", "0.1"),
    ),
    "peft_lora": (
        ("transformers", "peft"),
        ["--width", "32", "--base-steps", "30", "--steps", "30", "--lr", "0.01"],
        ("0.01", "0"),
    ),
    "lightning_gpt": (("lightning",), SMALL, ("0.004", "0.1")),
    "torchtitan_llama": (("torchtitan",), SMALL, ("0.004", "0.1")),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_its_plan_and_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    packages, flags, _ = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    losses = importlib.import_module(f"examples.{name}").main(flags)
    assert sum(losses[-2:]) < sum(losses[:2])
    shown = capsys.readouterr().out
    assert "cosmos" in shown and "total:" in shown and "loss" in shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_plan_of_an_example_shows_the_rate_and_decay_that_it_trains_with(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packages, flags, rate_and_decay = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    importlib.import_module(f"examples.{name}").main(flags)
    rows = re.findall(r"  cosmos .*  (\S+) +(\S+) +\S+ (?:B|KiB|MiB)$", capsys.readouterr().out, re.MULTILINE)
    assert set(rows) == {rate_and_decay}


def test_the_trainer_example_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    packages, _, _ = EXAMPLES["transformers_trainer"]
    for package in packages:
        pytest.importorskip(package)
    example = importlib.import_module("examples.transformers_trainer")
    small = ["--width", "16", "--depth", "1", "--output", str(tmp_path)]
    first = example.main([*small, "--steps", "20"])
    again = example.main([*small, "--steps", "30", "--resume"])
    assert again[: len(first)] == first and len(again) == len(first) + 1


def test_the_lightning_example_resumes_and_its_rate_falls_to_the_end_of_the_longer_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning")
    example = importlib.import_module("examples.lightning_gpt")
    small = ["--width", "16", "--depth", "1", "--lr", "0.004", "--checkpoints", str(tmp_path)]
    first = example.main([*small, "--steps", "11"])
    capsys.readouterr()
    again = example.main([*small, "--steps", "21", "--resume", str(tmp_path / "last.ckpt")])
    assert len(first) == 11 and len(again) == 10
    assert again[0] < first[0]
    (rate,) = re.findall(r"^step   20   lr (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert float(rate) < 0.05 * 0.004
