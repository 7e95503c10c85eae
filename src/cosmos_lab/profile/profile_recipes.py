"""The paper's profiles of LLaMA-1B, and the speed bar of the lab itself."""

from __future__ import annotations

from collections.abc import Callable

from cosmos_lab.profile.profile import ProfileConfig

PAPER = ("adam", "soap", "muon", "cosmos-paper")


def profile_memory() -> ProfileConfig:
    """Peak memory and time of an iteration: LLaMA-1B, batch 10, accumulation 25.

    Paper, on an A100: Adam 62.75 GB, 34.73 s; SOAP 72.58, 39.51; MUON 58.25, 35.56; COSMOS 58.47, 35.75.
    """
    return ProfileConfig(tables=("memory",), optimizers=PAPER)


def profile_throughput() -> ProfileConfig:
    """Largest batch and samples per second under 80 GB: LLaMA-1B.

    Paper, on an A100: Adam 13, 7.24; SOAP 10, 6.33; MUON 14, 7.23; COSMOS 14, 7.07.
    """
    return ProfileConfig(tables=("throughput",), optimizers=PAPER)


def profile_mfu() -> ProfileConfig:
    """Model FLOP utilization of training steps of 256k tokens."""
    return ProfileConfig(tables=("mfu",), optimizers=("adam", "cosmos"))


PROFILES: dict[str, Callable[[], ProfileConfig]] = {
    "profile-memory": profile_memory,
    "profile-throughput": profile_throughput,
    "profile-mfu": profile_mfu,
}
