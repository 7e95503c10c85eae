"""Tokens to AdamW's loss, by benchmarks/evidence.py: invented curves, and the kept results."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import evidence, evidence_costs, evidence_pictures
from benchmarks.best_rows import Row, best_rows, curve_on_test_text, curve_shares, token_shares
from benchmarks.kept_runs import Result, losses, read_results
from benchmarks.protocol import Protocol
from benchmarks.student import half_width, quantile
from cosmos_lab.report.style import KNOWN

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "results" / "protocol-60m.json"
POINT = {"lr": 0.0, "adam_lr": 0.0, "beta2": 0.98}


def invented(entry: str, seed: int, offset: float, share: float = 1.0) -> Result:
    """Return a run whose test loss is 5 - log10(tokens / 1e6) - offset, with 25 million tokens at share 1."""
    run = Protocol().at("B", entry, POINT, seed, share)
    curve = [[i, i * share * 10**6, 0.0, 5 - math.log10(i * share) - offset] for i in range(1, 26)]
    last = curve[-1][3]
    return {"id": run.id, "seed": seed, "share": share, "lr": run.lr, "val_loss": last, "test_loss": last,
            "test_ppl": math.exp(last), "curve_columns": ["step", "tokens", "val_loss", "test_loss"],
            "curve": curve}  # fmt: skip


def rows_of(*runs: Result) -> tuple[dict[str, Row], dict[str, Result]]:
    results = {r["id"]: r for r in runs}
    return best_rows(Protocol(), "B", results), results


def test_a_curve_lower_by_log10_of_2_crosses_at_half_of_the_tokens() -> None:
    rows, _ = rows_of(invented("adamw", 0, 0.0), *(invented("cosmos", s, math.log10(2)) for s in (0, 1, 2)))
    assert curve_shares(rows) == {"cosmos": pytest.approx(0.5, rel=1e-6)}


def test_shorter_runs_give_the_share_and_paired_seeds_its_interval() -> None:
    offsets = [math.log10(1.5) + 0.01 * (s - 1) for s in (0, 1, 2)]
    full = [invented("cosmos", s, offset) for s, offset in enumerate(offsets)]
    short = [invented("cosmos", 0, math.log10(1.5), share) for share in (0.45, 0.6, 0.75)]
    rows, results = rows_of(*(invented("adamw", s, 0.0) for s in (0, 1, 2)), *full, *short)
    (found,) = token_shares(Protocol(), "B", rows, results).values()
    assert found.share == pytest.approx(1 / 1.5, rel=1e-6) and not found.outside
    # The loss falls by log10(e) per unit of log tokens.
    assert found.half_width == pytest.approx(half_width(offsets) / math.log10(math.e) / 1.5, rel=1e-6)


def test_a_share_outside_of_the_lengths_that_ran_is_called_so() -> None:
    fast, slow = [invented("cosmos", 0, 1.0), invented("cosmos", 0, 1.0, 0.45)], invented("muon", 0, -0.1)
    rows, results = rows_of(invented("adamw", 0, 0.0), *fast, slow, invented("muon", 0, -0.1, 0.75))
    shares = token_shares(Protocol(), "B", rows, results)
    assert {entry: str(share) for entry, share in shares.items()} == {
        "cosmos": "less than 0.45",
        "muon": "more than 1.00",
    }


def test_an_optimizer_that_never_reaches_the_loss_has_no_share_by_its_curve() -> None:
    rows, _ = rows_of(invented("adamw", 0, 0.0), invented("muon", 0, -0.1))
    assert curve_shares(rows) == {}


def test_a_coarse_curve_is_refused_with_what_to_store() -> None:
    run = invented("adamw", 0, 0.0)
    run["curve"] = run["curve"][::2]
    with pytest.raises(ValueError, match="13 points of test loss, 20 are needed"):
        curve_on_test_text(run)


def test_every_kept_run_of_the_comparison_has_a_curve_that_is_fine_enough() -> None:
    runs = read_results(sorted(KEPT.parent.glob("protocol-*.json"))).values()
    compared = [run for run in runs if run["regime"] in Protocol().regimes]
    assert {run["model"] for run in compared} == {"llama-60m", "llama-130m"}
    for run in compared:
        assert curve_on_test_text(run)[-1][0] == run["tokens"]


def test_shares_by_curves_are_called_bounds_and_costs_are_those_of_the_profiles() -> None:
    results = read_results([KEPT])
    page = evidence.report({name: r for name, r in results.items() if r["entry"] != "muon" or r["share"] == 1})
    assert re.search(r"\| COSMOS \|.*\| 0\.\d\d \+- 0\.\d\d \|", page)
    assert re.search(r"\| Muon \|.*\| at most 0\.\d\d \|", page)
    cost = evidence_costs.costs()
    assert cost["adamw"].step_s < cost["cosmos"].step_s < cost["soap-f10"].step_s
    assert cost["cosmos"].state_gib == pytest.approx(5.59, abs=0.01)


def test_the_ratio_of_steps_reads_full_runs_of_one_regime_without_variants() -> None:
    def run(entry: str, step_ms: float, **more: object) -> Result:
        return {"model": "llama-60m", "regime": "B", "entry": entry, "share": 1.0, "step_ms": step_ms, **more}

    others = [run("cosmos", 99.0, share=0.6), run("cosmos", 99.0, regime="A"), run("cosmos", 99.0, variant="heads")]
    runs = [run("adamw", 20.0), run("cosmos", 21.0), run("cosmos", 22.0), run("cosmos", 90.0), *others]
    assert evidence_costs.step_ratio({str(i): r for i, r in enumerate(runs)}, "llama-60m", "B") == pytest.approx(1.1)


def test_step_times_tell_the_defaults_from_the_papers_settings() -> None:
    times = evidence_costs.step_times()
    assert len(times["cosmos"]) >= 4 and len(times["cosmos-paper"]) >= 3
    state: dict[str, set[int]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        kept = json.loads(path.read_text())
        rows = [row for run in kept.get("runs", [kept]) if run.get("model") == "llama-1b" for row in run["rows"]]
        for row in rows:
            state.setdefault(row["name"], set()).add(row["state_bytes"])
    assert len(state["cosmos"]) == len(state["cosmos-paper"]) == 1  # every row is called what it is
    assert evidence_costs.described([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0, 3 runs)"


def test_the_committed_page_and_picture_are_what_the_command_writes(tmp_path: Path) -> None:
    evidence.main(["--page", str(tmp_path / "page.md"), "--pictures", str(tmp_path)])
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "results" / "evidence.md").read_text()
    assert all("<svg" in (tmp_path / f"{name}.svg").read_text() for name in ("evidence", "outer-rates", "long-run"))


@pytest.mark.parametrize(("regime", "row"), [("B", 0), ("A", 1)])
def test_the_readme_has_the_perplexities_and_shares_of_the_kept_results(regime: str, row: int) -> None:
    results = read_results([KEPT])
    rows = best_rows(Protocol(), regime, results)
    shares = token_shares(Protocol(), regime, rows, results)
    readme = (ROOT / "README.md").read_text().replace("**", "")
    _, *cells = (line.strip("| ").split(" | ") for line in readme.partition("| LLaMA-60M")[2].splitlines()[1:6])
    order = ("cosmos", "muon", "normuon", "adamw")
    assert cells[row][1:] == [f"{math.exp(rows[entry].test_loss):.1f}" for entry in order]
    assert cells[row + 2][1:] == [*(str(shares[entry]) for entry in order[:-1]), "1"]


def complete(protocol: Protocol, regime: str, entries: tuple[str, ...]) -> dict[str, Result]:
    """Return made-up results of every run that the protocol asks for in a regime: search, five seeds, shorter runs."""
    sample = next(iter(read_results([KEPT]).values()))
    stages = ("lr", "adam_lr", "beta2", "seeds", "more-seeds", "short")
    found: dict[str, Result] = {}
    for order, entry in enumerate(entries):
        while runs := protocol.wanted(regime, entry, stages, losses(found)):
            for run in runs:
                lr, adam_lr = protocol.entries[entry].start[regime]
                far = abs(math.log2(run.lr / lr) - 1) + abs(math.log2(run.adam_lr / adam_lr) + 2)
                loss = 3.2 + 0.05 * order + 0.02 * far + 0.01 * (run.beta2 != 0.95) - math.log10(run.share)
                loss += 0.001 * run.seed * (order + 1)
                curve = [[i, i * 1000, loss, loss + 1 - i / 25] for i in range(1, 26)]
                made = {"val_loss": loss, "test_loss": loss, "val_ppl": math.exp(loss), "test_ppl": math.exp(loss)}
                more = {"curve": curve, "curve_columns": ["step", "tokens", "val_loss", "test_loss"]}
                found[run.id] = {**sample, **dataclasses.asdict(run), **made, **more, "id": run.id}
    return found


def test_a_complete_regime_with_five_seeds_has_no_open_cell_and_corrected_intervals() -> None:
    results = complete(Protocol(), "A", ("cosmos", "muon", "normuon", "adamw"))
    page = "\n".join(evidence.regime_part(Protocol(), "A", results))
    assert "open" not in page and "corrected for 3 comparisons" in page
    first = re.search(r"\| COSMOS \| 2e-3, 4e-3, 0\.95 \| (\d+) \| done \| (.*) \| \*\*", page)
    assert first and int(first[1]) >= 10 and len(first[2].split(", ")) == 5
    gaps = [0.05 + 0.001 * seed for seed in range(5)]
    shown = rf"\| Muon \| \+0\.052 \+- {half_width(gaps):.3f} \| \+- {half_width(gaps, 3):.3f} \| \+0\.052 \|"
    assert re.search(shown, page)
    for start in ("Shorter runs", "Hidden rate, at", "Outer rate, at", "Hidden rate again", "beta2, at"):
        lines = page.partition(f"\n{start}")[2].splitlines()[4:8]
        assert any("| Muon |" in line for line in lines) and any("| COSMOS |" in line for line in lines)
        assert start == "Shorter runs" or all(line.count("**") == 2 for line in lines)


def test_intervals_are_corrected_for_the_comparisons_of_all_regimes() -> None:
    results = complete(Protocol(), "A", ("cosmos", "muon")) | complete(Protocol(), "B", ("cosmos", "muon", "adamw"))
    page = "\n".join(evidence.regime_part(Protocol(), "A", results))
    gaps = [0.05 + 0.001 * seed for seed in range(5)]
    assert "corrected for 3 comparisons" in page and f"| +- {half_width(gaps, 3):.3f} |" in page


def test_a_change_is_compared_with_the_same_run_without_it() -> None:
    results = complete(Protocol(), "B", ("cosmos",))
    point, _, _ = Protocol().best("B", "cosmos", losses(results))
    for seed, better in enumerate((0.03, 0.01)):
        plain = Protocol().at("B", "cosmos", point, seed)
        run, loss = dataclasses.replace(plain, variant="norms-half"), results[plain.id]["test_loss"] - better
        made = {"test_loss": loss, "test_ppl": math.exp(loss), "id": run.id}
        results[run.id] = results[plain.id] | dataclasses.asdict(run) | made
    alone = dataclasses.replace(run, seed=7)  # without an unchanged run
    results[alone.id] = results[run.id] | {"seed": 7, "id": alone.id}
    page = "\n".join(evidence.regime_part(Protocol(), "B", results)).partition("Changes of one thing:")[2]
    (line,) = [line for line in page.splitlines() if "norms at half the outer rate" in line]
    assert f"| -0.0200 +- {half_width([0.03, 0.01]):.4f} |" in line and line.count(", ") == 4


def test_what_finer_steps_could_gain_is_the_lowest_point_of_a_parabola() -> None:
    results = complete(Protocol(), "A", ("cosmos",))
    assert "COSMOS 0.0 %" in "\n".join(evidence.tables.finer_steps(Protocol(), "A", results))  # symmetric: no gain
    for r in results.values():
        r["val_loss"] -= 0.019 * (r["lr"] == 4e-3)  # 0.02, 0 and 0.001 at 1e-3, 2e-3 and 4e-3
    gain = 100 * math.expm1((0.02 - 0.001) ** 2 / (8 * (0.02 + 0.001)))
    assert f"COSMOS {gain:.1f} %" in "\n".join(evidence.tables.finer_steps(Protocol(), "A", results))


def test_another_size_takes_settings_and_says_which_search_they_come_from() -> None:
    tuned = complete(Protocol(), "A", ("cosmos", "muon", "normuon", "adamw"))
    larger = {}
    for entry in ("cosmos", "muon", "normuon", "adamw"):
        protocol = Protocol(model="llama-130m", tuned_on="llama-60m")
        run = protocol.at("A", entry, Protocol().best("A", entry, losses(tuned))[0])
        larger[run.id] = {
            **tuned[dataclasses.replace(run, model="llama-60m").id],
            **dataclasses.asdict(run),
            "id": run.id,
        }
    page = "\n".join(evidence.regime_part(protocol, "A", tuned | larger))
    assert page.count("of llama-60m, regime A: done") == page.count("| none |") == 4
    assert "No optimizer was tuned here" in page
    assert "| Muon | +0.050, one seed |" in page


@pytest.mark.parametrize("kept", range(0, 30, 3))
def test_a_search_cut_off_anywhere_makes_a_page_that_says_open(kept: int) -> None:
    results = complete(Protocol(), "A", ("cosmos",))
    some = dict(list(results.items())[:kept])
    page = "\n".join(evidence.regime_part(Protocol(), "A", some))
    unfinished = Protocol().best("A", "cosmos", losses(some))[1]
    assert ("open" in page) == bool(some and unfinished) or "0.45 of the steps" in page
    muon_alone = complete(Protocol(), "A", ("muon",))
    assert "difference to COSMOS" not in "\n".join(evidence.regime_part(Protocol(), "A", muon_alone))


def test_a_diverged_run_is_shown_in_the_search() -> None:
    results = complete(Protocol(), "A", ("cosmos",))
    name = next(iter(results))
    results[name] |= dict.fromkeys(("val_loss", "test_loss", "val_ppl", "test_ppl"))
    assert "diverged" in "\n".join(evidence.regime_part(Protocol(), "A", results))


def test_an_optimizer_looks_as_in_reports() -> None:
    assert evidence_pictures.LOOKS["cosmos"] == KNOWN["cosmos"] and evidence_pictures.LOOKS["adamw"] == KNOWN["adam"]


def test_the_results_are_not_changed_by_reading_them() -> None:
    results = read_results([KEPT])
    before = copy.deepcopy(results)
    evidence.report(results)
    assert results == before


@pytest.mark.parametrize(
    ("p", "expected"),  # from printed tables, for 1 to 5 degrees of freedom
    [(0.975, [12.706, 4.303, 3.182, 2.776, 2.571]), (1 - 0.025 / 3, [38.188, 7.649, 4.857, 3.961, 3.534])],
)
def test_quantiles_of_student_are_those_of_printed_tables(p: float, expected: list[float]) -> None:
    assert [quantile(p, freedom) for freedom in range(1, 6)] == pytest.approx(expected, abs=5e-4)


def test_the_quantile_for_three_seeds_is_its_closed_form() -> None:
    for p in (0.6, 0.975, 0.995):
        assert quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-9)
