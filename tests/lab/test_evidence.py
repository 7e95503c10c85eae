"""Tokens to AdamW's loss, by benchmarks/evidence.py: invented curves, and the kept results."""

import copy
import json
import math
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.protocol import Protocol, Result
from cosmos_lab.report.style import KNOWN

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results" / "protocol-60m.json"
POINT = {"lr": 0.0, "adam_lr": 0.0, "beta2": 0.98}


def invented(entry: str, seed: int, offset: float) -> Result:
    """Return a run whose test loss is 5 - log10(tokens / 1e6) - offset."""
    run = Protocol().at("B", entry, POINT, seed)
    curve = [[i, i * 10**6, 0.0, 5 - math.log10(i) - offset] for i in range(1, 26)]
    last = curve[-1][3]
    return {"id": run.id, "seed": seed, "lr": run.lr, "val_loss": last, "test_loss": last, "test_ppl": math.exp(last),
            "curve_columns": ["step", "tokens", "val_loss", "test_loss"], "curve": curve}  # fmt: skip


def test_a_curve_lower_by_log10_of_2_needs_half_of_the_tokens() -> None:
    runs = [invented("adamw", 0, 0.0), *(invented("cosmos", s, math.log10(2) + 0.01 * (s - 1)) for s in (0, 1, 2))]
    (found,) = evidence.crossings({r["id"]: r for r in runs}, "B")
    expected = [0.5 * 10 ** (0.01 * (1 - s)) for s in (0, 1, 2)]
    assert found.entry == "cosmos" and found.shares == pytest.approx(expected, rel=1e-6)
    assert found.uncertainty.endswith("3 seeds") and found.slope == pytest.approx(0.5 * (10**-0.01 - 1), rel=1e-2)


def test_an_optimizer_that_never_reaches_the_loss_has_no_share() -> None:
    runs = [invented("adamw", 0, 0.0), invented("muon", 0, -0.1)]
    assert evidence.crossings({r["id"]: r for r in runs}, "B") == []


def test_a_coarse_curve_is_refused_with_what_to_store() -> None:
    run = invented("adamw", 0, 0.0)
    run["curve"] = run["curve"][::2]
    with pytest.raises(ValueError, match="13 points of test loss, 20 are needed"):
        evidence.test_curve(run)


def test_every_kept_run_has_a_curve_that_is_fine_enough() -> None:
    for run in evidence.read_results([KEPT]).values():
        assert evidence.test_curve(run)[-1][0] == run["tokens"]


def test_time_counts_the_step_and_one_seed_is_called_one_seed() -> None:
    page = evidence.report(evidence.read_results([KEPT]))
    assert "one seed" in page and "is not a run of that length" in page
    cost = evidence.costs()
    assert cost["adamw"].step_s < cost["cosmos"].step_s < cost["soap-f10"].step_s
    assert cost["cosmos"].state_gib == pytest.approx(5.59, abs=0.01)


def test_step_times_tell_the_defaults_from_the_papers_settings() -> None:
    times = evidence.step_times()
    assert len(times["cosmos"]) >= 4 and len(times["cosmos-paper"]) >= 3
    state: dict[str, set[int]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        kept = json.loads(path.read_text())
        rows = [row for run in kept.get("runs", [kept]) if run.get("model") == "llama-1b" for row in run["rows"]]
        for row in rows:
            state.setdefault(row["name"], set()).add(row["state_bytes"])
    assert len(state["cosmos"]) == len(state["cosmos-paper"]) == 1  # every row is called what it is
    assert evidence.described([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0, 3 runs)"


def test_the_committed_page_and_picture_are_what_the_command_writes(tmp_path: Path) -> None:
    evidence.main(["--page", str(tmp_path / "page.md"), "--picture", str(tmp_path / "picture.svg")])
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "results" / "evidence.md").read_text()
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_an_optimizer_has_the_colour_of_reports() -> None:
    assert evidence.COLORS["cosmos"] == KNOWN["cosmos"].light and evidence.COLORS["adamw"] == KNOWN["adam"].light


def test_the_results_are_not_changed_by_reading_them() -> None:
    results = evidence.read_results([KEPT])
    before = copy.deepcopy(results)
    evidence.report(results)
    assert results == before
