"""The fine-tuning experiment of benchmarks/finetune.py on a CPU: adapters, groups, what it keeps and prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import finetune
from benchmarks.finetune import work
from benchmarks.finetune_table import read, table, verdict
from benchmarks.finetune_training import METHODS, OPTIMIZER_NAMES, TOY, Bench, Result, Run, add_lora, make_optimizer
from cosmos_lab.data import write_shard
from cosmos_lab.models import Decoder, build

SMALL = {"width": 64, "depth": 1, "mlp": 96}
SCALE = dataclasses.replace(
    TOY, sizes={"vocab_size": 64, **SMALL}, seq_len=16, batch=4, pretrain_steps=6, steps=4, lora_rank=4,
    read_tokens=128,
)  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> dict[str, str]:
    """Write two texts with T5's end-of-document token and return where they are."""
    for seed, text in enumerate(("old", "new")):
        rng = np.random.default_rng(seed)
        for part, length in (("train", 2_000), ("val", 600)):
            tokens = rng.integers(2, 40 + 20 * seed, length)
            tokens[29::30] = 1
            write_shard(tmp_path / f"{text}_t5_{part}.bin", tokens)
    return {"base_data": str(tmp_path / "old_t5"), "data": str(tmp_path / "new_t5")}


def bench(shards: dict[str, str], folder: Path) -> Bench:
    return Bench(SCALE, **shards, out=folder / "out", device="cpu", cache=str(folder / "cache"))


def adapted() -> tuple[Decoder, Decoder]:
    """Return a decoder, and the same one with adapters."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build("tiny", **SMALL))
    return models[0], add_lora(models[1], 4, 2.0)


def test_a_new_adapter_changes_nothing_and_a_trained_one_is_added_to_the_weight() -> None:
    plain, lora = adapted()
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(plain(tokens), lora(tokens))
    layer = lora.blocks[0].mlp.down
    torch.nn.init.normal_(layer.lora_B.weight)
    merged = plain.blocks[0].mlp.down.weight.detach() + 2.0 * layer.lora_B.weight @ layer.lora_A.weight
    plain.blocks[0].mlp.down.weight.data = merged.detach()
    torch.testing.assert_close(lora(tokens), plain(tokens))


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_the_optimizer_gets_both_rates_and_of_a_model_with_adapters_only_those(name: str) -> None:
    plain, lora = adapted()
    hidden = {n for n, _ in plain.blocks.named_parameters(prefix="blocks") if "norm" not in n}
    rates = {n: g["lr"] for g in make_optimizer(plain, name, 1e-3, 5e-4).param_groups for n in g["param_names"]}
    assert rates == {n: 1e-3 if n in hidden else 5e-4 for n, _ in plain.named_parameters()}
    groups = make_optimizer(lora, name, 1e-3, 5e-4).param_groups
    assert {group["lr"] for group in groups} == {1e-3}
    names = {n for group in groups for n in group["param_names"]}
    assert len(names) == 14 and all(".lora_A." in n or ".lora_B." in n for n in names)
    assert {group["rule"] for group in groups} == {"adam" if name == "adamw" else name}


def test_lora_trains_adapters_and_leaves_the_base_alone(shards: dict[str, str], tmp_path: Path) -> None:
    one = bench(shards, tmp_path)
    base = one.base("adamw")
    model = one.model("lora", base, 0)
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    one.train(model, make_optimizer(model, "cosmos", 1e-2, 1e-2), one.sources["tune"], 4, 0)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if ".lora_" in name}


def test_finished_runs_are_skipped_and_a_repeated_one_is_the_same(shards: dict[str, str], tmp_path: Path) -> None:
    runs = [Run("adamw", method, name, 1e-3) for method in METHODS for name in OPTIMIZER_NAMES]
    one = bench(shards, tmp_path)
    assert not work(one, runs, seconds=-1.0) and read(one.out) == {}
    assert work(one, runs, seconds=600.0)
    results = read(one.out)
    assert set(results) == {"base-adamw", *(run.id for run in runs)}
    for kept in results.values():  # a base has no method: it trains everything at the rates of pre-training
        rates = {kept["lr"]} if kept.get("method") == "lora" else {kept["lr"], kept["outer_lr"]}
        assert {group["lr"] for group in kept["groups"]} == rates
    kept = results[runs[-1].id]
    assert kept["groups"][0]["rank"] == 32 and kept["clip"] == 1.0 and kept["scale"]["lora_rank"] == 4
    assert len({result["weights"] for name, result in results.items() if name != "base-adamw"}) == 1

    (one.out / "runs" / f"{runs[-1].id}.json").unlink()
    again = bench(shards, tmp_path)
    assert work(again, runs, seconds=600.0)
    changing = {"wall_s", "commit"}
    for name, result in read(one.out).items():
        assert {k: v for k, v in result.items() if k not in changing} == {
            k: v for k, v in results[name].items() if k not in changing
        }
    text = table(results)
    assert text.count("\nadamw   full") == text.count("\nadamw   lora") == 3
    assert "full: cosmos minus AdamW is" in text and "lora: muon minus AdamW is" in text


def test_a_base_is_not_begun_if_it_would_end_too_late(
    shards: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def run(self: Bench, one: Run) -> Result:
        """Take 100 s for a base and 5 s for a run, by a clock that nothing else moves."""
        base = self.out / f"base-{one.base}.pt"
        now[0] += 5.0 if base.exists() else 105.0
        base.touch()
        return {"val_loss": 1.0}

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(finetune.time, "monotonic", lambda: now[0])
    runs = [Run(base, "full", name, 1e-3) for base in ("adamw", "muon") for name in OPTIMIZER_NAMES]
    assert not work(bench(shards, tmp_path), runs, seconds=200.0, began=-20.0)
    printed = capsys.readouterr().out
    assert printed.count("adamw-full-") == 3 and "muon-full-" not in printed and "give the same command" in printed


def test_the_outer_rate_may_be_a_multiple_of_lr(shards: dict[str, str], tmp_path: Path) -> None:
    runs = [Run("adamw", "full", "cosmos", 1e-4, outer_times=times) for times in (4.0, 16.0)]
    one = bench(shards, tmp_path)
    assert work(one, runs, seconds=600.0)
    results = read(one.out)
    assert [results[run.id]["outer_lr"] for run in runs] == [pytest.approx(4e-4), pytest.approx(1.6e-3)]
    assert "norms at 4 times lr" in table(results) and "norms at 16 times lr" in table(results)


def result(base: str, name: str, lr: float, loss: float | None) -> Result:
    return {"base": base, "method": "full", "optimizer": name, "lr": lr, "val_loss": loss, "test_loss": loss,
            "base_loss": 1.0, "weights": base}  # fmt: skip


def test_the_verdict_compares_best_rates_on_the_base_of_adamw_with_those_on_the_own_base() -> None:
    rows = [("adamw", "adamw", 1e-3, 2.0), ("adamw", "adamw", 2e-3, 2.5), ("adamw", "muon", 1e-3, 2.3),
            ("adamw", "muon", 2e-3, None), ("muon", "adamw", 1e-3, 2.2), ("muon", "muon", 1e-3, 2.1)]  # fmt: skip
    results = {str(row): result(*row) for row in rows}
    line = "full: muon minus AdamW is +0.3000 on AdamW's base, -0.1000 on its own; mismatch +0.4000"
    assert verdict(results) == line
    text = table(results)
    assert "2.3000 diverged" in text and "0.001*" in text and "different weights" not in text
    results["other"] = {**results[str(rows[0])], "weights": "others"}
    assert "started from different weights" in table(results)


def test_the_command_asks_for_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune.main(["--data", "somewhere"])
    assert "--base-data, --data and --out are needed" in capsys.readouterr().err
