"""The validation loss by position: its mean is the one that training logged."""

import json
from pathlib import Path

import pytest

from cosmos_lab.cli.main import main
from cosmos_lab.config import RunConfig
from cosmos_lab.data import write_shard
from cosmos_lab.results.reading import CONFIG
from cosmos_lab.run.evaluate import evaluate
from cosmos_lab.run.train import train
from tests.lab.conftest import write_text

LOSS_TOL = 1e-5  # float32 sums in another order


def test_the_mean_loss_over_positions_is_the_logged_loss(tiny_run: RunConfig) -> None:
    summary = train(tiny_run)
    result = evaluate(tiny_run.folder, device="cpu")
    assert result["val_loss"] == pytest.approx(summary["final_val_loss"], abs=LOSS_TOL)
    assert (result["step"], result["tokens"]) == (8, 512)
    spans = [(part["first"], part["last"]) for part in result["positions"]]
    assert spans == [(1, 1), (2, 4), (5, 16)]
    whole = sum(part["loss"] * (part["last"] - part["first"] + 1) for part in result["positions"]) / 16
    assert whole == pytest.approx(result["val_loss"], abs=LOSS_TOL)


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_training_validates_on_the_text_that_evaluate_reads(tiny_run: RunConfig, micro_batch: int) -> None:
    config = tiny_run.replace(val_tokens=31 * 16 + 5, micro_batch=micro_batch)  # 31 sequences and a part
    summary, result = train(config), evaluate(config.folder, device="cpu")
    assert result["tokens"] == 31 * 16
    assert summary["final_val_loss"] == pytest.approx(result["val_loss"], abs=LOSS_TOL)


def test_more_positions_than_the_model_has_are_refused_in_the_words_of_the_command(tiny_run: RunConfig) -> None:
    train(tiny_run.replace(steps=1))
    with pytest.raises(ValueError, match="--seq-len 4096 is longer than the 2048 positions of this model"):
        evaluate(tiny_run.folder, seq_len=4096, device="cpu")


def test_a_text_that_has_changed_since_the_training_is_evaluated_with_a_warning(
    tiny_run: RunConfig, tmp_path: Path
) -> None:
    write_text(tmp_path)
    config = tiny_run.replace(data=str(tmp_path / "toy"))
    train(config)
    write_shard(tmp_path / "toy_val.bin", [1, 2, 3] * 100)
    with pytest.warns(UserWarning, match="toy .val. has changed since .* was trained"):
        evaluate(config.folder, device="cpu")


def test_the_evaluate_command_shows_and_writes_the_losses_of_every_run(
    tiny_run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        train(tiny_run.replace(name=name, steps=4, seed=len(name)))
    folders = [str(tiny_run.replace(name=name).folder) for name in ("one", "two")]
    out = tmp_path / "positions.json"
    assert main(["evaluate", *folders, "--seq-len", "8", "--tokens", "64", "--out", str(out), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "one" in shown and "two" in shown and "5 to 8" in shown
    assert [result["tokens"] for result in json.loads(out.read_text())] == [64, 64]


def test_the_losses_are_shown_if_their_file_cannot_be_written(
    tiny_run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run.replace(steps=2))
    (tmp_path / "folder.json").mkdir()
    assert main(["evaluate", str(tiny_run.folder), "--out", str(tmp_path / "folder.json"), "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert "2 to 4" in shown.out and str(tmp_path / "folder.json") in shown.err
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_the_error_for_a_run_without_a_checkpoint_says_so(
    tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run.replace(checkpoint_every=0, steps=2))
    assert main(["evaluate", str(tiny_run.folder)]) == 2
    assert "--checkpoint-every" in capsys.readouterr().err


def test_the_error_for_a_run_without_its_config_says_so(
    tiny_run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run.replace(steps=2))
    folder = tiny_run.folder
    for content in ("[]", "{", None):
        (folder / CONFIG).unlink() if content is None else (folder / CONFIG).write_text(content)
        assert main(["evaluate", str(folder), "--device", "cpu"]) == 2
        assert f"cosmos-lab: {folder} has no readable config.json" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--seq-len", "0"), ("--tokens", "0"), ("--tokens", "-5")])
def test_a_count_of_zero_or_less_is_refused_with_its_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "some-run", f"{flag}={value}"]) == 2
    assert f"cosmos-lab: {flag} must be positive; got {value}" in capsys.readouterr().err
