"""Which runs the comparison makes, what the kept results say, and how they are read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import benchmarks.protocol as protocol_module
from benchmarks import rate_runs, trials
from benchmarks.best_rows import best_rows
from benchmarks.kept_runs import losses, read_results, run_of, write_bundle
from benchmarks.protocol import MOST, Protocol
from benchmarks.sweep import main
from benchmarks.sweep_options import Filters, Options
from benchmarks.sweep_queue import Queue
from benchmarks.sweep_table import table
from benchmarks.variants import VARIANTS
from cosmos_lab.optimizers import hyperparameters
from tests.lab.tiny_sweep import BUNDLE, TINY, fake, powers, tiny_options


@pytest.fixture(autouse=True)
def _restored(only_the_packages_rules: None) -> None:
    """Forget the trial optimizers after each test."""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Write a text and return options for it."""
    return tiny_options(tmp_path)


def test_a_search_brackets_the_best_rates_with_the_same_rule_for_all() -> None:
    for best in (-1, 0, 1):
        loss = fake(TINY, best)
        for entry in TINY.entries:
            point, unfinished, at_the_end = TINY.best("B", entry, loss)
            assert point == {"lr": best, "adam_lr": best, "beta2": 0.95} and not unfinished and not at_the_end
        counts = [sum(f"-{entry}-" in name for name in loss) for entry in TINY.entries]
        assert counts[0] == counts[1] <= sum(MOST.values()) - 1 + 2 + 2


def test_the_hidden_rate_is_tuned_again_if_the_outer_rate_has_moved_far() -> None:
    """The best hidden rate rises by a factor of 2 with every factor of 4 in the outer rate, whose best is 8 times."""
    loss: dict[str, float] = {}
    search = dataclasses.replace(TINY, phases=[("B", ("adamw",), ("lr", "adam_lr"))])
    while runs := search.candidates(loss):
        lr, outer = powers(runs[0])
        loss[runs[0].id] = float((lr - outer / 2) ** 2 + (outer - 3) ** 2)
    point, unfinished, at_the_end = search.best("B", "adamw", loss)
    assert (point["lr"], point["adam_lr"]) == (1, 2) and unfinished == ["beta2"] and not at_the_end
    assert {lr for lr in (5e-4, 1e-3, 2e-3, 4e-3) if f"tiny-B-adamw-lr{lr:g}-emb0.008-b0.98-s0" in loss} >= {1e-3, 2e-3}


def test_a_best_value_at_the_end_of_its_range_is_marked() -> None:
    _, unfinished, at_the_end = TINY.best("B", "adamw", fake(TINY, 8))
    assert not unfinished and at_the_end == ["lr", "adam_lr"]


def test_a_larger_model_runs_at_the_best_settings_of_a_smaller_one() -> None:
    found = fake(TINY, 1)
    larger = dataclasses.replace(TINY, model="larger", tuned_on="tiny")
    runs = larger.candidates(found)
    assert [(run.model, run.entry, run.seed) for run in runs] == [
        ("larger", entry, seed) for seed in (0, 1, 2) for entry in ("adamw", "cosmos")
    ]
    assert {(run.lr, run.adam_lr, run.beta2) for run in runs} == {(2e-3, 4e-3, 0.95)}
    assert larger.candidates(found | {run.id: 1.0 for run in runs}) == []


def test_a_row_that_never_ran_on_the_smaller_model_does_not_run_on_the_larger_one(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = dataclasses.replace(TINY, model="larger", tuned_on="tiny")
    found = {name: loss for name, loss in fake(TINY, 1).items() if "-cosmos-" in name}
    assert {run.entry for run in larger.candidates(found)} == {"cosmos"}
    assert Queue(larger, options).next() == []
    assert "skipped, because --known has no search of tiny: adamw in B, cosmos in B\n" in capsys.readouterr().out


def with_weights_field(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config that a kept run has today: before `weights`, trial-cosmos turned them into bfloat16."""
    if "bf16_weights=True" not in config["options"]:
        return config
    assert config["optimizer"] == "trial-cosmos"
    options = [option for option in config["options"] if option != "bf16_weights=True"]
    return {**config, "optimizer": "cosmos", "options": options, "weights": "bf16"}


def test_a_kept_run_would_be_repeated_with_the_settings_it_records() -> None:
    trials.register()
    results = read_results(sorted(BUNDLE.parent.glob("protocol-*.json")))
    assert {r["model"] for r in results.values()} == set(rate_runs.SIZES)
    for result in results.values():
        run = run_of(result)
        compared = run.regime in Protocol().regimes
        config = (Protocol(model=run.model) if compared else rate_runs.protocol(run.model)).config(run)
        asked = {name: list(v) if isinstance(v, tuple) else v for name, v in config.flat().items()}
        kept = with_weights_field(result["config"])
        if kept["optimizer"] == "muon-eq":  # Muon with equal rows was a trial before it was an option.
            kept |= {"optimizer": "muon", "options": ["equal_rows=True"]}
        other = {name for name, value in kept.items() if asked[name] != value}
        assert run.id == result["id"]
        # Earlier runs gave AdamW its second rate by these fields.
        assert other <= {"recipe", "embedding_lr", "head_lr", "vector_lr"}
        # "auto" was called "input" for the same side: every matrix has at least `rank` rows.
        now, then = (
            {name.replace("muon-eq.", "muon."): "input" if x == "auto" else x for name, x in found.items()}
            for found in (hyperparameters(config), result["settings"])
        )
        assert {name: now[name] for name in then} == then


def test_the_kept_results_belong_to_the_search_and_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", str(BUNDLE)]) == 0
    assert "cosmos" in capsys.readouterr().out
    results = read_results([BUNDLE])
    runs = {Protocol().at("B", name, {"lr": 0, "adam_lr": 0, "beta2": 0.98}).id for name in Protocol().entries}
    assert runs & set(results) and not {run.id for run in Protocol().candidates(losses(results))} & set(results)


def test_the_table_of_a_model_shows_the_settings_that_came_from_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", str(BUNDLE), str(BUNDLE.with_name("protocol-130m.json"))]) == 0
    of_130m = capsys.readouterr().out.partition("llama-130m, regime A")[2].partition("llama-130m, regime long")[0]
    for entry in ("cosmos", "normuon", "muon", "adamw"):
        (line,) = [line for line in of_130m.splitlines() if line.startswith(f"{entry} ")]
        assert line.endswith("tuned on llama-60m")


def test_filters_leave_only_the_named_variants_and_seeds() -> None:
    plain = {name: r for name, r in read_results([BUNDLE]).items() if not r.get("variant")}
    runs = [r for r in Protocol().candidates(losses(plain)) if r.entry == "cosmos"]
    named = [r for r in runs if Filters(("embed-x4", "momentum-int8"), (0,)).allow(r)]
    assert {r.variant for r in named} == {"embed-x4", "momentum-int8"} and {r.seed for r in named} == {0}
    assert all(not r.variant for r in runs if Filters(("none",)).allow(r)) and all(map(Filters().allow, runs))


def test_stages_leave_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = ["--plan", "--out", str(tmp_path), "--known", str(BUNDLE), "--parallel", "2"]
    assert main([*known, "--regimes", "A", "--only", "cosmos", "--stages", "memory"]) == 0
    ids = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ids and all(VARIANTS[name.rpartition("-s2-")[2]] in protocol_module.MEMORY for name in ids if "-s2-" in name)
    assert main([*known, "--regimes", "A", "--only", "cosmos", "--stages", "seeds"]) == 0
    assert "llama" not in capsys.readouterr().out  # rates come before seeds, and are not tuned yet


def test_further_seeds_run_after_the_search_and_count_in_the_table() -> None:
    results = {name: r for name, r in read_results([BUNDLE]).items() if r["seed"] < 3}
    asked = Protocol().wanted("B", "cosmos", ("more-seeds",), losses(results))
    assert [run.seed for run in asked] == [3, 4]
    unfinished = {name: r for name, r in results.items() if r["beta2"] != 0.999}
    assert Protocol().wanted("B", "cosmos", ("more-seeds",), losses(unfinished)) == []
    first = results[dataclasses.replace(asked[0], seed=0).id]
    results |= {run.id: {**first, "id": run.id, "seed": run.seed} for run in asked}
    assert len(best_rows(Protocol(), "B", results)["cosmos"].seeds) == 5


def test_two_results_of_one_run_are_an_error_unless_they_are_equal(tmp_path: Path) -> None:
    name, result = next(iter(read_results([BUNDLE]).items()))
    for file, loss in (("a", 3.0), ("b", 3.0), ("c", 3.1)):
        write_bundle(tmp_path / f"{file}.json", {name: {**result, "val_loss": loss}})
    assert read_results([tmp_path / "a.json", tmp_path / "b.json"])[name]["val_loss"] == 3.0
    with pytest.raises(ValueError, match=rf"b.json and .*c.json have different results of {name}"):
        read_results([tmp_path / "b.json", tmp_path / "c.json"])


@pytest.mark.parametrize("content", ['{"id": "x", "val_lo', '["id"]', '{"name": "x"}'])
def test_a_damaged_result_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    damaged = tmp_path / "runs" / "x.json"
    damaged.parent.mkdir()
    damaged.write_text(content)
    for flags in (["--out", str(tmp_path)], ["--out", str(tmp_path / "new"), "--known", str(damaged)]):
        with pytest.raises(SystemExit):
            main(["--plan", *flags])
        assert f"{damaged} is not " in capsys.readouterr().err


def test_a_variant_that_ran_at_two_settings_has_a_line_for_each() -> None:
    results = read_results([BUNDLE])
    for result in list(results.values()):
        run = run_of(result)
        if (run.regime, run.entry, run.variant) == ("A", "cosmos", "all-8"):
            for variant, loss in (("", 4.0), ("all-8", 4.0 + run.seed)):
                other = dataclasses.replace(run, adam_lr=2e-3, variant=variant)
                results[other.id] = {**result, **dataclasses.asdict(other), "test_loss": loss}
    lines = [line for line in table(Protocol(), results).splitlines() if "cosmos with all-8" in line]
    assert any("+1.0000 nats" in line and "3 seed(s) at 0.001, 0.002, beta2 0.98" in line for line in lines)
    assert any("+0.0010 nats" in line and "3 seed(s) at 0.001, 0.004, beta2 0.98" in line for line in lines)


def test_result_files_with_a_recipe_say_how_long_and_how_large_their_runs_were() -> None:
    for path in BUNDLE.parent.glob("*.json"):
        kept = json.loads(path.read_text())
        if "recipe" in kept:
            assert {"steps", "batch", "seq_len", "note"} <= set(kept["set_up"]), path.name
            assert all("embedding_lr" in row for row in kept["rows"]), path.name
