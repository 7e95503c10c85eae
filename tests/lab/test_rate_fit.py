"""The list of benchmarks/rate_runs.py and the fit of benchmarks/rate_fit.py, on invented losses."""

import dataclasses
import json
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rate_fit, rate_runs, sweep
from benchmarks.comparison import Regime, Run
from benchmarks.kept_runs import losses, read_results
from benchmarks.protocol import RATES, Protocol
from benchmarks.rate_fit import CENTER, TERMS
from benchmarks.rate_runs import CALLS, CELLS, RUNS, plan, protocol, regime
from benchmarks.sweep_options import Options
from benchmarks.sweep_table import table
from benchmarks.sweep_training import train
from cosmos_lab.data import write_shard
from cosmos_lab.models import PRESETS

BUNDLE = Path(__file__).resolve().parents[2] / "results" / "protocol-60m.json"
TOKENS = 70_303_935  # in the two shards
NOISE = 0.004  # nats by which seeds differ
CURVATURE = {"lr": 0.03, "adam_lr": 0.015}  # nats for a factor of 2; older sweeps have 0.03 for lr
CONSTANT = {"lr": 6e-4, "adam_lr": 3e-3}
EXPONENTS = {"lr": (-0.3, -0.4, 0.2), "adam_lr": (-0.5, -0.25, 0.15)}
FLAT = {"lr": (0.0, 0.0, 0.0), "adam_lr": (0.0, 0.0, 0.0)}

Result = dict[str, Any]


def truth(exponents: Mapping[str, tuple[float, ...]], model: str, name: str) -> dict[str, float]:
    """Return log2 of the best rates in a cell."""
    spent = regime(name)
    sizes = (rate_fit.WIDTHS[model], spent.steps, spent.batch * spent.seq_len)
    logs = [math.log2(size / CENTER[term]) for size, term in zip(sizes, TERMS, strict=True)]
    return {rate: math.log2(CONSTANT[rate]) + float(np.dot(exponents[rate], logs)) for rate in RATES}


def result(run: Run, loss: float) -> Result:
    """Return the fields of a result that the fit reads."""
    spent = regime(run.regime)
    fields = {name: getattr(run, name) for name in Run.__dataclass_fields__}
    return {**fields, "id": run.id, "val_loss": loss, "steps": spent.steps, "batch": spent.batch,
            "seq_len": spent.seq_len, "config": {"width": None}}  # fmt: skip


def finished(
    exponents: Mapping[str, tuple[float, ...]], seed: int = 0, noise: float = NOISE,
    best: Callable[[str, str, dict[str, float]], dict[str, float]] = lambda model, name, rates: rates,
) -> list[Result]:  # fmt: skip
    """Run the whole list on invented losses: parabolas around the truth, with noise as large as seeds differ."""
    rng = np.random.default_rng(seed)
    done: dict[str, Result] = {}
    for call in CALLS:
        search = protocol(call.model)
        search = dataclasses.replace(search, phases=[p for p in search.phases if p[0] in call.regimes])
        while runs := search.candidates(losses(done)):
            for run in runs[: call.parallel]:
                at = best(run.model, run.regime, truth(exponents, run.model, run.regime))
                gaps = {rate: math.log2(getattr(run, rate)) - at[rate] for rate in RATES}
                loss = 3.4 + sum(CURVATURE[rate] * gap**2 for rate, gap in gaps.items())
                assert run.id not in done
                done[run.id] = result(run, loss + noise * rng.standard_normal())
    return list(done.values())


def early_results() -> dict[str, Result]:
    """Return the kept results of the first commits, so that later runs do not change what a test expects."""
    commits = ("9d6b85d", "cec8595", "daf6c1a", "1d30316", "5abacca", "0e301e4")
    return {name: r for name, r in read_results([BUNDLE]).items() if r["commit"][:7] in commits}


def fits(runs: list[Result]) -> tuple[list[rate_fit.Cell], list[rate_fit.Fit]]:
    """Return the cells, all with brackets, and the fits of both rates."""
    found = rate_fit.cells(runs)
    pairs = [rate_fit.optima(cell.points) for cell in found]
    assert len(found) == len(CELLS) and all(lr and adam_lr for lr, adam_lr in pairs)
    return found, [rate_fit.Fit(found, [o for pair in pairs if (o := pair[i])]) for i in (0, 1)]


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_list_takes_less_than_45_minutes_and_no_call_more_than_ten() -> None:
    calls = list(plan(losses(read_results([BUNDLE]))))
    assert sum(cost for _, _, cost in calls) < 45 * 60
    assert all(cost < 600 for _, _, cost in calls)
    for part in (1, 2):
        assert sum(cost for call, _, cost in calls if call.part == part) < 25 * 60


def test_every_size_and_length_is_listed_and_no_run_needs_more_tokens_than_there_are() -> None:
    assert {model for model, _ in CELLS} == set(rate_runs.SIZES) == set(rate_fit.WIDTHS) and len(set(CELLS)) == 17
    assert {regime(name).steps for _, name in CELLS} == {400, 800, 1600, 3200, 6400}
    for model in rate_runs.SIZES:
        search = protocol(model)
        for run in search.candidates({}):
            config = search.config(run).check()
            assert search.tokens(run) < TOKENS and config.training.batch % (config.training.micro_batch or 1) == 0
        width = rate_runs.SIZES[model].get("width") or PRESETS[model].width
        assert width == rate_fit.WIDTHS[model]


@pytest.mark.parametrize("kind", ["model", "steps"])
def test_the_cells_determine_all_exponents_without_any_one_size_or_length(kind: str) -> None:
    found, both = fits(finished(EXPONENTS))
    for group in {getattr(cell, kind) for cell in found}:
        keep = np.array([getattr(cell, kind) != group for cell in found])
        assert all(np.isfinite(fit.solve(TERMS, keep)).all() for fit in both)


@pytest.mark.parametrize("exponents", [EXPONENTS, FLAT], ids=["rule", "constant"])
def test_the_search_needs_no_more_runs_than_the_estimate_says(exponents: dict[str, tuple[float, ...]]) -> None:
    for seed in range(3):
        assert 5 * len(CELLS) <= len(finished(exponents, seed)) <= RUNS * len(CELLS)


def test_a_search_ends_if_the_best_rate_is_far_away_and_says_so() -> None:
    runs = finished(FLAT, best=lambda model, name, rates: {rate: at + 9 for rate, at in rates.items()})
    assert len(runs) <= 2 * rate_runs.MOST * len(CELLS)
    results = {r["id"]: r for r in runs}
    for model in rate_runs.SIZES:
        search = protocol(model)
        assert search.candidates(losses(results)) == []
        assert all(search.best(name, "cosmos", losses(results))[1:] == ([], [*RATES]) for name in search.regimes)


def test_a_cell_begins_near_what_finished_cells_say() -> None:
    runs = [r for r in finished(EXPONENTS, noise=0.0) if r["model"] != "llama-130m"]
    loss = losses({r["id"]: r for r in runs})
    for name in ("400x8", "1600x8", "400x32"):
        start, at = rate_runs.predict(("llama-130m", name), loss), truth(EXPONENTS, "llama-130m", name)
        for rate in RATES:
            assert abs(start[rate] + math.log2(rate_runs.FIRST[rate]) - at[rate]) < 0.8  # half of it is rounding


def test_a_search_that_was_cut_off_continues_with_its_finished_runs() -> None:
    runs = {r["id"]: r for r in finished(EXPONENTS) if (r["model"], r["regime"]) == ("llama-10m", "1600x8")}
    loss = losses(runs)
    search = dataclasses.replace(protocol("llama-10m"), phases=[("1600x8", ("cosmos",), RATES)])
    assert search.candidates(loss) == []
    for name in runs:
        rest = {other: value for other, value in loss.items() if other != name}
        again = dataclasses.replace(search)  # as in another process
        assert len(again.candidates(rest)) <= 3
        pending = [run.id for run in again.candidates(rest)]
        assert again.candidates(rest, pending) == []  # waits for them


def test_the_regimes_of_the_comparison_run_with_its_settings_and_count_its_runs() -> None:
    results = early_results()
    search = protocol("llama-60m")
    runs = [run for run in search.candidates(losses(results)) if run.regime in "AB"]
    assert {run.id for run in runs} == {
        "llama-60m-A-cosmos-lr0.002-emb0.004-b0.98-s0", "llama-60m-A-cosmos-lr0.0005-emb0.004-b0.98-s0",
        "llama-60m-B-cosmos-lr0.0005-emb0.032-b0.98-s0",  # not 0.001: the best of those that ran is 0.016
    }  # fmt: skip
    assert all(search.config(run) == Protocol().config(run) for run in runs)
    assert "to tune: lr, adam_lr" in table(search, results)


@pytest.mark.usefixtures("only_the_packages_rules")
def test_the_commands_of_the_list_are_commands_of_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rate_runs.main([]) == 0
    printed = capsys.readouterr().out
    for call in CALLS:
        assert call.command in printed
        arguments = call.command.split()[3:]
        assert sweep.main([*arguments, "--plan", "--out", str(tmp_path)]) == 0
        planned = capsys.readouterr().out
        assert all(f"{call.model}-{name}-cosmos" in planned for name in call.regimes)


def test_a_run_of_the_list_trains_in_small_passes_and_the_fit_reads_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, length in (("train", 8_000), ("val", 1_000)):
        tokens = rng.integers(2, 64, length)
        tokens[29::30] = 1
        write_shard(tmp_path / f"toy_t5_{name}.bin", tokens)
    options = Options(str(tmp_path / "toy_t5"), tmp_path / "out", device="cpu", compile="off",
                            cache=str(tmp_path / "cache"), commit="abc")  # fmt: skip
    tiny = dataclasses.replace(
        protocol("llama-30m"), sizes={"width": 64, "depth": 1, "mlp": 96, "vocab_size": 64}, cut=500, block=256,
        regimes={"400x64": Regime(steps=5, batch=16, seq_len=16)}, phases=[("400x64", ("cosmos",), RATES)],
    )  # fmt: skip
    search = pickle.loads(pickle.dumps(tiny))  # as a worker receives it
    found = train(search, options, search.candidates({})[0])
    assert found["status"] == "done" and found["config"]["micro_batch"] == 8 and len(found["curve"]) == 5
    (cell,) = rate_fit.cells([json.loads(json.dumps(found))])
    assert (cell.width, cell.steps, cell.batch, len(cell.points)) == (64, 5, 256, 1)
    assert len(search.candidates(losses({found["id"]: found}))) == 2


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_the_fit_is_as_far_from_the_exponents_as_it_says() -> None:
    """Over 20 seeds the distance has the stated standard error: neither more nor less. All errors are small.

    The largest standard error of an exponent over 40 seeds, in two orders of the list, is 0.133.
    """
    distances = []
    for seed in range(20):
        _, both = fits(finished(EXPONENTS, seed))
        for rate, fit in zip(RATES, both, strict=True):
            expected, errors = np.array([math.log2(CONSTANT[rate]), *EXPONENTS[rate]]), fit.errors(TERMS)
            assert (errors[1:] < 0.15).all()
            distances.append((fit.solve(TERMS) - expected) / errors)
    assert 0.85 < np.sqrt(np.mean(np.square(distances))) < 1.15


def test_without_noise_the_fit_is_exact() -> None:
    _, both = fits(finished(EXPONENTS, noise=0.0))
    for rate, fit in zip(RATES, both, strict=True):
        assert fit.solve(TERMS) == pytest.approx([math.log2(CONSTANT[rate]), *EXPONENTS[rate]], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_length_or_size_left_out_is_predicted(seed: int) -> None:
    found, both = fits(finished(EXPONENTS, seed))
    for rate, fit in zip(RATES, both, strict=True):
        expected = np.array([truth(EXPONENTS, cell.model, name_of(cell))[rate] for cell in found])
        for left_out in ("size", "length"):
            assert np.abs(fit.predict(TERMS, left_out) - expected).max() < 0.5
    rule = rate_fit.choose(rate_fit.compare(both))
    assert rule.worst <= 1 and "steps" in rule.terms[0]
    assert "bar of 1 % holds at each of 17 cells (4 sizes, 5 lengths)" in rate_fit.report(found).splitlines()[-1]


def name_of(cell: rate_fit.Cell) -> str:
    """Return the name of a cell's regime in the list."""
    return f"{cell.steps}x{cell.batch // 1024}"


@pytest.mark.parametrize("seed", range(3))
def test_constants_are_enough_if_the_truth_is_constant(seed: int) -> None:
    found, both = fits(finished(FLAT, seed))
    rule = rate_fit.choose(rate_fit.compare(both))
    assert rule.terms == ((), ())
    for rate, fit in zip(RATES, both, strict=True):
        assert 2.0 ** fit.solve(())[0] == pytest.approx(CONSTANT[rate], rel=0.1)
    assert "lr by a constant, adam_lr by a constant" in rate_fit.report(found).splitlines()[-1]


def test_constants_are_not_enough_if_rates_follow_a_rule() -> None:
    _, both = fits(finished(EXPONENTS))
    rules = rate_fit.compare(both)
    assert rules[0].terms == ((), ()) and rules[0].worst > 1
    assert rules[0].percent["cell"].mean() > rules[-1].percent["cell"].mean()


def test_a_truth_that_is_no_power_law_breaks_the_bar_and_the_report_says_where() -> None:
    def other(model: str, name: str, rates: dict[str, float]) -> dict[str, float]:
        return {**rates, "lr": rates["lr"] + (2 if model == "llama-30m" else 0)}

    last = rate_fit.report(rate_fit.cells(finished(FLAT, best=other))).splitlines()[-1]
    assert "does not hold" in last and "llama-30m" in last.partition("size left out:")[2].partition(";")[0]


@pytest.mark.parametrize(("rate", "how"), [("lr", "missing"), ("adam_lr", "missing"), ("lr", "diverged")])
def test_a_cell_without_a_bracket_is_named_and_left_out(rate: str, how: str) -> None:
    runs = finished(EXPONENTS)
    cell = next(cell for cell in rate_fit.cells(runs) if len(cell.points) == 5)  # the search did not move there
    optimum = rate_fit.optima(cell.points)[RATES.index(rate)]
    assert optimum
    mine = [r for r in runs if (r["model"], r["steps"], r["batch"] * 1024) == (cell.model, cell.steps, cell.batch)]
    above = [r for r in mine if math.log2(r[rate]) > optimum.high - 0.1]
    assert len(above) == 1
    if how == "diverged":
        for r in above:
            r["val_loss"] = None
    else:
        runs = [r for r in runs if r not in above]
    text = rate_fit.report(rate_fit.cells(runs))
    assert f"no bracket, left out: {cell.name}: {rate} (" in text
    assert text.count("no bracket") == 1 and "16 cells" in text


def test_the_first_part_alone_leaves_a_table() -> None:
    first = {(call.model, name) for call in CALLS if call.part == 1 for name in call.regimes}
    text = rate_fit.report(rate_fit.cells([r for r in finished(EXPONENTS) if (r["model"], r["regime"]) in first]))
    assert "11 cells" in text and "def rates(" in text


def test_the_printed_code_gives_the_rates_of_the_table() -> None:
    found, both = fits(finished(EXPONENTS))
    rule = rate_fit.choose(rate_fit.compare(both))
    names: dict[str, Any] = {}
    exec(rate_fit.code(both, rule), names)
    at = [2.0 ** fit.predict(terms) for fit, terms in zip(both, rule.terms, strict=True)]
    for i, cell in enumerate(found):
        assert names["rates"](cell.width, cell.steps, cell.batch) == pytest.approx([at[0][i], at[1][i]], rel=0.02)


def test_the_rule_of_the_package_costs_less_than_one_percent_in_every_measured_cell() -> None:
    """Bars of 1 %. With the exponents fitted again without the largest size or the longest run, it holds there too."""
    found = rate_fit.cells(read_results(sorted(BUNDLE.parent.glob("protocol-*.json"))).values())
    full = [(cell, lr, adam_lr) for cell in found for lr, adam_lr in [rate_fit.optima(cell.points)] if lr and adam_lr]
    kept = [cell for cell, _, _ in full]
    both = [rate_fit.Fit(kept, [lr for _, lr, _ in full]), rate_fit.Fit(kept, [adam_lr for _, _, adam_lr in full])]
    assert len(kept) >= 11 and {cell.width for cell in kept} == {256, 384, 512, 768}
    assert rate_fit.package_costs(kept, both).max() < 1
    rule = next(r for r in rate_fit.compare(both) if r.terms == (("width", "batch"), ("tokens",)))
    assert all(rule.percent["size"][i] < 1 for i, cell in enumerate(kept) if cell.width == 768)
    assert all(rule.percent["length"][i] < 1 for i, cell in enumerate(kept) if cell.steps == 3200)


def test_the_table_of_rates_has_the_numbers_of_the_fit() -> None:
    found = rate_fit.cells(read_results(sorted(BUNDLE.parent.glob("protocol-*.json"))).values())
    full = [(cell, *optima) for cell in found if all(optima := rate_fit.optima(cell.points))]
    kept, *best = zip(*full, strict=True)
    costs = rate_fit.package_costs(kept, [rate_fit.Fit(kept, one) for one in best])
    page = (BUNDLE.parents[1] / "docs" / "rates.md").read_text()
    lines = {tuple(line.strip("| ").split(" | ")) for line in page.splitlines() if line.startswith("| LLaMA-")}
    for cell, lr, adam_lr, cost in zip(kept, *best, costs, strict=True):
        rates = (2.0**lr.at, 2.0**adam_lr.at, *rate_fit.rates(cell.width, cell.steps, cell.batch))
        model = cell.model.replace("llama", "LLaMA").replace("m", "M")
        cells = (model, str(cell.width), f"{cell.steps:,} x {cell.batch:,}")
        shown = [f"{rate:.1e}".replace("e-0", "e-") for rate in rates]
        assert (*cells, *shown, f"{cost:.2f}") in lines


def test_only_plain_runs_of_cosmos_with_one_seed_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rate_fit.cells(early_results().values())
    assert {cell.name: len(cell.points) for cell in found} == {
        "llama-60m 3200 x 16384": 6, "llama-60m 800 x 65536": 1,
    }  # fmt: skip
    for r in finished(EXPONENTS):
        (tmp_path / f"{r['id']}.json").write_text(json.dumps(r))
    assert rate_fit.main([str(tmp_path)]) == 0
    assert "llama-130m" in capsys.readouterr().out
