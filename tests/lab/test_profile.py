"""Profiles on the CPU with a tiny model: rows, memory by count, the search for the largest batch."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_lab.profile.config import PROFILES, ProfileConfig
from cosmos_lab.profile.profile import format_rows, largest_batch, profile
from cosmos_lab.profile.profiler import Profiler, free_memory
from cosmos_lab.run.meters import GIB, Clock, mfu

SMALL: dict[str, Any] = {
    "model": "tiny", "vocab_size": 64, "batch": 2, "accumulation": 2, "seq_len": 16, "iterations": 1, "updates": 2,
    "device": "cpu",
}  # fmt: skip


def quiet(line: str) -> None:
    """Ignore the lines about progress."""


def test_the_three_tables_agree_with_each_other_and_the_paper_s_order(tmp_path: Path) -> None:
    config = ProfileConfig(
        **SMALL,
        optimizers=("adam", "muon", "cosmos"),
        tables=("memory", "throughput", "mfu"),
        memory_cap_gb=0.01,
        tokens_per_step=128,
        out=str(tmp_path / "profile.json"),
    )
    result = profile(config, quiet)
    assert json.loads((tmp_path / "profile.json").read_text())["memory"] == result["memory"]
    memory = {row["optimizer"]: row for row in result["memory"]}
    assert list(memory) == ["adam", "muon", "cosmos"]
    for row in memory.values():
        assert row["seconds"] == pytest.approx(row["forward_backward_s"] + row["optimizer_s"])
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / row["seconds"])
        assert row["mfu"] is None  # a CPU's peak is not known
    # Same model, gradients and activations: what differs is the state, and the paper's order of it.
    assert memory["muon"]["peak_gb"] < memory["cosmos"]["peak_gb"] < memory["adam"]["peak_gb"]
    extra = memory["adam"]["peak_gb"] - memory["muon"]["peak_gb"]
    assert extra == pytest.approx(memory["adam"]["state_gb"] - memory["muon"]["state_gb"])
    largest = [row["largest_batch"] for row in result["throughput"]]
    assert largest[1] >= largest[2] >= largest[0] > 1
    assert all(row["samples_per_s"] > 0 for row in result["throughput"])
    assert all(row["micro_batch"] * row["accumulation"] * 16 >= 128 for row in result["mfu"])


class FakeProfiler:
    """A profiler with a peak of base + slope * size, bent a little, as a real allocator's is."""

    def __init__(self, base: float, slope: float, bend: float) -> None:
        self.base, self.slope, self.bend, self.tried = base, slope, bend, 0

    def fits(self, size: int) -> bool:
        self.tried += 1
        return self.base + self.slope * size**self.bend <= 80.0


@pytest.mark.parametrize("bend", [0.9, 1.0, 1.05])
@pytest.mark.parametrize("slope", [0.11, 1.0, 4.9, 30.0])
@pytest.mark.parametrize("base", [0.0, 21.7, 79.5])
@pytest.mark.parametrize("near", [1, 10, 300])
def test_the_largest_batch_is_found_in_few_tries(base: float, slope: float, bend: float, near: int) -> None:
    profiler: Any = FakeProfiler(base, slope, bend)
    found = largest_batch(profiler, quiet, near)
    expected = sum(base + slope * size**bend <= 80.0 for size in range(1, 2000))
    assert found == expected
    assert profiler.tried <= 3 + 2 * max(1, abs(expected - near)).bit_length()  # each costs two passes


def test_the_largest_batch_is_0_if_nothing_fits() -> None:
    for near in (1, 2, 10):
        profiler: Any = FakeProfiler(90.0, 1.0, 1.0)
        assert largest_batch(profiler, quiet, near) == 0


def test_a_batch_that_fits_for_two_passes_must_fit_for_whole_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(profiler: Profiler, size: int, accumulation: int) -> dict[str, Any]:
        if size > fitting:
            raise torch.cuda.OutOfMemoryError("too much")
        return {"tokens_per_s": 16.0 * size}

    monkeypatch.setattr("cosmos_lab.profile.profile._timed", timed)
    monkeypatch.setattr("cosmos_lab.profile.profile.largest_batch", lambda *_: 14)
    lines: list[str] = []
    config = ProfileConfig(**SMALL, optimizers=("adam",), tables=("throughput",))
    fitting = 12
    assert profile(config, lines.append)["throughput"] == [
        {"optimizer": "adam", "largest_batch": 12, "samples_per_s": 12.0, "tokens_per_s": 192.0}
    ]
    assert [line for line in lines if "whole" in line] == [
        f"  batch {size}: too large for whole iterations" for size in (14, 13)
    ]
    fitting = 0
    assert profile(config, quiet)["throughput"] == [{"optimizer": "adam", "largest_batch": 0, "samples_per_s": None}]


def test_optimizer_steps_beyond_the_timed_iterations_follow_a_single_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler(ProfileConfig(**SMALL | {"iterations": 2, "updates": 5}))
    profiler.set_optimizer("adam")
    passes: list[int] = []
    once = profiler.passes
    monkeypatch.setattr(profiler, "passes", lambda size, count: (passes.append(count), once(size, count)))
    assert all(seconds > 0 for seconds in profiler.time(1, 3))
    assert passes == [3, 3, 1, 1, 1]


def test_counted_activations_grow_in_proportion_to_the_batch() -> None:
    profiler = Profiler(ProfileConfig(**SMALL))
    profiler.set_optimizer("adam")
    weights = sum(p.numel() * 4 for p in profiler.model.parameters())
    one, two, four = (profiler.peak_gb(size)[0] * GIB for size in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)  # linear except for a few tensors of fixed size
    assert one > 4 * weights  # weights, gradients, two moments


def test_the_memory_of_a_large_batch_is_counted_without_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler(ProfileConfig(**SMALL))
    assert profiler._activation_bytes(16) == pytest.approx(profiler._saved_bytes(16), rel=1e-4)  # a scalar or two
    sizes: list[int] = []
    batch = profiler.batch
    monkeypatch.setattr(profiler, "batch", lambda size: (sizes.append(size), batch(size))[1])
    profiler._saved = None
    profiler.set_optimizer("adam")
    assert largest_batch(profiler, quiet) > 100_000
    profiler.set_optimizer("muon")
    assert largest_batch(profiler, quiet) > 100_000
    assert sizes == [1, 2]


def test_a_cpu_with_too_little_memory_gets_counted_bytes_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_lab.profile.profiler.free_memory", lambda: 0.5 * GIB)
    monkeypatch.setattr(Profiler, "iterate", lambda *_: pytest.fail("an iteration was run"))
    lines: list[str] = []
    result = profile(ProfileConfig(**SMALL | {"batch": 50_000}, optimizers=("adam",), memory_cap_gb=4.0), lines.append)
    (memory,), (throughput,) = result["memory"], result["throughput"]
    assert memory["peak_gb"] > 0.5 and "seconds" not in memory
    assert throughput["largest_batch"] > 5000 and throughput["samples_per_s"] is None
    why = [line for line in lines if "is not timed" in line]
    assert len(why) == 2 and all("0.5 GiB are free" in line for line in why)
    profiler = Profiler(ProfileConfig(**SMALL))
    assert profiler.pass_speed(50_000, 1) is None  # nor a micro-batch of the mfu table


def test_free_memory_is_less_than_the_total_memory() -> None:
    assert 0 < free_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_mfu_is_useful_work_over_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert mfu(1e5, 989e7, torch.device("cuda"), devices=2) == pytest.approx(0.5)
    assert mfu(1e5, 1e9, torch.device("cpu")) is None


def test_a_stopped_clock_does_not_advance() -> None:
    clock = Clock(5.0)
    assert clock.read() == 5.0
    clock.start()
    assert clock.stop() > 5.0
    assert clock.read() == clock.read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama-2b"}, "no preset 'llama-2b'"),
        ({"optimizers": ("adam", "sgd")}, "unknown optimizer 'sgd'"),
        ({"batch": 0}, "--batch must be positive; got 0"),
        ({"updates": 0}, "--updates must be positive; got 0"),
        ({"micro_batches": (8, 0)}, "--micro-batches must be positive; got 0"),
        ({"micro_batches": (-2,)}, "--micro-batches must be positive; got -2"),
        ({"memory_cap_gb": float("inf")}, "--memory-cap-gb must be positive and finite; got inf"),
        ({"memory_cap_gb": float("nan")}, "--memory-cap-gb must be positive; got nan"),
        ({"tables": ("speed",)}, "--tables takes memory, throughput, mfu; got 'speed'"),
    ],
)
def test_bad_input_is_refused_by_flag(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile(ProfileConfig(**{**SMALL, **change}), quiet)


def test_profiles_have_the_paper_s_settings() -> None:
    memory = PROFILES["profile-memory"]()
    assert (memory.model, memory.batch, memory.accumulation, memory.seq_len) == ("llama-1b", 10, 25, 1024)
    assert memory.optimizers == ("adam", "soap", "muon", "cosmos-paper")
    assert PROFILES["profile-throughput"]().memory_cap_gb == 80


def test_every_form_of_state_is_measured_and_the_smaller_ones_leave_room_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cosmos_lab.profile.profile._WARM_UP", 1)
    forms = PROFILES["profile-forms"]()
    assert (forms.model, forms.tables) == ("llama-1b", ("memory", "throughput"))
    result = profile(ProfileConfig(**SMALL, optimizers=forms.optimizers, memory_cap_gb=0.01), quiet)
    state = {row["optimizer"]: row["state_gb"] for row in result["memory"]}
    assert tuple(state) == forms.optimizers
    both = "cosmos:momentum_dtype=int8+adam_dtype=int8"
    order = ("cosmos", "cosmos:momentum_dtype=bfloat16", "cosmos:momentum_dtype=int8", both)
    assert sorted(order, key=lambda row: -state[row]) == list(order)
    assert state["adam:adam_dtype=int8"] < 0.3 * state["adam"]
    largest = {row["optimizer"]: row["largest_batch"] for row in result["throughput"]}
    assert largest["soap"] < largest["cosmos"] < largest[both] < largest[f"{both}+weights=bf16+weight_correction=true"]


def test_a_row_may_have_bfloat16_weights_and_the_next_row_has_float32() -> None:
    profiler = Profiler(ProfileConfig(**SMALL))
    profiler.set_optimizer("cosmos")
    wide = profiler.peak_gb(1)[0]
    profiler.set_optimizer("cosmos:weights=bf16+weight_correction=true")
    assert {p.dtype for p in profiler.model.parameters()} == {torch.bfloat16}
    profiler.iterate(1, 1)
    assert profiler.peak_gb(1)[0] < wide
    profiler.set_optimizer("cosmos")
    assert {p.dtype for p in profiler.model.parameters()} == {torch.float32}
    assert profiler.peak_gb(1)[0] == wide


def test_options_of_a_row_replace_those_of_all_rows() -> None:
    profiler = Profiler(ProfileConfig(**SMALL, rank=8, options=("ns_steps=4", "nesterov=false")))
    profiler.set_optimizer("cosmos:ns_steps=3+rank=4")
    assert profiler.optimizer is not None
    group = profiler.optimizer.param_groups[0]
    assert (group["ns_steps"], group["nesterov"], group["rank"]) == (3, False, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("cosmos:momentum_dtype", "--optimizers cosmos: takes name=value"),
        ("cosmos:", "--optimizers cosmos: takes name=value"),
        ("cosmo:rank=4", "unknown optimizer 'cosmo'; did you mean cosmos"),
        ("adam:momentum_dtype=int8", "row adam:momentum_dtype=int8: .*momentum_dtype"),
        ("cosmos:momentum_dtype=int9", "row cosmos:momentum_dtype=int9: .*int9"),
        ("cosmos:weight_correction=true", "row cosmos:weight_correction=true: .* weights=bf16"),
        ("cosmos:weights=bf8", "row cosmos:weights=bf8: .*--weights must be one of fp32, bf16"),
    ],
)
def test_a_wrong_row_is_refused_before_any_row_is_measured(row: str, message: str) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match=message):
        profile(ProfileConfig(**SMALL, optimizers=("adam", row)), lines.append)
    assert lines == []


def test_rows_are_formatted_as_an_aligned_table() -> None:
    assert format_rows([{"optimizer": "adam", "mfu": 0.4512, "tokens_per_s": 123456.7}]).splitlines() == [
        "optimizer     MFU  tokens/s",
        "adam       45.1 %   123,457",
    ]
