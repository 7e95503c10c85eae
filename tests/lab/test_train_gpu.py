"""Training on a GPU: no host synchronization between log lines, exact resume with --deterministic, and its rates."""

from contextlib import closing
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from cosmos_lab.config import RunConfig
from cosmos_lab.profile.config import ProfileConfig
from cosmos_lab.profile.profile import profile
from cosmos_lab.run import checkpoint, distributed
from cosmos_lab.run.train import Trainer, train
from tests.gpu import never_waiting

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu_run(tiny_run: RunConfig) -> RunConfig:
    """Return the tiny run on the GPU, without compilation."""
    return tiny_run.replace(device="cuda", compile="off", diagnostics_every=0)


@pytest.mark.parametrize("optimizer", ["adam", "muon", "cosmos"])
def test_a_step_never_waits_for_the_device(gpu_run: RunConfig, optimizer: str) -> None:
    rank = 8 if optimizer == "cosmos" else None
    with distributed.session("cuda", "auto") as world:
        with closing(Trainer(gpu_run.replace(optimizer=optimizer, rank=rank, steps=20, clip=1.0), world)) as trainer:
            for _ in range(4):
                trainer._step()  # first bases, autotuning
            with never_waiting():
                for _ in range(4):
                    trainer._step()


def test_deterministic_runs_resume_bit_for_bit(gpu_run: RunConfig) -> None:
    config = gpu_run.replace(deterministic=True, checkpoint_every=3)

    class Stop(Exception):
        pass

    def fall(record: Any) -> None:
        if record["step"] > 5:
            raise Stop

    with pytest.raises(Stop):
        train(config, progress=fall)
    train(config)
    train(config.replace(name="whole"))
    states = []
    for name in ("run", "whole"):
        newest = checkpoint.latest(config.replace(name=name).folder / "checkpoints")
        assert newest is not None
        states.append(torch.load(newest / "state.pt", map_location="cpu", weights_only=True)["model"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_compiled_bf16_training_learns_and_reports_its_rates(gpu_run: RunConfig) -> None:
    summary = train(gpu_run.replace(compile="on", steps=80, lr=5e-3, log_every=10, val_every=0))
    assert 0.7 < summary["final_val_loss"] < 2.0
    assert summary["optimizer_ms"] < summary["step_ms"] and summary["peak_memory_gb"] > 0


def test_a_second_compiled_run_compiles_nothing_and_repeats_the_first(gpu_run: RunConfig) -> None:
    config = gpu_run.replace(compile="on", deterministic=True)
    first = train(config.replace(name="first"))
    train(config.replace(name="between", optimizer="adam", rank=None, seed=1))
    graphs = counters["stats"]["unique_graphs"]
    assert train(config.replace(name="again"))["final_val_loss"] == first["final_val_loss"]
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_profile_finds_the_largest_batch_under_the_cap() -> None:
    sizes: dict[str, Any] = {"model": "tiny", "batch": 4, "accumulation": 2, "seq_len": 512, "compile": "off"}
    config = ProfileConfig(
        **sizes, optimizers=("adam", "cosmos"), tables=("memory", "throughput", "mfu"), memory_cap_gb=1.0,
        tokens_per_step=16_384, device="cuda",
    )  # fmt: skip
    result = profile(config, lambda line: None)
    for row in result["throughput"]:
        assert row["largest_batch"] > 4 and row["reserved_gb"] <= 1.1
    assert all(row["mfu"] is None or 0 < row["mfu"] < 1 for row in result["mfu"])
